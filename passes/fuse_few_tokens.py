"""A form of each piece for steps of few tokens, with linears, norms, activations and residuals in few kernels."""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import PassResult
from mllm_compile.passes.linear_match import Linear, match_linear, match_residual, match_silu_mul
from mllm_compile.passes.rms_norm_match import RMSNorm, match_rms_norm
from mllm_compile.passes.small_forms import add_forms, copy_of
from mllm_compile.runtime.few_token_shapes import MAX_FEW_TOKENS, is_taken, num_norm_blocks


class FuseFewTokens:
    """Pieces for few tokens: a linear takes its gate or its residual with it, and the norm between two linears goes.

    Why: with a few tokens a step is still reads of weights and launches. cuBLAS splits the inputs of small weights
        among blocks, which takes a second kernel, and none of its kernels starts before the one ahead has ended
        (figures in docs/performance.md).

    Before::

        y = residual + linear(a, down)
        h = norm_weight * to(y.to(f32) * rsqrt(mean(y.to(f32) ** 2) + eps)); z = linear(h, weight)

    After::

        y, scaled, squares = mllm.few_linear_residual_norm(a, down, residual, norm_weight)
        z = mllm.few_linear(scaled, weight, squares, eps, False)

    and silu(gate) * up of one linear's halves is `few_linear(…, True)`. A norm that no such linear makes stays as it is
    before a plain `few_linear`.

    Requires: deduplicated pieces on CUDA in bfloat16 or float16. The pieces for any number of tokens stay as they are;
        the new forms are submodules named in gm.meta[SMALL_FORMS].
    Preserves: the meaning. A norm that goes is rounded once, with its weight in and its factor left out; the factor is
        applied to the product in float32. In bfloat16 alone: float16 could overflow without the factor.
    """

    name: ClassVar[str] = "fuse_few_tokens"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = add_forms(gm, MAX_FEW_TOKENS, "_few_tokens", few_token_form)
        return PassResult(gm, matches, before, len(gm.graph.nodes))


@dataclass(frozen=True)
class _Scaled:
    """A norm's input times its weight, the sums of squares of the input, and the norm's eps."""

    value: fx.Node
    squares: fx.Node
    eps: float


def few_token_form(piece: fx.GraphModule) -> fx.GraphModule | None:
    """The piece with its linears fused, or None where nothing matches."""
    form = copy_of(piece)
    fusion = _Fusion(form.graph)
    # In this order: a linear is read by all that it can be a part of.
    for fuse in (fusion.residual, fusion.gated, fusion.linear):
        for node in list(form.graph.nodes):
            fuse(node)
    form.graph.eliminate_dead_code()
    form.recompile()
    return form if fusion.fused else None


class _Fusion:
    """One piece's fusing.

    Attributes:
        fused: linears that a kernel of ours stands for now.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.fused: set[fx.Node] = set()
        self._graph = graph
        self._scaled: dict[fx.Node, _Scaled] = {}  # by the norm that it stands for
        self._norms: defaultdict[fx.Node, list[tuple[fx.Node, RMSNorm]]] = defaultdict(list)  # by what is normed
        for node in graph.nodes:
            norm = match_rms_norm(node)
            if norm is not None:
                self._norms[norm.x].append((node, norm))

    def residual(self, node: fx.Node) -> None:
        """residual + linear, with the one norm behind it if only linears of ours read that."""
        for linear, residual in match_residual(node):
            if is_taken(*linear.shape):
                norms = self._norms[node]
                if len(norms) == 1 and _can_go(*norms[0], linear):
                    out = self._call_norm_op(node, linear, residual, *norms[0])
                else:
                    out = self._call(node, "few_linear_residual", linear.source, linear.weight, residual)
                self._replace(node, linear, out)
                return

    def gated(self, node: fx.Node) -> None:
        """silu(gate) * up over the halves of a linear."""
        linear = match_linear(match_silu_mul(node))
        if linear is not None and is_taken(*linear.shape) and is_taken(linear.shape[0] // 2, linear.shape[1]):
            self._replace(node, linear, self._call_linear(node, linear, True))

    def linear(self, node: fx.Node) -> None:
        """What is part of nothing else."""
        linear = None if node in self.fused else match_linear(node)
        if linear is not None and is_taken(*linear.shape):
            self._replace(node, linear, self._call_linear(node, linear, False))

    def _call_linear(self, node: fx.Node, linear: Linear, is_gated: bool) -> fx.Node:
        norm = self._scaled.get(linear.source)
        if norm is None:
            return self._call(node, "few_linear", linear.source, linear.weight, None, 0.0, is_gated)
        return self._call(node, "few_linear", norm.value, linear.weight, norm.squares, norm.eps, is_gated)

    def _call_norm_op(
        self, node: fx.Node, linear: Linear, residual: fx.Node, norm_node: fx.Node, norm: RMSNorm
    ) -> fx.Node:
        op = "few_linear_residual_norm"
        together = self._call(node, op, linear.source, linear.weight, residual, norm.weight)
        val = node.meta["val"]
        squares = val.new_empty((*val.shape[:-1], num_norm_blocks(*linear.shape)), dtype=torch.float32)
        together.meta["val"] = (val, torch.empty_like(val), squares)
        with self._graph.inserting_before(node):
            out, value, sums = (self._graph.call_function(operator.getitem, (together, index)) for index in range(3))
        for one, its_val in zip((out, value, sums), together.meta["val"], strict=True):
            one.meta["val"] = its_val
        self._scaled[norm_node] = _Scaled(value, sums, norm.eps)
        return out

    def _call(self, node: fx.Node, name: str, *operands: Any) -> fx.Node:
        """A call in the place of `node`."""
        if not hasattr(torch.ops.mllm, name):
            import mllm_compile.runtime.few_token_ops  # noqa: F401  (defines the ops; needs Triton)
        with self._graph.inserting_before(node):
            made = self._graph.call_function(getattr(torch.ops.mllm, name).default, operands)
        made.meta.update(node.meta)
        return made

    def _replace(self, node: fx.Node, linear: Linear, by: fx.Node) -> None:
        self.fused.add(linear.node)
        node.replace_all_uses_with(by)
        self._graph.erase_node(node)


def _can_go(norm_node: fx.Node, norm: RMSNorm, linear: Linear) -> bool:
    """Whether the linear that makes a norm's input and the linears that read the norm can do without it."""
    readers = [match_linear(user) for user in norm_node.users]
    are_ours = all(reader is not None and is_taken(*reader.shape) for reader in readers)
    return norm.x.meta["val"].dtype == torch.bfloat16 and are_ours and num_norm_blocks(*linear.shape) is not None
