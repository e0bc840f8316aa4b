// Runs a model in onnxruntime-node: {"path", "feeds"} as JSON on standard input, {"version",
// "outputs"} on standard output. A tensor is {"type", "dims", "data": base64 of its bytes}.
import { readFileSync } from "node:fs";
import { InferenceSession, Tensor, env } from "onnxruntime-node";

// onnxruntime for JavaScript leaves inputs that have a default value at it, whatever it is given.
// An input without one it takes, so the default (an initializer of the same name) gets another name.
function withoutDefault(model, input) {
  const name = Buffer.from(input);
  const field = Buffer.concat([Buffer.from([0x42, name.length]), name]); // TensorProto.name
  const at = model.indexOf(field);
  if (at >= 0) model.write("_", at + 2);
  return model;
}

const arrays = { float32: Float32Array, int64: BigInt64Array, uint8: Uint8Array };

function decode({ type, dims, data }) {
  const bytes = new Uint8Array(Buffer.from(data, "base64"));
  return new Tensor(type, new arrays[type](bytes.buffer), dims);
}

function encode({ type, dims, data }) {
  const bytes = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
  return { type, dims, data: bytes.toString("base64") };
}

const each = (tensors, change) =>
  Object.fromEntries(Object.entries(tensors).map(([name, tensor]) => [name, change(tensor)]));

const { path, feeds } = JSON.parse(readFileSync(0, "utf8"));
const model = Object.keys(feeds).reduce(withoutDefault, readFileSync(path));
const session = await InferenceSession.create(model, { intraOpNumThreads: 1, logSeverityLevel: 3 });
const outputs = each(await session.run(each(feeds, decode)), encode);
process.stdout.write(JSON.stringify({ version: env.versions.node, outputs }));
