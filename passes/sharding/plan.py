"""The calls of a graph that is cut: sizes and places as they are on a rank, or the weights that cannot be cut.

Views are run once more on a rank's own labels: what they give has to be that rank's part of what the whole call gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from mllm_compile.passes.base import WeightCut
from mllm_compile.passes.match.nodes import is_attention, is_symbolic
from mllm_compile.passes.sharding.calls import COMPLEX, POINTWISE, name_of
from mllm_compile.passes.sharding.cells import Owners
from mllm_compile.passes.sharding.labels import Labelling, Labels
from mllm_compile.passes.sharding.states import OF_GROUPS, TOGETHER, is_state, operands_of

Box = list[np.ndarray]  # the indices that a rank has, in each dimension
_KEEP_SIZES = POINTWISE | {
    "unsqueeze",
    "squeeze",
    "transpose",
    "contiguous",
}  # what a cut parameter may go through as it is


class NotCutError(Exception):
    """A call cannot be made on parts of its values."""


class ShardPlan:
    """A cut of one graph, or the reason against one.

    Attributes:
        cuts: weight → how it is cut.
        calls: node → the target and arguments that it has on a rank.
        gathers: output → the dimension that ranks' parts are joined in.
        refused: weights that have to be whole for the next try.
    """

    def __init__(self, gm: fx.GraphModule, labelling: Labelling, owners: Owners) -> None:
        self.cuts: dict[str, tuple[WeightCut, ...]] = {}
        self.calls: dict[fx.Node, tuple[Any, tuple[Any, ...]]] = {}
        self.gathers: dict[fx.Node, int] = {}
        self._labelling, self._owners = labelling, owners
        self._values, self._parameters = labelling.values, labelling.parameters
        self._boxes: dict[fx.Node, list[list[Box]]] = {}  # of each tensor of a value, by rank
        self.refused = labelling.cells.weights_of(owners.undealt) | labelling.cells.whole_weights()
        if self.refused:
            return
        self._cut_weights(gm)
        self._check_products()
        for node in gm.graph.nodes:
            if node.op in ("call_function", "call_method") and labelling.are_cut(node):
                self._refuse_where_wrong(node, self._plan_call)
        for node in labelling.means:
            self._refuse_where_wrong(node, self._plan_mean)
        for node in labelling.outputs:
            self._refuse_where_wrong(node, self._plan_output)

    # Weights ----------------------------------------------------------------------------------------------------------

    def _cut_weights(self, gm: fx.GraphModule) -> None:
        for name, uses in self._labelling.uses.items():
            wanted = [self._cuts_of(use) for use in uses]
            if any(one is None or one != wanted[0] for one in wanted):
                self._refuse([labels for use in uses for labels in use.values()])
            elif wanted[0]:
                self.cuts[name] = wanted[0]
        for node in gm.graph.nodes:
            name = self._parameters.parameter_of(node) or ""
            if name in self.cuts and node.op != "placeholder" and name_of(node) not in _KEEP_SIZES:
                self._refuse([labels for use in self._labelling.uses[name] for labels in use.values()])

    def _cuts_of(self, use: dict[int, Labels]) -> tuple[WeightCut, ...] | None:
        """How one use wants its weight cut; None: ranks would have parts of different sizes."""
        cuts = []
        for dim, labels in sorted(use.items()):
            kept = [np.flatnonzero(self._owners.has(labels, rank)) for rank in range(self._owners.num_ranks)]
            if len({one.size for one in kept}) > 1 or not kept[0].size:
                return None
            if kept[0].size < labels.size:
                cuts.append(WeightCut(dim, tuple(map(_ranges, kept))))
        return tuple(cuts)

    def _refuse(self, labels: Sequence[Labels]) -> None:
        classes = [self._labelling.cells.classes_of(one) for one in labels]
        self.refused |= self._labelling.cells.weights_of(np.concatenate(classes)) if classes else set()

    def _refuse_where_wrong(self, node: fx.Node, plan: Any) -> None:
        try:
            plan(node)
        except (NotCutError, ValueError, TypeError, IndexError, RuntimeError, StopIteration):
            read = [self._labelling.labels.get(one) for one in (*node.all_input_nodes, node)]
            self._refuse(
                [part for one in read if one is not None for part in (one if isinstance(one, list) else [one])]
            )

    def _check_products(self) -> None:
        """A sum over ranks counts everything once; ranks have equal, contiguous parts of a vocabulary."""
        for _, labels in self._labelling.rows.values():
            if not self._owners.are_held_once(labels):
                self._refuse([labels])
        for node in self._labelling.lookups:
            weight: Any = node.args[1]
            name, rows = weight.meta["weight_name"], int(weight.meta["val"].shape[0])
            if name in self.cuts and self.cuts[name] != (WeightCut(0, _equal_parts(rows, self._owners.num_ranks)),):
                self._refuse([labels for use in self._labelling.uses[name] for labels in use.values()])

    # Values -----------------------------------------------------------------------------------------------------------

    def boxes(self, node: fx.Node) -> list[list[Box]]:
        """The part that each rank has of each tensor of a value."""
        if node not in self._boxes:
            labels: Any = self._labelling.labels.get(node)
            parts = labels if isinstance(labels, list) else [labels]
            if labels is None:
                zeros = self._values.zeros(node)
                parts = zeros if isinstance(zeros, list) else [zeros]
            self._boxes[node] = [self._boxes_of(part) for part in parts]
        return self._boxes[node]

    def _boxes_of(self, labels: Labels) -> list[Box]:
        boxes = [self._owners.box(labels, rank) for rank in range(self._owners.num_ranks)]
        found = [box for box in boxes if box is not None]
        if len(found) < len(boxes) or len({tuple(len(kept) for kept in box) for box in found}) > 1:
            raise NotCutError("ranks have parts of different shapes")
        return found

    def local_shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of a rank's part of a value, with a few tokens."""
        return tuple(len(kept) for kept in self.boxes(node)[0][0])

    def _plan_call(self, node: fx.Node) -> None:
        boxes, name = self.boxes(node), name_of(node)
        if node in self._labelling.columns or node in self._labelling.rows:
            return
        if is_attention(node):
            self._check_attention(node)
        elif is_state(node):
            self._check_state(node)
        elif name in ("mean", "softmax", "rms_norm", "layer_norm", "normalize"):
            self._check_reduction(node)
        elif name in ("cat", "stack") and all(self._labelling.are_cut(one) for one in node.all_input_nodes):
            self._check_view(node, node.target, node.args)
        elif name in POINTWISE or name == "cat":
            self._check_operands(node, boxes[0])
        elif name in COMPLEX:
            self._check_pairs(node)
        else:
            self._plan_view(node, name)

    def _check_operands(self, node: fx.Node, boxes: list[Box]) -> None:
        shape = self._values.shape(node)
        joined = None
        if name_of(node) == "cat":
            joined = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(shape)  # type: ignore[operator]
        for one in node.all_input_nodes:
            if not isinstance(one.meta["val"], torch.Tensor) or self._parameters.parameter_of(one) in self.cuts:
                continue
            whole, skip = self._values.shape(one), len(shape) - one.meta["val"].dim()
            if not np.prod(whole):
                continue  # the empty part of a split: a rank's is empty too
            for dim, size in enumerate(whole):
                if size == 1 or dim + skip == joined:
                    continue
                for theirs, ours in zip(self.boxes(one)[0], boxes, strict=True):
                    if not np.array_equal(theirs[dim], ours[dim + skip]):
                        raise NotCutError("an operand is not of the rank's part")

    def _check_reduction(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        shape, kept = self._values.shape(source), self.local_shape(source)
        if name_of(node) in ("rms_norm", "layer_norm"):
            dims = range(len(shape) - len(node.args[1]), len(shape))  # type: ignore[arg-type]
        else:
            dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else -1)
            dims = [one % len(shape) for one in (dim if isinstance(dim, tuple | list) else (dim,))]  # type: ignore[assignment]
        if any(shape[dim] != kept[dim] for dim in dims):
            raise NotCutError("a rank has a part of what is reduced")

    def _check_pairs(self, node: fx.Node) -> None:
        pairs: Any = node.args[0] if name_of(node) == "view_as_complex" else node
        if self.local_shape(pairs)[-1] != 2:
            raise NotCutError("a rank has one of two parts of a number")

    def _check_attention(self, node: fx.Node) -> None:
        q, k, v, *others = node.args
        self._check_together([k, v])  # type: ignore[list-item]
        self._check_groups(q, k)  # type: ignore[arg-type]
        # Slopes are numbers in the call, of all heads: a rank finds its own by its number (AttentionLayer.of).
        has_slopes = any(isinstance(one, list | tuple) for one in others)
        for rank, box in enumerate(self.boxes(q)[0]):  # type: ignore[arg-type]
            first = rank * box[1].size
            if has_slopes and not np.array_equal(box[1], np.arange(first, first + box[1].size)):
                raise NotCutError("ranks' heads are not one behind another")

    def _check_state(self, node: fx.Node) -> None:
        name, operands, constants = operands_of(node)
        if any(self._parameters.parameter_of(operands[key]) not in self.cuts for key in constants & operands.keys()):
            raise NotCutError("a constant of the layer is whole")
        together = [operands[key] for key in TOGETHER[name] if key in operands]
        self._check_together([node, *together])
        for key in OF_GROUPS.get(name, ()):
            self._check_groups(together[0], operands[key])

    def _check_together(self, nodes: Sequence[fx.Node]) -> None:
        """Ranks have the same heads, or channels, of all of these."""
        for boxes in zip(*(self.boxes(one)[0] for one in nodes), strict=True):
            if any(not np.array_equal(box[1], boxes[0][1]) for box in boxes):
                raise NotCutError("heads that go together are on different ranks")

    def _check_groups(self, of_heads: fx.Node, of_groups: fx.Node) -> None:
        """A rank's heads find their groups by their place among the rank's."""
        size = of_heads.meta["val"].shape[1] // of_groups.meta["val"].shape[1]
        for box, other in zip(self.boxes(of_heads)[0], self.boxes(of_groups)[0], strict=True):
            heads, groups = box[1], other[1]
            local_size, rest = divmod(heads.size, groups.size)
            if rest or not np.array_equal(groups[np.arange(heads.size) // local_size], heads // size):
                raise NotCutError("heads are not beside their groups")

    def _plan_view(self, node: fx.Node, name: str) -> None:
        args = self._local_args(node, name)
        target: Any = torch.reshape if name in ("view", "reshape", "flatten", "unflatten") else node.target
        if name == "chunk":
            target, args = self._split(node, args)
        elif target is torch.reshape:
            args = (node.args[0], self._local_sizes(node, args))
        if node not in self._labelling.spread:
            self._check_view(node, target, args)
        if target is not node.target or args != node.args:
            self.calls[node] = target, args

    def _check_view(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
        """Checks that a view of a rank's parts is the rank's part of the view."""
        for rank in (0, self._owners.num_ranks - 1):
            made = self._values.run(node, lambda one: self._part(one, rank), args=args, target=target)  # noqa: B023
            wanted = self._part(node, rank)
            pairs = zip(made, wanted, strict=True) if isinstance(wanted, list) else [(made, wanted)]
            if not all(np.array_equal(one, other) for one, other in pairs):
                raise NotCutError("a view of a part is no part of the view")

    def _part(self, node: fx.Node, rank: int) -> Any:
        labels = self._labelling.labels.get(node)
        if labels is None:
            return self._values.zeros(node)
        parts = [one[np.ix_(*boxes[rank])] for one, boxes in zip(_as_list(labels), self.boxes(node), strict=True)]
        return parts if isinstance(labels, list) else parts[0]

    def _local_args(self, node: fx.Node, name: str) -> tuple[Any, ...]:
        args = node.args
        if name == "expand":
            return (args[0], *self._local_sizes(node, args))
        if name == "split":
            return self._split(node, args)[1]
        if name == "narrow":
            first: Any
            length: Any
            dim, first, length = args[1] % node.meta["val"].dim(), *args[2:4]
            start, stop = self._between(args[0], dim, first, first + length)  # type: ignore[arg-type]
            return (args[0], dim, start, stop - start)
        if name == "getitem" and isinstance(args[0].meta["val"], torch.Tensor):  # type: ignore[union-attr]
            return (args[0], self._local_index(node))
        return args

    def _split(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        source: Any = args[0]
        dim = (args[2] if len(args) > 2 else node.kwargs.get("dim", 0)) % source.meta["val"].dim()
        if self._values.shape(source)[dim] == self.local_shape(source)[dim]:
            return node.target, args
        sizes = [len(boxes[0][dim]) for boxes in self.boxes(node)]
        is_chunk = name_of(node) == "chunk"
        if is_chunk and len(set(sizes)) == 1 and len(sizes) == args[1]:
            return node.target, args
        return torch.split, (source, sizes, dim)

    def _local_sizes(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The sizes of a view: a rank's numbers, and tokens' sizes unchanged."""
        val, local = node.meta["val"], self.local_shape(node)
        dims = [dim for dim in range(val.dim()) if is_symbolic(val.shape[dim])]
        given = _elements(args[1:]) if name_of(node) in ("view", "reshape", "expand") else []
        sizes: list[Any] = list(local)
        for dim in dims:
            is_whole = local[dim] == self._values.shape(node)[dim]  # else it is of tokens' heads
            is_said = len(given) == val.dim() and (isinstance(given[dim], fx.Node) or given[dim] == -1)
            sizes[dim] = given[dim] if is_said and is_whole else -1
        if sum(isinstance(size, int) and size == -1 for size in sizes) > 1 and name_of(node) != "expand":
            raise NotCutError("two sizes are not numbers")
        return tuple(sizes)

    def _local_index(self, node: fx.Node) -> Any:
        source: Any = node.args[0]
        index: Any = node.args[1]
        items = list(index) if isinstance(index, tuple) else [index]
        shape, kept = self._values.shape(source), self.local_shape(source)
        left_out = len(shape) - sum(item is not None and item is not Ellipsis for item in items)
        place = next((place for place, item in enumerate(items) if item is Ellipsis), None)
        if place is not None:
            items[place : place + 1] = [slice(None)] * left_out
        dim = 0
        local: list[Any] = []
        for item in items:
            if item is None:
                local.append(item)
                continue
            if shape[dim] != kept[dim]:
                if not isinstance(item, slice):
                    raise NotCutError("one of a cut dimension is taken")
                if item != slice(None) and item.step in (None, 1):
                    start, stop, _ = item.indices(shape[dim])
                    item = slice(*self._between(source, dim, start, stop))
            local.append(item)
            dim += 1
        if place is not None:  # spelled as before: later passes match it
            local[place : place + left_out] = [Ellipsis]
        return tuple(local) if isinstance(index, tuple) else local[0]

    def _between(self, node: fx.Node, dim: int, start: int, stop: int) -> tuple[int, int]:
        """Where a rank has what is between two places; the same for all ranks."""
        places = {(int((box[dim] < start).sum()), int((box[dim] < stop).sum())) for box in self.boxes(node)[0]}
        if len(places) > 1:
            raise NotCutError("a slice is of different places on two ranks")
        return places.pop()

    def _plan_mean(self, node: fx.Node) -> None:
        """A mean over parts of equal sizes is the mean of their means."""
        source: Any = node.args[0]
        shape, kept = self._values.shape(source), self.local_shape(source)
        cut = [dim for dim, size in enumerate(shape) if kept[dim] != size]
        dims = {one % len(shape) for one in _as_list(node.args[1])}
        held = [
            int(self._owners.has(self._labelling.labels[source], rank).sum()) for rank in range(self._owners.num_ranks)
        ]
        counts = sum(self._owners.has(self._labelling.labels[source], rank).astype(int) for rank in range(len(held)))
        if not set(cut) <= dims or len(np.unique(counts)) > 1:
            raise NotCutError("parts of a mean are not alike")

    def _plan_output(self, node: fx.Node) -> None:
        shape = self._values.shape(node)
        boxes = self.boxes(node)[0]
        (dim,) = (dim for dim in range(len(shape)) if len(boxes[0][dim]) != shape[dim])
        if tuple(_ranges(box[dim]) for box in boxes) != _equal_parts(shape[dim], len(boxes)):
            raise NotCutError("parts do not stand one behind another")
        self.gathers[node] = dim


def _ranges(kept: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(start, length) of each stretch of ascending indices."""
    ends = np.flatnonzero(np.diff(kept) != 1)
    starts = np.concatenate([kept[:1], kept[ends + 1]])
    stops = np.concatenate([kept[ends], kept[-1:]]) + 1
    return tuple((int(start), int(stop - start)) for start, stop in zip(starts, stops, strict=True))


def _equal_parts(size: int, num_ranks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    part = size // num_ranks
    return tuple(((rank * part, part),) for rank in range(num_ranks))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _elements(args: Sequence[Any]) -> list[Any]:
    """The sizes that a view is given, one by one; a torch.Size of the graph has its own."""
    if len(args) == 1 and isinstance(args[0], fx.Node):
        made = args[0]
        if made.target is torch.Size:
            return list(made.args[0])  # type: ignore[arg-type]
        return [] if isinstance(made.meta["val"], torch.Size) else list(args)
    return list(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else list(args)
