"""Reads the parent graph that the passes leave (pieces and layers between them) into the runtime's Program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mllm_compile.compiler.pieces import of_scores, size_symbols
from mllm_compile.errors import CompileError
from mllm_compile.passes.base import (
    ATTENTION_LAYERS,
    CACHE_INPUT,
    CACHE_INPUTS,
    CROSS_LAYERS,
    PACKED_WEIGHTS,
    PANELS,
    QUANTISED_TENSORS,
    STAGE,
    STATE_LAYERS,
    VARIANTS,
    PackedPart,
    QuantisedTensor,
)
from mllm_compile.passes.match.experts import match_expert_linear
from mllm_compile.passes.match.layer_kinds import (
    AttentionKind,
    CrossAttentionKind,
    LayerKind,
    PackedAttentionKind,
    SegmentAttentionKind,
    StateLayerKind,
    lowered_kind,
)
from mllm_compile.passes.match.nodes import is_call, is_op, is_symbolic, is_weight
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.program.spec import (
    BATCH_INPUTS,
    ExpertWeight,
    HandedValue,
    PieceVariant,
    Program,
    QuantisedWeight,
    StageStart,
)
from mllm_compile.runtime.program.steps import (
    AttentionStep,
    CrossAttentionStep,
    PackedAttentionStep,
    PieceStep,
    RopeInputNames,
    StateStep,
    Step,
)
from mllm_compile.runtime.quantised.scheme import OFFSETS, SCALES, VALUES, ZEROS


def build_program(graph: fx.GraphModule) -> Program:
    """One step for each piece call, each attention and each layer with a state, in order."""
    steps: list[Step] = []
    stages: list[int] = []
    for node in graph.graph.nodes:
        if node.op == "call_module" or lowered_kind(node) is not None:
            stages.append(node.meta.get(STAGE, 0))
        if node.op == "call_module":
            outputs = sorted((user.args[1], user.name) for user in node.users if user.target is operator.getitem)
            count = len(node.meta["val"])
            names = dict(outputs)
            layers_of_cache = [arg.meta[CACHE_INPUT][1] for arg in node.all_input_nodes if CACHE_INPUT in arg.meta]
            steps.append(
                PieceStep(
                    piece=str(node.target),
                    inputs=tuple(_value_name(arg) for arg in node.args if not _is_cache(arg)),
                    outputs=tuple(names.get(index, f"{node.name}.unused{index}") for index in range(count)),
                    writes_kv_of=next((name for name in layers_of_cache if name), None),
                )
            )
        elif (kind := lowered_kind(node)) is not None:
            steps.append(_STEP_MAKERS[type(kind)](node))
    layers: tuple[LayerSpec, ...] = tuple(graph.meta[ATTENTION_LAYERS])
    output = next(node for node in graph.graph.nodes if node.op == "output")
    logits, *others = output.args[0]
    of_layers = [name for layer in layers for name in (layer.sinks, layer.up_projection) if name]
    weights = tuple(dict.fromkeys([*weight_shapes(graph), *of_layers]))
    expert_weights, counted = _experts(graph)
    return Program(
        tuple(steps),
        layers,
        weights,
        _value_name(logits),
        _variants(graph),
        expert_weights=expert_weights,
        counted_experts=counted,
        state_layers=tuple(graph.meta[STATE_LAYERS]),
        quantised_weights=_quantised(graph),
        panels=dict(graph.meta.get(PANELS, {})),
        inputs=_own_inputs(graph),
        further_outputs=tuple(map(_value_name, others)),
        stages=_stages(graph, steps, stages),
        cross_layers=tuple(graph.meta.get(CROSS_LAYERS, ())),
    )


def _stages(graph: fx.GraphModule, steps: Sequence[Step], stages: Sequence[int]) -> tuple[StageStart, ...]:
    """Where each stage but the first begins; `stages` has each step's."""
    given = {_value_name(node) for node in graph.graph.find_nodes(op="placeholder")}
    nodes = {node.name: node for node in graph.graph.nodes}
    found = []
    for stage in range(1, max(stages, default=0) + 1):
        first = stages.index(stage)
        made = {name for step in steps[:first] for name in step.writes}
        read = dict.fromkeys(name for step in steps[first:] for name in step.reads)
        found.append(StageStart(first, tuple(_handed(nodes[name]) for name in read if name in made - given)))
    return tuple(found)


