"""Joins what adapters change behind one linear, the norm or activation there, and the first product of the next."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.match.nodes import is_call, is_op
from mllm_compile.passes.match.rms_norm import RMSNorm, match_rms_norm
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.lora.shapes import MOST_SLOTS, chained_columns

_STREAMED = "stream_linear", "stream_quantised_linear"
_PLAIN_OPERANDS = 8  # of lora_expand and lora_expand_gated without a norm ahead
_SUMS_AT_ONCE = 4  # that streamed linears read of a norm

Shapes = tuple[tuple[Any, torch.dtype], ...]


def chain(graph: fx.Graph, node: fx.Node) -> bool:
    """Puts one kernel in the place of up to five between two linears of few tokens; says whether it has.

    Why: with adapters a linear takes neither its residual nor its activation, nor the norm ahead. Each kernel between
        two linears costs two microseconds, whatever it computes.

    Before::

        h = residual + mllm.lora_expand(o, shrunk, b, slots, [0], [N], True, True)
        x = rms_norm(h, norm_weight)
        gate_up = mllm.stream_linear(x, weight, None, 0.0, False)
        shrunk = mllm.lora_shrink(x, a, slots, True, True)
        y = mllm.lora_expand_gated(gate_up, shrunk, b, slots, starts, rows, True, True)
        shrunk = mllm.lora_shrink(y, next_a, slots, True, True)

    After::

        h, scaled, squares, shrunk = mllm.lora_expand_norm(o, shrunk, b, slots, residual, norm_weight, False, a)
        gate_up = mllm.stream_linear(scaled, weight, squares, eps, False)
        y, shrunk = mllm.lora_expand_gated_chained(
            gate_up, shrunk, b, slots, starts, rows, squares, eps, N, next_a)

    A norm goes where streamed linears and adapters alone read it, in bfloat16. Slots are the program's input.
    """
    if is_op(node, "lora_expand"):
        return _chain_norm(graph, node)
    return is_op(node, "lora_expand_gated") and _chain_activation(graph, node)


def _chain_norm(graph: fx.Graph, node: fx.Node) -> bool:
    """Joins a product with B, the residual and the norm behind it, and the product with A of what is normed."""
    operands: Any = node.args
    y, shrunk, b, slots, starts, rows, *last = operands
    val, found = node.meta["val"], _residual(node)
    is_whole = (list(starts), list(rows)) == ([0], [val.shape[-1]])
    if found is None or last != [True, True] or not is_whole or val.dtype != torch.bfloat16:
        return False
    total, residual = found
    norms = [(one, norm) for one in graph.nodes if (norm := match_rms_norm(one)) is not None and norm.x is total]
    if len(norms) != 1:
        return False
    normed, norm = norms[0]
    shrink = _shrink_of(normed, slots)
    if shrink is None or not _can_scale(normed, shrink):
        return False
    (expand,) = shrink.users
    width = val.shape[-1]
    num_sums = width // chained_columns(width)
    shapes: Shapes = ((val.shape, val.dtype), (val.shape, val.dtype), ((*val.shape[:-1], num_sums), torch.float32))
    taken = (y, shrunk, b, slots, residual, norm.weight, norm.plus_one, shrink.args[1])
    shapes = (*shapes, _products_of(shrink, num_sums))
    out, scaled, squares, products = _call(graph, total, op("lora_expand_norm"), taken, shapes)
    total.replace_all_uses_with(out)
    for reader in list(normed.users):
        if reader is not shrink:
            _take_scaled(reader, scaled, squares, norm)
    expand.args = (*expand.args, squares, norm.eps, width)
    _replace(graph, shrink, products)
    return True


def _chain_activation(graph: fx.Graph, node: fx.Node) -> bool:
    """Joins a gated product with B, and the product with A of what it gives."""
    operands: Any = node.args
    y, shrunk, b, slots, starts, rows, is_few, _, *norm = operands
    shrink = _shrink_of(node, slots)
    if not is_few or shrink is None:
        return False
    val = node.meta["val"]
    num_sums = val.shape[-1] // chained_columns(val.shape[-1])
    taken = (y, shrunk, b, slots, starts, rows, *(norm or (None, 0.0, 0)), shrink.args[1])
    shapes = (val.shape, val.dtype), _products_of(shrink, num_sums)
    out, products = _call(graph, node, op("lora_expand_gated_chained"), taken, shapes)
    _replace(graph, shrink, products)
    _replace(graph, node, out)
    return True


def _residual(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The sum that alone reads `node`, and the other operand, if that is of the same shape."""
    (total, *others) = node.users or [None]
    if total is None or others or not is_call(total, operator.add):
        return None
    operands: Any = total.args
    residual = operands[operands[0] is node]
    if not isinstance(residual, fx.Node) or residual is node:
        return None
    ours, theirs = node.meta["val"], residual.meta["val"]
    return (total, residual) if ours.shape == theirs.shape and ours.dtype == theirs.dtype else None


def _shrink_of(x: fx.Node, slots: Any) -> fx.Node | None:
    """The one product of `x` with A of these slots, of few tokens, that a kernel ahead can make."""
    found = [node for node in x.users if is_op(node, "lora_shrink")]
    if len(found) != 1 or found[0].args[2:] != (slots, True, True) or not chained_columns(x.meta["val"].shape[-1]):
        return None
    if found[0].args[1].meta["val"].shape[0] > MOST_SLOTS:  # type: ignore[union-attr]
        return None
    readers = list(found[0].users)
    takes_sums = len(readers) == 1 and is_op(readers[0], "lora_expand", "lora_expand_gated")
    return found[0] if takes_sums and len(readers[0].args) == _PLAIN_OPERANDS else None


def _can_scale(normed: fx.Node, shrink: fx.Node) -> bool:
    """True if all other readers of a norm are linears that take its input times its weight, with sums of squares."""
    width = normed.meta["val"].shape[-1]
    others = [reader for reader in normed.users if reader is not shrink]
    are_streamed = all(is_op(one, *_STREAMED) and one.args[_squares_place(one)] is None for one in others)
    return are_streamed and width // chained_columns(width) % _SUMS_AT_ONCE == 0


def _squares_place(linear: fx.Node) -> int:
    target: Any = linear.target
    return [argument.name for argument in target._schema.arguments].index("squares")


def _take_scaled(linear: fx.Node, scaled: fx.Node, squares: fx.Node, norm: RMSNorm) -> None:
    place = _squares_place(linear)
    linear.args = (scaled, *linear.args[1:place], squares, norm.eps, *linear.args[place + 2 :])


def _products_of(shrink: fx.Node, num_sums: int) -> tuple[tuple[Any, ...], torch.dtype]:
    return (num_sums, *shrink.meta["val"].shape[1:]), torch.float32


def _call(graph: fx.Graph, before: fx.Node, target: Any, operands: tuple[Any, ...], shapes: Shapes) -> list[fx.Node]:
    """The results of a call ahead of a node, which has a value like theirs."""
    val = before.meta["val"]
    with graph.inserting_before(before):
        made = graph.call_function(target, operands)
        made.meta.update(before.meta)
        made.meta["val"] = tuple(val.new_empty(shape, dtype=dtype) for shape, dtype in shapes)
        results = [graph.call_function(operator.getitem, (made, index)) for index in range(len(shapes))]
    for result, its_val in zip(results, made.meta["val"], strict=True):
        result.meta["val"] = its_val
    return results


def _replace(graph: fx.Graph, node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    graph.erase_node(node)
