"""The table of the kinds of graphs: which class captures and replays each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mllm_compile.runtime.cuda_graph.decodes import DecodeGraphs
from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.cuda_graph.kind import KindGraphs
from mllm_compile.runtime.cuda_graph.mixed import MixedGraphs
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.piece_graphs import PiecewiseGraphs
from mllm_compile.runtime.cuda_graph.prompts import PromptGraphs
from mllm_compile.runtime.cuda_graph.verifies import VerifyGraphs
from mllm_compile.runtime.graph_mode import CUDAGraphMode, GraphKind

KINDS: Mapping[GraphKind, type[KindGraphs]] = {
    GraphKind.PIECEWISE: PiecewiseGraphs,
    GraphKind.MIXED: MixedGraphs,
    GraphKind.PREFILL_NEW: PromptGraphs,
    GraphKind.PREFILL_CACHED: PromptGraphs,
    GraphKind.DECODE: DecodeGraphs,
    GraphKind.CASCADE: DecodeGraphs,
    GraphKind.DECODE_GREEDY_ACROSS_RANKS: DecodeGraphs,
    GraphKind.CASCADE_GREEDY_ACROSS_RANKS: DecodeGraphs,
    GraphKind.VERIFY: VerifyGraphs,
}


def dispatcher_of(runner: CapturableModel) -> GraphDispatcher:
    """The dispatcher of all sizes that are captured of a model.

    Raises:
        ConfigError: sizes that are asked for cannot be captured.
    """
    mode = CUDAGraphMode.from_name(runner.config.cudagraph.mode)
    sizes = {kind: graphs.sizes(runner, kind) for kind, graphs in KINDS.items() if mode.captures(kind)}
    if runner.config.cudagraph.few_sizes:
        sizes = _few(sizes)
    return GraphDispatcher(sizes, runner.config.lora.max_adapters, runner.always_takes_adapters)


def _few(sizes: Mapping[GraphKind, Sequence[int]]) -> dict[GraphKind, Sequence[int]]:
    """Each size is at most half of the next one. Pieces have no size below those of whole steps."""
    least_pieces = max(sizes.get(GraphKind.MIXED, ()), default=0)
    found: dict[GraphKind, Sequence[int]] = {}
    for kind, of_kind in sizes.items():
        kept = sorted(of_kind)[-1:]
        for size in sorted(of_kind, reverse=True):
            if 2 * size <= kept[0] and (kind is not GraphKind.PIECEWISE or size >= least_pieces):
                kept.insert(0, size)
        found[kind] = tuple(kept)
    return found