def _handed(node: fx.Node) -> HandedValue:
    val = node.meta["val"]
    shape = tuple(-1 if is_symbolic(size) else int(size) for size in val.shape)
    return HandedValue(_value_name(node), shape, str(val.dtype).removeprefix("torch."))


def _own_inputs(graph: fx.GraphModule) -> tuple[str, ...]:
    """The inputs of the batch that not every program has."""
    names = (node.meta.get("input_name") for node in graph.graph.find_nodes(op="placeholder"))
    return tuple(name for name in names if name is not None and name not in (*BATCH_INPUTS, *CACHE_INPUTS))


def _quantised(graph: fx.GraphModule) -> dict[str, QuantisedWeight]:
    """The quantised weights, by the names of their values, whatever the pieces do with them."""
    tensors: Mapping[str, QuantisedTensor] = graph.meta.get(QUANTISED_TENSORS, {})
    packed: Mapping[str, tuple[PackedPart, ...]] = graph.meta.get(PACKED_WEIGHTS, {})
    roles: dict[tuple[str, ...], dict[str, str]] = {}
    sides: dict[tuple[str, ...], tuple[int, int]] = {}
    shapes = weight_shapes(graph)
    for name in shapes:
        members = [tensors.get(part.weight_name) for part in packed[name]] if name in packed else [tensors.get(name)]
        of_weights = tuple(member.weight_name for member in members if member is not None)
        if members[0] is not None:
            roles.setdefault(of_weights, {})[members[0].role] = name
            sides[of_weights] = shapes[name][0][-2], members[0].shape[-1]
    return {
        names[VALUES]: QuantisedWeight(names[SCALES], names.get(ZEROS) or names.get(OFFSETS), *sides[key])
        for key, names in roles.items()
    }


def _experts(graph: fx.GraphModule) -> tuple[dict[str, ExpertWeight], tuple[str, ...]]:
    """The weights of experts, by their names; and the first weight behind each counter, in order."""
    found: dict[str, ExpertWeight] = {}
    counted: list[str] = []
    for call in graph.graph.find_nodes(op="call_module"):
        piece: Any = graph.get_submodule(str(call.target))
        given: dict[Any, Any] = dict(zip(piece.graph.find_nodes(op="placeholder"), call.args, strict=True))
        is_counted = False
        for node in piece.graph.nodes:
            is_counted = is_counted or is_op(node, "count_experts")
            product = _product_of_experts(node)
            if product is None:
                continue
            name = _weight_behind(product[0], given)
            if name is not None:
                found[name] = product[1]
                if is_counted:
                    counted.append(name)
                is_counted = False
    return found, tuple(counted)


def _product_of_experts(node: fx.Node) -> tuple[fx.Node, ExpertWeight] | None:
    """The weight that the node multiplies rows of experts with; None: it does something else."""
    operands: Any = node.args
    is_transposed: Any = False
    if (linear := match_expert_linear(node)) is not None:
        outputs, inputs = linear.shape
        return linear.weight, ExpertWeight(linear.num_experts, linear.num_chosen, inputs, outputs, linear.of_tokens)
    if is_op(node, "quantised_grouped_linear"):
        x, values, (num_chosen, of_tokens) = operands[0], operands[3], operands[9:11]
        num_experts, outputs, _ = map(int, values.meta["val"].shape)
        inputs = int(x.meta["val"].shape[1])
        return values, ExpertWeight(num_experts, num_chosen, inputs, outputs, of_tokens)
    if is_op(node, "grouped_linear"):
        weight, (num_chosen, is_transposed, of_tokens) = operands[3], operands[5:8]
    elif is_op(node, "gated_expert_tiles"):
        weight, num_chosen, of_tokens = operands[3], operands[4], True
    elif is_op(node, "expert_tiles"):
        weight, num_chosen, of_tokens = operands[3], _num_chosen(operands[4]), False
    else:
        return None
    num_experts, *sides = map(int, weight.meta["val"].shape)
    inputs, outputs = sides if is_transposed else reversed(sides)
    return weight, ExpertWeight(num_experts, num_chosen, inputs, outputs, of_tokens)


def _num_chosen(ids: fx.Node) -> int:
    return int(ids.meta["val"].shape[1])


