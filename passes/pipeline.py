"""The passes, in the order in which they run: PASSES is the list.

To add a pass: a file with a class of the same name, its import and its line in PASSES, a test. Its results and
invariants that hold from then on go into verify.py.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from mllm_compile.passes.absorb_latents import AbsorbLatents
from mllm_compile.passes.add_lora import AddLora
from mllm_compile.passes.attend_segments import AttendSegments
from mllm_compile.passes.base import GraphPass, PassResult, PassTarget
from mllm_compile.passes.canonicalise import Canonicalise
from mllm_compile.passes.choose_experts import ChooseExperts
from mllm_compile.passes.count_experts import CountExperts
from mllm_compile.passes.deduplicate_pieces import DeduplicatePieces
from mllm_compile.passes.dequantise_experts import DequantiseExperts
from mllm_compile.passes.dequantise_weights import DequantiseWeights
from mllm_compile.passes.expand_latents import ExpandLatents
from mllm_compile.passes.fuse_add_norm import FuseAddNorm
from mllm_compile.passes.fuse_few_tokens import FuseFewTokens
from mllm_compile.passes.fuse_gated_linear import FuseGatedLinear
from mllm_compile.passes.fuse_gelu import FuseGelu
from mllm_compile.passes.fuse_rank_sums import FuseRankSums
from mllm_compile.passes.fuse_rope_cache import FuseRopeCache
from mllm_compile.passes.fuse_silu_mul import FuseSiluMul
from mllm_compile.passes.fuse_single_token import FuseSingleToken
from mllm_compile.passes.gate_in_recurrences import GateInRecurrences
from mllm_compile.passes.gather_rows_early import GatherRowsEarly
from mllm_compile.passes.group_experts import GroupExperts
from mllm_compile.passes.launch_lora import LaunchLora
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.passes.match import nodes
from mllm_compile.passes.multiply_outer_products import MultiplyOuterProducts
from mllm_compile.passes.multiply_patches import MultiplyPatches
from mllm_compile.passes.norm_in_recurrences import NormInRecurrences
from mllm_compile.passes.pack_linears import PackLinears
from mllm_compile.passes.pack_projections import PackProjections
from mllm_compile.passes.pad_heads import PadHeads
from mllm_compile.passes.pad_linears import PadLinears
from mllm_compile.passes.quantise_activations import QuantiseActivations
from mllm_compile.passes.quantise_linears import QuantiseLinears
from mllm_compile.passes.rotate_heads import RotateHeads
from mllm_compile.passes.rotate_in_attention import RotateInAttention
from mllm_compile.passes.scale_keys_and_values import ScaleKeysAndValues
from mllm_compile.passes.shard import Shard
from mllm_compile.passes.split_at_attention import SplitAtAttention
from mllm_compile.passes.spread_experts import SpreadExperts
from mllm_compile.passes.stage import Stage
from mllm_compile.passes.stream_expert_rows import StreamExpertRows
from mllm_compile.passes.stream_experts import StreamExperts
from mllm_compile.passes.stream_linears import StreamLinears
from mllm_compile.passes.sum_experts import SumExperts
from mllm_compile.passes.sum_in_one_order import SumInOneOrder
from mllm_compile.passes.tile_experts import TileExperts
from mllm_compile.passes.unrepeat_keys import UnrepeatKeys
from mllm_compile.passes.verify import no_new_size_equalities, size_equalities, verify_graph

PASSES: tuple[type[GraphPass], ...] = (
    # The graph as it was traced.
    Canonicalise,  # sizes and names, no writes, one spelling an operation
    MultiplyOuterProducts,  # the angles of rotary positions need no GEMM
    MultiplyPatches,  # of images: a convolution that covers each patch is a linear
    ScaleKeysAndValues,  # of a KV cache in fp8: the checkpoint's scales go into the weights around attention
    Shard,  # over ranks: each has a part of the heads, the features and the vocabulary
    SpreadExperts,  # over ranks with tokens of their own
    AbsorbLatents,  # latent attention over the latents, which are all that is cached
    ExpandLatents,  # long prompts attend over keys and values that attention makes of them
    QuantiseLinears,  # weights in eight or four bits stay so in memory
    PackProjections,  # q, k, v and gate, up as one GEMM each
    AddLora,  # of a program for adapters: linears add what their tokens' adapters change
    PadLinears,  # of towers: rows that tensor cores read at their full rate
    FuseGelu,  # of packed rows: a product that ends with its activation
    UnrepeatKeys,  # of recurrences, whose kernels read a key head for several value heads
    GateInRecurrences,  # recurrences make their gates of what projections give
    NormInRecurrences,  # and norm what they give
    PadHeads,  # heads as wide as those that attention kernels are made for
    # From here on attention is the runtime's op, and layers have names and parameters.
    LowerAttention,
    AttendSegments,  # of towers: attention by a kernel for Hopper's tensor cores
    RotateHeads,  # of texts: norms and rotation of q and k as one kernel before attention
    FuseRopeCache,  # norms and rotation of q and k and the write into the KV cache as one kernel before attention
    RotateInAttention,  # attention is told what that kernel makes q and k of: decodes do without it
    GatherRowsEarly,  # of the last layer only the rows whose logits are wanted
    PackLinears,  # on a CPU: our C++ over weights in panels, and in few bits
    Stage,  # over ranks: each computes a part of the layers
    # From here on the graph is pieces with attention between them.
    SplitAtAttention,
    DeduplicatePieces,  # equal stretches share one module
    FuseRankSums,  # a sum over ranks with the residual and the norm behind it
    ChooseExperts,  # a router's largest scores, with softmax and renormalisation, as one kernel
    CountExperts,  # for runtime.expert_stats, how often each expert is chosen
    StreamExperts,  # a variant for steps of up to 8 tokens of pieces with experts, which find the choice themselves
    FuseSingleToken,  # a further variant of each piece, for steps of one token
    StreamLinears,  # a variant for steps of up to 64, 208 or 256 tokens
    FuseFewTokens,  # a variant for up to 16 tokens of pieces that have none by stream_linears
    GroupExperts,  # the rows of each expert as one product, in variants for 1, 64, 256 and any number of tokens
    StreamExpertRows,  # experts in MXFP4 in these variants: weights are streamed, with the activation
    SumExperts,  # the weighted sum of each token's rows, for more tokens
    DequantiseExperts,  # in MXFP4, of many tokens: ahead of their products
    TileExperts,  # products of many tokens by kernels for Hopper's tensor cores
    FuseGatedLinear,  # gate_up and its activation as one kernel, for more tokens
    FuseSiluMul,  # the activation of a feed-forward as one kernel, for any number of tokens
    QuantiseActivations,  # of linears with fp8 weights, for many tokens: products in fp8
    LaunchLora,  # of a program for adapters: two kernels for what they add to a linear
    DequantiseWeights,  # of quantised weights that no kernel ahead took, in one kernel before their product
    SumInOneOrder,  # linears of deterministic steps: kernels for few rows that have the bits of many
    FuseAddNorm,  # the norm ahead of such a linear, with its residual's sum, as one kernel
)

# The passes that a tower of images goes through; the others look for what only a language model has.
OF_TOWERS = frozenset(
    {
        Canonicalise.name,
        MultiplyOuterProducts.name,
        MultiplyPatches.name,
        PackProjections.name,
        PadLinears.name,
        FuseGelu.name,
        LowerAttention.name,
        AttendSegments.name,
        SplitAtAttention.name,
        DeduplicatePieces.name,
    }
)

# The passes of a model that pools: a tower's for its rows, and those of a language model's heads and linears.
OF_TEXTS = OF_TOWERS - {MultiplyPatches.name} | {
    RotateHeads.name,
    PackLinears.name,
    FuseGatedLinear.name,
    FuseSiluMul.name,
}

Observer = Callable[["PassReport", fx.GraphModule], None]


@dataclass(frozen=True)
class PassReport:
    """One line of the table of passes."""

    name: str
    matches: int
    nodes_before: int
    nodes_after: int
    ms: float


class PassFailedError(Exception):
    """A pass raised something, or left a graph that it should not: its bug, or a graph that it was not written for.

    The message names the pass, and the config key that does without it.
    """

    def __init__(self, name: str, what: str) -> None:
        if name not in optional_pass_names():
            remedy = "No model is served without it: report this with the model's config.json"
        else:
            remedy = f"Set compile.disable_passes: [{name}] to do without it, and report this"
        super().__init__(f"the pass {name} {what}. {remedy}; MLLM_COMPILE_DEBUG=1 shows the traceback.")


def pass_names() -> list[str]:
    """All names, in order."""
    return [graph_pass.name for graph_pass in PASSES]


def optional_pass_names() -> list[str]:
    """Names that compile.disable_passes takes."""
    return [graph_pass.name for graph_pass in PASSES if not graph_pass.is_required]


def passes_left_out(target: PassTarget, disabled: Collection[str] = ()) -> dict[str, str]:
    """The passes that a compile for `target` does without, each with the reason.

    Args:
        disabled: names in compile.disable_passes.
    """
    reasons = {graph_pass.name: _why_left_out(graph_pass, target, disabled) for graph_pass in PASSES}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _why_left_out(graph_pass: type[GraphPass], target: PassTarget, disabled: Collection[str]) -> str | None:
    if graph_pass.name in disabled:
        return "compile.disable_passes names it"
    if graph_pass.needs and target.device_type != nodes.KERNEL_DEVICE_TYPE:
        return f"its kernels do not run on a {target.device_type.upper()}"
    if graph_pass.needs and not target.compiles_pieces:
        return "with compile.backend: eager pieces run as they were traced, without kernels"
    return graph_pass.obstacle(target)


def run_passes(
    gm: fx.GraphModule,
    left_out: Container[str] = (),
    verify: bool = True,
    observer: Observer | None = None,
) -> tuple[fx.GraphModule, list[PassReport]]:
    """Runs the pipeline.

    Args:
        gm: a traced model; it is rewritten.
        left_out: names of passes not to run (passes_left_out).
        verify: check each stage's invariants.
        observer: called after each pass with its report and the graph, to write dumps; the module cannot be called
            yet.

    Returns:
        The parent graph of pieces and attention ops, and one report a pass.

    Raises:
        PassFailedError: naming the pass and its error with the line, or the invariant that it broke.
    """
    reports: list[PassReport] = []
    assumed = size_equalities(gm)
    for make_pass in PASSES:
        if make_pass.name in left_out:
            continue
        start = time.perf_counter()
        result = _run(make_pass(), gm)
        gm = result.gm
        ms = (time.perf_counter() - start) * 1e3
        if verify:
            _verify(gm, make_pass.name, [*(report.name for report in reports), make_pass.name], assumed)
        report = PassReport(make_pass.name, result.matches, result.nodes_before, result.nodes_after, ms)
        reports.append(report)
        if observer is not None:
            observer(report, gm)
    gm.recompile()  # once: with all its pieces that takes as long as a pass
    return gm, reports


def _run(graph_pass: GraphPass, gm: fx.GraphModule) -> PassResult:
    try:
        result = graph_pass(gm)
        result.gm.graph.lint()
    except Exception as error:
        raise PassFailedError(
            graph_pass.name, f"raised {type(error).__name__}: {error} ({_places(graph_pass, error)})"
        ) from error
    return result


def _verify(gm: fx.GraphModule, name: str, done: Sequence[str], assumed: frozenset[str]) -> None:
    try:
        verify_graph(gm, done)
        no_new_size_equalities(gm, assumed)
    except Exception as error:
        raise PassFailedError(name, f"broke the graph: {error}") from error


def _places(graph_pass: GraphPass, error: Exception) -> str:
    """The pass's line that failed, and the line of the helper that raised, if one did."""
    frames = traceback.extract_tb(error.__traceback__)
    source = getattr(sys.modules.get(type(graph_pass).__module__), "__file__", None)  # none of what is typed in
    own = [frame for frame in frames if frame.filename == source][-1:]
    places = dict.fromkeys((Path(frame.filename).name, frame.lineno) for frame in (*own, frames[-1]))
    return ", in ".join(f"{name}, line {line}" for name, line in places)
