"""From a model folder to pieces: build on meta, trace, gate, passes, sources. Every graph is written as text as well.

The modules that it calls do each stage's work; Transformers is imported here and not before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.compiler.draft_model import places_read
from mllm_compile.compiler.graph_text import GraphDumper
from mllm_compile.compiler.lent_weights import with_lent
from mllm_compile.compiler.lowered import BuiltModel, Lowered
from mllm_compile.config.device import has_amx, has_panels
from mllm_compile.config.layer_checks import check_any_rows, check_cascade_layers, check_state_dtype
from mllm_compile.config.model_folder import ModelFolder, check_remote_code
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.sparse_keys import chooses_keys
from mllm_compile.config.speculators import head_type
from mllm_compile.config.token_map import read_token_map
from mllm_compile.errors import CompileError, ConfigError
from mllm_compile.kernels import of_every_kind
from mllm_compile.kernels.cuda import can_compile_kernels, kernels_of
from mllm_compile.kernels.decode_loop import add_decode_loop
from mllm_compile.kernels.piece import WrittenPiece
from mllm_compile.kernels.sampling import add_sampling_pieces
from mllm_compile.kernels.states import add_state_pieces
from mllm_compile.kernels.verify import add_verify_steps
from mllm_compile.model.refusals import refusing
from mllm_compile.process.no_gc import gc_paused
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.program.pieces import PACKAGE_SUFFIX, SOURCE_SUFFIX
from mllm_compile.store.key import max_traced_tokens

if TYPE_CHECKING:
    from torch import fx

    from mllm_compile.checkpoint.planned_tensor import PlannedTensor
    from mllm_compile.inductor.job import PieceJob
    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.model.trace import Trace
    from mllm_compile.passes.base import PassTarget, WeightSchemes
    from mllm_compile.passes.pipeline import Observer, PassReport
    from mllm_compile.runtime.config_sections import RuntimeSection
    from mllm_compile.runtime.program.spec import Program
    from mllm_compile.runtime.quantised.scheme import WeightScheme
    from mllm_compile.runtime.updates.names import TensorNames
    from mllm_compile.runtime.weights.spec import WeightSpec


@contextmanager
def private_inductor_cache(folder: Path) -> Iterator[None]:
    """Points Inductor's cache to `folder` while a model is traced.

    Importing Dynamo makes that cache, and torch.compile looks there for what may change a trace: by default among
    temporary files, under a name that any user can guess. It may go afterwards: pieces are compiled in processes of
    their own (inductor/workers.py).
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ.setdefault(name, str(folder))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def build_model(config: ResolvedConfig, model: ModelFolder, reporter: Reporter) -> BuiltModel:
    """Builds the model without its weights, and finds where these are.

    Raises:
        UnsupportedModelError: Transformers cannot build it, or it would not be served right.
        CheckpointError: the checkpoint does not hold what the model needs.
    """
    with reporter.stage("import transformers"), gc_paused():
        import transformers  # noqa: F401 - named here so that its seconds are not the next stage's

        from mllm_compile.checkpoint.cache_scales import cache_scales
        from mllm_compile.checkpoint.plan import line_on_unlisted, names_of_each, read_checkpoint, untie_stored_apart
        from mllm_compile.checkpoint.tensors import read_model_tensors
        from mllm_compile.model.cut_head import with_cut_head
        from mllm_compile.model.hf_model import build_on_meta
        from mllm_compile.model.late_imports import import_modeling_code
        from mllm_compile.model.prediction import build_prediction, read_prediction

        import_modeling_code()
    with reporter.stage("build on meta"), gc_paused():  # which imports the model's code
        dtype = getattr(torch, config.model.dtype)
        if config.model.pools:
            from mllm_compile.model.pooling.build import build_pooling_on_meta

            check_remote_code(model, config.model.trust_remote_code)
            whole = build_pooling_on_meta(model.path, dtype, config.model.task, config.model.trust_remote_code)
        elif head_type(model.config) is None:
            check_remote_code(model, config.model.trust_remote_code)
            whole = build_on_meta(model.path, dtype, config.model.trust_remote_code)
            if whole.unused_parts:
                reporter.announce(f"its answers are text: its {' and its '.join(whole.unused_parts)} are not used")
            whole = replace(whole, chooses_keys=chooses_keys(config.runtime.max_model_len, model))
            whole = replace(whole, hidden_states=places_read(config, whole.sizes().num_hidden_layers))
        else:
            from mllm_compile.model.heads import build_head_on_meta

            whole = build_head_on_meta(model.path, dtype)
        number = config.model.prediction_layer
        hf_model = whole if number is None else build_prediction(whole, number)
    token_ids = () if config.model.token_map is None else read_token_map(config.model.token_map)
    if config.model.load_format == "dummy":
        hf_model = with_cut_head(hf_model, token_ids) if token_ids else hf_model
        return BuiltModel(hf_model, None, _weight_schemes(config, hf_model, None), names=names_of_each(hf_model.model))
    with reporter.stage("find weights"):
        tensors = read_model_tensors(model)
        untie_stored_apart(tensors, whole.model)
        tensors, lent = with_lent(config, model, tensors)
        table = read_checkpoint(tensors, whole.model, lent)
        if number is not None:
            table = read_prediction(tensors, whole, hf_model, table, number)
        if token_ids:
            hf_model = with_cut_head(hf_model, token_ids)
            head = hf_model.embedding_and_head()[1]
            table[head] = table[head].rows(token_ids)
    if line := line_on_unlisted(tensors, table):
        reporter.announce(line)
    weight_schemes = _weight_schemes(config, hf_model, table)
    scales = cache_scales(tensors, table)
    if model.scheme is not None and model.scheme.is_plain and not scales:
        reporter.announce(f"the checkpoint says that it has {model.scheme.name}, but no scale of it that is read")
    return BuiltModel(hf_model, table, weight_schemes, tensors, scales, names_of_each(hf_model.model))


