"""Dequantises experts in MXFP4 ahead of products of many tokens, in pieces on Hopper."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import NO_CUDA_COMPILER, NO_VARIANTS, VARIANTS, GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.nodes import call, is_op, replace_by_op, rewrite_pieces
from mllm_compile.passes.variants import copy_of
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.expert_tiles.kernel import is_taken

# Tokens for each expert from which the product gains what the weight's copy costs (docs/lab/quantised.md).
_TOKENS_OF_EXPERT = 40
_MOST_BYTES = 2 << 30  # of a layer's copy
_ADAPTERS = ("add_lora", "add_lora_of_experts", "add_lora_of_ids")


class DequantiseExperts(GraphPass):
    """Writes a layer's experts as plain weights, which expert_tiles multiplies at the tensor cores' rate.

    Why: Triton's product makes bfloat16 of each weight again for each block of 128 rows, at 0.6 of the rate with
        which plain weights are made and multiplied (figures in docs/lab/quantised.md).

    Before::

        y = mllm.quantised_grouped_linear(x, order, blocks, values, scales, None, bias, "mxfp4", 32, k, …, 128)

    After::

        weight = mllm.dequantised_experts(values, scales, bfloat16)
        y = mllm.grouped_linear(x, order, blocks, weight, bias, k, False, …, 128)

    A piece keeps what it was as its variant for up to 40 tokens an expert, where a copy takes longer than it saves.

    Requires: pieces by group_experts on a Hopper GPU in bfloat16, with variants for fewer tokens; weights that
        expert_tiles takes, of at most 2 GiB each as bfloat16; no adapters, whose kernels are by variant.
    Preserves: every number of the weight. Products are summed in float32 in another order.
    """

    name: ClassVar[str] = "dequantise_experts"
    needs: ClassVar[tuple[str, ...]] = ("dequantised_experts",)

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        if target.any_rows:
            return NO_VARIANTS
        return None if target.compiles_cuda else NO_CUDA_COMPILER

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        names = [name for name in gm.meta.get(VARIANTS, {}) if _keep_variant(gm, name)]
        return PassResult(gm, rewrite_pieces(gm, names, _dequantise), before, len(gm.graph.nodes))


def _keep_variant(gm: fx.GraphModule, name: str) -> bool:
    """Adds the variant of a piece for too few tokens; returns if the piece has experts to dequantise."""
    piece: Any = gm.get_submodule(name)
    linears: list[Any] = [node for node in piece.graph.nodes if is_op(node, "quantised_grouped_linear")]
    has_adapters = any(is_op(node, *_ADAPTERS) for node in piece.graph.nodes)
    if not linears or has_adapters or not all(map(_is_taken, linears)):
        return False
    num_experts = max(int(node.args[3].meta["val"].shape[0]) for node in linears)
    variants, size = gm.meta[VARIANTS][name], _TOKENS_OF_EXPERT * num_experts
    if size > max(variants, default=0):
        variants[size] = f"{name}_quantised_{size}"
        gm.add_module(variants[size], copy_of(piece))
    return True


def _is_taken(node: fx.Node) -> bool:
    operands: Any = node.args
    x, _, _, values, _, zeros, bias, kind, _, _, _, is_gated, _ = operands
    experts, rows, half = map(int, values.meta["val"].shape)
    is_bfloat16 = all(one.meta["val"].dtype == torch.bfloat16 for one in (x, bias) if one is not None)
    is_small = experts * rows * 4 * half <= _MOST_BYTES
    fits = is_taken(rows // 2 if is_gated else rows, 2 * half)
    return kind == "mxfp4" and zeros is None and is_bfloat16 and is_small and fits


def _dequantise(graph: fx.Graph, node: fx.Node) -> bool:
    if not is_op(node, "quantised_grouped_linear"):
        return False
    operands: Any = node.args
    x, order, blocks, values, scales, _, bias, _, _, num_chosen, of_tokens, is_gated, block = operands
    with graph.inserting_before(node):
        weight = call(graph, op("dequantised_experts"), values, scales, torch.bfloat16)
    how = (num_chosen, False, of_tokens, is_gated, block)
    replace_by_op(graph, node, op("grouped_linear"), x, order, blocks, weight, bias, *how)
    return True
