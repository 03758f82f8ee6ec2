"""Lets latent attention (MLA) attend over the latents themselves, which are expanded into no head's keys and values."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.nodes import (
    KERNEL_DTYPES,
    LINEAR,
    call,
    drop_dead_nodes,
    is_attention,
    is_call,
    is_symbolic,
    is_weight,
    linear_operands,
)

# Ops that move numbers and compute none.
_MOVES = (
    *("view", "expand", "contiguous", "permute", "new_empty", torch.reshape, torch.flatten, torch.unsqueeze),
    *(torch.transpose, torch.split, torch.chunk, torch.cat, operator.getitem, torch.ops.aten.slice_scatter.default),
)
_PROBE_TOKENS = 3


class AbsorbLatents(GraphPass):
    """Makes all heads of latent attention share one KV head: a token's latent, and its rotated part beside it.

    Why: kv_b_proj makes the keys and values of every head out of one latent of kv_lora_rank numbers. As q · (W c) is
        (Wᵀ q) · c, its rows for keys can be applied to the queries instead, and those for values to the output. The KV
        cache then holds the latent and the rotated part: 576 numbers of a token for DeepSeek-V3, in place of 40,960.

    Before::

        kv = linear(c, kv_b_proj.weight)                                        # [.., T, H * (n + v)]
        k = cat(kv[.., :n], rotated of each token for all heads); value = kv[.., n:]
        out = mllm.attention(q, k, value, None, 0.07, 0.0, -1, "")              # heads of n + r

    After::

        k = cat((c, rotated), -1)                                               # [T, 1, l + r]
        q = cat((bmm(q[.., :n], weight[:, :n]), q[.., n:]), -1)                 # [T, H, l + r]
        out = bmm(mllm.attention(q, k, k, None, 0.07, 0.0, -1, "", None, 0, l), weight[:, n:]ᵀ)

    Requires: attention of all layers is so, without windows, caps, sinks and biases; else no layer is changed, as one
        backend serves them all. How keys and values come from the linear is not matched by its spelling: what is
        between moves numbers alone, and is run on their places (_origins).
    Preserves: every value, except the order of sums and rounding of the queries.
    """

    name: ClassVar[str] = "absorb_latents"

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        if target.attention_backend == "torch":
            return None
        if not target.compiles_pieces:
            return "with compile.backend: eager there are no kernels for attention over latents"
        if not target.split_decode:
            return "kernels over latents are compiled beside our decode kernels (split_decode), which do not serve here"
        if getattr(torch, target.dtype) not in KERNEL_DTYPES or target.kv_cache_dtype != target.dtype:
            return (
                "the kernels over latents compute in float16 or bfloat16, as the cache is: not in "
                f"{target.dtype} over a {target.kv_cache_dtype} KV cache"
            )
        return None

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        attentions = [node for node in gm.graph.nodes if is_attention(node)]
        found = [_match(node) for node in attentions]
        if not all(found):
            return PassResult(gm, 0, before, before)
        for one in found:
            if one is not None:
                _absorb(gm.graph, one)
        drop_dead_nodes(gm)
        return PassResult(gm, len(found), before, len(gm.graph.nodes))


@dataclass(frozen=True)
class _Expansion:
    """An attention, and what its keys and values are expanded from.

    Attributes:
        latent: c, of l numbers a token; rotated: of r numbers a token.
        weight: [H * (n + v), l].
        num_heads: H; key_width: n; value_width: v.
    """

    attention: fx.Node
    latent: fx.Node
    rotated: fx.Node
    weight: fx.Node
    num_heads: int
    key_width: int
    value_width: int


def _match(attention: fx.Node) -> _Expansion | None:
    k, v = attention.args[1], attention.args[2]
    if not isinstance(k, fx.Node) or not isinstance(v, fx.Node) or not _is_plain(attention):
        return None
    num_heads, width = (int(size) for size in attention.args[0].meta["val"].shape[1:])  # type: ignore[union-attr]
    value_width = int(v.meta["val"].shape[2])
    if num_heads == 1 or any(operand.meta["val"].shape[1] != num_heads for operand in (k, v)):
        return None
    linear, *others = _sources(v, 0)
    if others or not is_call(linear, LINEAR):
        return None
    latent, weight, bias = linear_operands(linear)
    if bias is not None or not is_weight(weight) or weight.meta["val"].dim() != 2:
        return None
    key_width, rest = divmod(int(weight.meta["val"].shape[0]), num_heads)
    key_width -= value_width
    rope_width = width - key_width
    if rest or key_width <= 0 or rope_width <= 0:
        return None
    rotated = [node for node in _sources(k, rope_width) if node is not linear and not _is_room(node)]
    if len(rotated) != 1 or _numbers_of_a_token(rotated[0]) != rope_width:
        return None
    expansion = _Expansion(attention, latent, rotated[0], weight, num_heads, key_width, value_width)
    return expansion if _is_expanded_so(expansion, linear) else None


def _is_plain(attention: fx.Node) -> bool:
    """True for attention with a scale and nothing else, or with an indexer, whose choice depends on no head."""
    _, _, _, sinks, _, soft_cap, window_left, _, *others = attention.args
    return (sinks, soft_cap, window_left) == (None, 0, -1) and not any(others[:5])


def _is_room(node: fx.Node) -> bool:
    return is_call(node, "new_empty")


def _numbers_of_a_token(node: fx.Node) -> int | None:
    """The numbers that a value [1, .., T, .., N] has for each token; None for any other."""
    val = node.meta["val"]
    if not isinstance(val, torch.Tensor):
        return None
    symbolic: list[Any] = [size for size in val.shape if is_symbolic(size)]
    if len(symbolic) != 1 or not symbolic[0].node.expr.is_symbol:
        return None
    return math.prod(int(size) for size in val.shape if not is_symbolic(size))


def _sources(node: fx.Node, width: int) -> Iterator[fx.Node]:
    """The tensors that the numbers of `node` come from by moves alone; one of `width` numbers a token is one."""
    seen: set[fx.Node] = set()
    pending = [node]
    while pending:
        one = pending.pop()
        if one in seen or not _is_of_tensors(one):
            continue
        seen.add(one)
        if _is_room(one) or not is_call(one, *_MOVES) or _numbers_of_a_token(one) == width:
            yield one
        else:
            pending.extend(one.all_input_nodes)


def _is_of_tensors(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) or (isinstance(val, tuple | list) and not isinstance(val, torch.Size))


def _is_expanded_so(expansion: _Expansion, linear: fx.Node) -> bool:
    """True if a head's keys are its first n columns of the linear's and the rotated part, its values the v behind."""
    heads, n, v = expansion.num_heads, expansion.key_width, expansion.value_width
    rope = _numbers_of_a_token(expansion.rotated) or 0
    columns = heads * (n + v)
    places = torch.arange(_PROBE_TOKENS * columns, dtype=torch.float64)
    rotated = -1 - torch.arange(_PROBE_TOKENS * rope, dtype=torch.float64)
    wanted = places.view(_PROBE_TOKENS, heads, n + v)
    keys = torch.cat((wanted[..., :n], rotated.view(-1, 1, rope).expand(-1, heads, -1)), -1)
    try:
        known = {linear: _shaped(places, linear), expansion.rotated: _shaped(rotated, expansion.rotated)}
        k, value = (_origins(operand, known) for operand in expansion.attention.args[1:3])
    except (RuntimeError, TypeError, IndexError, ValueError):  # it cannot be run on places: it is something else
        return False
    return torch.equal(k, keys) and torch.equal(value, wanted[..., n:])


def _shaped(places: torch.Tensor, node: fx.Node) -> torch.Tensor:
    return places.view([_concrete(size) for size in node.meta["val"].shape])


def _concrete(size: Any) -> int:
    """A size for _PROBE_TOKENS tokens."""
    if not is_symbolic(size):
        return int(size)
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, _PROBE_TOKENS)))


def _origins(node: Any, known: dict[fx.Node, torch.Tensor]) -> Any:
    """The value of `node` by its moves of the numbers in `known`, whose meaning is their place."""
    if node in known:
        return known[node]
    if is_symbolic(node.meta["val"]):
        return _concrete(node.meta["val"])
    if not is_call(node, *_MOVES):
        raise ValueError(f"{node.name} moves nothing")
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: _origins(arg, known))
    if _is_room(node):  # what is written nowhere is no place
        return torch.full([_concrete(size) for size in node.meta["val"].shape], math.nan, dtype=torch.float64)
    run: Callable[..., Any] = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
    known[node] = run(*(args[1:] if isinstance(node.target, str) else args), **kwargs)
    return known[node]


def _absorb(graph: fx.Graph, expansion: _Expansion) -> None:
    attention, n, v = expansion.attention, expansion.key_width, expansion.value_width
    q: Any = attention.args[0]
    rope = int(q.meta["val"].shape[2]) - n
    rank = int(expansion.weight.meta["val"].shape[1])

    with graph.inserting_before(attention):
        tokens = call(graph, torch.ops.aten.sym_size.int, q, 0)

        def put(target: Callable[..., Any], *args: Any) -> fx.Node:
            return call(graph, target, *args)

        def parts(node: fx.Node, sizes: list[int], dim: int) -> list[fx.Node]:
            of = put(torch.split, node, sizes, dim)
            return [put(operator.getitem, of, index) for index in range(len(sizes))]

        def by_head(x: fx.Node, weight: fx.Node) -> fx.Node:
            """[T, H, a] · [H, a, b] → [T, H, b]"""
            return put(torch.transpose, put(torch.bmm, put(torch.transpose, x, 0, 1), weight), 0, 1)

        of_heads = put(torch.reshape, expansion.weight, (expansion.num_heads, n + v, rank))
        for_keys, for_values = parts(of_heads, [n, v], 1)
        latent = put(torch.reshape, expansion.latent, (tokens, 1, rank))
        rotated = put(torch.reshape, expansion.rotated, (tokens, 1, rope))
        index = attention.args[13:]
        k = put(torch.cat, (latent, rotated), -1)
        q_keys, q_rope = parts(q, [n, rope], -1)
        wide = put(torch.cat, (by_head(q_keys, for_keys), q_rope), -1)
        behind = (None, None, *index) if index else ()
        out = put(attention.target, wide, k, k, *attention.args[3:8], None, 0, rank, *behind)  # type: ignore[arg-type]
        out.meta = attention.meta | {"val": out.meta["val"]}  # it says which module attends
        of_values = by_head(out, put(torch.transpose, for_values, 1, 2))
        flat = graph.call_method("contiguous", (of_values,))
        flat.meta["val"] = of_values.meta["val"].contiguous()
    attention.replace_all_uses_with(flat)
    graph.erase_node(attention)
