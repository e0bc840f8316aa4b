"""The contract of a graph that has a part of all outputs."""

from __future__ import annotations

import dataclasses

from onnxplain.contract import Contract
from onnxplain.graphs.seeds import TARGET
from onnxplain.outputs import (
    FEATURES,
    FEATURES_GRADIENT,
    INPUT_RELEVANCE,
    INPUT_RELEVANCE_ATTNLRP,
    METHODS,
    attention_gradient_name,
    attention_name,
    attention_relevance_lrp_name,
    attention_relevance_name,
    map_name,
)

__all__ = ["maps_alone", "with_methods"]


def with_methods(contract: Contract, methods: tuple[str, ...]) -> Contract:
    """The contract of a graph that has the outputs of `methods` and no others."""
    count = len(contract.layers)
    needed = {method: METHODS[method].outputs(count, contract.readout) for method in methods}
    outputs = {name for names in needed.values() for name in names}

    def present(name: str) -> str | None:
        return name if name in outputs else None

    asked = any(METHODS[method].takes_target(contract.readout) for method in methods)
    return dataclasses.replace(
        contract,
        methods=needed,
        layers=tuple(
            dataclasses.replace(
                layer,
                attention=present(attention_name(i)),
                gradient=present(attention_gradient_name(i)),
                relevance=present(attention_relevance_name(i)),
                relevance_lrp=present(attention_relevance_lrp_name(i)),
            )
            for i, layer in enumerate(contract.layers)
        ),
        features=present(FEATURES),
        features_gradient=present(FEATURES_GRADIENT),
        rules={m: rules for m, rules in contract.rules.items() if m in methods},
        maps={m: options for m, options in contract.maps.items() if m in methods},
        input_relevance=present(INPUT_RELEVANCE),
        input_relevance_attnlrp=present(INPUT_RELEVANCE_ATTNLRP),
        target=TARGET if asked else None,
        targets=contract.targets if asked else 1,
        class_weights=contract.class_weights if asked else None,
    )


def maps_alone(contract: Contract) -> Contract:
    """The contract of the same graph without what the maps are made of."""
    return dataclasses.replace(
        with_methods(contract, ()),
        methods={method: (map_name(method),) for method in contract.methods},
        maps=contract.maps,
        rules=contract.rules,
        target=contract.target,
        targets=contract.targets,
        class_weights=contract.class_weights,
    )
