"""Makes norms and rotation of q and k, and the write of k and v into the KV cache, one kernel before attention."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import (
    ATTENTION_LAYERS,
    CACHE_DTYPE,
    CACHE_INPUT,
    CACHE_INPUTS,
    GraphPass,
    PassResult,
    PassTarget,
)
from mllm_compile.passes.match.made_heads import match_made_heads
from mllm_compile.passes.match.nodes import drop_dead_nodes, is_attention_with_output
from mllm_compile.runtime.attention.layer import LayerSpec


class FuseRopeCache(GraphPass):
    """Puts one kernel between the projections and attention, which then finds its keys and values in the cache.

    Why: a decode step has few tokens, so each of these kernels costs its launch. Norm and rotation of q and of k, and
        an index copy of k and of v, are 10 of 57 µs of a layer of Qwen3-0.6B at one token. One kernel takes 1.5 (other
        shapes: runtime/ops/attention/rope_cache.py).

    Before::

        q = rotate(norm(q0), cos, sin); k = rotate(norm(k0), cos, sin); v = …
        attention_with_output(q, k, v, out, "l0")

    After::

        q, k = mllm.rope_and_cache(q0, k0, v, cos, sin, q_norm, k_norm, eps, slots, keys_of_l0, values_of_l0)
        attention_with_output(q, k, v, out, "l0", False)

    with True as a last operand where the norms are times 1 + their weight. Of a head as many columns are rotated as cos
    and sin have; where q and k are heads as a projection gives them, both are None.

    Requires: lowered attention on CUDA in bfloat16 or float16; a cache of the same type, or of e4m3 on a Hopper GPU
        (gm.meta[CACHE_DTYPE]); and no rotation, or rotation by halves of heads or their first columns, as Transformers
        writes it, by angles of heads or of halves. Slots, keys and values are new inputs; the piece that has the call
        declares that it writes them.
    Preserves: the meaning; computes in float32 throughout, where the trace rounds after every operation.
    """

    name: ClassVar[str] = "fuse_rope_cache"
    needs: ClassVar[tuple[str, ...]] = ("rope_and_cache",)

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        if target.kv_cache_dtype != target.dtype and not (target.compiles_cuda and target.dtype == "bfloat16"):
            return f"the runtime writes a {target.kv_cache_dtype} KV cache: not every GPU's Triton rounds to that"
        return None

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        layers = {layer.name: layer for layer in gm.meta.get(ATTENTION_LAYERS, [])}
        matches = 0
        for node in list(gm.graph.nodes):
            if is_attention_with_output(node) and node.args[5:6] != (False,):
                matches += _fuse(gm, node, layers[str(node.args[4])])
        drop_dead_nodes(gm)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def _fuse(gm: fx.GraphModule, attention: fx.Node, layer: LayerSpec) -> bool:
    q, k, v, out, name = attention.args[:5]
    if not isinstance(v, fx.Node) or layer.head_dim != layer.v_head_dim:
        return False
    heads = match_made_heads(q, k, v)
    if heads is None:
        return False
    new_q, new_k = heads.by_kernel(gm.graph, v, _cache_inputs(gm, layer, v.meta["val"]))
    attention.args = (new_q, new_k, v, out, name, False, *attention.args[6:])
    return True


def _cache_inputs(gm: fx.GraphModule, layer: LayerSpec, v: torch.Tensor) -> list[fx.Node]:
    """Placeholders of the slots (one for the graph) and of the layer's keys and values."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    known = {node.meta[CACHE_INPUT][0]: node for node in placeholders if CACHE_INPUT in node.meta}
    num_slots = known["keys"].meta["val"].shape[0] if known else _new_size(v)
    shapes = {
        "slots": (v.shape[0],),
        "keys": (num_slots, layer.num_kv_heads, layer.head_dim),
        "values": (num_slots, layer.num_kv_heads, layer.v_head_dim),
    }
    found = []
    for which in CACHE_INPUTS:
        name = which if which == "slots" else f"{which}_{layer.layer_id}"
        node = known.get(which) if which == "slots" else None
        if node is None:
            with gm.graph.inserting_after(placeholders[-1]):
                node = gm.graph.placeholder(name)
            dtype = torch.int64 if which == "slots" else gm.meta.get(CACHE_DTYPE, v.dtype)
            node.meta["val"] = v.new_empty(shapes[which], dtype=dtype)
            placeholders.append(node)
        node.meta["input_name"] = which
        node.meta[CACHE_INPUT] = (which, "" if which == "slots" else layer.name)
        found.append(node)
    return found


def _new_size(v: Any) -> torch.SymInt:
    """P, the slots of the KV cache: known when the runtime has allocated it."""
    size: torch.SymInt = v.fake_mode.shape_env.create_unbacked_symint()
    torch._check(size >= 1)
    return size
