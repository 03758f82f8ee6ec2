"""Adds what adapters change to outputs of linears and of the embedding, in the program for requests with adapters."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import fx
from torch.nn import functional

from mllm_compile.passes.base import (
    EXPERT_RANKS,
    LORA,
    LORA_LAYOUT,
    PACKED_WEIGHTS,
    QUANTISED_TENSORS,
    WEIGHT_CUTS,
    WEIGHT_FACTORS,
    GraphPass,
    LoraWish,
    PackedPart,
    PassResult,
    PassTarget,
    QuantisedTensor,
    WeightCut,
)
from mllm_compile.passes.match.experts import ExpertLinear, match_expert_linear
from mllm_compile.passes.match.nodes import (
    LINEAR,
    call,
    has_input,
    identifier,
    input_node,
    is_call,
    is_symbolic,
    is_weight,
    linear_operands,
)
from mllm_compile.passes.match.quantised import match_quantised_linear
from mllm_compile.runtime.lora.target import (
    LoraBuffers,
    LoraLayout,
    LoraTarget,
    Ranges,
    TargetKind,
    a_name,
    b_name,
    scales_name,
)
from mllm_compile.runtime.ops import op

SLOTS_INPUT = "adapter_slots"
TOKENS, ROWS = "input_ids", "logits_indices"  # inputs


class AddLora(GraphPass):
    """Puts mllm.add_lora behind every linear with a weight that adapters may change.

    Why: an adapter's factors are inputs beside the weight, so that loading another compiles nothing. Packed linears
        read their input once for all parts.

    Before::

        qkv = linear(x, packed_weight)

    After::

        qkv = mllm.add_lora(linear(x, packed_weight), x, lora_A, lora_B, adapter_slots, [0, 24], [16, 8])

    The head takes adapter_slots[logits_indices], one for each row. Behind an embedding it is
    mllm.add_lora_of_ids, which takes a row of A for each id; behind experts mllm.add_lora_of_experts. Experts that
    ranks have parts of read the tokens of all ranks, and the slots of all with them.
    Where adapters may scale outputs (DoRA), mllm.scale_of_adapters is between the linear and that.

    Requires: gm.meta[LORA], which the program for adapters alone has. Linears packed and cut over ranks: a sum over
        ranks is behind the linear, so that each adds its part.
    Preserves: the numbers of tokens without an adapter.
    """

    name: ClassVar[str] = "add_lora"
    is_required: ClassVar[bool] = True

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return None if target.has_adapters else "the config has no section lora"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        wish: LoraWish | None = gm.meta.get(LORA)
        if wish is None or LORA_LAYOUT in gm.meta:
            return PassResult(gm, 0, before, before)
        made = _Adapters(gm, wish)
        matches = sum(made.add(node) for node in list(gm.graph.nodes))
        gm.meta[LORA_LAYOUT] = made.layout()
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def places_of_slots(gm: fx.GraphModule, name: str) -> frozenset[int]:
    """The inputs of a piece that are the program's slots, wherever it is called."""
    of_calls = [
        {place for place, given in enumerate(node.args) if _is_slots_input(given)}
        for node in gm.graph.nodes
        if node.op == "call_module" and node.target == name
    ]
    return frozenset(set.intersection(*of_calls))


