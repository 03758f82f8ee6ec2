"""Computes the last layer's outputs only for the rows whose logits are wanted."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import fx
from torch.nn import functional

from mllm_compile.passes.base import HEAD_INPUT, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.layer_kinds import is_layer
from mllm_compile.passes.match.nodes import (
    LINEAR,
    call,
    drop_dead_nodes,
    input_node,
    is_call,
    is_op,
    is_symbolic,
    recompute_value,
)


class GatherRowsEarly(GraphPass):
    """Moves the head's row gather up to the last attention (or another layer outside of pieces).

    Why: the last layer needs only keys and values of a prompt's tokens before the last one. So its output projection
        and feed-forward, most of a layer's products, work on S rows in place of T (figures in docs/lab/performance.md).

    Before::

        y = residual + linear(out, o); z = y + mlp(norm(y)); logits = linear(norm(z)[:, rows], head)

    After::

        y = residual[:, rows] + linear(out[rows], o); z = y + mlp(norm(y)); logits = linear(norm(z), head)

    Requires: attention lowered. All nodes between the last attention and the gather must work on each token by itself:
        linears, and the operations of `_RULES`. Any other graph is left unchanged.
    Preserves: every row's numbers, except for the order of sums, which the library chooses by the number of rows.
    """

    name: ClassVar[str] = "gather_rows_early"

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return None if target.num_expert_ranks == 1 else "experts take as many tokens of each rank"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        rows = input_node(gm, "logits_indices")
        gather = _gather_of(rows)
        last = next((node for node in reversed(gm.graph.nodes) if is_layer(node)), None)
        region = None if gather is None or last is None else _Region.ahead_of(gather, last)
        if region is None or last is None or gather is None:
            return PassResult(gm, 0, before, before)
        region.rebuild(gm.graph, gather, last, rows)
        drop_dead_nodes(gm)
        return PassResult(gm, 1, before, len(gm.graph.nodes))


def _gather_of(rows: fx.Node) -> fx.Node | None:
    """The only reader of the rows if it is x[:, rows, :] of hidden states, else None; inputs may be gathered too."""
    readers = [node for node in rows.users if not (is_symbolic(node.meta.get("val")) or _is_of_input(node))]
    if len(readers) != 1 or not is_call(readers[0], operator.getitem) or not isinstance(readers[0].args[0], fx.Node):
        return None
    source: Any = readers[0].args[0]
    index: Any = readers[0].args[1]
    index = index if isinstance(index, tuple) else (index,)
    is_plain = source is not rows and rows in index and all(one is rows or one == slice(None) for one in index)
    if not is_plain or not isinstance(source.meta["val"], torch.Tensor):
        return None
    is_of_tokens = index.index(rows) == _token_dim(source.meta["val"]) == source.meta["val"].dim() - 2
    return readers[0] if is_of_tokens else None


def _is_of_input(node: fx.Node) -> bool:
    """True for input[rows], which the head reads as it is."""
    source = node.args[0]
    return is_call(node, operator.getitem) and isinstance(source, fx.Node) and "input_name" in source.meta


class _Region:
    """The nodes between the last attention and the gather.

    Attributes:
        nodes: the region's nodes in order.
        sources: tensors of T tokens that come from before.
    """

    def __init__(self) -> None:
        self.nodes: list[fx.Node] = []
        self.sources: list[fx.Node] = []

    @classmethod
    def ahead_of(cls, gather: fx.Node, last: fx.Node) -> _Region | None:
        """None where a node works on more than one token at a time, where the head reads more than what is gathered, or
        where nothing is between."""
        order = {node: place for place, node in enumerate(gather.graph.nodes)}
        between = [node for node in order if order[last] < order[node] < order[gather]]
        if any(_is_read_behind(node, gather, order) for node in between):
            return None
        region, wanted = set(), [gather.args[0]]
        sources: dict[fx.Node, None] = {}
        while wanted:
            node: Any = wanted.pop()
            if node in region or not any(_sizes(node)):
                continue
            if order[node] < order[last] and isinstance(node.meta["val"], torch.Tensor):
                sources[node] = None
            elif order[node] > order[last] and _is_by_token(node):
                region.add(node)
                wanted += [arg for arg in node.all_input_nodes if not _is_of_sizes(arg.meta["val"])]
            else:
                return None
        found = cls()
        found.nodes = sorted(region, key=order.__getitem__)
        found.sources = sorted(sources, key=order.__getitem__)
        return found if found.nodes else None

    def rebuild(self, graph: fx.Graph, gather: fx.Node, last: fx.Node, rows: fx.Node) -> None:
        """Repeats the region's nodes on gathered sources, in the place of the gather's input."""
        made: dict[fx.Node, fx.Node] = {}
        with graph.inserting_before(last.next):
            size = call(graph, torch.ops.aten.sym_size.int, rows, 0)
            for source in self.sources:
                val = source.meta["val"]
                index = tuple(rows if dim == _token_dim(val) else slice(None) for dim in range(val.dim()))
                made[source] = call(graph, operator.getitem, source, index)

        def operand(arg: fx.Node) -> Any:
            val = arg.meta["val"]
            if isinstance(val, torch.Size):
                return tuple(size if is_symbolic(one) else one for one in val)
            return size if is_symbolic(val) else made.get(arg, arg)

        with graph.inserting_before(gather):
            for node in self.nodes:
                made[node] = graph.node_copy(node, operand)
                recompute_value(made[node])
        of_rows = made[gather.args[0]]  # type: ignore[index]
        of_rows.meta[HEAD_INPUT] = True
        gather.replace_all_uses_with(of_rows)
        graph.erase_node(gather)


def _is_read_behind(node: fx.Node, gather: fx.Node, order: dict[fx.Node, int]) -> bool:
    """True if the head reads the node, other than as a size."""
    return not _is_of_sizes(node.meta.get("val")) and any(order[user] > order[gather] for user in node.users)


# Rules for nodes that work on each token by itself --------------------------------------------------------------------


def _each(val: Any) -> tuple[Any, ...]:
    """The tensors of a tuple, or the one tensor."""
    return tuple(val) if isinstance(val, tuple | list) else (val,)


def _is_of_sizes(val: Any) -> bool:
    """True if `val` is a size, or a tensor's sizes (`x.size()`)."""
    return is_symbolic(val) or isinstance(val, torch.Size)


