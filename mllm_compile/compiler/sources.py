"""The program of an encoder-decoder's sources, beside its decoder's: both are traced apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mllm_compile.compiler.graph_text import GraphDumper
from mllm_compile.compiler.lowered import BuiltModel, Lowered
from mllm_compile.compiler.pieces import packed_operands
from mllm_compile.compiler.rewriting import lowered_of, rewrite_graph
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.kernels.text_attention import add_text_attention
from mllm_compile.model.refusals import refusing
from mllm_compile.process.no_gc import gc_paused
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.media.tower import MAX_FEATURES
from mllm_compile.runtime.program.spec import SourcePrograms
from mllm_compile.runtime.sources.facts import SourceFacts
from mllm_compile.store.key import max_traced_tokens


def with_source(config: ResolvedConfig, lowered: Lowered, dump_dir: Path, reporter: Reporter) -> Lowered:
    """Adds the program of sources to an encoder-decoder's; another model stays as it is.

    Args:
        dump_dir: gets a text file for the graph after its passes.

    Raises:
        UnsupportedModelError: the encoder would not be served right.
        CompileError: a pass failed.
    """
    from mllm_compile.model.sources.supported import check_source
    from mllm_compile.model.sources.trace import trace_source
    from mllm_compile.passes.pipeline import OF_TEXTS, OF_TOWERS, pass_names

    hf_model, device, cross = lowered.hf_model, config.runtime.device, lowered.hf_model.cross
    if cross is None:
        return lowered
    is_sound = cross.sound_shape is not None
    with reporter.stage("trace sources"), gc_paused():
        most = MAX_FEATURES if is_sound else max_traced_tokens(config)
        trace = trace_source(hf_model, cross, device, most)
        check_source(trace, hf_model, cross)
    of_sources = OF_TOWERS if is_sound else OF_TEXTS
    left_out = {name: "it is for models that generate" for name in pass_names() if name not in of_sources}
    with (
        reporter.stage("passes of sources"),
        gc_paused(),
        refusing(f"{hf_model.model.config.model_type!r} models cannot be rewritten"),
    ):
        source = _rewrite(config, lowered.built, trace, left_out, is_sound)
    GraphDumper(dump_dir)("source", source.graph, f"after {len(source.reports)} passes")
    program = replace(
        lowered.program,
        source=SourcePrograms(_facts(hf_model.model, cross), source.program),
        cross_layers=sharing_pages(hf_model.model, lowered.program.cross_layers, lowered.program.layers),
    )
    written = (*lowered.written_pieces, *source.written_pieces)
    return replace(lowered, program=program, written_pieces=written, of_source=(source,))


def _rewrite(
    config: ResolvedConfig, built: BuiltModel, trace: Any, left_out: dict[str, str], is_sound: bool
) -> Lowered:
    rewritten = rewrite_graph(config, built, trace, left_out)
    if is_sound:  # windows of sound are the same length, and have no bias
        return lowered_of(config, built, rewritten)
    return lowered_of(
        config, built, rewritten, lambda graph, program: add_text_attention(config, program, packed_operands(graph))
    )


def sharing_pages(
    model: Any, cross_layers: tuple[LayerSpec, ...], layers: tuple[LayerSpec, ...]
) -> tuple[LayerSpec, ...]:
    """The layers that attend to sources, each with the pages of one of the decoder's own.

    A page of a request holds keys of its own tokens, and one of a source those that the decoder attends to: they are
    of one shape, and of one pool.
    """
    shapes = [layer.cache_shape for layer in layers]
    if len(cross_layers) > len(layers) or any(
        one.cache_shape != shape for one, shape in zip(cross_layers, shapes, strict=False)
    ):
        raise UnsupportedModelError(
            f"{model.config.model_type!r} models would not be served right: keys of their encoder's states are of "
            "other shapes than those of the decoder's tokens. docs/models.md lists what is."
        )
    return cross_layers


def _facts(model: Any, cross: Any) -> SourceFacts:
    from mllm_compile.model.hf_model import NO_LIMIT

    if cross.sound_shape is not None:
        bins, frames = cross.sound_shape
        return SourceFacts(max_length=cross.states_of_sound, bins=bins, frames=frames)
    encoder = model.get_encoder()
    positions = getattr(encoder.config, "max_position_embeddings", None)
    vocab_size = int(encoder.get_input_embeddings().weight.shape[0])
    return SourceFacts(max_length=positions or NO_LIMIT, vocab_size=vocab_size)
