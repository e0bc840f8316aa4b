"""From a method's name to its function, the outputs it reads, and the map."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.contract import AttentionLayer, Contract
from onnxplain.errors import ContractError, InputError
from onnxplain.outputs import ALIASES, METHODS, map_name
from onnxplain.runtime import methods

__all__ = ["check_options", "choose", "compute", "of_first_class", "reads", "served"]

_BEST_FIRST = (
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
)
_FROM_CONTRACT = ("prefix_tokens", "grid", "readout")


def served(contract: Contract) -> tuple[str, ...]:
    """The methods that this version knows and the model can serve, cheapest first."""
    return tuple(name for name in METHODS if name in contract.methods)


def choose(method: str, contract: Contract) -> str:
    """The method's own name, or the best one that the model serves for "auto"."""
    have = served(contract)
    if method == "auto":
        best = next((name for name in _BEST_FIRST if name in have), None)
        if best is None:
            raise InputError("this file serves no method; export it with methods")
        return best
    method = ALIASES.get(method, method)
    if method in have:
        return method
    what = "is not in this file" if method in METHODS else "is not a method of onnxplain"
    raise InputError(f"method {method!r} {what}; it has {', '.join(have) or 'none'}")


def check_options(method: str, options: Collection[str]) -> None:
    known = [name for name in _keywords(_function(method)) if name not in _FROM_CONTRACT]
    for option in options:
        if option not in known:
            raise InputError(
                f"method {method!r} has no option {option!r}; it has {', '.join(known) or 'none'}"
            )


def fused(method: str, contract: Contract, options: Mapping[str, Any]) -> str | None:
    """The output with the method's finished map for these options, if the file has it.

    Raises:
        InputError: The file has the map alone, and for other options.
    """
    fixed = contract.maps.get(method)
    if fixed is None:
        return None
    name = map_name(method)
    wanted = {option: options.get(option, value) for option, value in fixed.items()}
    if all(isinstance(v, str | int | float) for v in wanted.values()) and wanted == fixed:
        return name
    if contract.methods[method] != (name,):
        return None
    other = next(o for o in fixed if not np.array_equal(wanted[o], fixed[o]))
    raise InputError(
        f"{other} {wanted[other]!r}: this file holds the map of {method} for {fixed[other]!r}; "
        "export it with that, or with the taps (outputs='both')"
    )


def sources(method: str, contract: Contract) -> list[list[str]]:
    """For each array argument of the method, the outputs that make it up."""
    needs = METHODS[method]
    span = {"all": contract.layers, "last": contract.layers[-1:], "none": ()}
    if contract.readout is None and needs.reads_row:
        raise ContractError(
            f"the contract offers {method!r} without a readout; make the file again"
        )
    groups = [
        [layer.attention for layer in span[needs.attention]],
        [layer.gradient for layer in span[needs.gradient]],
        [layer.relevance for layer in span[needs.relevance]],
        [layer.relevance_lrp for layer in span[needs.relevance_lrp]],
    ]
    if needs.features:
        groups += [[contract.features], [contract.features_gradient]]
    if needs.pixels:
        groups += [[getattr(contract, needs.pixels)]]
    found = [[name for name in group if name is not None] for group in groups if group]
    if [len(group) for group in found] != [len(group) for group in groups if group]:
        raise ContractError(
            f"the contract offers {method!r} without the outputs it reads; make the file again"
        )
    return found


def reads(method: str, contract: Contract, options: Mapping[str, Any]) -> list[str]:
    """All outputs that the method's map is made of."""
    if (name := fused(method, contract, options)) is not None:
        return [name]
    names = [name for group in sources(method, contract) for name in group]
    weights = METHODS[method].weights(contract.readout)
    return names if weights is None else [*names, weights]


def compute(
    method: str,
    values: Mapping[str, NDArray[Any]],
    contract: Contract,
    options: Mapping[str, Any],
    *,
    column: int = 0,
) -> NDArray[np.float32]:
    """The method's raw maps, float32 [B, h, w] on the patch grid, or [B, H, W] for pixel methods.

    Args:
        method: One that the model serves.
        values: The outputs that `reads` names, by name.
        contract: The model's contract.
        options: The method's own options.
        column: Which of the classes of each image, in a file that takes several.

    Returns:
        A map per image; NaN for an image whose outputs are not all finite, so that one bad image
        does not take its batch along.
    """
    if (name := fused(method, contract, options)) is not None:
        maps = values[name]
        return _where_finite(maps[:, column] if maps.ndim == 4 else maps)
    needs = METHODS[method]
    groups = [[values[name] for name in group] for group in sources(method, contract)]
    if needs.reads_row:
        last = contract.layers[-len(groups[0]) :]
        groups = [
            [_square(a, layer, contract) for a, layer in zip(g, last, strict=True)] for g in groups
        ]
    count = len(groups[0][0])
    finite = np.ones(count, np.bool_)
    for array in (values[name] for name in reads(method, contract, options)):
        finite &= np.isfinite(array).reshape(count, -1).all(axis=1)
    size = contract.input.size if needs.pixels else contract.tokens.grid
    grid = np.full((count, *size), np.nan, np.float32)
    if not finite.any():
        return grid
    if not finite.all():
        groups = [[array[finite] for array in group] for group in groups]
    arguments: list[Any] = list(groups)
    if not needs.reads_row:
        arguments = [g[0] for g in groups]
    readout: Any = None if contract.readout is None else contract.readout.ranges
    if (name := needs.weights(contract.readout)) is not None:
        weights = values[name][finite]
        if weights.ndim == 4:  # of a pooling attention, by head and query
            weights = weights.mean(axis=(1, 2))
        ((start, stop),) = readout
        readout = np.pad(weights, ((0, 0), (start, contract.tokens.count - stop)))
    layout = {
        "prefix_tokens": len(contract.tokens.prefix),
        "grid": contract.tokens.grid,
        "readout": readout,
    }
    function = _function(method)
    keywords = {name: layout[name] for name in _keywords(function) if name in layout}
    maps = function(*arguments, **keywords, **options)
    if maps.shape[1:] != grid.shape[1:]:
        raise ContractError(
            f"the outputs that {method} reads give a map of shape {maps.shape[1:]}, the contract "
            f"says {grid.shape[1:]}; make the file again"
        )
    grid[finite] = maps
    return grid


def of_first_class(
    values: Mapping[str, NDArray[Any]], contract: Contract
) -> dict[str, NDArray[Any]]:
    """The outputs of a file that takes several classes at once, as of one that takes one."""
    several = contract.targets > 1
    return {
        name: value[:, 0] if several and value.ndim == 4 else value
        for name, value in values.items()
    }


def _where_finite(maps: NDArray[Any]) -> NDArray[np.float32]:
    finite = np.isfinite(maps).all(axis=(1, 2), keepdims=True)
    return np.where(finite, maps, np.float32(np.nan)).astype(np.float32, copy=False)


def _square(array: NDArray[Any], layer: AttentionLayer, contract: Contract) -> NDArray[Any]:
    """[B, heads, tokens, tokens] of a layer that has not all tokens: it leaves the others alone."""
    tokens, first = contract.tokens.count, layer.first_token
    if array.shape[-2:] == (tokens, tokens):
        return array
    whole = np.zeros((*array.shape[:-2], tokens, tokens), array.dtype)
    rows, columns = (first + size for size in array.shape[-2:])
    whole[..., first:rows, first:columns] = array
    return whole


def _function(method: str) -> Callable[..., NDArray[Any]]:
    function: Callable[..., NDArray[Any]] = getattr(methods, method)
    return function


def _keywords(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
