"""Spreads the experts of a mixture over ranks; each rank computes the rest of its own tokens alone."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import EXPERT_RANKS, WEIGHT_CUTS, GraphPass, PassResult, PassTarget, WeightCut
from mllm_compile.passes.match.experts import match_expert_linear
from mllm_compile.passes.match.layer_kinds import is_layer
from mllm_compile.passes.match.nodes import (
    call,
    drop_dead_nodes,
    is_attention,
    is_call,
    is_op,
    is_symbolic,
    is_weight,
    recompute_value,
)
from mllm_compile.passes.sharding.calls import name_of
from mllm_compile.passes.sharding.states import is_state
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.experts.shapes import ELSEWHERE

_VIEWS = frozenset(["view", "reshape", "flatten", "unsqueeze", "squeeze", "contiguous", "to"])
# Ops that keep a row of zeros, between experts' last product and the sum of a token's rows.
_KEEPS_ZEROS = frozenset([*_VIEWS, "mul", "truediv", "neg", "dropout", "sum"])


class SpreadExperts(GraphPass):
    """Sends each token to the ranks that have its experts, and brings the sums back.

    Why: the experts are most of a mixture's weights, and its attention has few heads to cut. With tokens dealt to
        ranks, keys and values are on one rank each, and nothing but experts is exchanged.

    Before::

        w, ids = topk(softmax(linear(h, router)), k)
        rows = mllm.expert_linear(act(mllm.expert_linear(h, ids, up, …)), ids, down, …)      # up: [E, …]
        y = (rows * reshape(w, (-1, 1))).view(T, k, -1).sum(1)

    After::

        # the same on each of N ranks; T tokens are its own
        all = mllm.all_gather(h, 0, N)                                                        # [N*T, H]
        w, ids = topk(softmax(linear(all, router)), k)
        own = where(the rank has ids, ids - its first, ELSEWHERE)
        rows = mllm.expert_linear(act(mllm.expert_linear(all, own, up, …)), own, down, …)     # up: [E/N, …]
        y = mllm.reduce_scatter((rows * reshape(w, (-1, 1))).view(N*T, k, -1).sum(1), N)      # [T, H]

    Every rank makes the choice for all tokens, where it follows from what experts read; else its choice and weights are
    gathered too. Rows of experts that are elsewhere are zeros (runtime/ops/experts/linear.py). All ranks have equally
    many tokens in a step, padding included. Experts that do not divide, or whose rows go through what this does not
    know, are whole on every rank.

    Requires: a canonical graph; `gm.meta[EXPERT_RANKS]`.
    Preserves: the meaning. Sums over experts are of another order; the weights of a rank are its ranges in
        `gm.meta[WEIGHT_CUTS]`.
    """

    name: ClassVar[str] = "spread_experts"
    is_required: ClassVar[bool] = True

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return "runtime.expert_parallel_size is 1" if target.num_expert_ranks == 1 else None

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        num_ranks = gm.meta.get(EXPERT_RANKS, 1)
        if num_ranks == 1 or WEIGHT_CUTS in gm.meta:
            return PassResult(gm, 0, before, before)
        cuts: dict[str, tuple[WeightCut, ...]] = {}
        of_tokens = _of_tokens(gm.graph)
        layers = list(_layers(gm.graph, num_ranks))
        for layer in layers:
            _Spreading(gm.graph, layer, of_tokens, num_ranks).run(cuts)
        gm.meta[WEIGHT_CUTS] = cuts
        drop_dead_nodes(gm)
        return PassResult(gm, len(layers), before, len(gm.graph.nodes))


@dataclass(frozen=True)
class _Layer:
    """The experts of one layer.

    Attributes:
        products: their linears, which all have one choice.
        weights: what these multiply by, and their biases, as they read them; to the chains of views behind.
        num_experts: all of them.
        rows: all that is computed of their rows, in order.
        end: the sum of each token's rows, the last of `rows`.
    """

    products: tuple[fx.Node, ...]
    weights: dict[fx.Node, list[fx.Node]]
    num_experts: int
    rows: tuple[fx.Node, ...]
    end: fx.Node


def _layers(graph: fx.Graph, num_ranks: int) -> Iterator[_Layer]:
    """The layers of experts that can be spread."""
    by_choice: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if (linear := match_expert_linear(node)) is not None:
            by_choice.setdefault(linear.ids, []).append(node)
    for products in by_choice.values():
        linears: list[Any] = [match_expert_linear(node) for node in products]
        num_experts = linears[0].num_experts
        read = [weight for one in linears for weight in (one.weight, one.bias) if weight is not None]
        weights = {weight: _views_of(weight, num_experts) for weight in read}
        rows = _rows_of(graph, products)
        if num_experts % num_ranks == 0 and rows and all(weights.values()):
            yield _Layer(tuple(products), weights, num_experts, rows, rows[-1])  # type: ignore[arg-type]


def _views_of(weight: fx.Node, num_experts: int) -> list[fx.Node] | None:
    """The weight, the views behind it and the placeholder that they are of, if experts alone read it, each its part."""
    chain = [weight]
    while not is_weight(chain[-1]):
        node = chain[-1]
        is_view = name_of(node) in ("view", "reshape") and num_experts in node.args[1:2]
        if not is_view or len(node.all_input_nodes) != 1:
            return None
        chain += node.all_input_nodes
    is_theirs = all(match_expert_linear(user) is not None for user in weight.users)
    return chain if is_theirs and all(len(one.users) == 1 for one in chain[1:]) else None


def _rows_of(graph: fx.Graph, products: list[fx.Node]) -> tuple[fx.Node, ...]:
    """Return what is computed of experts' rows, up to the one sum of each token's; () where they go elsewhere."""
    found, last = set(products), set(products[-1:])
    end: fx.Node | None = None
    for node in graph.nodes:
        read = [one for one in node.all_input_nodes if one in found]
        if not read or node in found:
            continue
        is_last = not last.isdisjoint(read)
        if end is not None or node.op == "output" or _is_beside_pieces(node):
            if end is not None and set(read) == {end}:
                continue
            return ()
        if is_last and name_of(node) not in _KEEPS_ZEROS:
            return ()
        found.add(node)
        if is_last:
            last.add(node)
            end = _with_cast(node) if _sums_choices(node) else None
            if end is not None:
                found.add(end)
    return () if end is None else tuple(node for node in graph.nodes if node in found)


def _is_beside_pieces(node: fx.Node) -> bool:
    """True for attention and states, which see several tokens."""
    return is_layer(node) or is_attention(node) or is_state(node)


def _sums_choices(node: fx.Node) -> bool:
    """True for a sum over the second of three dimensions, which goes."""
    if name_of(node) != "sum" or node.args[0].meta["val"].dim() != 3 or node.meta["val"].dim() != 2:  # type: ignore[union-attr]
        return False
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    return dim in (1, [1], (1,), -2, [-2], (-2,))


def _with_cast(end: fx.Node) -> fx.Node:
    """The sum, or its only reader if that has fewer bytes, so that less is sent."""
    reader, *others = end.users
    is_narrower = name_of(reader) == "to" and reader.meta["val"].dtype.itemsize < end.meta["val"].dtype.itemsize
    return reader if is_narrower and not others else end


def _of_tokens(graph: fx.Graph) -> set[fx.Node]:
    """The values that follow from a step's tokens; the others are the same on all ranks."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_input = node.op == "placeholder" and not is_weight(node)
        if is_input or any(one in found for one in node.all_input_nodes if not _is_size(one)):
            found.add(node)
    return found


