"""The methods: pure functions from arrays of attention, gradient and features to maps.

Every map is the patch part of `r . M`, where `r` is the readout row (which tokens the head reads)
and `M` a product of one matrix per layer. The product is taken from the left, so that each layer
costs one vector-matrix product. All functions share these arguments:

- attention, gradient, relevance: sequence over layers, input to output, of [B, heads, N, N] or
  [heads, N, N] arrays.
- prefix_tokens: how many tokens stand before the patches (class token, registers).
- grid: (h, w) of the patches, row by row; None where their count is a perfect square.
- readout: half-open (start, stop) ranges of the token positions whose mean the head reads, or a
  weight per token, [N], or per image and token, float [B, N], as the attention of a pooling head.
  None reads token 0, or the mean of the patches where prefix_tokens is 0.

They return [B, h, w] (or [h, w]) in the precision they were given: float64 for float64, else
float32. They raise `InputError` for arrays that are not finite or do not fit together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxplain.errors import InputError

__all__ = [
    "attention_gradcam",
    "attnlrp",
    "generic_attention",
    "gradcam",
    "gradient_rollout",
    "lrp",
    "partial_lrp",
    "raw_attention",
    "rollout",
    "transformer_attribution",
]

Array = NDArray[np.floating[Any]]
Readout = Sequence[tuple[int, int]] | ArrayLike | None
Grid = tuple[int, int] | None

_FUSE: dict[str, Callable[..., Array]] = {"mean": np.mean, "max": np.max, "min": np.min}


def raw_attention(
    attention: Sequence[ArrayLike],
    *,
    prefix_tokens: int = 1,
    grid: Grid = None,
    readout: Readout = None,
) -> Array:
    """The last layer's attention, `r . mean_h(A)`.

    Args:
        attention: See the module; only the last layer is read.
        prefix_tokens, grid, readout: See the module.
    """
    (last,) = _layers(list(attention)[-1:], "attention")
    row = _readout_row(readout, prefix_tokens, last)
    return _to_grid((row @ last.mean(axis=-3))[..., 0, :], prefix_tokens, grid)


def rollout(
    attention: Sequence[ArrayLike],
    *,
    prefix_tokens: int = 1,
    grid: Grid = None,
    readout: Readout = None,
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
    start_layer: int = 0,
) -> Array:
    """Attention rollout (Abnar & Zuidema 2020).

    `r . M_{L-1} ... M_s` with `M_l = rownorm(fuse_h(A_l) + I)`.

    Args:
        attention: See the module.
        prefix_tokens, grid, readout: See the module.
        head_fusion: "mean", "max" or "min" over the heads.
        discard_ratio: Share of each fused matrix, lowest entries first, that becomes 0; in [0, 1).
            The class token's attention to itself is never discarded.
        start_layer: First layer of the product; 0 takes all layers.
    """
    if head_fusion not in _FUSE:
        raise InputError(f"unknown head_fusion {head_fusion!r}; one of {', '.join(_FUSE)}")
    layers = _layers(attention, "attention")
    fuse = _FUSE[head_fusion]
    fused = (fuse(layers[i], axis=-3) for i in _down_to(start_layer, len(layers)))
    return _roll_out(fused, layers[-1], prefix_tokens, grid, readout, discard_ratio)


def gradient_rollout(
    attention: Sequence[ArrayLike],
    gradient: Sequence[ArrayLike],
    *,
    prefix_tokens: int = 1,
    grid: Grid = None,
    readout: Readout = None,
    discard_ratio: float = 0.0,
    start_layer: int = 0,
) -> Array:
    """Rollout of `relu(mean_h(A * G))` in place of the fused attention.

    Args:
        attention, gradient: See the module.
        prefix_tokens, grid, readout: See the module.
        discard_ratio, start_layer: As in `rollout`.
    """
    layers = _paired(_layers(attention, "attention"), _layers(gradient, "gradient"))
    used = (layers[i] for i in _down_to(start_layer, len(layers)))
    fused = (np.maximum((a * g).mean(axis=-3), 0) for a, g in used)
    return _roll_out(fused, layers[-1][0], prefix_tokens, grid, readout, discard_ratio)


def generic_attention(
    attention: Sequence[ArrayLike],
    gradient: Sequence[ArrayLike],
    *,
    prefix_tokens: int = 1,
    grid: Grid = None,
    readout: Readout = None,
) -> Array:
    """Generic attention explainability (Chefer, Gur & Wolf, ICCV 2021).

    `R = I`, then from the first layer to the last `R += mean_h(relu(A * G)) . R`; the map is
    `r . R`.

    Args:
        attention, gradient: See the module.
        prefix_tokens, grid, readout: See the module.
    """
    layers = _paired(_layers(attention, "attention"), _layers(gradient, "gradient"))
    row = _readout_row(readout, prefix_tokens, layers[-1][0])
    return _to_grid(_accumulate(row, layers[::-1]), prefix_tokens, grid)


def transformer_attribution(
    gradient: Sequence[ArrayLike],
    relevance: Sequence[ArrayLike],
    *,
    prefix_tokens: int = 1,
    grid: Grid = None,
    readout: Readout = None,
    start_layer: int = 0,
) -> Array:
    """Transformer attribution (Chefer, Gur & Wolf, CVPR 2021).

    `M = I + mean_h(relu(G * C))` with the relevance C of each attention; the map is
    `r . M_{L-1} ... M_s`. The matrices are not row-normalised.

    Args:
        gradient, relevance: See the module.
        prefix_tokens, grid, readout: See the module.
        start_layer: First layer of the product; 0 takes all layers.
    """
    layers = _paired(_layers(gradient, "gradient"), _layers(relevance, "relevance"))
    row = _readout_row(readout, prefix_tokens, layers[-1][0])
    used = [layers[i] for i in _down_to(start_layer, len(layers))]
    return _to_grid(_accumulate(row, used), prefix_tokens, grid)


def partial_lrp(
    relevance: Sequence[ArrayLike],
    *,
    prefix_tokens: int = 1,
    grid: Grid = None,
    readout: Readout = None,
) -> Array:
    """Partial LRP (Voita et al. 2019): `r . mean_h(relu(C))` of the last layer.

    Args:
        relevance: Relevance of the attention under the plain LRP rules; see the module. Only the
            last layer is read.
        prefix_tokens, grid, readout: See the module.
    """
    (last,) = _layers(list(relevance)[-1:], "relevance")
    row = _readout_row(readout, prefix_tokens, last)
    return _to_grid((row @ np.maximum(last, 0).mean(axis=-3))[..., 0, :], prefix_tokens, grid)


def lrp(relevance: ArrayLike) -> Array:
    """Layer-wise relevance propagation down to the pixels (Bach et al. 2015).

    Args:
        relevance: Relevance of the input under the plain LRP rules, [B, 3, H, W] or [3, H, W].

    Returns:
        The sum over the channels, [B, H, W] or [H, W]; positive where a pixel speaks for the class.
    """
    return _over_channels(relevance)


def attnlrp(relevance: ArrayLike) -> Array:
    """AttnLRP (Achtibat et al., ICML 2024) down to the pixels.

    Args:
        relevance: Relevance of the input under the AttnLRP rules, [B, 3, H, W] or [3, H, W].

    Returns:
        The sum over the channels, [B, H, W] or [H, W]; positive where a pixel speaks for the class.
    """
    return _over_channels(relevance)


def attention_gradcam(
    attention: Sequence[ArrayLike],
    gradient: Sequence[ArrayLike],
    *,
    prefix_tokens: int = 1,
    grid: Grid = None,
    readout: Readout = None,
) -> Array:
    """Grad-CAM on the last layer's attention heads.

    On the patch part of row r: `a_h = mean over patches of G_h`; the map is
    `relu(mean_h(a_h A_h))`.

    Args:
        attention, gradient: See the module; only the last layer is read.
        prefix_tokens, grid, readout: See the module.
    """
    ((last, last_gradient),) = _paired(
        _layers(list(attention)[-1:], "attention"), _layers(list(gradient)[-1:], "gradient")
    )
    row = _readout_row(readout, prefix_tokens, last)
    row = row[..., None, :, :]  # the same for every head
    patches = slice(prefix_tokens, None)
    weights = (row @ last_gradient)[..., 0, patches].mean(axis=-1)
    heads = (row @ last)[..., 0, :]
    fused = np.maximum((weights[..., None] * heads).mean(axis=-2), 0)
    return _to_grid(fused, prefix_tokens, grid)


def gradcam(
    features: ArrayLike,
    gradient: ArrayLike,
    *,
    prefix_tokens: int = 1,
    grid: Grid = None,
) -> Array:
    """Grad-CAM (Selvaraju et al. 2017) on tokens or on a feature map.

    Without the prefix tokens: `a_k = mean over positions of dF_k`; the map is
    `relu(sum_k a_k F_k)`.

    Args:
        features: [B, N, D] or [N, D] tokens, or a [B, C, h, w] feature map, which has no prefix
            tokens and brings its own grid.
        gradient: d logit / d features, same shape.
        prefix_tokens, grid: See the module.
    """
    f, g = _floating(features, "features"), _floating(gradient, "gradient")
    if f.shape != g.shape:
        raise InputError(f"features have shape {f.shape}, their gradient {g.shape}")
    if f.ndim == 4:
        grid, prefix_tokens = (f.shape[2], f.shape[3]), 0
        f, g = (x.reshape(*x.shape[:2], -1).swapaxes(1, 2) for x in (f, g))
    if f.ndim not in (2, 3):
        raise InputError(f"features have shape {f.shape}, expected [B, N, D] or [B, C, h, w]")
    _patches(f.shape[-2], prefix_tokens)
    weights = g[..., prefix_tokens:, :].mean(axis=-2)
    fused = np.maximum((f @ weights[..., None])[..., 0], 0)
    return _to_grid(fused, prefix_tokens, grid)


def _over_channels(relevance: ArrayLike) -> Array:
    values = _floating(relevance, "relevance")
    if values.ndim not in (3, 4):
        raise InputError(f"relevance has shape {values.shape}, expected [B, 3, H, W] or [3, H, W]")
    return values.sum(axis=-3)


def _floating(values: ArrayLike, name: str) -> Array:
    """float64 and float32 as they are, half precision as float32, everything else as float64."""
    try:
        array = np.asarray(values)
        if array.dtype == np.float16:
            array = array.astype(np.float32)
        elif array.dtype not in (np.float32, np.float64):
            array = array.astype(np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} is not an array of numbers") from None
    if not np.isfinite(array).all():
        raise InputError(f"{name} holds NaN or infinite values")
    return array


def _layers(values: Sequence[ArrayLike], name: str) -> list[Array]:
    layers = [_floating(value, f"{name} of layer {i}") for i, value in enumerate(values)]
    if not layers:
        raise InputError(f"{name} has no layers")
    for i, layer in enumerate(layers):
        if layer.ndim not in (3, 4) or layer.shape[-1] != layer.shape[-2]:
            raise InputError(
                f"{name} of layer {i} has shape {layer.shape}, "
                "expected [B, heads, N, N] or [heads, N, N]"
            )
        if layer.ndim != layers[0].ndim or layer.shape[-1] != layers[0].shape[-1]:
            raise InputError(
                f"{name} of layer {i} has shape {layer.shape}, that of layer 0 {layers[0].shape}"
            )
    return layers


def _paired(first: list[Array], second: list[Array]) -> list[tuple[Array, Array]]:
    if len(first) != len(second):
        raise InputError(f"{len(first)} layers of one array, {len(second)} of the other")
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        if a.shape != b.shape:
            raise InputError(f"the arrays of layer {i} have shapes {a.shape} and {b.shape}")
    return list(zip(first, second, strict=True))


def _down_to(start_layer: Any, layers: int) -> range:
    """The layers from the last one down to `start_layer`, in the order of a row-vector product."""
    if not isinstance(start_layer, int | np.integer) or not 0 <= start_layer < layers:
        raise InputError(f"start_layer is {start_layer!r}, expected 0..{layers - 1}")
    return range(layers - 1, start_layer - 1, -1)


def _readout_row(readout: Readout, prefix_tokens: int, layer: Array) -> Array:
    """Weight of each token in what the head reads, [1, N] or [B, 1, N]."""
    tokens = layer.shape[-1]
    _patches(tokens, prefix_tokens)
    if readout is None:
        readout = ((0, 1),) if prefix_tokens else ((0, tokens),)
    given = np.asarray(readout)
    if given.ndim == 1 and given.shape == (tokens,) and np.isfinite(given).all():
        return given.astype(layer.dtype)[None]
    if given.dtype.kind == "f" and given.shape == (*layer.shape[:-3], tokens):
        return _floating(given, "readout").astype(layer.dtype)[:, None]
    row = np.zeros((1, tokens), layer.dtype)
    if given.ndim != 2 or given.shape[1] != 2 or not len(given):
        raise InputError(
            f"readout has shape {given.shape}, expected (start, stop) ranges or {tokens} weights, "
            "for all images or for each"
        )
    for start, stop in given.tolist():
        if not 0 <= start < stop <= tokens:
            raise InputError(f"readout range {start}..{stop} does not lie in {tokens} tokens")
        row[0, start:stop] = 1
    return row / row.sum()


def _roll_out(
    fused: Iterator[Array],
    last: Array,
    prefix_tokens: int,
    grid: Grid,
    readout: Readout,
    discard_ratio: Any,
) -> Array:
    """The rollout of already fused matrices that arrive last layer first."""
    if not isinstance(discard_ratio, int | float | np.floating) or not 0 <= discard_ratio < 1:
        raise InputError(f"discard_ratio is {discard_ratio!r}, expected 0 <= ratio < 1")
    row = _readout_row(readout, prefix_tokens, last)
    for matrix in fused:
        kept = _discard(matrix, float(discard_ratio), keep_class_token=prefix_tokens > 0)
        # rownorm(F + I) divides row i by its sum: the same as dividing entry i of the row vector.
        row = row / (kept.sum(axis=-1) + 1)[..., None, :]
        row = row @ kept + row
    return _to_grid(row[..., 0, :], prefix_tokens, grid)


def _discard(fused: Array, ratio: float, *, keep_class_token: bool) -> Array:
    """Zeroes the int(ratio * N * N) lowest entries of each matrix; of equal ones the first."""
    tokens = fused.shape[-1]
    count = int(ratio * tokens * tokens)
    if count == 0:
        return fused
    flat = fused.reshape(*fused.shape[:-2], -1)
    cut = np.partition(flat, count - 1, axis=-1)[..., count - 1 : count]
    below, ties = flat < cut, flat == cut
    room = count - below.sum(axis=-1, keepdims=True)
    dropped = below | (ties & (ties.cumsum(axis=-1) <= room))
    if keep_class_token:  # it keeps its place in the count, so that one entry fewer is dropped
        dropped[..., 0] = False
    return np.where(dropped, 0, flat).reshape(fused.shape)


def _accumulate(row: Array, pairs: Iterable[tuple[Array, Array]]) -> Array:
    """`row . (I + E_last) ... (I + E_first)`, E = mean_h(relu(a * b)), pairs last layer first."""
    for a, b in pairs:
        row = row @ np.maximum(a * b, 0).mean(axis=-3) + row
    return row[..., 0, :]


def _patches(tokens: int, prefix_tokens: int) -> int:
    if not 0 <= prefix_tokens < tokens:
        raise InputError(f"prefix_tokens is {prefix_tokens} of {tokens} tokens")
    return tokens - prefix_tokens


def _to_grid(tokens: Array, prefix_tokens: int, grid: Grid) -> Array:
    """The patch part of [..., N] token values as [..., h, w]."""
    patches = _patches(tokens.shape[-1], prefix_tokens)
    if grid is None:
        side = math.isqrt(patches)
        if side * side != patches:
            raise InputError(f"{patches} patches do not make a square; give grid=(h, w)")
        grid = (side, side)
    height, width = grid
    if height < 1 or width < 1 or height * width != patches:
        raise InputError(f"grid {height}x{width} does not hold {patches} patches")
    return tokens[..., prefix_tokens:].reshape(*tokens.shape[:-1], height, width)
