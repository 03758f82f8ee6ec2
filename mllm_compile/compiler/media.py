"""The programs for images of a model that takes some: its tower, and its text with features in place of embeddings.

Both are traced apart from the program for text, which stays as it is; pieces that are alike are shared with it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mllm_compile.compiler.graph_text import GraphDumper
from mllm_compile.compiler.lowered import BuiltModel, Lowered
from mllm_compile.compiler.lowering import pass_target, rewrite_graph
from mllm_compile.compiler.program_builder import build_program, size_symbols
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.kernels.cuda import kernels_of
from mllm_compile.model.refusals import refusing
from mllm_compile.process.no_gc import gc_paused
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.program.spec import MediaPrograms
from mllm_compile.store.key import max_traced_tokens

if TYPE_CHECKING:
    from mllm_compile.model.trace import Trace


def with_media(config: ResolvedConfig, lowered: Lowered, dump_dir: Path, reporter: Reporter) -> Lowered:
    """Adds the programs for images; the same where the model has no tower of a protocol that is served (with an
    announcement where it has one that is nearly so). Ranks have parts of the text with features as of the text, and
    the tower whole.

    Args:
        dump_dir: gets a text file for each graph after its passes.

    Raises:
        CompileError: a pass failed.
    """
    from mllm_compile.model.supported import check_tower, check_trace
    from mllm_compile.model.towers.find import tower_adapter
    from mllm_compile.passes.pipeline import OF_TOWERS, pass_names

    hf_model, device = lowered.hf_model, config.runtime.device
    try:
        with refusing(f"images of {hf_model.model.config.model_type!r} models cannot be served"):
            adapter = tower_adapter(hf_model)
        if adapter is None:
            return lowered
        if config.runtime.pipeline_parallel_size > 1:
            reporter.announce("its text is served without images: runtime.pipeline_parallel_size is set")
            return lowered
        with reporter.stage("trace images"), gc_paused():
            text = adapter.trace_text(device, max_traced_tokens(config))
            check_trace(text, hf_model)
            tower = adapter.trace_tower(device)
            check_tower(tower, hf_model)
    except UnsupportedModelError as error:
        reporter.announce(f"its text is served without images: {error}")
        return lowered
    not_of_towers = {name: "it is for language models" for name in pass_names() if name not in OF_TOWERS}
    rewriting = refusing(f"images of {hf_model.model.config.model_type!r} models cannot be rewritten")
    with reporter.stage("passes of images"), gc_paused(), rewriting:
        with_features = _rewrite(config, lowered.built, text, {})
        of_tower = _rewrite(config, lowered.built, tower, not_of_towers)
    if with_features.cuts != lowered.cuts:
        other = next(iter(set(with_features.cuts.items()) ^ set(lowered.cuts.items())))[0]
        reporter.announce(f"its text is served without images: over ranks {other!r} would be cut otherwise beside them")
        return lowered
    dump = GraphDumper(dump_dir / "images")
    (dump_dir / "images").mkdir(exist_ok=True)
    for name, one in (("with_features", with_features), ("tower", of_tower)):
        dump(name, one.graph, f"after {len(one.reports)} passes")
    programs = MediaPrograms(with_features.program, of_tower.program, adapter.facts)
    program = replace(lowered.program, media=programs)
    return replace(lowered, program=program, of_media=(with_features, of_tower), adapter=adapter)


def _rewrite(config: ResolvedConfig, built: BuiltModel, trace: Trace, left_out: dict[str, str]) -> Lowered:
    graph, reports, left_out = rewrite_graph(config, built, trace, left_out)
    program = build_program(graph)
    if pass_target(config).compiles_cuda:
        program = replace(program, kernels=kernels_of(graph, program))
    return Lowered(built, graph, program, reports, left_out, size_symbols(graph), ())
