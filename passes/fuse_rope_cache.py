"""Makes norms and rotation of q and k, and the write of k and v into the KV cache, one kernel before attention."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mllm_compile.passes.base import (
    ATTENTION_LAYERS,
    CACHE_DTYPE,
    CACHE_INPUT,
    CACHE_INPUTS,
    GraphPass,
    PassResult,
    PassTarget,
)
from mllm_compile.passes.match.nodes import (
    call,
    drop_dead_nodes,
    is_attention_with_output,
    is_call,
    takes_kernels,
)
from mllm_compile.passes.match.rotation import Rotation, match_rotation
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.ops import op


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
    if not (isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)):
        return False
    q_rotation, k_rotation = match_rotation(q), match_rotation(k)
    if q_rotation is None or k_rotation is None or not _go_together(q_rotation, k_rotation):
        return False
    val = v.meta["val"]
    if not takes_kernels(v) or layer.head_dim != layer.v_head_dim:
        return False
    if layer.head_dim & (layer.head_dim - 1):  # the kernel's blocks are powers of two
        return False
    given = (q_rotation.source, k_rotation.source, v, q_rotation.cos, q_rotation.sin)
    operands = tuple(node for node in given if node is not None)
    # Angles of halves are copied, however they lie.
    read = operands[:3] if q_rotation.are_halves else operands
    if not all(statically_known_true(node.meta["val"].stride(-1) == 1) for node in read):
        return False
    first_user = _first_user(gm.graph, q, operands)
    if first_user is None:
        return False
    cache = _cache_inputs(gm, layer, val)
    q_rotation = _widened(gm.graph, q_rotation)
    with gm.graph.inserting_before(first_user):
        new_q, new_k = _call_op(gm.graph, q, k, v, q_rotation, k_rotation, cache)
    q.replace_all_uses_with(new_q)
    attention.args = (new_q, new_k, v, out, name, False, *attention.args[6:])
    return True


def _first_user(graph: fx.Graph, q: fx.Node, operands: tuple[fx.Node, ...]) -> fx.Node | None:
    """The first reader of q; None if it is before any of `operands`."""
    waiting = set(operands)
    for node in graph.nodes:
        waiting.discard(node)
        if node in q.users:
            return None if waiting else node
    return None


def _go_together(q: Rotation, k: Rotation) -> bool:
    if (q.cos, q.sin, q.are_halves) != (k.cos, k.sin, k.are_halves) or (q.norm is None) != (k.norm is None):
        return False
    return q.norm is None or k.norm is None or (q.norm.eps, q.norm.plus_one) == (k.norm.eps, k.norm.plus_one)


def _widened(graph: fx.Graph, rotation: Rotation) -> Rotation:
    """The same with angles of whole heads, which the kernel reads; they are made once for all layers."""
    if not rotation.are_halves:
        return rotation
    cos, sin = (_twice(graph, angles) for angles in (rotation.cos, rotation.sin) if angles is not None)
    return replace(rotation, cos=cos, sin=sin, are_halves=False)


def _twice(graph: fx.Graph, angles: fx.Node) -> fx.Node:
    """cat((angles, angles), -1), behind `angles`."""
    for user in angles.users:
        if is_call(user, torch.cat) and user.args == ((angles, angles), -1):
            return user
    with graph.inserting_after(angles):
        return call(graph, torch.cat, (angles, angles), -1)


def _call_op(
    graph: fx.Graph,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    q_rotation: Rotation,
    k_rotation: Rotation,
    cache: list[fx.Node],
) -> tuple[fx.Node, fx.Node]:
    q_norm, k_norm = q_rotation.norm, k_rotation.norm
    weights = (None, None) if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight)
    eps = 0.0 if q_norm is None else q_norm.eps
    plus_one = q_norm is not None and q_norm.plus_one
    operands = (
        q_rotation.source,
        k_rotation.source,
        v,
        q_rotation.cos,
        q_rotation.sin,
        *weights,
        eps,
        *cache,
        plus_one,
    )
    both = graph.call_function(op("rope_and_cache"), operands)
    both.meta["val"] = tuple(torch.empty_like(x.meta["val"], memory_format=torch.contiguous_format) for x in (q, k))
    made = []
    for index in range(2):
        node = graph.call_function(operator.getitem, (both, index))
        node.meta["val"] = both.meta["val"][index]
        made.append(node)
    return made[0], made[1]


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
