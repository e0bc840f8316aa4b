// From a map to a heatmap, back onto the picture, and to colours.
// The same as `upsample` of onnxplain/runtime/explanation.py and `Geometry.project` beside it.

// A map whose span is below this share of its largest magnitude is constant up to rounding;
// stretched to 0..1 it would show noise as if it were evidence.
const DEGENERATE_SPAN = 1e-5;

/**
 * A map as a heatmap: bilinear between its cells' centres, lowest value 0, highest 1.
 *
 * @param {{data: ArrayLike<number>, rows: number, columns: number}} map Raw values.
 * @param {number[]} size [H, W] of the model's input.
 * @param {number[]} covered Rows and columns of it that the map covers; the rest is 0.
 * @returns {?Float32Array} [H, W] in 0..1; null where the map is degenerate (not finite, or
 *   constant up to rounding).
 */
export function upsample(map, size, covered = size) {
  const [low, high] = range(map.data);
  const span = high - low;
  if (!(span > DEGENERATE_SPAN * Math.max(Math.abs(low), Math.abs(high)) && span < Infinity)) {
    return null;
  }
  const scaled = Float32Array.from(map.data, (value) => (value - low) / span);
  const y = centres(map.rows, covered[0]);
  const x = centres(map.columns, covered[1]);
  const large = sample(scaled, map.rows, map.columns, y, x);
  const [floor, ceiling] = range(large);
  const heatmap = new Float32Array(size[0] * size[1]);
  for (let row = 0; row < covered[0]; row++) {
    for (let column = 0; column < covered[1]; column++) {
      const value = large[row * covered[1] + column];
      heatmap[row * size[1] + column] = (value - floor) / (ceiling - floor);
    }
  }
  return heatmap;
}

/**
 * Carries a heatmap at model input size back onto the original picture.
 *
 * @param {Float32Array} heatmap [H, W].
 * @param {object} way The picture's geometry (preprocessing.js); another `original` gives the map
 *   for the picture at that size.
 * @returns {{top: number, left: number, rows: number, columns: number, data: Float32Array}} The
 *   part of the original that the model saw, and the map there.
 */
export function project(heatmap, way) {
  const y = seen(way, 0);
  const x = seen(way, 1);
  return {
    top: y.start,
    left: x.start,
    rows: y.at.length,
    columns: x.at.length,
    data: sample(heatmap, ...way.size, y.at, x.at),
  };
}

/** The part of the original's axis that the model saw, and where on the input it lies. */
function seen(way, axis) {
  const [length, size] = [way.original[axis], way.size[axis]];
  const scale = way.resized[axis] / length;
  const all = Array.from({ length }, (_, i) => (i + 0.5) * scale - way.offset[axis]);
  let start = all.findIndex((at) => at >= 0);
  let end = all.findLastIndex((at) => at <= size) + 1;
  if (start === -1 || start >= end) {
    // Fewer original pixels than the crop: the one in the middle covers it.
    const distances = all.map((at) => Math.abs(at - size / 2));
    start = distances.indexOf(Math.min(...distances));
    end = start + 1;
  }
  return { start, at: all.slice(start, end).map((at) => at - 0.5) };
}

/** Where the centres of `to` pixels lie on an axis of `from` cells of the same length. */
function centres(from, to) {
  return Array.from({ length: to }, (_, i) => ((i + 0.5) * from) / to - 0.5);
}

/** `values` [rows, columns] at fractional places, linear in between, the edge beyond. */
function sample(values, rows, columns, y, x) {
  const across = x.map((at) => between(at, columns));
  const out = new Float32Array(y.length * x.length);
  let to = 0;
  for (const at of y) {
    const [low, high, share] = between(at, rows);
    for (const [left, right, part] of across) {
      const above = mix(values[low * columns + left], values[low * columns + right], part);
      const below = mix(values[high * columns + left], values[high * columns + right], part);
      out[to++] = mix(above, below, share);
    }
  }
  return out;
}

const mix = (a, b, share) => a * (1 - share) + b * share;

/** The two cells around a place, and the share of the second. */
function between(at, length) {
  const inside = Math.min(Math.max(at, 0), length - 1);
  const low = Math.floor(inside);
  return [low, Math.min(low + 1, length - 1), inside - low];
}

/** Lowest and highest; NaN where a value is. */
function range(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (Number.isNaN(value)) return [NaN, NaN];
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

// Every fifth of the 256 colours of the turbo colormap, by Anton Mikhailov, Google, 2019 (Apache-2.0).
const TURBO = `
  30123b 36215f 3b2f80 3f3e9c 424bb5 4559cb 4666dd 4773eb 4680f6 458cfd 4099ff 38a5fb 2fb2f4
  27bee9 1fc9dd 1ad4d0 18ddc2 1ae4b6 22ebaa 2ff19b 3ff68a 52fa7a 65fd69 79fe59 8bff4b 9cfe40
  a9fb39 b7f735 c3f134 d0ea34 dbe236 e5d938 eecf3a f5c53a faba39 fdae35 fea130 fe932a fc8423
  f9751d f46617 ef5811 e84b0c e14109 d83706 ce2d04 c32503 b71d02 a91601 9b0f01 8b0902 7a0403
`
  .trim()
  .split(/\s+/)
  .map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

/** Colour of a value in 0..1, [red, green, blue] in 0..255. */
export function turbo(value) {
  const [low, high, share] = between(value * (TURBO.length - 1), TURBO.length);
  return TURBO[low].map((part, i) => Math.round(mix(part, TURBO[high][i], share)));
}
