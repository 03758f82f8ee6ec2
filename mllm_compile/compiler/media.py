"""The programs for images and sounds of a model that takes some: its towers, and its text with features in place of
embeddings.

They are traced apart from the program for text, which stays as it is; pieces that are alike are shared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mllm_compile.compiler.graph_text import GraphDumper
from mllm_compile.compiler.lowered import Lowered
from mllm_compile.compiler.rewriting import lowered_of, rewrite_graph
from mllm_compile.config.folders.hub import SPEECH_FOLDER
from mllm_compile.config.folders.own_adapters import CONFIG_FILE, HAS_OWN
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.refusals import refusing
from mllm_compile.process.no_gc import gc_paused
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.program.spec import MediaPrograms
from mllm_compile.store.key import max_traced_tokens

if TYPE_CHECKING:
    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.model.towers.adapter import TowerAdapter
    from mllm_compile.model.trace import Trace


def with_media(config: ResolvedConfig, lowered: Lowered, dump_dir: Path, reporter: Reporter) -> Lowered:
    """Adds the programs for images and sounds; the same where the model has no tower of a protocol that is served (with
    an announcement where it has one that is nearly so). Ranks have parts of the text with features as of the text, and
    towers whole.

    Args:
        dump_dir: gets a text file for each graph after its passes.

    Raises:
        CompileError: a pass failed.
    """
    from mllm_compile.passes.pipeline import OF_TOWERS, pass_names

    built, hf_model, device = lowered.built, lowered.hf_model, config.runtime.device
    found = _adapters(hf_model, reporter)
    if found and config.runtime.pipeline_parallel_size > 1:
        reporter.announce("its text is served without images and sounds: runtime.pipeline_parallel_size is set")
        return lowered
    found = [one for one in found if _has_its_adapter(config, one, reporter)]
    with reporter.stage("trace images"), gc_paused():
        traced = [(one, trace) for one in found if (trace := _tower_trace(one, hf_model, device, reporter)) is not None]
        if not traced:
            return lowered
        adapters = tuple(one for one, _ in traced)
        text = _text_trace(config, adapters[0], hf_model, reporter)
        if text is None:
            return lowered
    not_of_towers = {name: "it is for language models" for name in pass_names() if name not in OF_TOWERS}
    rewriting = refusing(f"images of {hf_model.model.config.model_type!r} models cannot be rewritten")
    with reporter.stage("passes of images"), gc_paused(), rewriting:
        with_features = lowered_of(config, built, rewrite_graph(config, built, text))
        rewritten = [rewrite_graph(config, built, trace, not_of_towers) for _, trace in traced]
        of_towers = [lowered_of(config, built, one) for one in rewritten]
    if with_features.cuts != lowered.cuts:
        other = next(iter(set(with_features.cuts.items()) ^ set(lowered.cuts.items())))[0]
        reporter.announce(
            f"its text is served without {_nouns(adapters)}: over ranks {other!r} would be cut otherwise beside them"
        )
        return lowered
    dump = GraphDumper(dump_dir / "images")
    (dump_dir / "images").mkdir(exist_ok=True)
    for name, one in zip(("with_features", "tower", "sound_tower"), (with_features, *of_towers), strict=False):
        dump(name, one.graph, f"after {len(one.reports)} passes")
    facts = adapters[0].facts if len(adapters) == 1 else replace(adapters[0].facts, sound=adapters[1].facts)
    towers = [one.program for one in of_towers]
    programs = MediaPrograms(with_features.program, towers[0], facts, *towers[1:])
    program = replace(lowered.program, media=programs)
    return replace(lowered, program=program, of_media=(with_features, *of_towers), adapters=adapters)


def _adapters(hf_model: HFModel, reporter: Reporter) -> list[TowerAdapter]:
    """The model's adapters, that of images first; those that cannot be served are announced."""
    from mllm_compile.model.towers.find import sound_adapter, tower_adapter

    found = []
    for noun, find in (("image", tower_adapter), ("sound", sound_adapter)):
        try:
            with refusing(f"{noun}s of {hf_model.model.config.model_type!r} models cannot be served"):
                adapter = find(hf_model)
        except UnsupportedModelError as error:
            reporter.announce(f"its text is served without {noun}s: {error}")
            continue
        found += [] if adapter is None else [adapter]
    return found


def _has_its_adapter(config: ResolvedConfig, adapter: TowerAdapter, reporter: Reporter) -> bool:
    """True unless the config says that an adapter computes prompts with what the tower takes, and it is not there. That
    is announced; so is one that is not there where it may be merged."""
    if adapter.facts.noun != "sound" or config.lora.of_sounds:
        return True
    if adapter.has_adapter_apart:
        reporter.announce(
            f"its sounds are computed without an adapter: {config.model.folder} has no {SPEECH_FOLDER}/{CONFIG_FILE}. "
            "Bring that folder, unless the adapter is merged into the weights"
        )
        return True
    if not getattr(adapter.hf_model.model.config, HAS_OWN, False):
        return True
    reporter.announce(
        f"its text is served without sounds: its config says {HAS_OWN}, and {config.model.folder} has no "
        f"{CONFIG_FILE}: an adapter computes prompts with sounds. Bring it and adapter_model.safetensors, or set "
        f"{HAS_OWN} to false where it is merged into the weights"
    )
    return False


def _tower_trace(adapter: TowerAdapter, hf_model: HFModel, device: str, reporter: Reporter) -> Trace | None:
    """The trace of a tower; None: it is announced why it is not served."""
    from mllm_compile.model.supported import check_tower

    noun = adapter.facts.noun
    try:
        tower = adapter.trace_tower(device)
        check_tower(tower, hf_model, noun, adapter.attends_by_itself)
    except UnsupportedModelError as error:
        reporter.announce(f"its text is served without {noun}s: {error}")
        return None
    return tower


def _text_trace(config: ResolvedConfig, adapter: TowerAdapter, hf_model: HFModel, reporter: Reporter) -> Trace | None:
    """The trace of the text with features; None: it is announced why it is not served."""
    from mllm_compile.model.supported import check_trace

    try:
        text = adapter.trace_text(config.runtime.device, max_traced_tokens(config))
        check_trace(text, hf_model)
    except UnsupportedModelError as error:
        reporter.announce(f"its text is served without {adapter.facts.noun}s: {error}")
        return None
    return text


def _nouns(adapters: Sequence[TowerAdapter]) -> str:
    return " and ".join(f"{one.facts.noun}s" for one in adapters)
