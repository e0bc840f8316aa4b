// Pillow's resize, to the bit: models were evaluated on pictures that Pillow had resized.

// Support and weight of a source pixel at distance x from a target pixel's centre, in units of the
// larger of the two pixels.
const FILTERS = {
  box: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  hamming: [1, (x) => hamming(Math.abs(x))],
  bicubic: [2, (x) => bicubic(Math.abs(x))],
  lanczos: [3, (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0)],
};

/** Names of the interpolations, as contracts have them. */
export const INTERPOLATIONS = ["nearest", ...Object.keys(FILTERS)];

// Weights are integers of 22 fractional bits, so that 8-bit sums fit in 32 bits.
const ONE = 2 ** 22;

/**
 * Resizes an RGB picture with antialiasing (the filter widens where the picture shrinks).
 *
 * @param {{width: number, height: number, rgb: Uint8Array}} picture rgb is [height, width, 3].
 * @param {number} height
 * @param {number} width
 * @param {string} interpolation One of INTERPOLATIONS.
 * @returns {{width: number, height: number, rgb: Uint8Array}} The picture itself if it has the size.
 */
export function resize(picture, height, width, interpolation) {
  if (interpolation === "nearest") return nearest(picture, height, width);
  const filter = FILTERS[interpolation];
  let { rgb } = picture;
  if (width !== picture.width) {
    const { first, weights, taps } = coefficients(picture.width, width, filter);
    const out = new Uint8Array(picture.height * width * 3);
    for (let y = 0; y < picture.height; y++) {
      for (let x = 0; x < width; x++) {
        const from = (y * picture.width + first[x]) * 3;
        convolve(rgb, from, 3, weights, x * taps, taps, out, (y * width + x) * 3);
      }
    }
    rgb = out;
  }
  if (height !== picture.height) {
    const { first, weights, taps } = coefficients(picture.height, height, filter);
    const out = new Uint8Array(height * width * 3);
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        const from = (first[y] * width + x) * 3;
        convolve(rgb, from, width * 3, weights, y * taps, taps, out, (y * width + x) * 3);
      }
    }
    rgb = out;
  }
  return { width, height, rgb };
}

/** One RGB pixel: the weighted sum of `taps` pixels that lie `step` bytes apart. */
function convolve(source, from, step, weights, at, taps, out, to) {
  let r = ONE / 2;
  let g = ONE / 2;
  let b = ONE / 2;
  for (let i = 0; i < taps; i++, from += step) {
    const weight = weights[at + i];
    if (weight === 0) continue; // keeps what lies behind the last pixel out
    r += weight * source[from];
    g += weight * source[from + 1];
    b += weight * source[from + 2];
  }
  out[to] = clip(r);
  out[to + 1] = clip(g);
  out[to + 2] = clip(b);
}

const clip = (sum) => Math.min(255, Math.max(0, Math.floor(sum / ONE)));

/** For each target pixel its first source pixel and the weights from there on, padded with 0. */
function coefficients(from, to, [support, weight]) {
  const scale = from / to;
  const widened = Math.max(1, scale);
  const reach = support * widened;
  const taps = Math.ceil(reach) * 2 + 1;
  const first = new Int32Array(to);
  const weights = new Int32Array(to * taps);
  for (let target = 0; target < to; target++) {
    const centre = (target + 0.5) * scale;
    const low = Math.max(0, Math.trunc(centre - reach + 0.5));
    const high = Math.min(from, Math.trunc(centre + reach + 0.5));
    const row = [];
    let sum = 0;
    for (let source = low; source < high; source++) {
      row.push(weight((source - centre + 0.5) * (1 / widened)));
      sum += row.at(-1);
    }
    first[target] = low;
    row.forEach((value, i) => {
      const share = (sum === 0 ? value : value / sum) * ONE;
      weights[target * taps + i] = Math.trunc(share < 0 ? share - 0.5 : share + 0.5);
    });
  }
  return { first, weights, taps };
}

function nearest(picture, height, width) {
  const columns = nearestIndices(picture.width, width);
  const rows = nearestIndices(picture.height, height);
  const rgb = new Uint8Array(height * width * 3);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const from = (rows[y] * picture.width + columns[x]) * 3;
      rgb.set(picture.rgb.subarray(from, from + 3), (y * width + x) * 3);
    }
  }
  return { width, height, rgb };
}

function nearestIndices(from, to) {
  const scale = from / to;
  // Added up, not multiplied, because Pillow's roundings come from adding up.
  let at = scale / 2;
  return Int32Array.from({ length: to }, () => {
    const index = Math.min(Math.floor(at), from - 1);
    at += scale;
    return index;
  });
}

function bicubic(x) {
  const a = -0.5;
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

function hamming(x) {
  if (x === 0) return 1;
  // Pillow has these two constants in single precision.
  const [base, swing] = [Math.fround(0.54), Math.fround(0.46)];
  return x < 1 ? sinc(x) * (base + swing * Math.cos(Math.PI * x)) : 0;
}

function sinc(x) {
  return x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x);
}
