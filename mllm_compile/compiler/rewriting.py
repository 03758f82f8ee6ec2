"""The passes with the values of a config, and the program of the graph that they leave: the same for every trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mllm_compile.compiler.lowered import BuiltModel, Lowered
from mllm_compile.compiler.pieces import size_symbols
from mllm_compile.compiler.program_builder import build_program
from mllm_compile.config.resolution.device import has_amx, has_panels
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import CompileError
from mllm_compile.kernels.cuda import can_compile_kernels, kernels_of
from mllm_compile.kernels.piece import WrittenPiece

if TYPE_CHECKING:
    from torch import fx

    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.model.trace import Trace
    from mllm_compile.passes.base import PassTarget
    from mllm_compile.passes.pipeline import Observer, PassReport
    from mllm_compile.runtime.config_sections import RuntimeSection
    from mllm_compile.runtime.program.spec import Program

AddPieces = Callable[["fx.GraphModule", "Program"], "tuple[Program, Sequence[WrittenPiece]]"]


@dataclass(frozen=True)
class Rewritten:
    """A trace after the passes.

    Attributes:
        graph: what they left.
        reports: one of each.
        left_out: those that were left out, with reasons.
    """

    graph: fx.GraphModule
    reports: list[PassReport]
    left_out: dict[str, str]


def rewrite_graph(
    config: ResolvedConfig,
    built: BuiltModel,
    trace: Trace,
    not_of_it: Mapping[str, str] | None = None,
    observer: Observer | None = None,
) -> Rewritten:
    """Runs the passes over a trace, which is rewritten.

    Args:
        not_of_it: passes that this trace does without, and why, besides those that the config leaves out.
        observer: sees the graph after each.

    Raises:
        CompileError: a pass failed; the message names it and how to do without it.
    """
    from mllm_compile.passes.base import ANY_ROWS, CACHE_DTYPE, CACHE_SCALES, HAS_AMX, WEIGHT_SCHEMES
    from mllm_compile.passes.pipeline import PassFailedError, run_passes

    _set_ranks(trace, built.hf_model, config.runtime)
    trace.graph_module.meta[WEIGHT_SCHEMES] = built.weight_schemes
    trace.graph_module.meta[CACHE_SCALES] = dict(built.cache_scales)
    trace.graph_module.meta[ANY_ROWS] = config.runtime.any_rows
    trace.graph_module.meta[HAS_AMX] = has_amx(config.runtime.device)
    trace.graph_module.meta[CACHE_DTYPE] = getattr(torch, config.runtime.kv_cache_dtype)
    try:
        left_out = left_out_of(config) | dict(not_of_it or {})
        graph, reports = run_passes(trace.graph_module, left_out, observer=observer)
    except PassFailedError as error:
        raise CompileError(str(error)) from error
    return Rewritten(graph, reports, left_out)


def lowered_of(
    config: ResolvedConfig, built: BuiltModel, rewritten: Rewritten, add_pieces: AddPieces | None = None
) -> Lowered:
    """The program of a rewritten trace, with the kernels that its pieces call.

    Args:
        add_pieces: changes the program, and gives the pieces that are written for it; None: it stays.

    Raises:
        ConfigError, CompileError: as `add_pieces` does.
    """
    graph = rewritten.graph
    program = build_program(graph)
    written: Sequence[WrittenPiece] = ()
    if add_pieces is not None:
        program, written = add_pieces(graph, program)
    if pass_target(config).compiles_cuda:
        program = replace(program, kernels=kernels_of(graph, program))
    return Lowered(built, graph, program, rewritten.reports, rewritten.left_out, size_symbols(graph), tuple(written))


def left_out_of(config: ResolvedConfig) -> dict[str, str]:
    """The passes that a config does without, with reasons."""
    from mllm_compile.passes.pipeline import passes_left_out

    return passes_left_out(pass_target(config), config.compile.disable_passes)


def pass_target(config: ResolvedConfig) -> PassTarget:
    """Collects what passes decide by whether they are of use."""
    from mllm_compile.passes.base import PassTarget

    return PassTarget(
        device_type=config.runtime.device.partition(":")[0],
        compiles_pieces=config.compile.backend != "eager",
        compiles_cuda=can_compile_kernels(config.runtime.device),
        hopper_decode=config.compile.hopper_decode,
        dtype=config.model.dtype,
        kv_cache_dtype=config.runtime.kv_cache_dtype,
        counts_experts=config.runtime.sees_experts,
        num_ranks=config.runtime.tensor_parallel_size,
        num_expert_ranks=config.runtime.expert_parallel_size,
        num_stages=config.runtime.pipeline_parallel_size,
        attention_backend=config.runtime.attention_backend,
        deterministic=config.runtime.deterministic,
        any_rows=config.runtime.any_rows,
        split_decode=config.compile.split_decode,
        has_panels=has_panels(config.runtime.device),
        has_adapters=config.lora.max_adapters > 0,
    )


def _set_ranks(trace: Trace, hf_model: HFModel, runtime: RuntimeSection) -> None:
    """Tells `shard`, `spread_experts` and `stage` for how many ranks it is, and what no checkpoint holds."""
    from mllm_compile.passes.base import EXPERT_RANKS, IS_CONSTANT, NUM_STAGES, RANKS

    trace.graph_module.meta[RANKS] = runtime.tensor_parallel_size
    trace.graph_module.meta[EXPERT_RANKS] = runtime.expert_parallel_size
    trace.graph_module.meta[NUM_STAGES] = runtime.pipeline_parallel_size
    for node in trace.graph_module.graph.find_nodes(op="placeholder"):
        node.meta[IS_CONSTANT] = node.meta.get("weight_name") in hf_model.constants