def _weight_schemes(config: ResolvedConfig, hf_model: HFModel, table: dict[str, PlannedTensor] | None) -> WeightSchemes:
    """The weights that config.model.quantization wants in few bits, where rows are whole."""
    from mllm_compile.checkpoint.plan import as_linear, can_be_quantised, scheme_of
    from mllm_compile.model.hf_model import tied_head
    from mllm_compile.passes.base import WeightSchemes
    from mllm_compile.passes.pipeline import passes_left_out
    from mllm_compile.runtime.quantised.scheme import MXFP4, quantised_as

    asked = config.model.quantization
    if asked == "none" or asked == "dequantize":
        return WeightSchemes({})

    def scheme(name: str, shape: torch.Size, is_transposed: bool) -> WeightScheme | None:
        planned = None if table is None else as_linear(table[name], is_transposed)
        if asked == "keep" or asked == "keep_a8":
            if planned is None:  # random weights, of which experts' alone have a scheme
                return MXFP4 if len(shape) > 2 else None
            return scheme_of(planned)
        is_whole = planned is None or can_be_quantised(planned)
        return quantised_as(asked, shape[-2 if is_transposed else -1]) if is_whole else None

    def schemes(is_transposed: bool) -> dict[str, WeightScheme]:
        dims = (3,) if is_transposed else (2, 3)  # experts may have theirs either way round
        shapes = {name: one.shape for name, one in hf_model.model.named_parameters() if one.dim() in dims}
        found = {name: scheme(name, shape, is_transposed) for name, shape in shapes.items()}
        return {name: one for name, one in found.items() if one is not None}

    in_panels = "pack_linears" not in passes_left_out(pass_target(config), config.compile.disable_passes)
    head = tied_head(hf_model.model)
    return WeightSchemes(
        schemes(False),
        schemes(True),
        are_chosen=not config.model.keeps_weights,
        head=head,
        in_panels=in_panels,
        rounds_inputs=asked in ("keep_a8", "int8"),
    )


