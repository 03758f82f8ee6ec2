"""How an attention's q and k are made of projections' heads, and the kernel that makes them so in their stead."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mllm_compile.passes.match.nodes import call, is_call, takes_kernels
from mllm_compile.passes.match.rotation import Rotation, match_rotation
from mllm_compile.runtime.ops import op


@dataclass(frozen=True)
class MadeHeads:
    """q [T, H, D] and k [T, Hk, D] of an attention, and how each is made.

    Attributes:
        first_user: of q; all that they are made of is there ahead of it.
    """

    q: fx.Node
    k: fx.Node
    of_q: Rotation
    of_k: Rotation
    first_user: fx.Node

    @property
    def are_plain(self) -> bool:
        """True if they are a projection's, neither normed nor rotated."""
        return self.of_q.norm is None and self.of_q.cos is None

    def by_kernel(self, graph: fx.Graph, v: fx.Node | None = None, cache: Sequence[fx.Node] = ()) -> list[fx.Node]:
        """Calls the kernel ahead of the first user; returns its q, which q's users read now, and its k.

        Args:
            cache: slots, keys and values that it writes k and v to; none: v is not needed.
        """
        of_q = _widened(graph, self.of_q)
        q_norm, k_norm = of_q.norm, self.of_k.norm
        weights = (None, None) if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight)
        eps, plus_one = (0.0, False) if q_norm is None else (q_norm.eps, q_norm.plus_one)
        written = (v,) if cache else ()
        operands = (of_q.source, self.of_k.source, *written, of_q.cos, of_q.sin, *weights, eps, *cache, plus_one)
        with graph.inserting_before(self.first_user):
            both = graph.call_function(op("rope_and_cache" if cache else "rotate_heads"), operands)
            contiguous = torch.contiguous_format
            both.meta["val"] = tuple(
                torch.empty_like(x.meta["val"], memory_format=contiguous) for x in (self.q, self.k)
            )
            made = []
            for index in range(2):
                node = graph.call_function(operator.getitem, (both, index))
                node.meta["val"] = both.meta["val"][index]
                made.append(node)
        self.q.replace_all_uses_with(made[0])
        return made


def match_made_heads(q: object, k: object, v: fx.Node | None = None) -> MadeHeads | None:
    """q and k as a kernel can make them; None: it cannot.

    Args:
        v: what else the kernel reads.
    """
    if not (isinstance(q, fx.Node) and isinstance(k, fx.Node) and takes_kernels(q)):
        return None
    head_dim = int(q.meta["val"].shape[-1])
    if head_dim & (head_dim - 1):  # the kernel's blocks are powers of two
        return None
    of_q, of_k = match_rotation(q), match_rotation(k)
    if of_q is None or of_k is None or not _go_together(of_q, of_k):
        return None
    read = [node for node in (of_q.source, of_k.source, v) if node is not None]
    angles = [node for node in (of_q.cos, of_q.sin) if node is not None]
    # Angles of halves are copied, however they lie.
    lying = read if of_q.are_halves else [*read, *angles]
    if not all(statically_known_true(node.meta["val"].stride(-1) == 1) for node in lying):
        return None
    first_user = _first_user(q, {*read, *angles})
    return None if first_user is None else MadeHeads(q, k, of_q, of_k, first_user)


def _first_user(q: fx.Node, waiting: set[fx.Node]) -> fx.Node | None:
    """The first reader of q; None if it is before any of `waiting`."""
    for node in q.graph.nodes:
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
