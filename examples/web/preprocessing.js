// From a picture to the model's input, and where on the picture each of the input's pixels lies.
// The same as onnxplain/runtime/preprocessing.py; pixels that leave the decoder equal give equal inputs.
import { PageError } from "./errors.js";
import { INTERPOLATIONS, resize } from "./resize.js";

const CROP_MODES = ["center", "squash", "border"];

// The shorter side is resized to a fixed length, so a long thin picture grows without bound.
const LARGEST_RESIZED = 2 ** 26;

/**
 * Decodes a picture: upright, transparent parts on white, colours as stored.
 *
 * @param {Blob} blob Any format that the browser knows.
 * @param {string} name The file's name, for messages.
 * @returns {Promise<{name: string, canvas: HTMLCanvasElement, width: number, height: number,
 *   rgb: Uint8Array}>} rgb is [height, width, 3].
 * @throws {PageError} It is not a picture, or more than the browser can hold.
 */
export async function readPicture(blob, name) {
  let bitmap;
  try {
    // A colour profile is left out of account, as it was when the model was evaluated.
    bitmap = await createImageBitmap(blob, {
      imageOrientation: "from-image",
      colorSpaceConversion: "none",
    });
  } catch {
    throw new PageError(`${name} is not a picture that this browser can read.`);
  }
  const { width, height } = bitmap;
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  // Pixels that went through a graphics card need not come back the same.
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  let rgba;
  try {
    rgba = context.getImageData(0, 0, width, height).data;
  } catch {
    throw new PageError(`${name} is too large for this browser: ${width}x${height} pixels.`);
  }
  const rgb = new Uint8Array(width * height * 3);
  for (let from = 0, to = 0; from < rgba.length; from += 4, to += 3) {
    rgb[to] = rgba[from];
    rgb[to + 1] = rgba[from + 1];
    rgb[to + 2] = rgba[from + 2];
  }
  return { name, canvas, width, height, rgb };
}

/**
 * How the picture becomes the model's input: resized, then cropped (or padded).
 *
 * All pairs are [height, width] or [top, left] in pixels. `offset` is the crop's corner on the
 * resized picture, and negative where the picture is padded.
 *
 * @param {{width: number, height: number, name: string}} picture
 * @param {object} input The contract's `input`.
 * @returns {{original: number[], resized: number[], offset: number[], size: number[]}}
 * @throws {PageError} The contract has a crop mode or interpolation that this page does not know,
 *   or the picture is so elongated that its resized form would not fit in memory.
 */
export function geometry(picture, input) {
  for (const [what, value, known] of [
    ["interpolation", input.interpolation, INTERPOLATIONS],
    ["crop mode", input.crop_mode, CROP_MODES],
  ]) {
    if (!known.includes(value)) {
      throw new PageError(`The model wants the ${what} "${value}", which this page does not know.`);
    }
  }
  const original = [picture.height, picture.width];
  const resized = resizedSides(original, input);
  if (resized[0] * resized[1] > LARGEST_RESIZED) {
    throw new PageError(
      `${picture.name} is too elongated: ${picture.width}x${picture.height} pixels.`,
    );
  }
  const offset = resized.map((have, axis) =>
    cropOffset(have, input.size[axis], input.crop_rounding),
  );
  return { original, resized, offset, size: input.size };
}

/**
 * The model's input.
 *
 * @param {{width: number, height: number, rgb: Uint8Array}} picture
 * @param {object} input The contract's `input`.
 * @param {object} way The picture's geometry.
 * @returns {Float32Array} [3, H, W], normalised.
 */
export function preprocess(picture, input, way) {
  const small = resize(picture, ...way.resized, input.interpolation);
  const [height, width] = way.size;
  const [top, left] = way.offset;
  const padding = input.crop_mode === "border" ? input.mean.map((m) => halfEven(255 * m)) : [0, 0, 0];
  const pixels = new Float32Array(3 * height * width);
  for (let channel = 0; channel < 3; channel++) {
    const from = input.color_order === "BGR" ? 2 - channel : channel;
    const table = normalised(input.mean[channel], input.std[channel]);
    for (let y = 0, to = channel * height * width; y < height; y++) {
      const row = y + top;
      for (let x = 0; x < width; x++, to++) {
        const column = x + left;
        const inside = row >= 0 && row < small.height && column >= 0 && column < small.width;
        const value = inside ? small.rgb[(row * small.width + column) * 3 + from] : padding[from];
        pixels[to] = table[value];
      }
    }
  }
  return pixels;
}

/** What each of the 256 values of a channel becomes, rounded to single precision at every step. */
function normalised(mean, std) {
  const { fround } = Math;
  return Float32Array.from({ length: 256 }, (_, value) =>
    fround(fround(fround(value / 255) - fround(mean)) / fround(std)),
  );
}

function resizedSides([height, width], input) {
  const target = input.size.map((side) => Math.floor(side / input.crop_pct));
  if (input.crop_mode === "squash") return target;
  if (input.crop_mode === "center" && target[0] === target[1]) {
    // torchvision's Resize(int) truncates the longer side where timm's own resize rounds it.
    const short = Math.min(height, width);
    return [Math.trunc((target[0] * height) / short), Math.trunc((target[0] * width) / short)];
  }
  const pick = input.crop_mode === "border" ? Math.max : Math.min;
  const ratio = pick(height / target[0], width / target[1]);
  return [Math.max(1, halfEven(height / ratio)), Math.max(1, halfEven(width / ratio))];
}

function cropOffset(have, want, rounding) {
  if (want > have) return -Math.floor((want - have) / 2);
  return rounding === "down" ? Math.floor((have - want) / 2) : halfEven((have - want) / 2);
}

/** Python's round: halves go to the even neighbour. */
function halfEven(value) {
  const low = Math.floor(value);
  if (value - low !== 0.5) return Math.round(value);
  return low % 2 === 0 ? low : low + 1;
}
