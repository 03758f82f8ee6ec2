"""Cuts the layers into stages of a pipeline, each computed by ranks of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import IS_CONSTANT, NUM_STAGES, STAGE, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.layer_kinds import buffer_of, is_layer
from mllm_compile.passes.match.nodes import is_symbolic, is_weight, size_text

_MOST_MORE = 1.25  # bytes of a token that a cut may hand on, by those of the best cut


class Stage(GraphPass):
    """Marks each node with its stage, so that the stages hold equally many bytes of weights.

    Why: a model that no rank holds is spread by layers. Ranks of one stage wait for no sums of another: of each token
        a stage hands on hidden states alone, once.

    Before::

        y = mlp(norm(x)) + x; q, k, v = qkv(norm(y)); …; rotated = q * cos(positions)

    After::

        y = mlp(norm(x)) + x                                            # stage 0
        q, k, v = qkv(norm(y)); …; rotated = q * cos_1(positions)       # stage 1, which is handed y

    A cut is between two layers (attention, or those with a state), where the fewest bytes are needed behind it: mostly
    one hidden state. What follows from the batch's inputs and from constants alone is computed by each stage anew.

    Requires: attention lowered; `gm.meta[NUM_STAGES]`. A model with too few such places keeps its nodes unmarked.
    Preserves: every value bitwise.
    """

    name: ClassVar[str] = "stage"
    is_required: ClassVar[bool] = True

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return "runtime.pipeline_parallel_size is 1" if target.num_stages == 1 else None

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        num_stages = gm.meta.get(NUM_STAGES, 1)
        computed = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        if num_stages == 1 or any(STAGE in node.meta for node in computed):
            return PassResult(gm, 0, before, before)
        anew = _computed_anew(computed)
        starts = _balanced(computed, _cuts(computed, anew), num_stages)
        if starts is None:
            return PassResult(gm, 0, before, before)
        stage = 0
        for node in computed:
            stage += stage < len(starts) and node is starts[stage]
            node.meta[STAGE] = stage
        for index, start in enumerate(starts, start=1):
            _compute_anew(gm.graph, [node for node in computed if node.meta[STAGE] == index], start, anew)
        return PassResult(gm, len(starts), before, len(gm.graph.nodes))


@dataclass(frozen=True)
class _Cut:
    """A place ahead of the node of this index, and the bytes of each token that are needed behind it."""

    place: int
    num_bytes: int


def _computed_anew(computed: list[fx.Node]) -> set[fx.Node]:
    """The nodes that follow from the batch's inputs and from constants alone; no layer does."""
    found: set[fx.Node] = set()
    for node in computed:
        is_beside = is_layer(node) or _is_buffer(node)
        if not is_beside and all(one in found or _is_given(one) for one in node.all_input_nodes):
            found.add(node)
    return found


def _is_given(node: fx.Node) -> bool:
    is_stored = is_weight(node) and not node.meta.get(IS_CONSTANT)
    return node.op == "placeholder" and not is_stored


def _is_buffer(node: fx.Node) -> bool:
    return any(_is_buffer_of(node, user) for user in node.users)


def _is_buffer_of(node: fx.Node, user: fx.Node) -> bool:
    return is_layer(user) and buffer_of(user) is node


def _is_size(node: fx.Node) -> bool:
    return is_symbolic(node.meta.get("val"))


def _cuts(computed: list[fx.Node], anew: set[fx.Node]) -> list[_Cut]:
    """Between each two layers the last of the best places, where it is about as good as the best of all."""
    best: list[_Cut | None] = []
    for place, num_bytes in _costs(computed, anew):
        if is_layer(computed[place - 1]):
            best.append(None)
        if best and num_bytes is not None and (best[-1] is None or num_bytes <= best[-1].num_bytes):
            best[-1] = _Cut(place, num_bytes)
    found = [cut for cut in best[:-1] if cut is not None]  # behind the last layer is the head
    least = min((cut.num_bytes for cut in found), default=0)
    return [cut for cut in found if cut.num_bytes <= _MOST_MORE * least]


