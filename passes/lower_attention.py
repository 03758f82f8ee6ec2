"""Replaces the trace-time ops of attention and of other layers by the runtime's; their arguments become parameters."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.match.layer_kinds import KINDS, LayerKind, Spec, traced_kind
from mllm_compile.passes.match.nodes import call, drop_dead_nodes
from mllm_compile.passes.match.query_factor import move_query_factor
from mllm_compile.runtime.ops import op


class LowerAttention(GraphPass):
    """Gives each call one name and an output of the caller's, and takes all that varies per layer out of the graph.

    Why: the runtime's op reads metadata, pages, slots and states from the forward context under a layer's name; scale,
        window, soft cap and sinks are the layer's, so equal layers stay equal graphs. A layer with a state
        (passes/match/layer_kinds.py) is lowered alike. So is a constant that queries are multiplied by: part of the
        scale (match/query_factor.py).

    Before::

        out = mllm.attention(q, k, v, None, 0.088, 0.0, -1, "")
        y = mllm.causal_conv(x, weight, None, "silu", "")

    After::

        out = q.new_empty([T, H, Dv])
        mllm.attention_with_output(q, k, v, out, "model.layers.3.self_attn")
        y = x.new_empty([T, C])
        mllm.state_with_output([x, weight], y, "model.layers.4.mixer.causal_conv")

    Requires: the consent of model/supported.py (no refusals left in the ops). Names are per call, not per module: a
    module that
        attends twice gets `….self_attn` and `….self_attn#1`, else their KV would collide.
    Preserves: the meaning of the op; the numbers are the backend's.
    """

    name: ClassVar[str] = "lower_attention"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before, matches = len(gm.graph.nodes), 0
        layers: dict[str, list[Spec]] = {kind.layers: gm.meta.setdefault(kind.layers, []) for kind in KINDS}
        names = {layer.name for members in layers.values() for layer in members}
        for node in list(gm.graph.nodes):
            kind = traced_kind(node)
            if kind is None:
                continue
            move_query_factor(gm, node)
            members = layers[kind.layers]
            spec = kind.spec(node, _unique_name(node, kind, len(members), names), len(members))
            names.add(spec.name)
            members.append(spec)
            _lower(gm, node, kind, spec)
            matches += 1
        drop_dead_nodes(gm)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _lower(gm: fx.GraphModule, node: fx.Node, kind: LayerKind, spec: Spec) -> None:
    first, val = node.args[0], node.meta["val"]
    with gm.graph.inserting_before(node):
        num_tokens = call(gm.graph, torch.ops.aten.sym_size.int, first, 0)
        shape: list[Any] = [num_tokens, *kind.out_shape(spec)]
        is_other_type = val.dtype != first.meta["val"].dtype  # type: ignore[union-attr]
        changes = {"dtype": val.dtype} if is_other_type else {}
        output = gm.graph.call_function(torch.ops.aten.new_empty.default, (first, shape), changes)
        output.meta["val"] = val
        lowered = gm.graph.call_function(op(kind.lowered), kind.arguments(node, output, spec.name))
        lowered.meta["val"] = None
        lowered.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
    node.replace_all_uses_with(output)
    gm.graph.erase_node(node)


def _unique_name(node: fx.Node, kind: LayerKind, index: int, taken: set[str]) -> str:
    """The kind's name for the module's path, as Dynamo recorded it, made unique per call."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    base = kind.name_of(node, stack[-1][0].partition("].model.")[2] if stack else "", index)
    name, again = base, 1
    while name in taken:
        name, again = f"{base}#{again}", again + 1
    return name
