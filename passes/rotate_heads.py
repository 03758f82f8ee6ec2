"""Makes norms and rotation of q and k of packed texts one kernel before attention."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import fx

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.match.made_heads import match_made_heads
from mllm_compile.passes.match.nodes import drop_dead_nodes, is_op

_ATTENTION = ("segment_attention_with_output", "segment_attention_by_kernel")


class RotateHeads(GraphPass):
    """Puts one kernel between the projections and attention over texts.

    Why: Inductor's kernels for norms and rotation of Qwen3-0.6B's heads take 107 of 583 µs of a layer of 8,192 tokens,
        one kernel 31 (docs/lab/encoders.md).

    Before::

        q = rotate(norm(q0), cos, sin); k = rotate(norm(k0), cos, sin)
        segment_attention_with_output(q, k, v, bounds, out, 0.088, "l0")

    After::

        q, k = mllm.rotate_heads(q0, k0, cos, sin, q_norm, k_norm, eps, False)
        segment_attention_with_output(q, k, v, bounds, out, 0.088, "l0")

    Requires: what `fuse_rope_cache` requires, less the cache; heads that are normed or rotated.
    Preserves: as there.
    """

    name: ClassVar[str] = "rotate_heads"
    needs: ClassVar[tuple[str, ...]] = ("rotate_heads",)

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before, matches = len(gm.graph.nodes), 0
        for node in list(gm.graph.nodes):
            if not is_op(node, *_ATTENTION):
                continue
            q, k, *others = node.args
            heads = match_made_heads(q, k)
            if heads is not None and not heads.are_plain:
                made: Any = heads.by_kernel(gm.graph)
                node.args = (*made, *others)
                matches += 1
        drop_dead_nodes(gm)
        return PassResult(gm, matches, before, len(gm.graph.nodes))