def _weight_behind(node: fx.Node, given: dict[fx.Node, fx.Node]) -> str | None:
    """The name of the weight that a piece is given as this node, or as what it is a view of."""
    while node not in given and (is_call(node, operator.getitem) or node.target == "view"):
        node = node.args[0]  # type: ignore[assignment]
    return given[node].meta["weight_name"] if is_weight(given.get(node)) else None


def _attention_step(node: fx.Node) -> AttentionStep:
    q, k, v, out = (_value_name(arg) for arg in node.args[:4])
    saves_kv = bool(node.args[5]) if len(node.args) > 5 else True
    rope_inputs = None
    if len(node.args) > 6 and node.args[6] is not None:
        values: Any
        values, eps = node.args[6:8]
        rope_inputs = RopeInputNames(tuple(map(_value_name, values)), float(eps))  # type: ignore[arg-type]
    bias = _value_name(node.args[8]) if len(node.args) > 8 and node.args[8] is not None else None
    index: Any = node.args[9] if len(node.args) > 9 else ()
    return AttentionStep(str(node.args[4]), q, k, v, out, saves_kv, rope_inputs, bias, tuple(map(_value_name, index)))


def _cross_attention_step(node: fx.Node) -> CrossAttentionStep:
    q, out, name = node.args
    return CrossAttentionStep(str(name), _value_name(q), _value_name(out))


def _state_step(node: fx.Node) -> StateStep:
    operands: Any
    operands, out, name = node.args
    return StateStep(str(name), tuple(map(_value_name, operands)), _value_name(out))


def _packed_attention_step(node: fx.Node) -> PackedAttentionStep:
    operands: Any = node.args
    out, scale, name = operands[4:7]
    q, k, v, segments = map(_value_name, operands[:4])
    num_heads, v_head_dim = map(int, out.meta["val"].shape[1:])
    by_kernel = is_op(node, SegmentAttentionKind.lowered)
    left, right = operands[8:10] or (-1, -1)
    step = PackedAttentionStep(
        str(name),
        *(q, k, v, segments, _value_name(out)),
        (num_heads, v_head_dim),
        float(scale),
        by_kernel,
        int(left),
        int(right),
    )
    values: dict[str, Any] = {name: _value_name(value) for name, value in of_scores(node).items()}
    (cap,) = operands[15:] or (0.0,)
    return replace(step, soft_cap=float(cap), **values)


_STEP_MAKERS: dict[type[LayerKind], Callable[[fx.Node], Step]] = {
    AttentionKind: _attention_step,
    CrossAttentionKind: _cross_attention_step,
    StateLayerKind: _state_step,
    PackedAttentionKind: _packed_attention_step,
    SegmentAttentionKind: _packed_attention_step,
}


def _variants(graph: fx.GraphModule) -> dict[str, tuple[PieceVariant, ...]]:
    all_variants, symbols = {}, size_symbols(graph)
    for piece, variants in graph.meta.get(VARIANTS, {}).items():
        module: Any = graph.get_submodule(piece)
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        sizes = [
            (index, dim, str(size.node.expr))
            for index, node in enumerate(inputs)
            for dim, size in enumerate(node.meta["val"].shape)
            if is_symbolic(size)
        ]
        # A piece that gathers rows is sized by their number: nothing before the gather is work.
        index, dim, _ = next((one for one in sizes if symbols.get(one[2]) == "S"), sizes[0])
        all_variants[piece] = tuple(
            PieceVariant(variant, index, dim, size) for size, variant in sorted(variants.items())
        )
    return all_variants


def weight_shapes(graph: fx.GraphModule) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name → shape and dtype of every weight input."""
    return {
        node.meta["weight_name"]: (tuple(int(size) for size in node.meta["val"].shape), node.meta["val"].dtype)
        for node in graph.graph.nodes
        if is_weight(node)
    }


def _is_cache(arg: object) -> bool:
    return isinstance(arg, fx.Node) and CACHE_INPUT in arg.meta


def _value_name(node: object) -> str:
    if not isinstance(node, fx.Node):
        raise CompileError(f"a step reads {node!r}, which is not a value of the graph")
    if node.op == "placeholder":
        name: str = node.meta.get("weight_name") or node.meta["input_name"]
        return name
    return node.name