def _sizes(node: fx.Node) -> Iterator[Any]:
    """Sizes that depend on T."""
    for value in _each(node.meta["val"]):
        yield from (size for size in getattr(value, "shape", ()) if is_symbolic(size))


def _token_dim(val: Any) -> int | None:
    """The dimension of the tokens; None where it is not one of its own."""
    dims = [dim for dim, size in enumerate(val.shape) if is_symbolic(size)]
    return dims[0] if len(dims) == 1 and val.shape[dims[0]].node.expr.is_symbol else None


def _is_by_token(node: fx.Node) -> bool:
    """True if a row of the node's outputs depends only on the same row of its inputs."""
    rule = _RULES.get(node.target) if node.op in ("call_function", "call_method") else None
    rule = _is_linear if is_op(node, "quantised_linear") else rule
    rule = _moves_dims if is_op(node, "add_lora", "scale_of_adapters") else rule
    if is_op(node, "all_reduce"):
        rule = _is_pointwise
    inputs = [arg.meta["val"] for arg in node.all_input_nodes if not _is_of_sizes(arg.meta["val"]) and any(_sizes(arg))]
    if rule is None or not inputs or any(_token_dim(value) is None for one in inputs for value in _each(one)):
        return False
    if any(_token_dim(value) is None for value in _each(node.meta["val"])):
        return False
    # Sizes become the rows': rightly so in a view, but elsewhere they are numbers that mean T.
    if any(rule is not _keeps_order or not number.node.expr.is_symbol for number in _numbers_of(node)):
        return False
    return rule(node, _each(inputs[0])[0], inputs)


