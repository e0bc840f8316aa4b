// What is read from, and changed in, the bytes of an .onnx file. It is one protobuf message
// (ModelProto); fields that are of no interest are stepped over, so weights are never touched.
import { PageError } from "./errors.js";

// Field numbers of onnx.proto: ModelProto, StringStringEntryProto, GraphProto, TensorProto.
const MODEL = { graph: 7, metadata: 14 };
const ENTRY = { key: 1, value: 2 };
const GRAPH = { initializer: 5 };
const TENSOR = { name: 8 };

const UNUSED = 3; // a field number that GraphProto will never have, so every reader skips it
const BYTES = 2; // the wire type of text and messages

/**
 * The model's metadata.
 *
 * @param {Uint8Array} bytes The whole file.
 * @param {string} name The file's name, for messages.
 * @returns {Map<string, string>}
 * @throws {PageError} It is not an ONNX file, or a damaged one.
 */
export function metadata(bytes, name) {
  const found = new Map();
  let graph = false;
  try {
    for (const { number, value } of fields(bytes)) {
      graph ||= number === MODEL.graph;
      if (number === MODEL.metadata) found.set(text(value, ENTRY.key), text(value, ENTRY.value));
    }
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    graph = false;
  }
  if (!graph) throw new PageError(`${name} is not an ONNX file, or it is damaged.`);
  return found;
}

/**
 * Makes an optional input a required one, in place: takes its default value out of the graph.
 *
 * onnxruntime-web only takes values for inputs that have no default.
 *
 * @param {Uint8Array} bytes The whole file, of which one byte is changed.
 * @param {string} input The input's name.
 */
export function requireInput(bytes, input) {
  for (const { number, value: graph } of fields(bytes)) {
    if (number !== MODEL.graph) continue;
    for (const { number, value: tensor, at } of fields(graph)) {
      if (number === GRAPH.initializer && text(tensor, TENSOR.name) === input) {
        graph[at] = UNUSED * 8 + BYTES;
      }
    }
  }
}

/** A text field of a message; empty where it has none. */
function text(message, wanted) {
  for (const { number, value } of fields(message)) {
    if (number === wanted) return new TextDecoder().decode(value);
  }
  return "";
}

/** The fields of a message: number, value (a view of the bytes, where it is any), place of the tag. */
function* fields(bytes) {
  let next = 0;
  const varint = () => {
    // Not by shifts, which would wrap around: files are longer than 2 ** 31 bytes.
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      if (next >= bytes.length) throw new RangeError("the message ends within a number");
      const byte = bytes[next++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  const view = (length) => {
    if (next + length > bytes.length) throw new RangeError("the message ends within a value");
    next += length;
    return bytes.subarray(next - length, next);
  };
  const readers = { 0: varint, 1: () => view(8), [BYTES]: () => view(varint()), 5: () => view(4) };
  while (next < bytes.length) {
    const at = next;
    const tag = varint();
    const reader = readers[tag % 8];
    if (reader === undefined) throw new RangeError(`there is no wire type ${tag % 8}`);
    yield { number: Math.floor(tag / 8), value: reader(), at };
  }
}