def lower(config: ResolvedConfig, built: BuiltModel, dump_dir: Path, reporter: Reporter) -> Lowered:
    """Traces, checks and rewrites the model.

    Args:
        dump_dir: gets a numbered text file for the graph after each stage.

    Raises:
        UnsupportedModelError: the model would not be served right.
        CompileError: a pass failed.
        ConfigError: the model cannot be cut, counted or divided as is asked, or has no such layers.
    """
    hf_model = built.hf_model
    with reporter.stage("trace"), gc_paused():
        trace = _checked_trace(hf_model, config.runtime.device, max_traced_tokens(config))
    dump = GraphDumper(dump_dir)
    dump("trace", trace.graph_module, "as captured")
    rewriting = refusing(f"{hf_model.model.config.model_type!r} models cannot be rewritten")
    with reporter.stage("passes"), gc_paused(), rewriting:
        lowered = rewrite(
            config,
            built,
            trace,
            lambda report, gm: dump(
                report.name,
                gm,
                f"{report.matches} matches, {report.nodes_before} -> {report.nodes_after} nodes, {report.ms:.1f} ms",
            ),
        )
    _check_has(lowered.program, config)
    for line in lowered.lines_on_scales():
        reporter.announce(line)
    return lowered


def _checked_trace(hf_model: HFModel, device: str, most: int) -> Trace:
    """The trace of a causal model, or of the decoder of one with an encoder."""
    from mllm_compile.model.sources.supported import check_decoder
    from mllm_compile.model.sources.trace import trace_decoder
    from mllm_compile.model.supported import check_trace
    from mllm_compile.model.trace import trace_model

    if hf_model.cross is not None:
        trace = trace_decoder(hf_model, hf_model.cross, device, most)
        check_decoder(trace, hf_model, hf_model.cross)
        return trace
    trace = trace_model(hf_model, device, most)
    check_trace(trace, hf_model)
    return trace


def _check_has(program: Program, config: ResolvedConfig) -> None:
    """Refuses what is asked of layers that the model does not have; its first ones alone may not have them yet."""
    check_cascade_layers(config, program.layers)
    check_state_dtype(config, program.state_layers)
    if config.runtime.routed_experts and not program.counted_experts:
        raise ConfigError("runtime.routed_experts is set, and this model has no experts. Set it to false.")
    if config.runtime.expert_stats and not program.counted_experts:
        raise ConfigError(
            "runtime.expert_stats is set, and this model has no experts, whose choices it counts. Set it to false."
        )
    if config.runtime.kv_cache_dtype != config.model.dtype and not program.layers:
        raise ConfigError(
            "runtime.kv_cache_dtype is fp8_e4m3, and this model has no attention, so no KV cache. Set it to auto."
        )


def rewrite(config: ResolvedConfig, built: BuiltModel, trace: Trace, observer: Observer | None = None) -> Lowered:
    """Runs the passes over a trace, which is rewritten; `observer` sees the graph after each.

    Raises:
        CompileError: a pass failed; the message names it and how to do without it.
        ConfigError, UnsupportedModelError: the model cannot be cut, counted or divided as is asked.
    """
    from mllm_compile.compiler.program_builder import (
        build_program,
        layers_with_made_constants,
        size_symbols,
        state_operands,
    )
    from mllm_compile.runtime.ubatch.slices import check_divides

    graph, reports, left_out = rewrite_graph(config, built, trace, observer=observer)
    _check_cut(graph, config.runtime)
    _add_projection(graph, built.hf_model)
    of_model = {name: getattr(built.hf_model, name) for name in ("rope", "projection", "block")}
    program = replace(build_program(graph), **of_model)
    _check_stages(program, config.runtime)
    _check_counted(graph, program, config.runtime)
    if config.runtime.enable_dbo:
        check_divides(program.state_layers)
    written: list[WrittenPiece] = []
    for add_attention in of_every_kind("mllm_compile.kernels", "add"):
        program, pieces = add_attention(config, program)
        written += pieces
    own = {name for name, kernels in program.layer_kernels.items() if kernels.decode}
    check_any_rows(config, program.layers, own)
    made = layers_with_made_constants(graph, program.state_layers)
    program, state_pieces = add_state_pieces(config, program, state_operands(graph), made)
    output: Any = next(node for node in graph.graph.nodes if node.op == "output")
    logits = output.args[0][0].meta["val"]
    program, sampling_pieces = add_sampling_pieces(config, program, logits)
    program, loop_pieces = add_decode_loop(config, program, logits)
    program, verify_pieces = add_verify_steps(config, program)
    if pass_target(config).compiles_cuda:
        program = replace(program, kernels=kernels_of(graph, program))
    written += (*state_pieces, *sampling_pieces, *loop_pieces, *verify_pieces)
    return Lowered(built, graph, program, reports, left_out, size_symbols(graph), tuple(written))


