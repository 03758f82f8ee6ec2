"""Cuts the graph at every layer outside of pieces (attention, and those with a state), between stages of a pipeline, at
the row gather and before the head; a piece is between two cuts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import CACHE_INPUT, CACHE_INPUTS, HEAD_INPUT, STAGE, GraphPass, PassResult
from mllm_compile.passes.match.layer_kinds import buffer_of, is_layer
from mllm_compile.passes.match.nodes import has_input, input_node, is_call, is_symbolic, size_text

PIECE_PREFIX = "piece_"
ROW_INPUT = "logits_indices"


class SplitAtAttention(GraphPass):
    """Makes each stretch between attentions a submodule, called from a parent graph.

    Why: attention, as other kinds of layers (passes/match/layer_kinds.py), reads the forward context and is planned per
        batch. So it stays outside of Inductor's pieces and (for prefill) of CUDA graphs. The head works on S rows, not
        T tokens, so it is its own piece.

    Before::

        qkv = linear(x, w0); …; out = new_empty; attention_with_output(q, k, v, out, "l0"); y = linear(out, w1); …

    After::

        q, k, v, x = piece_0(x, w0); out = new_empty(q, …); attention_with_output(q, k, v, out, "l0")
        y = piece_1(out, x, w1); …

    Requires: attention lowered. A size never crosses a cut: each piece takes it from a tensor input. A SymInt shared
        across layers would make equal pieces differ. A `getitem` stays with the node that makes the tuple.
    Preserves: every value bitwise.
    """

    name: ClassVar[str] = "split_at_attention"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        if any(node.op == "call_module" for node in gm.graph.nodes):  # has pieces already
            return PassResult(gm, 0, before, before)
        stretches = _stretches_of(gm)
        parent = _ParentBuilder(gm, stretches).build()
        return PassResult(parent, len(stretches), before, len(parent.graph.nodes))


@dataclass
class _Stretch:
    nodes: list[fx.Node] = field(default_factory=list)
    layer: fx.Node | None = None  # the attention or other layer that follows the stretch's nodes

    def inputs(self) -> list[fx.Node]:
        """Tensors from outside in order of first use, so that equal layers read alike; the KV cache, which the
        executor adds, is last."""
        inside = set(self.nodes)
        found: dict[fx.Node, None] = {}
        for node in self.nodes:
            for arg in node.all_input_nodes:
                if arg not in inside and not _is_size(arg):
                    found[arg] = None
        return sorted(found, key=_place_in_cache)  # stable

    def outputs(self) -> list[fx.Node]:
        inside = set(self.nodes)
        return [
            node
            for node in self.nodes
            if not _is_size(node) and any(user not in inside and not _is_size(user) for user in node.users)
        ]


def _place_in_cache(node: fx.Node) -> int:
    """The node's index in CACHE_INPUTS, -1 for others."""
    return CACHE_INPUTS.index(node.meta[CACHE_INPUT][0]) if CACHE_INPUT in node.meta else -1


def _is_size(node: fx.Node) -> bool:
    return is_symbolic(node.meta.get("val"))


def _stretches_of(gm: fx.GraphModule) -> list[_Stretch]:
    stretches = [_Stretch()]
    home: dict[fx.Node, _Stretch] = {}
    # Of stretches, each at the first node that is so; a tower has no rows of logits.
    starts = [_reads_rows(input_node(gm, ROW_INPUT)), _reads_gathered] if has_input(gm, ROW_INPUT) else []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output") or _is_size(node) or _is_layer_buffer(node):
            continue
        if is_layer(node):
            stretches[-1].layer = node
            stretches.append(_Stretch())
            continue
        for start in starts:
            if start(node):
                starts.remove(start)
                stretches.append(_Stretch())
                break
        if stretches[-1].nodes and stretches[-1].nodes[-1].meta.get(STAGE) != node.meta.get(STAGE):
            stretches.append(_Stretch())
        stretch = stretches[-1]
        if is_call(node, operator.getitem) and isinstance(node.args[0], fx.Node):
            producer = node.args[0]
            if isinstance(producer.meta.get("val"), tuple | list):
                stretch = home[producer]
        if is_call(node, operator.getitem, torch.transpose) and not _can_cross(node.args[0]):
            stretch = home[node.args[0]]  # type: ignore[index]
        stretch.nodes.append(node)
        home[node] = stretch
    return [stretch for stretch in stretches if stretch.nodes or stretch.layer is not None]


def _can_cross(value: Any) -> bool:
    """False for a tensor that no compiled piece can take: a stride depends on T otherwise than in a dense tensor.

    In a dense one each stride is another dimension's size times its stride. A part of it is taken where it is made.
    """
    val = value.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return True
    strides = {
        size_text(size * stride) for size, stride in zip(val.shape, val.stride(), strict=True) if str(size) != "1"
    }
    return all(not is_symbolic(stride) or size_text(stride) in strides for stride in val.stride())


