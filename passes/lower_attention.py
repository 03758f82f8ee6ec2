"""Replaces the trace-time attention op by the runtime's op; its arguments become a layer's parameters."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import ATTENTION_LAYERS, GraphPass, PassResult
from mllm_compile.passes.match.nodes import call, drop_dead_nodes, is_attention
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.ops import op


class LowerAttention(GraphPass):
    """Gives each call one name and an output of the caller's, and takes all that varies per layer out of the graph.

    Why: the runtime's op reads metadata, pages and slots from the forward context under a layer's name; scale, window,
        soft cap and sinks are the layer's, so equal layers stay equal graphs.

    Before::

        out = mllm.attention(q, k, v, None, 0.088, 0.0, -1, "")

    After::

        out = q.new_empty([T, H, Dv])
        mllm.attention_with_output(q, k, v, out, "model.layers.3.self_attn")

    Requires: the gate's consent (no refusals left in the ops). Names are per call, not per module: a module that
        attends twice gets `….self_attn` and `….self_attn#1`, else their KV would collide.
    Preserves: the meaning of the op; the numbers are the attention backend's.
    """

    name: ClassVar[str] = "lower_attention"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        layers = gm.meta.setdefault(ATTENTION_LAYERS, [])
        names: set[str] = {layer.name for layer in layers}
        matches = [node for node in gm.graph.nodes if is_attention(node)]
        for node in matches:
            spec = _layer_of(node, len(layers), names)
            names.add(spec.name)
            layers.append(spec)
            _lower(gm, node, spec)
        drop_dead_nodes(gm)
        return PassResult(gm, len(matches), before, len(gm.graph.nodes))


def _lower(gm: fx.GraphModule, node: fx.Node, spec: LayerSpec) -> None:
    q, k, v = node.args[:3]
    val = node.meta["val"]
    with gm.graph.inserting_before(node):
        num_tokens = call(gm.graph, torch.ops.aten.sym_size.int, q, 0)
        shape: list[Any] = [num_tokens, spec.num_heads, spec.v_head_dim]
        output = gm.graph.call_function(torch.ops.aten.new_empty.default, (q, shape))
        output.meta["val"] = val
        lowered = gm.graph.call_function(op("attention_with_output"), (q, k, v, output, spec.name))
        lowered.meta["val"] = None
        lowered.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
    node.replace_all_uses_with(output)
    gm.graph.erase_node(node)


def _layer_of(node: fx.Node, layer_id: int, taken: set[str]) -> LayerSpec:
    q, k, v, sinks, sm_scale, logits_soft_cap, window_left = node.args[:7]
    slopes: Any = node.args[8] if len(node.args) > 8 else None
    chunk: Any = node.args[9] if len(node.args) > 9 else 0
    return LayerSpec(
        name=_unique_name(node, layer_id, taken),
        layer_id=layer_id,
        num_heads=q.meta["val"].shape[1],  # type: ignore[union-attr]
        num_kv_heads=k.meta["val"].shape[1],  # type: ignore[union-attr]
        head_dim=q.meta["val"].shape[2],  # type: ignore[union-attr]
        v_head_dim=v.meta["val"].shape[2],  # type: ignore[union-attr]
        sm_scale=float(sm_scale),  # type: ignore[arg-type]
        logits_soft_cap=float(logits_soft_cap),  # type: ignore[arg-type]
        window_left=int(window_left),  # type: ignore[arg-type]
        sinks=None if sinks is None else sinks.meta["weight_name"],  # type: ignore[union-attr]
        alibi_slopes=tuple(slopes or ()),
        chunk=int(chunk),
    )


def _unique_name(node: fx.Node, layer_id: int, taken: set[str]) -> str:
    """The module's path, as Dynamo recorded it, made unique per call."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = stack[-1][0].partition("].model.")[2] if stack else ""
    base = path or f"attention.{layer_id}"
    name, again = base, 1
    while name in taken:
        name, again = f"{base}#{again}", again + 1
    return name
