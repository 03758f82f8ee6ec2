"""Labels of a graph's values: for each element the cell that it is made of, or WHOLE; joined where they have to be.

Runs through the graph once, with a few tokens in place of T and S. Views are run on the labels by torch itself, so that
no way of packing or interleaving needs a rule. A call without a rule makes whole what it reads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from mllm_compile.passes.base import IS_CONSTANT, WEIGHT_SCHEMES, WeightSchemes
from mllm_compile.passes.match.nodes import is_attention, is_call, is_weight
from mllm_compile.passes.sharding.calls import COMPLEX, POINTWISE, VIEWS, Product, name_of
from mllm_compile.passes.sharding.cells import WHOLE, Cells
from mllm_compile.passes.sharding.parameters import Parameters
from mllm_compile.passes.sharding.states import is_state, label_state, operands_of
from mllm_compile.passes.sharding.values import Values
from mllm_compile.runtime.ops.experts.shapes import takes_part
from mllm_compile.runtime.quantised.scheme import WeightScheme

Labels = np.ndarray
_OF_IDS = VIEWS | {"to", "clone", "index_put", "masked_fill"}  # their first operand stays token ids


class Labelling:
    """The labels of one graph.

    Attributes:
        cells: their classes.
        values: the graph's values, with a few tokens.
        parameters: the parameters that calls work on, element by element.
        labels: node → its labels; for a call that gives several tensors a list; None: whole.
        uses: weight → for each of its uses, dimension → labels of what is along it.
        columns, rows: products whose outputs are cells; and those that are sums over ranks, with their input's labels.
        lookups: embeddings of token ids, whose rows are cells.
        means: means over what several ranks have, that are sums over ranks.
        over_heads: means that have put all heads of a layer into one class.
        shared: weights with cells that the keys of several heads have, which would all be on one rank for that.
        following: class → labels whose ranks hold it as well.
        outputs: labels of the graph's outputs.
        spread: expansions of whole values beside cut ones, which a rank expands as far as its part goes.
    """

    def __init__(self, gm: fx.GraphModule, num_ranks: int, whole: frozenset[str], means: frozenset[fx.Node]) -> None:
        self.cells = Cells()
        self.values = Values(gm)
        self.parameters = Parameters(self.values)
        self.labels: dict[fx.Node, Any] = {}
        self.uses: dict[str, list[dict[int, Labels]]] = defaultdict(list)
        self.columns: dict[fx.Node, Product] = {}
        self.rows: dict[fx.Node, tuple[Product, Labels]] = {}
        self.lookups: list[fx.Node] = []
        self.means: set[fx.Node] = set()
        self.over_heads: set[fx.Node] = set()
        self.shared: set[str] = set()
        self.following: dict[int, Labels] = {}
        self.outputs: dict[fx.Node, Labels] = {}
        self.spread: set[fx.Node] = set()
        self._summed = means
        self._merged: dict[fx.Node, int] = {}  # means that made one class of many, with a cell of it
        self._heads = np.empty(0, dtype=np.int64)  # cells that attention reads
        self._num_ranks = num_ranks
        self._whole = whole
        self._weight_schemes: WeightSchemes = gm.meta.get(WEIGHT_SCHEMES, WeightSchemes({}))
        for node in gm.graph.nodes:
            self._label(node)
        for name, use in self.parameters.uses(self.cells):
            self.uses[name].append(use)

    # Values -----------------------------------------------------------------------------------------------------------

    def of(self, node: fx.Node) -> Any:
        """The labels of a value, whole ones as WHOLE; None where all are."""
        labels = self.labels.get(node)
        if labels is None or isinstance(labels, list):
            return labels
        return self._fresh(labels)

    def _fresh(self, labels: Labels | None) -> Labels | None:
        if labels is None:
            return None
        classes = self.cells.find(labels.ravel()).reshape(labels.shape)
        return np.where(classes == WHOLE, WHOLE, labels) if (classes != WHOLE).any() else None

    def are_cut(self, node: fx.Node) -> bool:
        """True if ranks have different parts of the value."""
        labels = self.of(node)
        if isinstance(labels, list):
            return any(self._fresh(one) is not None for one in labels)
        return labels is not None

    # Calls ------------------------------------------------------------------------------------------------------------

    def _label(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if is_weight(node):
                self.parameters.add(node)
                if node.meta.get(IS_CONSTANT) and self.parameters.parameter_of(node) is not None:
                    self._use_whole(node)
            return
        if node.op == "output":
            for arg in node.all_input_nodes:
                labels = self.of(arg)
                if isinstance(labels, list):
                    self._poison([arg])
                elif labels is not None:
                    self.outputs[arg] = labels
            return
        tensors = [one for one in node.all_input_nodes if _has_tensors(one)]
        if not tensors or not _has_tensors(node):
            return
        cut = [one for one in tensors if self.are_cut(one)]
        product = Product.of(node)
        if product is not None:
            self._label_product(node, product, cut)
        elif is_attention(node):
            self._label_attention(node, cut)
        elif is_call(node, torch.nn.functional.embedding) and self._is_lookup(node, cut):
            self._label_lookup(node)
        elif not cut:
            if not self.parameters.follow(node, tensors):
                for one in tensors:
                    self._use_whole(one)
        else:
            try:
                self._label_call(node, tensors, cut)
            except Exception:  # a call of a form that no rule was written for: every rank computes it
                self._poison(cut)
                self.labels[node] = None
                for one in tensors:
                    self._use_whole(one)

    def _poison(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            for labels in _each(self.labels.get(node)):
                self.cells.make_whole(labels)

    def _use_whole(self, node: fx.Node) -> None:
        """Notes that a call reads all of a parameter."""
        if (name := self.parameters.read_by(node)) is not None:
            self.uses[name].append({})

    def _label_call(self, node: fx.Node, tensors: list[fx.Node], cut: list[fx.Node]) -> None:
        name = name_of(node)
        if is_state(node):
            self._label_state(node)
            return
        if name in ("cat", "stack"):
            self.labels[node] = self._joined(node, cut)
        elif name in VIEWS:
            if cut != [node.args[0]]:
                raise ValueError("an index is cut")
            self.labels[node] = self.values.run(node, self._operand)
        elif name in COMPLEX:
            self.labels[node] = self._of_pairs(self.labels[node.args[0]], name)  # type: ignore[index]
        elif name == "mean":
            self._label_mean(node)
        elif name in ("softmax", "rms_norm", "layer_norm", "normalize"):
            self._label_norm(node, name)
        elif name in POINTWISE:
            self._label_pointwise(node, tensors, cut)
            return
        else:
            raise ValueError(f"no rule for {name}")
        for one in tensors:
            if one not in cut:
                self._use_whole(one)

    def _of_pairs(self, labels: Labels, name: str) -> Labels:
        """The labels of numbers of their pairs of parts, or the reverse; both parts are on one rank."""
        if name == "view_as_real":
            return np.repeat(labels[..., None], 2, axis=-1)
        self.cells.join(labels[..., 0], labels[..., 1])
        return labels[..., 0].copy()

    def _operand(self, node: fx.Node) -> Any:
        labels = self.labels.get(node)
        return self.values.zeros(node) if labels is None else labels

    def _label_product(self, node: fx.Node, product: Product, cut: list[fx.Node]) -> None:
        name = product.weight.meta["weight_name"]
        shape = product.weight.meta["val"].shape
        labels = None
        if cut:
            is_alone = cut == [product.source] and not product.is_from_left
            labels = self._of_features(product.source) if is_alone else None
            if labels is not None and (scheme := self._scheme_of(product)) is not None:
                self._join_groups(labels, scheme)
            if labels is not None and not self._is_enough(labels):
                self._note_means_of(labels)
            if labels is None or (labels == WHOLE).any() or not self._is_enough(labels) or name in self._whole:
                self._poison(cut)
                labels = None
        if labels is not None:
            self.rows[node] = product, labels
            self.uses[name].append({product.inputs: labels})
            if product.bias is not None:
                self.uses[product.bias.meta["weight_name"]].append({})
            return
        if name in self._whole:
            self.uses[name].append({})
            if product.bias is not None:
                self.uses[product.bias.meta["weight_name"]].append({})
            return
        cells = self.cells.of_weight(name, int(shape[product.outputs]))
        self.columns[node] = product
        self.uses[name].append({product.outputs: cells})
        if product.bias is not None:
            dim = product.bias.meta["val"].dim() - 1
            self.uses[product.bias.meta["weight_name"]].append({dim: cells})
        along = cells[:, None] if product.is_from_left else cells
        self.labels[node] = np.broadcast_to(along, self.values.shape(node)).copy()

    def _of_features(self, node: fx.Node) -> Labels | None:
        """The labels along the last dimension, all tokens' joined."""
        labels = self.of(node)
        if labels is None or isinstance(labels, list):
            return None
        rows = labels.reshape(-1, labels.shape[-1])
        for row in rows[1:]:
            self.cells.join(rows[0], row)
        first: Labels | None = rows[0]
        return first

    def _scheme_of(self, product: Product) -> WeightScheme | None:
        """The scheme of a rank's part of the weight in memory; None: it is plain."""
        weight = product.weight
        name, shape = weight.meta["weight_name"], weight.meta["val"].shape
        if len(shape) == 2:
            return self._weight_schemes.schemes.get(name)
        scheme = (self._weight_schemes.transposed if product.inputs == 1 else self._weight_schemes.schemes).get(name)
        is_kept = scheme is not None and takes_part(scheme, int(shape[product.inputs]), self._num_ranks)
        return scheme if is_kept else None

    def _join_groups(self, labels: Labels, scheme: WeightScheme) -> None:
        """Joins inputs that share a scale, where a row has several, or a byte."""
        in_bytes = 1 if scheme.kind == "fp8" else 2
        together = scheme.group if scheme.group < labels.size else in_bytes
        self.cells.join(labels, labels[np.arange(labels.size) // together * together])

    def _is_enough(self, labels: Labels) -> bool:
        return np.unique(self.cells.classes_of(labels)).size >= self._num_ranks

    def _note_means_of(self, labels: Labels) -> None:
        """Notes the means that made the one class of these labels, if attention reads it."""
        classes = np.intersect1d(self.cells.classes_of(labels), self.cells.classes_of(self._heads))
        merged = (node for node, cell in self._merged.items() if self.cells.find(np.array([cell]))[0] in classes)
        self.over_heads.update(node for node in merged if name_of(node) == "mean")

    def _label_attention(self, node: fx.Node, cut: list[fx.Node]) -> None:
        q, k, v, sinks, *_ = node.args
        labels = [self.of(one) for one in (q, k, v)]  # type: ignore[arg-type]
        if any(one is None or (one == WHOLE).any() for one in labels):
            self._poison(cut)
            if sinks is not None:
                self._use_whole(sinks)  # type: ignore[arg-type]
            return
        of_q, of_k, of_v = (one[0].reshape(one.shape[1], -1) for one in labels)
        self._heads = np.concatenate([self._heads, of_q.ravel(), of_k.ravel()])
        self._note_means_of(np.concatenate([of_q.ravel(), of_k.ravel()]))
        num_heads, num_kv_heads = of_q.shape[0], of_k.shape[0]
        shared = self._weights_of_several(of_k)
        group = num_heads // num_kv_heads
        for head in range(num_kv_heads):
            self.cells.join_all(np.concatenate([of_k[head], of_v[head]]))
        for head in range(num_heads):
            self.cells.join_all(of_q[head])
        if num_kv_heads % self._num_ranks == 0:
            for head in range(num_heads):
                self.cells.join(of_q[head, :1], of_k[head // group, :1])
        elif self._num_ranks % num_kv_heads or num_heads % self._num_ranks:
            self._poison(cut)
        else:
            for head in range(num_kv_heads):
                self.following[int(of_k[head, 0])] = of_q[head * group : (head + 1) * group, 0]
        heads = of_q[:, 0]
        if shared and not self._is_enough(heads):
            self.shared |= shared
        self.labels[node] = np.broadcast_to(heads[None, :, None], self.values.shape(node)).copy()
        if sinks is not None:
            self.uses[sinks.meta["weight_name"]].append({0: heads})  # type: ignore[union-attr]

    def _label_state(self, node: fx.Node) -> None:
        name, operands, constants = operands_of(node)
        labels = {key: self.of(one) for key, one in operands.items() if key not in constants}
        heads, following = label_state(name, labels, self.cells, self._num_ranks)
        self._heads = np.concatenate([self._heads, heads])
        self.following |= following
        shape = self.values.shape(node)
        self.labels[node] = np.broadcast_to(heads.reshape(1, -1, *[1] * (len(shape) - 2)), shape).copy()
        for key in constants & operands.keys():
            one = operands[key]
            if self.parameters.parameter_of(one) is None:
                raise ValueError(f"{key} is no parameter, element by element")
            places = self.parameters.places(one)
            self.parameters.meet(one, places.shape, heads.reshape(-1, *[1] * (places.ndim - 1)))

    def _weights_of_several(self, of_k: Labels) -> set[str]:
        """The weights whose cells several heads of keys have."""
        of_heads = [np.unique(self.cells.classes_of(head)) for head in of_k]
        classes, counts = np.unique(np.concatenate(of_heads), return_counts=True)
        return self.cells.weights_of(classes[counts > 1]) if (counts > 1).any() else set()

    def _is_lookup(self, node: fx.Node, cut: list[fx.Node]) -> bool:
        ids, weight, *rest = node.args
        is_plain = not cut and is_weight(weight) and rest[1:2] in ([], [None]) and _is_of_input_ids(ids)
        is_cuttable = is_plain and weight.meta["val"].shape[0] % self._num_ranks == 0  # type: ignore[union-attr]
        return is_cuttable and weight.meta["weight_name"] not in self._whole  # type: ignore[union-attr]

    def _label_lookup(self, node: fx.Node) -> None:
        weight: Any = node.args[1]
        name = weight.meta["weight_name"]
        self.uses[name].append({0: self.cells.of_weight(name, int(weight.meta["val"].shape[0]))})
        self.lookups.append(node)

    def _joined(self, node: fx.Node, cut: list[fx.Node]) -> Labels:
        """Labels of a concatenation; a whole part is taken for as its neighbours are, along the other dimensions."""
        parts: Any = node.args[0]
        dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(self.values.shape(node))  # type: ignore[operator]
        is_beside_whole = any(one not in cut and math.prod(self.values.shape(one)) for one in parts)
        if is_beside_whole and name_of(node) == "stack":
            raise ValueError("whole parts are stacked")
        if is_beside_whole:
            pattern = self.labels[cut[0]].take([0], axis=dim)
            for one in cut:  # a part of what is joined would be between whole parts
                self.cells.join(
                    np.broadcast_to(self.labels[one].take([0], axis=dim), self.values.shape(one)), self.labels[one]
                )
            for one in parts:
                if one not in cut and self._is_spread(one, pattern):
                    self.spread.add(one)
                    self.labels[one] = np.broadcast_to(pattern, self.values.shape(one)).copy()
            joined: Labels = self.values.run(
                node, lambda one: self.labels[one] if one in cut else np.broadcast_to(pattern, self.values.shape(one))
            )
        else:
            joined = self.values.run(node, self._operand)
        return joined

    def _is_spread(self, node: fx.Node, pattern: Labels) -> bool:
        """True for an expansion that nothing else reads, of a value that is one along all that the pattern cuts."""
        if name_of(node) != "expand" or len(node.users) != 1:
            return False
        source = self.values.shape(node.args[0])  # type: ignore[arg-type]
        source = (1,) * (pattern.ndim - len(source)) + source
        return all(source[dim] == 1 or (pattern == pattern.take([0], axis=dim)).all() for dim in range(pattern.ndim))

    def _count(self, labels: Labels) -> int:
        return int(np.unique(self.cells.find(labels.ravel())).size)

    def _label_mean(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        if node in self._summed:
            self.means.add(node)
            return  # a sum over ranks, which every rank has
        labels = self.labels[source]
        dims = _dims_of(node.args[1] if len(node.args) > 1 else node.kwargs["dim"], labels.ndim)
        self.labels[node] = self._reduced(node, labels, dims).reshape(self.values.shape(node))

    def _label_norm(self, node: fx.Node, name: str) -> None:
        source: Any = node.args[0]
        labels = self.labels[source]
        if name in ("rms_norm", "layer_norm"):
            dims = tuple(range(labels.ndim - len(node.args[1]), labels.ndim))  # type: ignore[arg-type]
        else:
            dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else -1)
            dims = _dims_of(dim, labels.ndim)
        self.labels[node] = np.broadcast_to(self._reduced(node, labels, dims), labels.shape).copy()

    def _reduced(self, node: fx.Node, labels: Labels, dims: tuple[int, ...]) -> Labels:
        """Joins what is reduced together; the reduced labels, the dimensions kept."""
        others = tuple(dim for dim in range(labels.ndim) if dim not in dims)
        rows = labels.transpose(*others, *dims).reshape(math.prod(labels.shape[dim] for dim in others), -1)
        before = self._count(rows)
        self.cells.join(rows[:, :-1], rows[:, 1:])
        classes = np.unique(self.cells.find(rows.ravel()))
        if classes.size == 1 and before >= self._num_ranks > 1:
            self._merged[node] = int(classes[0])
        return rows[:, 0].reshape([1 if dim in dims else size for dim, size in enumerate(labels.shape)])

    def _label_pointwise(self, node: fx.Node, tensors: list[fx.Node], cut: list[fx.Node]) -> None:
        shape = self.values.shape(node)
        result = np.zeros(shape, dtype=np.int64)
        for one in cut:
            labels = np.broadcast_to(self.of(one), shape)
            both = (labels != WHOLE) & (result != WHOLE)
            self.cells.join(labels[both], result[both])
            result = np.where(result == WHOLE, labels, result)
        self.labels[node] = result
        for one in tensors:
            if one not in cut and self.parameters.parameter_of(one) is not None:
                self.parameters.meet(one, shape, result)
            elif one not in cut:
                self._use_whole(one)


def _each(labels: Any) -> Iterator[Labels]:
    if isinstance(labels, list):
        yield from (one for one in labels if one is not None)
    elif labels is not None:
        yield labels


def _has_tensors(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) or (
        isinstance(val, tuple | list) and any(isinstance(one, torch.Tensor) for one in val)
    )


def _dims_of(dim: Any, num_dims: int) -> tuple[int, ...]:
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return tuple(one % num_dims for one in dims)


def _is_of_input_ids(node: Any) -> bool:
    """True for a batch's tokens; some may be replaced by others, as placeholders of sounds by 0."""
    while isinstance(node, fx.Node) and node.op != "placeholder":
        if name_of(node) not in _OF_IDS or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return isinstance(node, fx.Node) and node.meta.get("input_name") == "input_ids"
