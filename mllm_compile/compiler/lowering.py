"""From a model folder to a causal model's program: build on meta, trace, gate, passes, pieces that are written.

Every graph is written as text as well. The modules that it calls do each stage's work; Transformers is imported here
and not before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mllm_compile.compiler.draft_model import places_read
from mllm_compile.compiler.graph_text import GraphDumper
from mllm_compile.compiler.lent_weights import with_lent
from mllm_compile.compiler.lowered import BuiltModel, Lowered
from mllm_compile.compiler.pieces import layers_with_made_constants, state_operands
from mllm_compile.compiler.program_checks import check_cut, check_head, check_layers, check_program
from mllm_compile.compiler.rewriting import lowered_of, rewrite_graph
from mllm_compile.compiler.weight_schemes import weight_schemes
from mllm_compile.config.folders.model_folder import ModelFolder, check_remote_code
from mllm_compile.config.folders.speculators import head_type
from mllm_compile.config.folders.token_map import read_token_map
from mllm_compile.config.resolution.layer_checks import check_any_rows
from mllm_compile.config.resolution.sparse_keys import chooses_keys
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.kernels import of_every_kind
from mllm_compile.kernels.decode_loop import add_decode_loop
from mllm_compile.kernels.piece import WrittenPiece
from mllm_compile.kernels.sampling import add_sampling_pieces
from mllm_compile.kernels.states import add_state_pieces
from mllm_compile.kernels.verify import add_verify_steps
from mllm_compile.model.refusals import refusing
from mllm_compile.process.no_gc import gc_paused
from mllm_compile.process.progress import Reporter
from mllm_compile.store.key import max_traced_tokens

if TYPE_CHECKING:
    from torch import fx

    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.model.trace import Trace
    from mllm_compile.passes.pipeline import Observer
    from mllm_compile.runtime.program.spec import Program


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
        return BuiltModel(hf_model, None, weight_schemes(config, hf_model, None), names=names_of_each(hf_model.model))
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
    schemes = weight_schemes(config, hf_model, table)
    scales = cache_scales(tensors, table)
    if model.scheme is not None and model.scheme.is_plain and not scales:
        reporter.announce(f"the checkpoint says that it has {model.scheme.name}, but no scale of it that is read")
    return BuiltModel(hf_model, table, schemes, tensors, scales, names_of_each(hf_model.model))


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
    check_layers(lowered.program, config)
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


def rewrite(config: ResolvedConfig, built: BuiltModel, trace: Trace, observer: Observer | None = None) -> Lowered:
    """Runs the passes over a trace, which is rewritten; `observer` sees the graph after each.

    Raises:
        CompileError: a pass failed; the message names it and how to do without it.
        ConfigError, UnsupportedModelError: the model cannot be cut, counted or divided as is asked.
    """
    rewritten = rewrite_graph(config, built, trace, observer=observer)
    check_cut(rewritten.graph, config.runtime)
    check_head(rewritten.graph, config, built.hf_model)
    _add_projection(rewritten.graph, built.hf_model)
    return lowered_of(config, built, rewritten, partial(_with_pieces, config, built.hf_model))


def _with_pieces(
    config: ResolvedConfig, hf_model: HFModel, graph: fx.GraphModule, program: Program
) -> tuple[Program, Sequence[WrittenPiece]]:
    """A causal model's program with all that is written for it, and these pieces."""
    of_model = {name: getattr(hf_model, name) for name in ("rope", "projection", "block")}
    program = replace(program, **of_model)
    check_program(graph, program, config.runtime)
    written: list[WrittenPiece] = []
    for add_attention in of_every_kind("mllm_compile.kernels", "add"):
        program, pieces = add_attention(config, program)
        written += pieces
    own = {name for name, kernels in program.layer_kernels.items() if kernels.decode}
    check_any_rows(config, program.layers, own)
    made = layers_with_made_constants(graph, program.state_layers)
    program, pieces = add_state_pieces(config, program, state_operands(graph), made)
    written += pieces
    logits = graph.graph.output_node().args[0][0].meta["val"]  # type: ignore[index, union-attr]
    program, pieces = add_sampling_pieces(config, program, logits)
    written += pieces
    program, pieces = add_decode_loop(config, program, logits)
    written += pieces
    program, pieces = add_verify_steps(config, program)
    return program, [*written, *pieces]


def _add_projection(graph: fx.GraphModule, hf_model: HFModel) -> None:
    """Adds the weights of the head's projection, which no piece reads, to the program's."""
    names = () if hf_model.projection is None else hf_model.projection.weights
    with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
        for name in names:
            node = graph.graph.placeholder(name.replace(".", "_"))
            node.meta |= {"weight_name": name, "val": hf_model.model.get_parameter(name)}