def _costs(computed: list[fx.Node], anew: set[fx.Node]) -> Iterator[tuple[int, int | None]]:
    """Each place and the bytes that a cut there hands on; None: it cannot be cut there."""
    order = {node: place for place, node in enumerate(computed)}
    ends: dict[int, list[fx.Node]] = {}
    alive: set[fx.Node] = set()
    for place, node in enumerate(computed):
        if place:
            is_split = any(order[user] >= place for one in alive for user in one.users if _is_buffer_of(one, user))
            yield place, None if is_split else _bytes_of(alive)
        alive.difference_update(ends.get(place, ()))
        last = max((order.get(user, len(computed)) for user in node.users), default=place)
        if last > place and node not in anew and not _is_size(node):
            alive.add(node)
            ends.setdefault(last, []).append(node)


def _bytes_of(alive: set[fx.Node]) -> int | None:
    """The bytes of a token of these values; None: one is no tensor of tokens, or lies otherwise than in order."""
    total = 0
    for node in alive:
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or not _is_dense(val):
            return None
        if sum(map(is_symbolic, val.shape)) != 1:
            return None
        total += val.dtype.itemsize * math.prod(int(size) for size in val.shape if not is_symbolic(size))
    return total


def _is_dense(val: torch.Tensor) -> bool:
    """True if elements lie in order without gaps; by texts, as sizes of tokens are not known."""
    expected: Any = 1
    for size, stride in zip(reversed(val.shape), reversed(val.stride()), strict=True):
        if str(size) != "1" and size_text(stride) != size_text(expected):
            return False
        expected = expected * size
    return True


def _balanced(computed: list[fx.Node], cuts: list[_Cut], num_stages: int) -> list[fx.Node] | None:
    """The first nodes of all stages but the first, so that the largest stage is as small as it can be; None: there are
    too few cuts."""
    if len(cuts) < num_stages - 1:
        return None
    bounds = [0, *(cut.place for cut in cuts), len(computed)]
    sizes = [_weight_bytes(computed[begin:end]) for begin, end in pairwise(bounds)]
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    # largest[n][i]: of the first i stretches in n stages, the least that the largest stage can be, and its last cut.
    largest = [{index: (sums[index], 0) for index in range(1, len(sums))}]
    for count in range(2, num_stages + 1):
        before = largest[-1]
        largest.append(
            {
                end: min((max(before[cut][0], sums[end] - sums[cut]), cut) for cut in range(count - 1, end))
                for end in range(count, len(sums))
            }
        )
    starts, end = [], len(sizes)
    for stages in reversed(largest[1:]):
        end = stages[end][1]
        starts.append(computed[bounds[end]])
    return starts[::-1]


def _weight_bytes(stretch: list[fx.Node]) -> int:
    read = {one for node in stretch for one in node.all_input_nodes if is_weight(one)}
    return sum(node.meta["val"].numel() * node.meta["val"].dtype.itemsize for node in read)


def _compute_anew(graph: fx.Graph, stage: list[fx.Node], start: fx.Node, anew: set[fx.Node]) -> None:
    """Gives a stage its own copies, ahead of its first node, of what it reads that each computes anew."""
    copies: dict[fx.Node, fx.Node] = {}
    own = set(stage)

    def copied(node: fx.Node) -> fx.Node:
        if node in own or node not in anew or _is_size(node):
            return node
        if node not in copies:
            for one in node.all_input_nodes:
                copied(one)
            with graph.inserting_before(start):
                copies[node] = graph.node_copy(node, lambda one: copies.get(one, one))
            copies[node].meta[STAGE] = start.meta[STAGE]
        return copies[node]

    for node in stage:
        for one in node.all_input_nodes:
            if copied(one) is not one:
                node.replace_input_with(one, copied(one))
