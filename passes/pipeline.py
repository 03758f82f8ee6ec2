"""The passes, in the order in which they run.

1. canonicalise        one form of Dynamo's names, sizes, writes and spellings
2. multiply_outer_products  rotary angles by multiplication, without a GEMM
3. pack_projections    q, k, v and gate, up as one GEMM each
4. lower_attention     the trace-time op becomes the runtime's op; layers get names and parameters
5. fuse_rope_cache     on CUDA, norms and rotation of q and k and the write into the KV cache as one kernel
6. rotate_in_attention on Hopper, decode attention norms and rotates itself, without that kernel
7. gather_rows_early   the last layer computes only the rows whose logits are wanted
8. split_at_attention  one submodule per stretch between attentions, and one for the head
9. deduplicate_pieces  equal stretches share one module
10. fuse_single_token  on CUDA, a further form of each piece, for steps of one token
11. stream_linears     on Hopper, a form for steps of up to 64, 208 or 256 tokens
12. fuse_few_tokens    on CUDA, a form for up to 16 tokens of pieces that have none by stream_linears
13. fuse_gated_linear  on Hopper, gate_up and its activation as one kernel, for more tokens
14. fuse_silu_mul      on CUDA, the activation of a feed-forward as one kernel, for any number of tokens

To add a pass: a file with a class of the same name, a line here and in PASSES, its invariants in verify.py, a test.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.canonicalise import Canonicalise
from mllm_compile.passes.deduplicate_pieces import DeduplicatePieces
from mllm_compile.passes.fuse_few_tokens import FuseFewTokens
from mllm_compile.passes.fuse_gated_linear import FuseGatedLinear
from mllm_compile.passes.fuse_rope_cache import FuseRopeCache
from mllm_compile.passes.fuse_silu_mul import FuseSiluMul
from mllm_compile.passes.fuse_single_token import FuseSingleToken
from mllm_compile.passes.gather_rows_early import GatherRowsEarly
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.passes.multiply_outer_products import MultiplyOuterProducts
from mllm_compile.passes.pack_projections import PackProjections
from mllm_compile.passes.rotate_in_attention import RotateInAttention
from mllm_compile.passes.split_at_attention import SplitAtAttention
from mllm_compile.passes.stream_linears import StreamLinears
from mllm_compile.passes.verify import no_new_size_equalities, size_equalities, verify_graph

PASSES: tuple[type[GraphPass], ...] = (
    Canonicalise,
    MultiplyOuterProducts,
    PackProjections,
    LowerAttention,
    FuseRopeCache,
    RotateInAttention,
    GatherRowsEarly,
    SplitAtAttention,
    DeduplicatePieces,
    FuseSingleToken,
    StreamLinears,
    FuseFewTokens,
    FuseGatedLinear,
    FuseSiluMul,
)
# Passes that every program needs; the others may be named in compile.disable_passes.
REQUIRED = frozenset({"canonicalise", "lower_attention", "split_at_attention", "deduplicate_pieces"})

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
        if name in REQUIRED:
            remedy = "No model is served without it: report this with the model's config.json"
        else:
            remedy = f"Set compile.disable_passes: [{name}] to do without it, and report this"
        super().__init__(f"the pass {name} {what}. {remedy}; MLLM_COMPILE_DEBUG=1 shows the traceback.")


def pass_names() -> list[str]:
    """All names, in order."""
    return [graph_pass.name for graph_pass in PASSES]


def optional_pass_names() -> list[str]:
    """Names that compile.disable_passes takes."""
    return [name for name in pass_names() if name not in REQUIRED]


def run_passes(
    gm: fx.GraphModule,
    disabled: Iterable[str] = (),
    verify: bool = True,
    observer: Observer | None = None,
) -> tuple[fx.GraphModule, list[PassReport]]:
    """Runs the pipeline.

    Args:
        gm: a traced model; it is rewritten.
        disabled: names of optional passes to leave out (validated by the config).
        verify: check each stage's invariants.
        observer: called after each pass with its report and the graph, to write dumps; the module cannot be called
            yet.

    Returns:
        The parent graph of pieces and attention ops, and one report a pass.

    Raises:
        PassFailedError: naming the pass and its error with the line, or the invariant that it broke.
    """
    off = set(disabled)
    reports = []
    assumed = size_equalities(gm)
    for make_pass in PASSES:
        if make_pass.name in off:
            continue
        start = time.perf_counter()
        result = _run(make_pass(), gm)
        gm = result.gm
        ms = (time.perf_counter() - start) * 1e3
        if verify:
            _verify(gm, make_pass.name, assumed)
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


def _verify(gm: fx.GraphModule, name: str, assumed: frozenset[str]) -> None:
    try:
        verify_graph(gm, name)
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
