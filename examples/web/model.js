// An explained model in onnxruntime-web: one run gives the logits and the maps of every method.
import * as ort from "./ort/ort.js";
import { readContract } from "./contract.js";
import { PageError } from "./errors.js";
import { upsample } from "./heatmap.js";
import { requireInput } from "./modelfile.js";
import { preprocess } from "./preprocessing.js";

// Threads need SharedArrayBuffer, which a page has only where the server sends the headers for
// cross-origin isolation. One thread runs from any server; it runs in a worker, so that the page
// stays alive meanwhile.
ort.env.wasm.numThreads = 1;
ort.env.wasm.proxy = true;
ort.env.wasm.wasmPaths = {
  wasm: new URL("ort/ort-wasm-simd-threaded.wasm", import.meta.url).href,
};
ort.env.logLevel = "error";

// Class -1 is the picture's own prediction.
const PREDICTION = -1;

const BEST_FIRST = [
  "transformer_attribution",
  "generic_attention",
  "gradient_rollout",
  "attention_gradcam",
  "gradcam",
  "rollout",
  "raw_attention",
  "attnlrp",
  "partial_lrp",
  "lrp",
];

// With a value per pixel instead of one per patch, and signed: the map shows what speaks for the class.
const OF_PIXELS = ["attnlrp", "lrp"];

const FOR_ANY_CLASS = ["raw_attention", "rollout"];

export class Model {
  #session;
  #outputs;
  #last = Promise.resolve();

  /**
   * @param {Uint8Array} bytes The whole .onnx file; it may be empty afterwards.
   * @param {string} name The file's name, for messages.
   * @returns {Promise<Model>}
   * @throws {PageError} Not an explained model with maps, or not one that this runtime can run.
   */
  static async load(bytes, name) {
    const model = new Model();
    model.name = name;
    model.contract = readContract(bytes, name);
    await model.#open(bytes);
    return model;
  }

  async #open(bytes) {
    const { name } = this;
    if (this.contract.target !== null) requireInput(bytes, this.contract.target);
    let session;
    try {
      session = await ort.InferenceSession.create(bytes);
    } catch (error) {
      throw new PageError(
        /external data|MountedFiles/i.test(oneLine(error))
          ? `${name} keeps its weights in a second file, and this page takes single files only.`
          : `${name} is damaged, or more than onnxruntime-web can run (${oneLine(error)}).`,
      );
    }
    this.#session = session;
    const { maps, logits } = this.contract;
    const has = (output) => session.outputNames.includes(output);
    const served = Object.keys(maps).filter((m) => has(`map.${m}`) || has(`heatmap.${m}`));
    this.methods = BEST_FIRST.filter((method) => served.includes(method));
    if (this.methods.length === 0) {
      await this.release();
      throw new PageError(
        `${name} has no maps in it: export it with --outputs maps or --outputs both.`,
      );
    }
    const all = this.methods.flatMap((method) => [`map.${method}`, `heatmap.${method}`]);
    this.#outputs = [logits, ...all.filter(has)];
    if (!has(logits)) {
      await this.release();
      throw new PageError(`${name} lacks the output "${logits}" of its contract: make it again.`);
    }
  }

  /** Whether the method's map is another for another class. */
  isClassSpecific(method) {
    const { target, readout } = this.contract;
    return target !== null && (readout?.kind === "gradient" || !FOR_ANY_CLASS.includes(method));
  }

  /** The class's name, or its number where the model has no names. */
  label(index) {
    return this.contract.labels?.[index] ?? `class ${index}`;
  }

  /**
   * Explains a picture.
   *
   * @param {object} picture As `readPicture` gives it.
   * @param {object} way Its geometry.
   * @param {number} target The class; -1: the prediction.
   * @returns {Promise<{logits: Float32Array, probabilities: number[], target: number,
   *   maps: Map<string, {raw: ?{data: Float32Array, rows: number, columns: number},
   *   heatmap: ?Float32Array}>}>} For each method its raw map, where the file has it, and its
   *   heatmap [H, W] in 0..1, null where the map is blank.
   */
  explain(picture, way, target = PREDICTION) {
    // A session runs one thing at a time.
    const run = this.#last.then(() => this.#explain(picture, way, target));
    this.#last = run.catch(() => {});
    return run;
  }

  async #explain(picture, way, target) {
    const { contract } = this;
    const feeds = { [contract.input.name]: this.#input(picture, way) };
    if (contract.target !== null) {
      // A file that takes several classes at once is asked for one as often as it takes.
      const asked = new BigInt64Array(contract.targets ?? 1).fill(BigInt(target));
      const shape = asked.length > 1 ? [1, asked.length] : [1];
      feeds[contract.target] = new ort.Tensor("int64", asked, shape);
    }
    let values;
    try {
      values = await this.#session.run(feeds, this.#outputs);
    } catch (error) {
      throw new PageError(`${this.name} failed on ${picture.name} (${oneLine(error)}).`);
    }
    const logits = values[contract.logits].data.slice(0, contract.classes);
    if (!logits.every(Number.isFinite)) {
      throw new PageError(`${this.name} gives logits that are not finite: it must be damaged.`);
    }
    return {
      logits,
      probabilities: softmax(logits),
      target: target === PREDICTION ? logits.indexOf(Math.max(...logits)) : target,
      maps: new Map(this.methods.map((method) => [method, this.#map(method, values)])),
    };
  }

  #input(picture, way) {
    const { input } = this.contract;
    if (input.layout === "HWC") {
      // A copy, because onnxruntime's worker takes the memory away.
      return new ort.Tensor("uint8", picture.rgb.slice(), [picture.height, picture.width, 3]);
    }
    const one = preprocess(picture, input, way);
    const batch = input.batch ?? 1; // where it is fixed, it is filled with copies
    const last = input.layout === "NHWC";
    const ordered = last ? channelsLast(one) : one;
    const pixels = new Float32Array(batch * one.length);
    for (let i = 0; i < batch; i++) pixels.set(ordered, i * one.length);
    return new ort.Tensor("float32", pixels, last ? [batch, ...input.size, 3] : [batch, 3, ...input.size]);
  }

  #map(method, values) {
    const raw = first(values[`map.${method}`]);
    const finished = first(values[`heatmap.${method}`]);
    if (finished) {
      const blank = !finished.data.some((value) => value > 0);
      return { raw, heatmap: blank ? null : finished.data };
    }
    const { input, tokens } = this.contract;
    if (OF_PIXELS.includes(method)) {
      const positive = { ...raw, data: raw.data.map((value) => Math.max(value, 0)) };
      return { raw, heatmap: upsample(positive, input.size) };
    }
    const covered = tokens.patch?.map((side, axis) => side * tokens.grid[axis]);
    return { raw, heatmap: upsample(raw, input.size, covered) };
  }

  /** Frees the model's memory. */
  async release() {
    await this.#last;
    await this.#session.release();
  }
}

/** Pixel values [3, height, width] as [height, width, 3]. */
function channelsLast(values) {
  const pixels = values.length / 3;
  return Float32Array.from(values, (_, i) => values[(i % 3) * pixels + Math.floor(i / 3)]);
}

/** The first map of an output [batch, rows, columns]; null where there is none. */
function first(tensor) {
  if (tensor === undefined) return null;
  const [rows, columns] = tensor.dims.slice(-2);
  return { data: tensor.data.slice(0, rows * columns), rows, columns };
}

function softmax(logits) {
  const largest = Math.max(...logits);
  const powers = Array.from(logits, (value) => Math.exp(value - largest));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / sum);
}

const oneLine = (error) => String(error?.message ?? error).trim().split("\n")[0];
