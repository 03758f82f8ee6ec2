"""The programs of a model some of whose layers attend to images, beside its program for text.

They are traced apart from it: a text passes over these layers, and its program stays as it is.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

from mllm_compile.compiler.graph_text import GraphDumper
from mllm_compile.compiler.lowered import Lowered
from mllm_compile.compiler.rewriting import lowered_of, rewrite_graph
from mllm_compile.compiler.sources import sharing_pages
from mllm_compile.config.resolution.seen_images import compile_obstacle
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.refusals import refusing
from mllm_compile.process.no_gc import gc_paused
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.program.spec import ImagePrograms
from mllm_compile.store.key import max_traced_tokens


def with_seen_images(config: ResolvedConfig, lowered: Lowered, dump_dir: Path, reporter: Reporter) -> Lowered:
    """Adds the programs for images that layers attend to; the same where the model has no such layers, or its images
    cannot be served, which is announced.

    Args:
        dump_dir: gets a text file for each graph after its passes.

    Raises:
        CompileError: a pass failed.
    """
    from mllm_compile.model.sources.seen_images import SeenImagesAdapter
    from mllm_compile.model.supported import check_tower, check_trace
    from mllm_compile.passes.pipeline import OF_TOWERS, pass_names

    hf_model, device = lowered.hf_model, config.runtime.device
    if "cross_attention_states" not in inspect.signature(type(hf_model.model).forward).parameters:
        return lowered
    try:
        with reporter.stage("trace images"), gc_paused():
            if (why := compile_obstacle(config)) is not None:
                raise UnsupportedModelError(why)
            adapter = SeenImagesAdapter.of(hf_model)
            tower = adapter.trace_tower(device)
            check_tower(tower, hf_model, attends_by_itself=True)
            text = adapter.trace_text(device, max_traced_tokens(config))
            check_trace(text, hf_model)
        rewriting = refusing(f"images of {hf_model.model.config.model_type!r} models cannot be rewritten")
        not_of_towers = {name: "it is for language models" for name in pass_names() if name not in OF_TOWERS}
        with reporter.stage("passes of images"), gc_paused(), rewriting:
            of_text = lowered_of(config, lowered.built, rewrite_graph(config, lowered.built, text))
            of_tower = lowered_of(config, lowered.built, rewrite_graph(config, lowered.built, tower, not_of_towers))
            sharing_pages(hf_model.model, of_text.program.cross_layers, of_text.program.layers)
    except UnsupportedModelError as error:
        reporter.announce(f"its text is served without images: {error}")
        return lowered
    (dump_dir / "images").mkdir(exist_ok=True)
    dump = GraphDumper(dump_dir / "images")
    for name, one in (("with_images", of_text), ("tower", of_tower)):
        dump(name, one.graph, f"after {len(one.reports)} passes")
    program = replace(lowered.program, images=ImagePrograms(of_text.program, of_tower.program, adapter.facts))
    return replace(lowered, program=program, of_images=(of_text, of_tower), seen_images=adapter)