def _numbers_of(node: fx.Node) -> Iterator[Any]:
    """The numbers in the node's arguments that depend on T, alone or in a tensor's sizes."""
    for arg in node.all_input_nodes:
        yield from (number for number in _each(arg.meta["val"]) if is_symbolic(number))


def _from_the_right(val: Any) -> int:
    count: int = val.dim() - (_token_dim(val) or 0)
    return count


def _is_pointwise(node: fx.Node, first: Any, inputs: list[Any]) -> bool:
    """True if broadcasting aligns all token dimensions."""
    return len({_from_the_right(value) for value in (*inputs, node.meta["val"])}) == 1


def _is_linear(node: fx.Node, first: Any, inputs: list[Any]) -> bool:
    return len(inputs) == 1 and _token_dim(first) != first.dim() - 1


def _moves_dims(node: fx.Node, first: Any, inputs: list[Any]) -> bool:
    """True: a token's numbers stay its own, whichever dimension is whose."""
    return True


def _is_product_of_rows(node: fx.Node, first: Any, inputs: list[Any]) -> bool:
    """True for a batch of products x · weight where tokens are the rows of x."""
    source: Any = node.args[0]
    return len(inputs) == 1 and source.meta["val"] is first and _token_dim(first) == 1


def _keeps_order(node: fx.Node, first: Any, inputs: list[Any]) -> bool:
    """A view that keeps tokens as rows, in the same order."""
    return len({math.prod(value.shape[: _token_dim(value)]) for value in (first, node.meta["val"])}) == 1


def _is_mean_of_others(node: fx.Node, first: Any, inputs: list[Any]) -> bool:
    dims = node.args[1] if len(node.args) > 1 else None
    dims = dims if isinstance(dims, tuple | list) else [dims]
    if not all(isinstance(dim, int) for dim in dims):
        return False
    others = {dim % first.dim() for dim in dims}
    return _token_dim(first) not in others and _keeps_order(node, first, inputs)


def _is_split_of_others(node: fx.Node, first: Any, inputs: list[Any]) -> bool:
    dim = node.args[2] if len(node.args) > 2 else 0
    return isinstance(dim, int) and dim % first.dim() != _token_dim(first)


def _is_norm_of_others(node: fx.Node, first: Any, inputs: list[Any]) -> bool:
    shape = node.args[1]
    return isinstance(shape, tuple | list) and len(inputs) == 1 and (_token_dim(first) or 0) < first.dim() - len(shape)


def _is_part(node: fx.Node, first: Any, inputs: list[Any]) -> bool:
    """True for an item of a tuple."""
    return isinstance(node.args[0], fx.Node) and isinstance(node.args[0].meta["val"], tuple | list)


_POINTWISE = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow),
    *(torch.add, torch.sub),  # with a factor
    *(torch.square, torch.sqrt, torch.rsqrt, torch.tanh, torch.sigmoid, torch.relu, torch.clamp, torch.where),
    *(functional.silu, functional.gelu, "to", "contiguous"),
)
_RULES: dict[Any, Callable[[fx.Node, Any, list[Any]], bool]] = {
    **dict.fromkeys(_POINTWISE, _is_pointwise),
    **dict.fromkeys((torch.reshape, "view", torch.flatten, torch.unsqueeze), _keeps_order),
    **dict.fromkeys((torch.split, torch.chunk), _is_split_of_others),
    LINEAR: _is_linear,
    torch.transpose: _moves_dims,
    torch.bmm: _is_product_of_rows,
    torch.mean: _is_mean_of_others,
    functional.layer_norm: _is_norm_of_others,
    operator.getitem: _is_part,
}
