"""Adds a variant of each piece for few tokens: linears, norms, activations and residuals in few kernels."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import NO_VARIANTS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.linear import (
    Linear,
    match_adapted_linear,
    match_gelu,
    match_linear,
    match_quantised_as_linear,
    match_residual,
    match_silu_mul,
    match_squared_relu,
)
from mllm_compile.passes.match.nodes import is_op
from mllm_compile.passes.match.quantised import QuantisedLinear
from mllm_compile.passes.match.rms_norm import RMSNorm, match_rms_norm
from mllm_compile.passes.variants import add_variants, copy_of
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.few_tokens_shapes import MAX_FEW_TOKENS, is_taken, num_norm_blocks
from mllm_compile.runtime.ops.stream_experts.shapes import ROWS
from mllm_compile.runtime.ops.stream_linear.linear import NORM_ROWS


class FuseFewTokens(GraphPass):
    """Makes pieces for few tokens: a linear takes its gate or its residual, and the norm between two linears goes.

    Why: with a few tokens a step is still reads of weights and launches. cuBLAS splits the inputs of small weights
        among blocks, which takes a second kernel. None of its kernels starts before the previous one has ended (figures
        in docs/lab/performance.md).

    Before::

        y = residual + linear(a, down)
        h = norm_weight * to(y.to(f32) * rsqrt(mean(y.to(f32) ** 2) + eps)); z = linear(h, weight)

    After::

        y, scaled, squares = mllm.few_linear_residual_norm(a, down, residual, norm_weight)
        z = mllm.few_linear(scaled, weight, squares, eps, False)

    with True as one more operand where the norm is times 1 + norm_weight (a norm may round ahead of its weight or
    behind it). And silu(gate) * up of one linear's halves is `few_linear(…, True)`. A norm whose input is no such
    linear stays as it is, before a plain `few_linear`.

    Requires: deduplicated pieces on CUDA in bfloat16 or float16. The pieces for any number of tokens stay as they are;
        the new variants are submodules named in gm.meta[VARIANTS].
    Preserves: the meaning. A fused norm is rounded once, with its weight but without its factor, which is applied to
        the product in float32. Norms are fused in bfloat16 only: float16 could overflow without the factor.
    """

    name: ClassVar[str] = "fuse_few_tokens"
    needs: ClassVar[tuple[str, ...]] = ("few_linear", "few_linear_residual", "few_linear_residual_norm")

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        return NO_VARIANTS if target.any_rows else None

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = add_variants(gm, MAX_FEW_TOKENS, "_few_tokens", lambda piece: few_token_variant(piece, FEW))
        return PassResult(gm, matches, before, len(gm.graph.nodes))


@dataclass(frozen=True)
class LinearOps:
    """A family of ops for few tokens: `mllm.<prefix>_linear`, `…_linear_residual` and `…_linear_residual_norm`.

    Attributes:
        prefix: their names' prefix.
        is_taken: tells if they take a weight of [rows, columns].
        num_norm_blocks: sums of squares a token that a linear leaves for the norm of its outputs; None: too many.
        takes_float16: as well as bfloat16.
        takes_bias: a linear may have one, where it is not gated and leaves nothing for a norm.
        activates: they take relu(x) ** 2 and gelu(x) of a linear's outputs along.
        is_quantised_taken: tells if they take a quantised weight, by ops `mllm.<prefix>_quantised_linear…`, or as a
            gated linear, the half of its rows.
        is_adapted_taken: tells if they take a linear with its adapters, by ops `mllm.<prefix>_linear_lora…`.
    """

    prefix: str
    is_taken: Callable[[int, int], bool]
    num_norm_blocks: Callable[[int, int], int | None]
    takes_float16: bool
    takes_bias: bool = False
    activates: bool = False
    is_quantised_taken: Callable[[QuantisedLinear, bool], bool] = lambda linear, half: False
    is_adapted_taken: Callable[[Linear], bool] = lambda linear: False

    def match(self, node: object) -> Linear | None:
        """The linear at `node` if these ops take it."""
        adapted = match_adapted_linear(node)
        if adapted is not None:
            return adapted if self.is_adapted_taken(adapted) else None
        linear = match_linear(node, self.takes_bias) or match_quantised_as_linear(node, self.takes_bias)
        return linear if linear is not None and self.takes(linear) and not self.is_within(linear.node) else None

    def is_within(self, node: fx.Node) -> bool:
        """True for the product of a linear that these ops take with its adapters."""
        return any(adapted.args[0] is node and self.match(adapted) is not None for adapted in node.users)

    def match_without_bias(self, node: object) -> Linear | None:
        """The linear at `node` if these ops take it, and it has no bias."""
        linear = self.match(node)
        return linear if linear is not None and linear.bias is None else None

    def norm_blocks(self, linear: Linear) -> int | None:
        """Sums of squares a token that it leaves for the norm of its outputs; None: too many."""
        if linear.quantised is not None:
            return linear.shape[0] // NORM_ROWS
        return self.num_norm_blocks(*linear.shape)

    def takes(self, linear: Linear) -> bool:
        """True if a kernel exists for the weight's shape and dtype, and for what it multiplies."""
        is_bfloat16 = linear.source.meta["val"].dtype == torch.bfloat16
        if linear.quantised is not None:
            return is_bfloat16 and self.is_quantised_taken(linear.quantised, False)
        return (self.takes_float16 or is_bfloat16) and self.is_taken(*linear.shape)

    def takes_half(self, linear: Linear) -> bool:
        """True if they take its gates and ups, a half of its rows each, as one gated linear."""
        if linear.quantised is not None:
            return self.is_quantised_taken(linear.quantised, True)
        rows, columns = linear.shape
        return self.is_taken(rows // 2, columns)


FEW = LinearOps("few", is_taken, num_norm_blocks, takes_float16=True)


@dataclass(frozen=True)
class _Scaled:
    """A norm's input times its weight, the sums of squares of the input, and the norm's eps."""

    value: fx.Node
    squares: fx.Node
    eps: float


def few_token_variant(piece: fx.GraphModule, ops: LinearOps) -> fx.GraphModule | None:
    """The piece with its linears fused, or None where nothing matches."""
    variant = copy_of(piece)
    fusion = _Fusion(variant.graph, ops)
    # In this order: a linear is read by all that it can be a part of.
    for fuse in (fusion.residual, fusion.experts, fusion.gated, fusion.activated, fusion.linear, fusion.scaled_experts):
        for node in list(variant.graph.nodes):
            fuse(node)
    variant.graph.eliminate_dead_code()
    variant.recompile()
    return variant if fusion.fused else None


class _Fusion:
    """Fuses the linears of one piece.

    Attributes:
        fused: linears that a kernel of ours stands for now.
    """

    def __init__(self, graph: fx.Graph, ops: LinearOps) -> None:
        self.fused: set[fx.Node] = set()
        self._graph = graph
        self._ops = ops
        self._scaled: dict[fx.Node, _Scaled] = {}  # by the norm that it stands for
        self._norms: defaultdict[fx.Node, list[tuple[fx.Node, RMSNorm]]] = defaultdict(list)  # by what is normed
        for node in graph.nodes:
            norm = match_rms_norm(node)
            if norm is not None:
                self._norms[norm.x].append((node, norm))

    def residual(self, node: fx.Node) -> None:
        """Fuses residual + linear, with the one norm behind it if only linears of ours read that."""
        for linear, residual in match_residual(node, self._ops.match):
            norms = self._norms[node]
            if len(norms) == 1 and linear.bias is None and self._can_go(*norms[0], linear):
                out = self._call_norm_op(node, linear, residual, *norms[0])
            else:
                bias = () if linear.bias is None else (linear.bias,)
                out = self._call(node, linear, "_residual", linear.source, residual, *bias)
            self._replace(node, linear, out)
            return

    def experts(self, node: fx.Node) -> None:
        """Lets experts (stream_experts) leave what a norm behind them needs, if only kernels of ours read that."""
        if not is_op(node, "stream_expert_down") or len(self._norms[node]) != 1:
            return
        norm_node, norm = self._norms[node][0]
        if self._have_scaled_input(norm_node, norm):
            x, weight, residual, *router = node.args
            with self._graph.inserting_before(node):
                operands = (x, weight, residual, norm.weight, norm.plus_one, *router)
                together = self._graph.call_function(op("stream_expert_down_norm"), operands)
            together.meta.update(node.meta)
            num_blocks = norm.x.meta["val"].shape[-1] // ROWS
            out = self._take_outputs(node, together, num_blocks, norm_node, norm)
            node.replace_all_uses_with(out)
            self._graph.erase_node(node)

    def scaled_experts(self, node: fx.Node) -> None:
        """Gives experts the norm before them as its input times its weight, where it is left so."""
        norm = self._scaled.get(node.args[0]) if is_op(node, "stream_expert_up") else None  # type: ignore[arg-type]
        if norm is not None:
            _, weight, _, _, *others = node.args
            node.args = (norm.value, weight, norm.squares, norm.eps, *others)

    def gated(self, node: fx.Node) -> None:
        """Fuses silu(gate) * up over the halves of a linear."""
        linear = self._ops.match_without_bias(match_silu_mul(node))
        if linear is not None and self._ops.takes_half(linear):
            self._replace(node, linear, self._call_linear(node, linear, True))

    def activated(self, node: fx.Node) -> None:
        """Fuses relu(linear) ** 2, or gelu(linear)."""
        for match, activation in ((match_squared_relu, (True,)), (match_gelu, (False, True))):
            linear = self._ops.match(match(node)) if self._ops.activates else None
            if linear is not None and len(linear.node.users) == 1:
                self._replace(node, linear, self._call_linear(node, linear, False, activation))
                return

    def linear(self, node: fx.Node) -> None:
        """Replaces a linear that is part of nothing larger."""
        linear = None if node in self.fused else self._ops.match(node)
        if linear is not None:
            self._replace(node, linear, self._call_linear(node, linear, False))

    def _call_linear(self, node: fx.Node, linear: Linear, is_gated: bool, activation: tuple[bool, ...] = ()) -> fx.Node:
        norm = self._scaled.get(linear.source)
        last = (linear.bias, *activation) if activation else () if linear.bias is None else (linear.bias,)
        if norm is None:
            return self._call(node, linear, "", linear.source, None, 0.0, is_gated, *last)
        return self._call(node, linear, "", norm.value, norm.squares, norm.eps, is_gated, *last)

    def _call_norm_op(
        self, node: fx.Node, linear: Linear, residual: fx.Node, norm_node: fx.Node, norm: RMSNorm
    ) -> fx.Node:
        together = self._call(node, linear, "_residual_norm", linear.source, residual, norm.weight, norm.plus_one)
        return self._take_outputs(node, together, self._ops.norm_blocks(linear), norm_node, norm)

    def _take_outputs(
        self, node: fx.Node, together: fx.Node, num_blocks: int | None, norm_node: fx.Node, norm: RMSNorm
    ) -> fx.Node:
        """Takes apart what a call gives that leaves a norm's input, that times its weight, and sums of squares; returns
        the input."""
        val = node.meta["val"]
        squares = val.new_empty((*val.shape[:-1], num_blocks), dtype=torch.float32)
        together.meta["val"] = (val, torch.empty_like(val), squares)
        with self._graph.inserting_before(node):
            out, value, sums = (self._graph.call_function(operator.getitem, (together, index)) for index in range(3))
        for one, its_val in zip((out, value, sums), together.meta["val"], strict=True):
            one.meta["val"] = its_val
        self._scaled[norm_node] = _Scaled(value, sums, norm.eps)
        return out

    def _call(self, node: fx.Node, linear: Linear, suffix: str, source: fx.Node, *operands: Any) -> fx.Node:
        """Puts a call of the linear's op in the place of `node`; its weight follows on `source`."""
        form = "linear_lora" if linear.adapters else "linear" if linear.quantised is None else "quantised_linear"
        with self._graph.inserting_before(node):
            made = self._graph.call_function(
                op(f"{self._ops.prefix}_{form}{suffix}"), (source, *linear.operands, *operands)
            )
        made.meta.update(node.meta)
        return made

    def _replace(self, node: fx.Node, linear: Linear, by: fx.Node) -> None:
        self.fused.add(linear.node)
        if linear.adapters:
            self.fused.update(linear.node.all_input_nodes[:1])
        node.replace_all_uses_with(by)
        self._graph.erase_node(node)

    def _can_go(self, norm_node: fx.Node, norm: RMSNorm, linear: Linear) -> bool:
        """True if the linear before a norm and the linears that read the norm can do without it."""
        return self._have_scaled_input(norm_node, norm) and self._ops.norm_blocks(linear) is not None

    def _have_scaled_input(self, norm_node: fx.Node, norm: RMSNorm) -> bool:
        """True if all that reads a norm can take its input times its weight, with sums of squares."""
        are_ours = all(
            self._ops.match(user) is not None or self._ops.is_within(user) or is_op(user, "stream_expert_up")
            for user in norm_node.users
        )
        return norm.x.meta["val"].dtype == torch.bfloat16 and are_ours