def _reads_rows(rows: fx.Node) -> Callable[[fx.Node], bool]:
    return lambda node: rows in node.all_input_nodes


def _reads_gathered(node: fx.Node) -> bool:
    return any(HEAD_INPUT in arg.meta for arg in node.all_input_nodes)


def _is_layer_buffer(node: fx.Node) -> bool:
    return node.op == "call_function" and any(is_layer(user) and buffer_of(user) is node for user in node.users)


class _ParentBuilder:
    """Builds the parent graph: placeholders, piece calls, buffers and ops of layers, output."""

    def __init__(self, gm: fx.GraphModule, stretches: list[_Stretch]) -> None:
        self.source = gm
        self.stretches = stretches
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.env: dict[fx.Node, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        for node in self.source.graph.nodes:
            if node.op == "placeholder":
                self._copy(node, self.graph.placeholder(str(node.target)))
        for index, stretch in enumerate(self.stretches):
            if stretch.nodes:
                self._call_piece(f"{PIECE_PREFIX}{index}", stretch)
            if stretch.layer is not None:
                self._run_layer(stretch.layer)
        output = next(node for node in self.source.graph.nodes if node.op == "output")
        self.graph.output(fx.map_arg(output.args[0], self.env.__getitem__))
        parent = fx.GraphModule(self.root, self.graph)
        parent.meta.update(self.source.meta)
        return parent

    def _copy(self, old: fx.Node, new: fx.Node) -> None:
        new.meta.update(old.meta)
        self.env[old] = new

    def _call_piece(self, name: str, stretch: _Stretch) -> None:
        inputs, outputs = stretch.inputs(), stretch.outputs()
        self.root.add_module(name, _piece_module(self.source, stretch, inputs, outputs))
        result = self.graph.call_module(name, tuple(self.env[node] for node in inputs))
        result.meta["val"] = tuple(node.meta["val"] for node in outputs)
        result.meta[STAGE] = stretch.nodes[0].meta.get(STAGE, 0)
        for index, node in enumerate(outputs):
            self._copy(node, self.graph.call_function(operator.getitem, (result, index)))

    def _run_layer(self, layer: fx.Node) -> None:
        buffer = buffer_of(layer)
        like: Any
        sizes: Any
        like, sizes = buffer.args
        size = self.graph.call_function(torch.ops.aten.sym_size.int, (self.env[like], 0))
        size.meta["val"] = buffer.meta["val"].shape[0]
        operands = (self.env[like], [size, *sizes[1:]])
        self._copy(buffer, self.graph.call_function(torch.ops.aten.new_empty.default, operands, dict(buffer.kwargs)))
        self._copy(layer, self.graph.call_function(layer.target, fx.map_arg(layer.args, self.env.__getitem__)))  # type: ignore[arg-type]


def _piece_module(
    source: fx.GraphModule, stretch: _Stretch, inputs: list[fx.Node], outputs: list[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta["val"] = node.meta["val"]
    sizes = _SizeMaker(source, graph, inputs, env)
    for node in stretch.nodes:
        for arg in node.all_input_nodes:
            if _is_size(arg):
                sizes.make(arg)
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in outputs))
    return fx.GraphModule(source, graph, class_name="Piece")


class _SizeMaker:
    """Makes sizes inside a piece: a bare symbol from a tensor input's shape, an expression by repeating its nodes."""

    def __init__(
        self, source: fx.GraphModule, graph: fx.Graph, inputs: list[fx.Node], env: dict[fx.Node, fx.Node]
    ) -> None:
        self.source, self.graph, self.inputs, self.env = source, graph, inputs, env
        self.by_expression: dict[Any, fx.Node] = {}

    def make(self, node: fx.Node) -> fx.Node:
        if node in self.env:
            return self.env[node]
        expression = node.meta["val"].node.expr
        if expression not in self.by_expression:
            found = self._from_shape(node.meta["val"], expression)
            if found is None:
                for arg in node.all_input_nodes:
                    if _is_size(arg):
                        self.make(arg)
                found = self.graph.node_copy(node, self.env.__getitem__)
            self.by_expression[expression] = found
        self.env[node] = self.by_expression[expression]
        return self.env[node]

    def _from_shape(self, val: Any, expression: Any) -> fx.Node | None:
        for node in self.inputs:
            for dim, size in enumerate(getattr(node.meta["val"], "shape", ())):
                if is_symbolic(size) and size.node.expr == expression:
                    made = self.graph.call_function(torch.ops.aten.sym_size.int, (self.env[node], dim))
                    made.meta["val"] = val
                    return made
        return None
