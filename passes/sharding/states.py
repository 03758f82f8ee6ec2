"""Labels of layers that carry a state: which channels and heads of their operands are on one rank.

Shape legend: T tokens, C channels, H heads, G groups of heads that share what is read and written by, D a head's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import fx

from mllm_compile.passes.match.nodes import is_op
from mllm_compile.passes.sharding.cells import WHOLE, Cells
from mllm_compile.runtime.ops.states.trace import call_of
from mllm_compile.runtime.state.layer import KINDS

Labels = np.ndarray
Following = dict[int, Labels]

# The operands of a kind whose heads or channels, in dimension 1, go together; the first is the output's too.
TOGETHER = {
    "causal_conv": ("x",),
    "gated_delta": ("v", "g", "beta"),
    "ssd": ("x", "dt"),
    "selective_scan": ("x", "dt", "z"),
    "wkv": ("k", "v"),
    "matrix_memory": ("q", "k", "v", "i", "f"),
}
_OF_CHANNELS = ("causal_conv", "selective_scan", "wkv")  # whose channels are each by itself
# Those with a group for several heads, and those that all channels read.
OF_GROUPS = {"gated_delta": ("q", "k"), "ssd": ("B", "C")}
OF_ALL = {"selective_scan": ("B", "C")}


def is_state(node: object) -> bool:
    """True for the trace's op of such a layer."""
    return is_op(node, *KINDS)


def operands_of(node: fx.Node) -> tuple[str, dict[str, fx.Node], frozenset[str]]:
    """The kind's name, its operands by name, and which of them are the layer's own."""
    name = next(name for name in KINDS if is_op(node, name))
    kind, operands = call_of(name, node.args)
    return name, operands, kind.constants


def label_state(
    name: str, labels: Mapping[str, Labels | None], cells: Cells, num_ranks: int
) -> tuple[Labels, Following]:
    """Joins what a layer needs on one rank.

    Args:
        labels: of its operands with a row for each token; None: whole.

    Returns:
        The labels of the heads or channels, and classes of groups that several ranks have, with labels of those ranks.

    Raises:
        ValueError: every rank has to compute the layer.
    """
    whole = [key for key in OF_ALL.get(name, ()) if labels[key] is not None]
    of_heads = [labels[key] for key in TOGETHER[name] if key in labels]
    of_groups = [labels[key] for key in OF_GROUPS.get(name, ())]
    if whole or any(one is None or (one == WHOLE).any() for one in (*of_heads, *of_groups)):
        raise ValueError("an operand is whole, or would have to be")
    rows = [_by_head(one, cells) for one in of_heads]
    for one in rows:
        for head in () if name in _OF_CHANNELS else one:
            cells.join_all(head)
        cells.join(one[:, 0], rows[0][:, 0])
    heads = rows[0][:, 0]
    return heads, _join_groups([_by_head(one, cells) for one in of_groups], heads, cells, num_ranks)


def _by_head(labels: Any, cells: Cells) -> Labels:
    """[H, D] of labels [T, H, ..]: all tokens' joined."""
    rows: Labels = labels.reshape(labels.shape[0], labels.shape[1], -1)
    for other in rows[1:]:
        cells.join(rows[0], other)
    first: Labels = rows[0]
    return first


def _join_groups(of_groups: list[Labels], heads: Labels, cells: Cells, num_ranks: int) -> Following:
    following: Following = {}
    if not of_groups:
        return following
    num_groups = of_groups[0].shape[0]
    size = heads.size // num_groups
    for group in range(num_groups):
        members = np.concatenate([one[group] for one in of_groups])
        cells.join_all(members)
        of_group = heads[group * size : (group + 1) * size]
        if num_groups % num_ranks == 0:
            cells.join(of_group, np.broadcast_to(members[:1], of_group.shape))
        elif num_ranks % num_groups or heads.size % num_ranks:
            raise ValueError("heads do not divide")
        else:
            following[int(members[0])] = of_group
    return following