def _add_projection(graph: fx.GraphModule, hf_model: HFModel) -> None:
    """Adds the weights of the head's projection, which no piece reads, to the program's."""
    names = () if hf_model.projection is None else hf_model.projection.weights
    with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
        for name in names:
            node = graph.graph.placeholder(name.replace(".", "_"))
            node.meta |= {"weight_name": name, "val": hf_model.model.get_parameter(name)}


def rewrite_graph(
    config: ResolvedConfig,
    built: BuiltModel,
    trace: Trace,
    not_of_it: Mapping[str, str] | None = None,
    observer: Observer | None = None,
) -> tuple[fx.GraphModule, list[PassReport], dict[str, str]]:
    """The graph after the passes, a report of each, and those that were left out, with reasons.

    Args:
        not_of_it: passes that this trace does without, and why, besides those that the config leaves out.

    Raises:
        CompileError: a pass failed; the message names it and how to do without it.
    """
    from mllm_compile.passes.base import ANY_ROWS, CACHE_DTYPE, CACHE_SCALES, HAS_AMX, WEIGHT_SCHEMES
    from mllm_compile.passes.pipeline import PassFailedError, passes_left_out, run_passes

    _set_ranks(trace, built.hf_model, config.runtime)
    trace.graph_module.meta[WEIGHT_SCHEMES] = built.weight_schemes
    trace.graph_module.meta[CACHE_SCALES] = dict(built.cache_scales)
    trace.graph_module.meta[ANY_ROWS] = config.runtime.any_rows
    trace.graph_module.meta[HAS_AMX] = has_amx(config.runtime.device)
    trace.graph_module.meta[CACHE_DTYPE] = getattr(torch, config.runtime.kv_cache_dtype)
    try:
        left_out = passes_left_out(pass_target(config), config.compile.disable_passes) | dict(not_of_it or {})
        graph, reports = run_passes(trace.graph_module, left_out, observer=observer)
    except PassFailedError as error:
        raise CompileError(str(error)) from error
    return graph, reports, left_out


def _set_ranks(trace: Trace, hf_model: HFModel, runtime: RuntimeSection) -> None:
    """Tells `shard`, `spread_experts` and `stage` for how many ranks it is, and what no checkpoint holds."""
    from mllm_compile.passes.base import EXPERT_RANKS, IS_CONSTANT, NUM_STAGES, RANKS

    trace.graph_module.meta[RANKS] = runtime.tensor_parallel_size
    trace.graph_module.meta[EXPERT_RANKS] = runtime.expert_parallel_size
    trace.graph_module.meta[NUM_STAGES] = runtime.pipeline_parallel_size
    for node in trace.graph_module.graph.find_nodes(op="placeholder"):
        node.meta[IS_CONSTANT] = node.meta.get("weight_name") in hf_model.constants


def _check_cut(graph: fx.GraphModule, runtime: RuntimeSection) -> None:
    """Refuses a model that every rank would compute whole."""
    from mllm_compile.passes.base import WEIGHT_CUTS

    is_cut, size = bool(graph.meta.get(WEIGHT_CUTS)), runtime.expert_parallel_size
    if runtime.tensor_parallel_size > 1 and not is_cut:
        raise ConfigError(
            f"runtime.tensor_parallel_size is {runtime.tensor_parallel_size}, and nothing of this model can be cut "
            "into as many parts: expected heads, features or a vocabulary that divide by it. Set a smaller one, or 1."
        )
    if size > 1 and not is_cut:
        raise ConfigError(
            f"runtime.expert_parallel_size is {size}, and this model has no experts that can be dealt to as many "
            "ranks: expected a mixture whose number of experts divides by it. Set another, or "
            "runtime.tensor_parallel_size, which cuts any model."
        )


def _check_stages(program: Program, runtime: RuntimeSection) -> None:
    """Refuses more stages than the model has."""
    if len(program.stages) + 1 != runtime.pipeline_parallel_size:
        raise ConfigError(
            f"runtime.pipeline_parallel_size is {runtime.pipeline_parallel_size}, and this model has "
            f"{len(program.layers) + len(program.state_layers)} layers that attend or have a state, between which it "
            "cannot be cut as often. Set a smaller one, or runtime.tensor_parallel_size."
        )


