"""Ways in which an ONNX file may be wrong: each changes a model, or a file's bytes, at random."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import onnx
from onnx import AttributeProto, TensorProto, helper

__all__ = ["BYTES", "MUTATIONS", "spoil_document"]

Mutation = Callable[[onnx.ModelProto, Random], None]

MUTATIONS: dict[str, Mutation] = {}
BYTES: dict[str, Callable[[bytes, Random], bytes]] = {}

NUMBERS = (
    -(2**63),
    -(2**31),
    -7,
    -2,
    -1,
    0,
    1,
    2,
    3,
    5,
    7,
    64,
    1000,
    2**20,
    2**31,
    2**40,
    2**63 - 1,
)
# Names that the rules, the contract or onnx treat in a way of their own.
NAMES = ("", "target", "logits", "attention.0", "features", "image", "output", "a b", "ä\n", "/x")
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "nowhere", "ai.onnx.preview.training")
OPERATORS = sorted({schema.name for schema in onnx.defs.get_all_schemas()})


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


def number(random: Random) -> int:
    return random.choice(NUMBERS) if random.random() < 0.8 else random.randint(-20, 300)


def values(model: onnx.ModelProto) -> list[str]:
    graph = model.graph
    made = [name for node in graph.node for name in node.output]
    return [*made, *(v.name for v in (*graph.input, *graph.initializer))] or [""]


@mutation
def drop_node(model: onnx.ModelProto, random: Random) -> None:
    del model.graph.node[random.randrange(len(model.graph.node))]


@mutation
def bypass_node(model: onnx.ModelProto, random: Random) -> None:
    """Whoever reads its output reads its first input."""
    i = random.randrange(len(model.graph.node))
    node = model.graph.node[i]
    if node.input and node.output:
        own, source = node.output[0], node.input[0]
        del model.graph.node[i]
        for other in model.graph.node:
            other.input[:] = [source if name == own else name for name in other.input]


@mutation
def duplicate_node(model: onnx.ModelProto, random: Random) -> None:
    nodes = model.graph.node
    copy = onnx.NodeProto()
    copy.CopyFrom(random.choice(nodes))
    if random.random() < 0.5:
        copy.output[:] = [name and f"{name}/again" for name in copy.output]
    nodes.insert(random.randrange(len(nodes) + 1), copy)


@mutation
def swap_nodes(model: onnx.ModelProto, random: Random) -> None:
    nodes = list(model.graph.node)
    i, j = (random.randrange(len(nodes)) for _ in range(2))
    nodes[i], nodes[j] = nodes[j], nodes[i]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


@mutation
def rewire(model: onnx.ModelProto, random: Random) -> None:
    node = random.choice(model.graph.node)
    names = list(node.input) or [""]
    names[random.randrange(len(names))] = random.choice([*values(model), *NAMES])
    node.input[:] = names


@mutation
def add_input(model: onnx.ModelProto, random: Random) -> None:
    random.choice(model.graph.node).input.append(random.choice([*values(model), ""]))


@mutation
def drop_input(model: onnx.ModelProto, random: Random) -> None:
    node = random.choice(model.graph.node)
    if node.input:
        del node.input[random.randrange(len(node.input))]


@mutation
def change_outputs(model: onnx.ModelProto, random: Random) -> None:
    node = random.choice(model.graph.node)
    if random.random() < 0.5 and node.output:
        node.output[random.randrange(len(node.output))] = random.choice([*values(model), *NAMES])
    elif random.random() < 0.5:
        node.output.append(random.choice(["more", "", *values(model)]))
    else:
        del node.output[:]


@mutation
def close_a_cycle(model: onnx.ModelProto, random: Random) -> None:
    nodes = model.graph.node
    i = random.randrange(len(nodes))
    later = nodes[random.randrange(i, len(nodes))]
    if nodes[i].input and later.output:
        nodes[i].input[0] = later.output[0]


@mutation
def change_operator(model: onnx.ModelProto, random: Random) -> None:
    node = random.choice(model.graph.node)
    own = sorted({other.op_type for other in model.graph.node})
    node.op_type = random.choice([*random.choice([OPERATORS, own]), "Nothing", ""])


@mutation
def change_domain(model: onnx.ModelProto, random: Random) -> None:
    random.choice(model.graph.node).domain = random.choice(DOMAINS)


@mutation
def name_node(model: onnx.ModelProto, random: Random) -> None:
    random.choice(model.graph.node).name = random.choice(NAMES)


@mutation
def change_attribute(model: onnx.ModelProto, random: Random) -> None:
    nodes = [node for node in model.graph.node if node.attribute] or list(model.graph.node)
    node = random.choice(nodes)
    if not node.attribute:
        return
    attribute = random.choice(node.attribute)
    kind = attribute.type
    if kind == AttributeProto.INT:
        attribute.i = number(random)
    elif kind == AttributeProto.INTS:
        numbers = list(attribute.ints)
        if numbers and random.random() < 0.6:
            numbers[random.randrange(len(numbers))] = number(random)
        elif random.random() < 0.5:
            numbers.append(number(random))
        else:
            numbers = numbers[1:]
        attribute.ints[:] = numbers
    elif kind == AttributeProto.FLOAT:
        attribute.f = random.choice([0.0, -1.0, float("nan"), float("inf"), 1e-38, 1e38])
    elif kind == AttributeProto.STRING:
        attribute.s = random.choice([b"", b"\xff", b"SAME_UPPER", b"tanh", b"bij,bjk->bik", b"i->"])
    elif kind == AttributeProto.TENSOR:
        spoil_tensor(attribute.t, random)


@mutation
def change_attributes(model: onnx.ModelProto, random: Random) -> None:
    node = random.choice(model.graph.node)
    if random.random() < 0.4 and node.attribute:
        del node.attribute[random.randrange(len(node.attribute))]
    elif random.random() < 0.3 and node.attribute:
        node.attribute.append(random.choice(node.attribute))
    elif random.random() < 0.3 and node.attribute:
        random.choice(node.attribute).type = random.randrange(16)
    else:
        given: Any = random.choice([1, -1, 2**40, [1, 1], [0], 0.5, "x", [0.5]])
        name = random.choice(
            ["axis", "axes", "perm", "to", "group", "keepdims", "equation", "alpha"]
        )
        node.attribute.append(helper.make_attribute(name, given))


@mutation
def refer_to_an_attribute(model: onnx.ModelProto, random: Random) -> None:
    nodes = [node for node in model.graph.node if node.attribute] or list(model.graph.node)
    node = random.choice(nodes)
    if node.attribute:
        random.choice(node.attribute).ref_attr_name = "nowhere"


def spoil_tensor(tensor: TensorProto, random: Random) -> None:
    what = random.randrange(6)
    if what == 0:
        tensor.data_type = random.randrange(-1, 28)
    elif what == 1 and tensor.dims:
        tensor.dims[random.randrange(len(tensor.dims))] = number(random)
    elif what == 2:
        tensor.dims.append(number(random))
    elif what == 3:
        tensor.raw_data = tensor.raw_data[: random.randrange(len(tensor.raw_data) + 1)]
    elif what == 4:
        raw = bytearray(tensor.raw_data)
        for _ in range(min(len(raw), 8)):
            raw[random.randrange(len(raw))] = random.randrange(256)
        tensor.raw_data = bytes(raw)
    else:
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (
            ("location", random.choice(["w.data", "../w.data", "/etc/passwd", ".", "", "a/b"])),
            ("offset", str(number(random))),
            ("length", str(number(random))),
        ):
            if random.random() < 0.8:
                tensor.external_data.add(key=key, value=value)


@mutation
def change_weight(model: onnx.ModelProto, random: Random) -> None:
    if model.graph.initializer:
        spoil_tensor(random.choice(model.graph.initializer), random)


@mutation
def names_of_weights(model: onnx.ModelProto, random: Random) -> None:
    weights = model.graph.initializer
    if not weights:
        return
    if random.random() < 0.5:
        random.choice(weights).name = random.choice([*values(model), *NAMES])
    elif random.random() < 0.5:
        weights.append(random.choice(weights))
    else:
        del weights[random.randrange(len(weights))]


@mutation
def weight_that_is_an_input(model: onnx.ModelProto, random: Random) -> None:
    if model.graph.initializer:
        one = random.choice(model.graph.initializer)
        model.graph.input.append(
            helper.make_tensor_value_info(one.name, one.data_type, list(one.dims))
        )


@mutation
def change_interface(model: onnx.ModelProto, random: Random) -> None:
    graph = model.graph
    which = random.choice([graph.input, graph.output])
    what = random.randrange(7)
    if not which or what == 0:
        name = random.choice([*values(model), *NAMES])
        which.append(helper.make_tensor_value_info(name, 1, [number(random)]))
        return
    value = random.choice(which)
    kind = value.type.tensor_type
    if what == 1:
        value.name = random.choice([*values(model), *NAMES])
    elif what == 2:
        kind.elem_type = random.randrange(-1, 28)
    elif what == 3 and kind.shape.dim:
        kind.shape.dim[random.randrange(len(kind.shape.dim))].dim_value = number(random)
    elif what == 4 and kind.shape.dim:
        dim = kind.shape.dim[random.randrange(len(kind.shape.dim))]
        dim.dim_param = random.choice(["", "n", "m", "ä"])
    elif what == 5:
        value.ClearField("type")
    elif random.random() < 0.5:
        kind.ClearField("shape")
    else:
        del which[random.randrange(len(which))]


@mutation
def recorded_shape(model: onnx.ModelProto, random: Random) -> None:
    model.graph.value_info.append(
        helper.make_tensor_value_info(
            random.choice(values(model)), random.randrange(0, 27), [number(random)] * 2
        )
    )


@mutation
def change_versions(model: onnx.ModelProto, random: Random) -> None:
    what = random.randrange(4)
    if what == 0:
        model.ir_version = number(random)
    elif what == 1 and model.opset_import:
        model.opset_import[0].version = random.choice([number(random), *range(15, 26)])
    elif what == 2:
        model.opset_import.add(domain=random.choice(DOMAINS), version=number(random))
    else:
        del model.opset_import[:]


@mutation
def metadata(model: onnx.ModelProto, random: Random) -> None:
    value = random.choice(["", "{}", "[]", "null", '{"format": 1}', '{"format": 9}', "{" * 9999])
    model.metadata_props.add(key=random.choice(["onnxplain", "", "x"]), value=value)


@mutation
def subgraph(model: onnx.ModelProto, random: Random) -> None:
    inner = helper.make_graph([], "g", [], [helper.make_tensor_value_info("y", 1, None)])
    for _ in range(random.choice([0, 3, 15])):
        branches = {"then_branch": inner, "else_branch": inner} if _ < 3 else {"body": inner}
        inner = helper.make_graph(
            [helper.make_node("If" if _ < 3 else "Loop", ["c"], ["y"], **branches)],
            "g",
            [],
            [helper.make_tensor_value_info("y", 1, None)],
        )
    node = random.choice(model.graph.node)
    node.attribute.append(helper.make_attribute("body", inner))
    if random.random() < 0.3:
        node.op_type = "If"


@mutation
def function(model: onnx.ModelProto, random: Random) -> None:
    """A function that calls itself, or another, or one node of it."""
    calls = random.choice(["f", "g", "Relu"])
    domain = "" if calls == "Relu" else "own"
    model.functions.append(
        helper.make_function(
            "own",
            "f",
            ["x"],
            ["y"],
            [helper.make_node(calls, ["x"], ["y"], domain=domain)],
            [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)],
        )
    )
    model.opset_import.add(domain="own", version=1)
    if calls == "g":
        other = onnx.FunctionProto()
        other.CopyFrom(model.functions[0])
        other.name, other.node[0].op_type = "g", "f"
        model.functions.append(other)
    node = random.choice(model.graph.node)
    node.op_type, node.domain = "f", "own"
    if random.random() < 0.7:
        del node.input[1:], node.output[1:], node.attribute[:]


@mutation
def insert_of_constants(model: onnx.ModelProto, random: Random) -> None:
    """A value of a size that stands in the file, put into a node's input."""
    size = [number(random) for _ in range(random.randrange(1, 4))]
    kind = random.choice(["ConstantOfShape", "Expand", "Range", "Tile", "Pad", "RandomNormal"])
    constants = {"big/size": size, "big/one": [1]}
    inputs = {
        "ConstantOfShape": ["big/size"],
        "Expand": ["big/one", "big/size"],
        "Range": ["big/0", "big/end", "big/step"],
        "Tile": ["big/one", "big/end/1"],
        "Pad": ["big/one", "big/pads"],
        "RandomNormal": [],
    }[kind]
    given: dict[str, Any] = {"shape": size} if kind == "RandomNormal" else {}
    ints = TensorProto.INT64
    for name, numbers in (*constants.items(), ("big/end/1", size[:1]), ("big/pads", [0, size[0]])):
        model.graph.initializer.append(helper.make_tensor(name, ints, [len(numbers)], numbers))
    for name, one in (("big/0", 0), ("big/end", size[0]), ("big/step", size[-1])):
        model.graph.initializer.append(helper.make_tensor(name, ints, [], [one]))
    model.graph.node.insert(0, helper.make_node(kind, inputs, ["big"], "big", **given))
    node = random.choice(model.graph.node)
    if node.input and node.output[:1] != ["big"]:
        node.input[random.randrange(len(node.input))] = "big"


def flip(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    end = len(data) if random.random() < 0.3 else min(len(data), 4000)
    for _ in range(random.choice([1, 1, 2, 8, 50])):
        changed[random.randrange(end)] = random.randrange(256)
    return bytes(changed)


def cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data))]


def splice(data: bytes, random: Random) -> bytes:
    i, j, k = (random.randrange(len(data)) for _ in range(3))
    return data[:i] + data[j : j + 200] + data[k:]


BYTES.update({function.__name__: function for function in (flip, cut, splice)})


def spoil_document(document: Any, random: Random) -> None:
    """Changes one entry of a JSON document, at whatever depth."""
    while True:
        keys = list(document) if isinstance(document, dict) else list(range(len(document)))
        if not keys:
            return
        key = random.choice(keys)
        inner = document[key]
        if not isinstance(inner, dict | list) or random.random() < 0.2:
            break
        document = inner
    if random.random() < 0.2:
        del document[key]
    else:
        other: list[Any] = [
            None,
            True,
            "",
            "x",
            -1,
            0,
            2,
            0.5,
            1e308,
            10**400,
            [],
            {},
            [1, 2],
            [[0, 9]],
        ]
        document[key] = random.choice([*other, number(random), "attention.1", "features"])
