"""Turns a config, or a runtime's folder, into an opened runtime.

resolve → look (target.py) → found: open it; else compile it (compiler/build.py, imported only for that) → check that
the runtime serves this checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mllm_compile.compiler.target import Target, alike_steps, alike_target, find_target, has_alike_steps
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.config.resolution.device import check_ranks, detect_device
from mllm_compile.config.resolution.layer_checks import check_cascade_layers, check_state_dtype
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ArtifactError, CheckpointError, ConfigError, UnlikeRowsError
from mllm_compile.files.writable_place import place_of
from mllm_compile.process.progress import Reporter
from mllm_compile.process.timeline import Timeline, timeline_of
from mllm_compile.store.artifact import DRAFTER, MANIFEST, Artifact, open_artifact
from mllm_compile.store.key import DRAFT_MODEL, MACHINE_FACTORS, key_of, machine_factors
from mllm_compile.store.locks import compile_lock
from mllm_compile.store.opened import CompiledRuntime
from mllm_compile.store.publish import check_replaceable, mark_used, sweep
from mllm_compile.store.rebind import serves, serving, verified

_NO_OPTIONS = CompileOptions()


def load_or_compile(
    config: EngineConfig, reporter: Reporter | None = None, options: CompileOptions = _NO_OPTIONS
) -> CompiledRuntime:
    """Finds the cached runtime of `config`, or compiles it.

    Raises:
        MllmError: whatever makes the config, the model or the device unusable, in one clear message.
    """
    timeline = timeline_of(reporter)
    with timeline.stage("resolve"):
        target = find_target(config, options)
    target.config.report(timeline)
    artifact = _open_cached(target, timeline, timeline.note)
    was_cached = artifact is not None
    if artifact is None:
        artifact, was_cached = _compile_or_wait(config, target, options, timeline)
    if has_alike_steps(target, artifact):
        target = alike_target(config, target, options)
        if was_cached:
            timeline.note(f"{alike_steps(target.config)}, as was found when this runtime was compiled")
    target = _as_compiled(target, artifact, timeline.note if was_cached else _tell_nothing)
    place = place_of(artifact.folder, is_output=options.output is not None)
    if options.output is not None:
        artifact = serving(artifact, target.config, target.weights, place)
    if options.verify_weights:
        artifact = verified(artifact, target.weights, target.model.path, place, timeline)
    _check_positions(artifact, target.config)
    check_cascade_layers(target.config, artifact.program.layers)
    check_state_dtype(target.config, artifact.program.state_layers)
    mark_used(artifact.folder)
    root = artifact.weights_root(target.model.path)
    serves_same = serves(artifact.manifest, target.config, target.weights)
    compiled = CompiledRuntime(artifact, target.config, root, was_cached, serves_same, timeline.stages)
    if target.drafter is None:
        return compiled
    drafter = _drafter_of(target.drafter, artifact, options, timeline)
    return replace(compiled, serves_same=serves_same and drafter.serves_same, drafter=drafter)


def _as_compiled(target: Target, artifact: Artifact, tell: Callable[[str], None]) -> Target:
    """The target, without a draft model that its runtime was compiled without."""
    other = target.without_drafter
    if other is None or _has_drafter(artifact):
        return target
    method, refused = other.config.speculative.method, target.config.speculative.method
    tell(f"speculative.method is {method}: {refused} was refused when this runtime was compiled")
    return other


def _has_drafter(artifact: Artifact) -> bool:
    """False: nothing drafts for the model, or a rule chose what was refused (build.py)."""
    return artifact.manifest.resolved_config(artifact.folder).speculative.has_model


def _drafter_of(target: Target, model: Artifact, options: CompileOptions, timeline: Timeline) -> CompiledRuntime:
    """The draft model in a runtime's folder, with the weights that `target` names."""
    artifact, place = _open_drafter(model), place_of(model.folder, is_output=options.output is not None)
    if options.output is not None:
        artifact = serving(artifact, target.config, target.weights, place)
    if options.verify_weights:
        artifact = verified(artifact, target.weights, target.model.path, place, timeline)
    compiled = CompiledRuntime(
        artifact,
        target.config,
        artifact.weights_root(target.model.path),
        True,
        serves(artifact.manifest, target.config, target.weights),
    )
    if target.drafter is None:
        return compiled
    further = _drafter_of(target.drafter, artifact, options, timeline)
    return replace(compiled, serves_same=compiled.serves_same and further.serves_same, drafter=further)


def _check_drafters(model: Artifact) -> None:
    """Opens a runtime's draft model, and those that draft on from it."""
    while DRAFT_MODEL in model.factors:
        model = _open_drafter(model)


def _open_drafter(model: Artifact) -> Artifact:
    """The draft model's folder of a runtime that has one.

    Raises:
        ArtifactError: it is not the one that was compiled with the runtime.
    """
    artifact = open_artifact(model.folder / DRAFTER)
    if key_of(artifact.factors) != model.factors.get(DRAFT_MODEL):
        raise ArtifactError(f"{artifact.folder} was compiled for something else; compile the model again")
    return artifact