def _check_counted(graph: fx.GraphModule, program: Program, runtime: RuntimeSection) -> None:
    """Refuses to count the choices of layers that are computed for one rank's tokens alone."""
    from mllm_compile.passes.base import WEIGHT_CUTS

    whole = [name for name in program.counted_experts if name not in graph.meta.get(WEIGHT_CUTS, {})]
    if runtime.expert_parallel_size > 1 and whole:
        raise ConfigError(
            f"runtime.expert_stats is set, and {whole[0]} is not spread over {runtime.expert_parallel_size} ranks: "
            "each would count its own tokens there. Set runtime.expert_stats: false, or another "
            "runtime.expert_parallel_size."
        )


def write_pieces(lowered: Lowered, folder: Path) -> list[PieceJob]:
    """Writes the source of every distinct piece; returns the jobs, beside the sources."""
    from mllm_compile.compiler.piece_source import piece_source
    from mllm_compile.compiler.program_builder import piece_inputs
    from mllm_compile.inductor.job import PieceJob

    sources = []
    written: set[str] = set()
    for one in lowered.every:
        variants = {variant.piece: variant for variant in one.program.all_variants()}
        for piece in (*one.program.step_pieces(), *variants):
            if piece in written:  # programs share it
                continue
            written.add(piece)
            graph: Any = one.graph.get_submodule(piece)
            inputs = piece_inputs(graph, one.symbols)
            if piece in variants and variants[piece].max_size == 1:
                size = inputs[variants[piece].input].shape[variants[piece].dim]  # T, or S behind the gather
                inputs = tuple(spec.of_one(str(size)) for spec in inputs)
            sources.append((piece, piece_source(graph, piece, one.symbols), inputs))
    # The smallest last: with few workers the others begin first.
    sources += [(piece.name, piece.source, piece.inputs) for piece in lowered.written_pieces]
    jobs = []
    for piece, source, inputs in sources:
        source_path = folder / (piece + SOURCE_SUFFIX)
        source_path.write_text(source, encoding="utf-8")
        jobs.append(PieceJob(piece, source_path, inputs, folder / (piece + PACKAGE_SUFFIX)))
    return jobs


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


def plan_lowered_weights(
    lowered: Lowered,
) -> tuple[dict[str, torch.Tensor], tuple[tuple[WeightSpec, ...], ...], TensorNames]:
    """The program's constants by name, of each rank where each of its weights comes from, and the names that updates
    may use."""
    from mllm_compile.checkpoint.tensor_names import parameter_table, unread_shapes
    from mllm_compile.compiler.program_builder import weight_shapes
    from mllm_compile.runtime.updates.names import TensorNames

    needed = set(lowered.program.every_weight())
    constants = {name: value for name, value in lowered.hf_model.constants.items() if name in needed}
    shapes = {name: shape for one in reversed(lowered.every) for name, shape in weight_shapes(one.graph).items()}
    shapes = {name: shape for name, shape in shapes.items() if name in needed and name not in constants}
    built = lowered.built
    weights = _plan(lowered, shapes, built.table)
    parameters = _plan(lowered, shapes, parameter_table(lowered.hf_model.model, built.names))
    unread = unread_shapes(lowered.hf_model.model, built.names, built.tensors, parameters, weights)
    ties = tuple(tuple(names) for names in built.names if len(names) > 1)
    return constants, weights, TensorNames(parameters, None, ties, unread)


def _plan(
    lowered: Lowered,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    table: Mapping[str, PlannedTensor] | None,
) -> tuple[tuple[WeightSpec, ...], ...]:
    """The weights of these shapes, by rank, filled as `table` says."""
    from mllm_compile.checkpoint.cache_scales import planned_factors
    from mllm_compile.checkpoint.plan import RankPart, plan_weights

    packed = {name: parts for one in lowered.every for name, parts in one.packed.items()}
    quantised = {name: tensor for one in lowered.every for name, tensor in one.quantised.items()}
    tensors = lowered.built.tensors
    factors = (
        {}
        if tensors is None
        else planned_factors({name: factor for one in lowered.every for name, factor in one.factors.items()}, tensors)
    )
    return tuple(
        tuple(
            plan_weights(shapes, packed, table, quantised, RankPart(lowered.cuts, lowered.whole_shapes, rank), factors)
        )
        for rank in range(lowered.num_ranks)
    )