def _is_size(node: fx.Node) -> bool:
    return is_symbolic(node.meta.get("val"))


class _Spreading:
    """Spreads one layer."""

    def __init__(self, graph: fx.Graph, layer: _Layer, of_tokens: set[fx.Node], num_ranks: int) -> None:
        self._graph, self._layer, self._of_tokens, self._num_ranks = graph, layer, of_tokens, num_ranks
        self._copies: dict[fx.Node, fx.Node] = {}

    def run(self, cuts: dict[str, tuple[WeightCut, ...]]) -> None:
        for chain in self._layer.weights.values():
            self._cut(chain, cuts)
        first: Any = match_expert_linear(self._layer.products[0])
        order = {node: index for index, node in enumerate(self._graph.nodes)}
        again = set(self._layer.rows)
        gathered: list[fx.Node] = []
        base = _base(first.x)
        if all(self._is_made_of(one, base) for one in self._entries(again)):
            gathered.append(base)
            for one in self._entries(again):
                again |= self._between(one, base)
        else:
            gathered += self._entries(again)
        with self._graph.inserting_before(self._layer.end):
            for node in gathered:
                self._copies[node] = self._gather(node)
            for node in sorted(again, key=order.__getitem__):
                self._copy(node)
            self._use(self._own(self._copies[first.ids], self._layer.num_experts))
            total = call(self._graph, op("reduce_scatter"), self._copies[self._layer.end], self._num_ranks)
        total.meta |= {"val": self._layer.end.meta["val"]}
        self._layer.end.replace_all_uses_with(
            total, delete_user_cb=lambda user: user is not self._copies[self._layer.end]
        )

    # What is sent -----------------------------------------------------------------------------------------------------

    def _entries(self, rows: Iterable[fx.Node]) -> list[fx.Node]:
        """The values of tokens that rows are made of, at their narrowest."""
        inside = set(rows)
        read = (one for node in self._layer.rows for one in node.all_input_nodes)
        entries = (one for one in read if one in self._of_tokens and one not in inside and not _is_size(one))
        return list(dict.fromkeys(entries))

    def _is_made_of(self, node: fx.Node, base: fx.Node) -> bool:
        """True if the node follows from `base`, weights and sizes alone."""
        if node is base or _is_size(node) or node not in self._of_tokens:
            return True
        if node.op == "placeholder" or _is_beside_pieces(node):
            return False
        return all(self._is_made_of(one, base) for one in node.all_input_nodes)

    def _between(self, node: fx.Node, base: fx.Node) -> set[fx.Node]:
        """Return what is computed of `base` on the way to the node, itself included."""
        if node is base or _is_size(node) or node not in self._of_tokens:
            return set()
        return {node}.union(*(self._between(one, base) for one in node.all_input_nodes))

    def _gather(self, node: fx.Node) -> fx.Node:
        val = node.meta["val"]
        dim = next(index for index, size in enumerate(val.shape) if is_symbolic(size))
        return call(self._graph, op("all_gather"), node, dim, self._num_ranks)

    # What is computed of it -------------------------------------------------------------------------------------------

    def _copy(self, node: fx.Node) -> None:
        """Computes for all ranks' tokens what the node computes for the rank's."""
        for size in node.all_input_nodes:
            if _is_size(size) and size not in self._copies:
                self._copies[size] = call(self._graph, operator.mul, size, self._num_ranks)
        copy = self._graph.node_copy(node, lambda one: self._copies.get(one, one))
        recompute_value(copy)
        self._copies[node] = copy

    def _own(self, ids: fx.Node, num_experts: int) -> fx.Node:
        """The experts as the rank counts its own; ELSEWHERE for other ranks', and for no expert its number of experts,
        which is no expert either."""
        graph, count = self._graph, num_experts // self._num_ranks
        with graph.inserting_after(ids):
            place = ids.next
        with graph.inserting_before(place):
            first = call(graph, operator.mul, call(graph, op("rank_index"), ids), count)
            places = call(graph, operator.sub, ids, first)
            is_own = _is_within(graph, places, count)
            others = call(graph, torch.where, _is_within(graph, ids, num_experts), ELSEWHERE, count)
            return call(graph, torch.where, is_own, places, others)

    def _use(self, own: fx.Node) -> None:
        for node in self._layer.products:
            product = self._copies[node]
            x, _, *rest = product.args
            product.args = (x, own, *rest)

    # Weights ----------------------------------------------------------------------------------------------------------

    def _cut(self, chain: list[fx.Node], cuts: dict[str, tuple[WeightCut, ...]]) -> None:
        """Leaves the rank its experts of a weight, and of the views that it is read by."""
        *views, placeholder = chain
        val = placeholder.meta["val"]
        length = val.shape[0] // self._num_ranks
        ranges = tuple(((rank * length, length),) for rank in range(self._num_ranks))
        cuts[placeholder.meta["weight_name"]] = (WeightCut(0, ranges),)
        placeholder.meta["val"] = val.new_empty((length, *val.shape[1:]))
        for node in reversed(views):
            source, _, *sizes = node.args
            node.args = (source, self._layer.num_experts // self._num_ranks, *sizes)
            recompute_value(node)


def chosen_of_all(own: fx.Node) -> fx.Node | None:
    """The choice among all ranks' experts, if `node` is a choice in a rank's own count, as this pass makes it; or
    None."""
    places: Any = own.args[1] if is_call(own, torch.where) else None
    first: Any = places.args[1] if is_call(places, operator.sub) else None
    is_spread = is_call(first, operator.mul) and is_op(first.args[0], "rank_index")
    return places.args[0] if is_spread else None


def _base(node: fx.Node) -> fx.Node:
    """The value that a node is a view of."""
    while name_of(node) in _VIEWS and not is_op(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_within(graph: fx.Graph, ids: fx.Node, count: int) -> fx.Node:
    return call(graph, operator.and_, call(graph, operator.ge, ids, 0), call(graph, operator.lt, ids, count))