def open_runtime(folder: Path, reporter: Reporter | None = None) -> CompiledRuntime:
    """Opens a runtime's folder; it serves with the config that it was compiled from.

    Raises:
        ArtifactError: it is not to be trusted, damaged, or made for another machine or version.
        CheckpointError: the weights are not where they were, or not those that were compiled for.
    """
    timeline = timeline_of(reporter)
    with timeline.stage("check runtime"):
        artifact = open_artifact(folder)
        config = artifact.manifest.resolved_config(folder)
        detect_device(config.runtime.device)
        check_ranks(config.runtime)
        _check_machine(artifact, config)
        weights = artifact.manifest.weights
        root = artifact.weights_root(Path(weights.folder))
        with artifact.trusted.naming_itself():
            weights.check_headers(root)
        drafter = _stored_drafter(artifact) if config.speculative.has_model else None
    mark_used(folder)
    return CompiledRuntime(artifact, config, root, True, True, timeline.stages, drafter)


def _stored_drafter(model: Artifact) -> CompiledRuntime:
    """The draft model of a runtime that is opened by itself."""
    artifact = _open_drafter(model)
    config, weights = artifact.manifest.resolved_config(artifact.folder), artifact.manifest.weights
    root = artifact.weights_root(Path(weights.folder))
    with artifact.trusted.naming_itself():
        weights.check_headers(root)
    further = _stored_drafter(artifact) if DRAFT_MODEL in artifact.factors else None
    return CompiledRuntime(artifact, config, root, True, True, drafter=further)


def _open_cached(target: Target, timeline: Timeline, tell: Callable[[str], None]) -> Artifact | None:
    if not os.path.exists(target.folder / MANIFEST):  # also where it may not be looked: compiling says so
        return None
    try:
        with timeline.stage("check runtime"):
            artifact = open_artifact(target.folder)
            if artifact.factors != target.factors:
                raise ArtifactError(f"{target.folder} was compiled for something else; it is compiled again")
            if artifact.manifest.weights.is_packed:
                with artifact.trusted.naming_itself():
                    artifact.manifest.weights.check_headers(artifact.trusted.pinned_path)
            if target.drafter is not None and _has_drafter(artifact):
                _check_drafters(artifact)
            elif target.drafter is not None and target.without_drafter is None:
                raise ArtifactError(f"{target.folder} was compiled without a draft model; it is compiled again")
            return artifact
    except (ArtifactError, CheckpointError) as error:
        tell(f"the cached runtime is not used: {error}")
        return None


def _check_machine(artifact: Artifact, config: ResolvedConfig) -> None:
    here = machine_factors(config)
    for name in MACHINE_FACTORS:
        if artifact.factors.get(name) != here[name]:
            raise ArtifactError(
                f"{artifact.folder} was compiled for {name} {artifact.factors.get(name)!r}, here it is {here[name]!r}. "
                "Compile the model again on this machine."
            )


def _check_positions(artifact: Artifact, config: ResolvedConfig) -> None:
    if config.model.pools and any(choice.key == "runtime.max_model_len" for choice in config.choices):
        return  # such an engine takes texts that are as long as the model takes
    sizes, length = artifact.sizes, config.runtime.max_model_len
    if sizes.is_table_of_positions and length > sizes.context_len:
        raise ConfigError(
            f"runtime.max_model_len is {length}, but the model has positions for {sizes.context_len} tokens: it counts "
            f"from beyond 0 in its table. Set runtime.max_model_len: {sizes.context_len} or less."
        )
    if sizes.is_sparse_beyond and length > sizes.context_len:
        raise ConfigError(
            f"runtime.max_model_len is {length}, but the model is served up to {sizes.context_len} tokens: of longer "
            f"texts its attention reads chosen keys alone. Set runtime.max_model_len: {sizes.context_len} or less."
        )


def _compile_or_wait(
    config: EngineConfig, target: Target, options: CompileOptions, timeline: Timeline
) -> tuple[Artifact, bool]:
    """Lets one process compile a key at a time; the others wait and take the result (True)."""
    if options.output is not None:
        check_replaceable(target.folder)
        return _compile(config, target, options, timeline), False
    sweep(target.folder.parent)

    def waiting() -> None:
        timeline.announce(f"another process is compiling {target.folder.name}: waiting for it")

    with compile_lock(target.folder, waiting):
        artifact = _open_cached(target, timeline, _tell_nothing)  # what is wrong with it has been told
        if artifact is not None:
            return artifact, True
        return _compile(config, target, options, timeline), False


def _tell_nothing(text: str) -> None:
    """For what was told before."""


def _compile(config: EngineConfig, target: Target, options: CompileOptions, timeline: Timeline) -> Artifact:
    from mllm_compile.compiler.build import build_runtime

    try:
        return build_runtime(target, options, timeline)
    except UnlikeRowsError as error:
        alike = alike_target(config, target, options)
        timeline.announce(f"{alike_steps(alike.config)}: {error}")
        return build_runtime(alike, options, timeline)
