// The contract: a JSON document in an explained model's metadata that says what it takes and gives.
// onnxruntime-web does not hand a model's metadata out, so it is read from the file's bytes.
import { PageError } from "./errors.js";
import { metadata } from "./modelfile.js";

const KEY = "onnxplain";
const FORMAT = 1;

/**
 * The contract of an explained model.
 *
 * @param {Uint8Array} bytes The whole .onnx file.
 * @param {string} name The file's name, for messages.
 * @returns {object} The parsed contract (onnxplain/contract.py says what is in it).
 * @throws {PageError} Not an ONNX file, a damaged one, one without a contract, or with a newer one.
 */
export function readContract(bytes, name) {
  const json = metadata(bytes, name).get(KEY);
  if (json === undefined) {
    throw new PageError(
      `${name} is an ONNX model, but not an explained one: make one of it with "onnxplain instrument".`,
    );
  }
  const damaged = new PageError(`${name} has a damaged contract: make the file again.`);
  let contract;
  try {
    contract = JSON.parse(json);
  } catch {
    throw damaged;
  }
  if (contract?.format > FORMAT) {
    throw new PageError(
      `${name} has a contract of format ${contract.format}, and this page reads up to ${FORMAT}.`,
    );
  }
  const { format, input, tokens, classes, maps } = contract ?? {};
  const complete = format && input?.size?.length === 2 && tokens?.grid && classes >= 1 && maps;
  if (!complete) throw damaged;
  return contract;
}
