"""Tells attention how its q and k are made, so that decode kernels can norm and rotate them on the way."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import (
    ATTENTION_LAYERS,
    NO_CUDA_COMPILER,
    GraphPass,
    PassResult,
    PassTarget,
)
from mllm_compile.passes.match.nodes import is_attention_with_output, is_call, is_op
from mllm_compile.runtime.attention.hopper.shapes import fuses_rope_of_heads, writes_keys_of_heads
from mllm_compile.runtime.attention.layer import LayerSpec


class RotateInAttention(GraphPass):
    """Lets decodes do without a kernel between the projections and attention.

    Why: with one token a request that kernel is only launching and waiting. An attention kernel can norm and rotate a
        query when it reads it, and write the new key and value of requests whose last keys it reads. It takes the same
        time, and its keys arrive while the projections still run (figures in docs/lab/performance.md).

    Before::

        q, k = mllm.rope_and_cache(q0, k0, v, cos, sin, q_norm, k_norm, eps, slots, keys, values)
        attention_with_output(q, k, v, out, "l0", False)

    After::

        q, k = mllm.rope_and_cache(q0, k0, v, cos, sin, q_norm, k_norm, eps, slots, keys, values)
        attention_with_output(q, k, v, out, "l0", False, [q0, k0, cos, sin, q_norm, k_norm], eps)

    Attention of heads that do not rotate, as Whisper's, is told [q0, k0] alone, and writes their keys and values.

    Requires: `fuse_rope_cache`, a Hopper GPU, and layers whose heads the kernels of runtime/attention/hopper/ take:
        rotated whole, by norms that are times their weight, not 1 + their weight; or neither normed nor rotated.
        There may be fewer slots than tokens: the runtime gives none in a step whose attention rotates, and the op does
        nothing then (runtime/ops/attention/layer_op.py). The pass is left out where no such kernel can be compiled or
        hopper_decode does not serve.
    Preserves: the meaning of both; a kernel rounds where the op does.
    """

    name: ClassVar[str] = "rotate_in_attention"
    needs: ClassVar[tuple[str, ...]] = ("rope_and_cache",)

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        if not target.hopper_decode:
            return "our decode kernels for Hopper (hopper_decode) do not serve here"
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        layers = {layer.name: layer for layer in gm.meta.get(ATTENTION_LAYERS, [])}
        found = [
            (node, call)
            for node in gm.graph.nodes
            if is_attention_with_output(node) and len(node.args) == 6
            for call in [_made_by(node)]
            if call is not None and _is_served(layers[str(node.args[4])], call)
        ]
        for node, call in found:
            q, k, _, cos, sin, q_norm, k_norm, eps = call.args[:8]
            told = (q, k, cos, sin, q_norm, k_norm)
            node.args = (*node.args, [each for each in told if each is not None], eps)
        if found:
            _let_slots_be_fewer(found[0][1].args[8])
        return PassResult(gm, len(found), before, len(gm.graph.nodes))


def _made_by(attention: fx.Node) -> fx.Node | None:
    """The call of rope_and_cache that makes the attention's q."""
    q = attention.args[0]
    call = q.args[0] if is_call(q, operator.getitem) else None
    return call if is_op(call, "rope_and_cache") else None


def _is_served(layer: LayerSpec, call: fx.Node) -> bool:
    """True if a kernel decodes this layer, norms and rotates as it does, and all operands have the type of q."""
    is_plain = layer.window_left < 0 and layer.logits_soft_cap == 0 and not layer.alibi_slopes and not layer.chunk
    q, k, v, cos, sin, *norms = call.args[:7]
    operands = [node for node in (q, k, v, cos, sin, *norms) if isinstance(node, fx.Node)]
    is_of_one_type = len({node.meta["val"].dtype for node in operands}) == 1
    heads = layer.num_heads, layer.num_kv_heads, layer.head_dim
    if not is_plain or not is_of_one_type:
        return False
    if not isinstance(cos, fx.Node):
        return norms == [None, None] and writes_keys_of_heads(*heads)
    is_whole = cos.meta["val"].shape[-1] == layer.head_dim
    return is_whole and call.args[11:] != (True,) and fuses_rope_of_heads(*heads)


def _let_slots_be_fewer(slots: Any) -> None:
    """Gives the input a size of its own."""
    val = slots.meta["val"]
    size = val.fake_mode.shape_env.create_unbacked_symint()
    torch._check(size >= 0)
    slots.meta["val"] = val.new_empty((size,))