def _is_slots_input(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and node.meta.get("input_name") == SLOTS_INPUT


class _Adapters:
    """The inputs and calls of a graph that adapters change."""

    def __init__(self, gm: fx.GraphModule, wish: LoraWish) -> None:
        self._gm, self._wish = gm, wish
        self._packed: dict[str, tuple[PackedPart, ...]] = gm.meta.get(PACKED_WEIGHTS, {})
        self._quantised: dict[str, QuantisedTensor] = gm.meta.get(QUANTISED_TENSORS, {})
        self._cuts: dict[str, tuple[WeightCut, ...]] = gm.meta.get(WEIGHT_CUTS, {})
        self._factors = gm.meta.get(WEIGHT_FACTORS, {})  # of a checkpoint's scales, which an adapter does not know
        self._inputs: dict[str, tuple[fx.Node, ...]] = {}
        self._targets: list[LoraTarget] = []
        self._buffers: list[LoraBuffers] = []
        self._dtype: torch.dtype | None = None  # of all factors: what the first linear computes in
        self._slots: fx.Node | None = None
        self._slots_of_all: dict[fx.Node, fx.Node] = {}  # by the choice of experts whose tokens they are of

    def layout(self) -> LoraLayout:
        """The weights that adapters change here, and their buffers."""
        dtype = str(self._dtype or torch.float32).removeprefix("torch.")
        wish = self._wish
        return LoraLayout(wish.num_slots, wish.max_rank, dtype, tuple(self._targets), tuple(self._buffers))

    def add(self, node: fx.Node) -> bool:
        """Changes what is read of a linear; False where `node` is none that adapters change."""
        experts = match_expert_linear(node)
        if experts is not None:
            return self._add_to_experts(node, experts)
        found = _source_and_weight(node)
        if found is None:
            return False
        source, weight, is_embedding = found
        linear = self._own_name(weight.meta["weight_name"], is_embedding)
        parts = self._parts(linear, int(node.meta["val"].shape[-1]))
        rows_of = self._rows_of(node)
        like = node if is_embedding else source
        if not parts or rows_of is None or not self._takes(like.meta["val"].dtype):
            return False
        kind: TargetKind = "embedding" if is_embedding else "linear" if rows_of == TOKENS else "head"
        inputs = int(weight.meta["val"].shape[0] if is_embedding else source.meta["val"].shape[-1])
        scales = 0 if is_embedding or not self._wish.has_scales else int(node.meta["val"].shape[-1])
        a, b, *of_outputs = self._inputs_of(linear, like, inputs, weight, parts, kind, scales)
        starts, rows = [part.start for _, part in parts], [part.rows for _, part in parts]
        readers, slots, graph = list(node.users), self._slots_input(), self._gm.graph
        last = node
        if rows_of == ROWS:
            with graph.inserting_after(last):
                last = slots = call(graph, operator.getitem, slots, (input_node(self._gm, ROWS),))
        y = node
        if of_outputs:
            with graph.inserting_after(last):
                last = y = call(graph, op("scale_of_adapters"), node, of_outputs[0], _bias(node), slots)
        with graph.inserting_after(last):
            if is_embedding:
                added = call(graph, op("add_lora_of_ids"), y, source, a, b, slots)
            else:
                starts, rows = [part.start for _, part in parts], [part.rows for _, part in parts]
                added = call(graph, op("add_lora"), y, source, a, b, slots, starts, rows)
        _read_instead(readers, node, added)
        return True

    def _add_to_experts(self, node: fx.Node, experts: ExpertLinear) -> bool:
        """Likewise, of experts."""
        linear = experts.weight.meta.get("weight_name", "")
        name, (outputs, inputs), count = self._weight_of(linear), experts.shape, experts.num_experts
        like = experts.x.meta["val"]
        if name not in self._wish.weights or not is_weight(experts.weight) or not self._takes(like.dtype):
            return False
        if linear not in self._inputs:
            rank = self._wish.max_rank
            self._buffers.append(LoraBuffers(linear, count * rank, inputs, count * outputs))
            self._targets.append(self._target_of_experts(name, linear, experts))
            shapes = {a_name(linear): (count * rank, inputs), b_name(linear): (count * outputs, rank)}
            a, b = (self._placeholder(name, like, shape, experts.weight) for name, shape in shapes.items())
            self._inputs[linear] = a, b
        readers, slots, graph = list(node.users), self._slots_of(experts.ids), self._gm.graph
        with graph.inserting_before(node.next):
            a, b = (call(graph, torch.unflatten, factor, 1, (count, -1)) for factor in self._inputs[linear])
            operands = experts.x, a, b, slots, experts.ids, experts.of_tokens
            _read_instead(readers, node, call(graph, op("add_lora_of_experts"), node, *operands))
        return True

    def _target_of_experts(self, name: str, linear: str, experts: ExpertLinear) -> LoraTarget:
        (outputs, inputs), count = experts.shape, experts.num_experts
        # Cuts are by dimensions of the weight, which may be [E, K, N].
        by_dim: dict[int, Ranges] = {cut.dim: cut.ranges for cut in self._cuts.get(name, ())}
        dims = (0, 2, 1) if experts.is_transposed else (0, 1, 2)
        of_experts, of_outputs, of_inputs = (by_dim.get(dim, ()) for dim in dims)
        return LoraTarget(
            name,
            _whole(of_outputs, outputs),
            _whole(of_inputs, inputs),
            linear,
            0,
            0,
            outputs,
            of_outputs,
            of_inputs,
            stored_in=linear,
            kind="experts",
            num_experts=_whole(of_experts, count),
            expert_ranges=of_experts,
        )

    def _slots_of(self, ids: fx.Node) -> fx.Node:
        """The slots of the tokens whose experts `ids` [tokens, k] are: a rank's own, or those of all ranks."""
        slots, graph = self._slots_input(), self._gm.graph
        if str(ids.meta["val"].shape[0]) == str(slots.meta["val"].shape[0]):
            return slots
        if ids not in self._slots_of_all:
            with graph.inserting_before(ids.next):
                gathered = call(graph, op("all_gather"), slots, 0, self._gm.meta[EXPERT_RANKS])
            self._slots_of_all[ids] = gathered
        return self._slots_of_all[ids]

    def _takes(self, dtype: torch.dtype) -> bool:
        """True if factors are of this type, as the first ones are; a router in float32 has none in another model."""
        self._dtype = self._dtype or dtype
        return dtype == self._dtype

    def _own_name(self, name: str, is_embedding: bool) -> str:
        """The name of a linear's weight; a head's own one, where the embedding has it too."""
        is_tied = not is_embedding and self._wish.tied_head and self._weight_of(name) == self._wish.embedding
        return self._wish.tied_head if is_tied else name

    def _rows_of(self, node: fx.Node) -> str | None:
        """The input that is as long as what a linear is of: a step's T tokens, or the head's rows of them. Experts'
        are of a part of the tokens."""
        sizes = [str(one) for one in node.meta["val"].shape[:-1] if is_symbolic(one)]
        inputs = (TOKENS, ROWS) if has_input(self._gm, ROWS) else (TOKENS,)
        return next((name for name in inputs if sizes == [str(input_node(self._gm, name).meta["val"].shape[0])]), None)

    def _parts(self, linear: str, outputs: int) -> list[tuple[str, PackedPart]]:
        """The linear's parts that adapters may change, each with the name of its weight."""
        whole = self._packed.get(linear, (PackedPart(linear, 0, outputs),))
        named = ((self._weight_of(part.weight_name), part) for part in whole)
        return [(name, part) for name, part in named if name in self._wish.weights and name not in self._factors]

    def _weight_of(self, tensor: str) -> str:
        """The weight that a tensor is of; a tied head's that is quantised keeps its own name."""
        quantised = self._quantised.get(tensor)
        return tensor if quantised is None or tensor == self._wish.tied_head else quantised.weight_name

    def _inputs_of(
        self,
        linear: str,
        like: fx.Node,
        inputs: int,
        weight: fx.Node,
        parts: list[tuple[str, PackedPart]],
        kind: TargetKind,
        scales: int,
    ) -> tuple[fx.Node, ...]:
        """The placeholders of A and B, and of scales of outputs; made once for linears that share a weight."""
        if linear not in self._inputs:
            rank, outputs = self._wish.max_rank, sum(part.rows for _, part in parts)
            a_shape = (inputs, rank) if kind == "embedding" else (rank * len(parts), inputs)
            buffers = LoraBuffers(linear, *a_shape, outputs, scales)
            self._buffers.append(buffers)
            self._add_targets(linear, inputs, parts, weight.meta["weight_name"], kind)
            shapes: dict[str, tuple[int, ...]] = {a_name(linear): a_shape, b_name(linear): (outputs, rank)}
            shapes |= {scales_name(linear): (scales,)} if scales else {}
            made = (self._placeholder(name, like.meta["val"], shape, weight) for name, shape in shapes.items())
            self._inputs[linear] = tuple(made)
        return self._inputs[linear]

    def _add_targets(
        self, linear: str, inputs: int, parts: list[tuple[str, PackedPart]], stored_in: str, kind: TargetKind
    ) -> None:
        start = 0
        for index, (name, part) in enumerate(parts):
            quantised = self._quantised.get(stored_in)
            cuts_of = stored_in if quantised is None else quantised.weight_name  # a tied head's are the embedding's
            cuts = self._cuts.get(name) or self._cuts.get(cuts_of, ())
            by_dim: dict[int, Ranges] = {cut.dim: cut.ranges for cut in cuts}
            of_outputs, of_inputs = (by_dim.get(dim, ()) for dim in ((1, 0) if kind == "embedding" else (0, 1)))
            self._targets.append(
                LoraTarget(
                    name,
                    _whole(of_outputs, part.rows),
                    _whole(of_inputs, inputs),
                    linear,
                    index,
                    start,
                    part.rows,
                    of_outputs,
                    of_inputs,
                    stored_in=stored_in,
                    stored_start=part.start,
                    kind=kind,
                )
            )
            start += part.rows

    def _placeholder(self, name: str, like: torch.Tensor, shape: tuple[int, ...], before: fx.Node) -> fx.Node:
        with self._gm.graph.inserting_before(before):
            node = self._gm.graph.placeholder(identifier(name))
        node.meta["weight_name"] = name
        node.meta["val"] = like.new_empty((self._wish.num_slots, *shape))
        return node

    def _slots_input(self) -> fx.Node:
        """The input that says which adapter each token has."""
        if self._slots is None:
            ids = input_node(self._gm, TOKENS)
            with self._gm.graph.inserting_after(ids):
                self._slots = self._gm.graph.placeholder(SLOTS_INPUT)
            self._slots.meta["input_name"] = SLOTS_INPUT
            self._slots.meta["val"] = torch.empty_like(ids.meta["val"], dtype=torch.int32)
        return self._slots


def _bias(node: fx.Node) -> fx.Node | None:
    quantised = match_quantised_linear(node)
    return linear_operands(node)[2] if quantised is None else quantised.bias


def _read_instead(readers: Iterable[fx.Node], node: fx.Node, added: fx.Node) -> None:
    """Gives the readers of `node` what was added to it."""
    added.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
    for reader in readers:
        reader.replace_input_with(node, added)


def _source_and_weight(node: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """The input of a linear of a stored weight, and the weight or its values; and of an embedding, with True."""
    source: Any
    is_embedding = is_call(node, functional.embedding)
    if is_embedding:
        source, weight = node.args[:2]
    elif is_call(node, LINEAR):
        source, weight, _ = linear_operands(node)
    elif (quantised := match_quantised_linear(node)) is not None:
        source, weight = quantised.source, quantised.values
    else:
        return None
    return (source, weight, is_embedding) if is_weight(weight) else None


def _whole(ranges: Ranges, size: int) -> int:
    """The size of a dimension before it was cut."""
    return size if not ranges else max(start + length for of_rank in ranges for start, length in of_rank)
