"""The compiler's driver: a config, or a runtime's folder, becomes an opened runtime.

resolve → (found? done) → lower → plan weights → pieces and kernels → self-check → publish. The stages' own work is in
the modules that this one calls; all that only a compile needs is imported when there is one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mllm_compile.artifact import (
    CUBINS,
    GRAPHS,
    KERNELS,
    MANIFEST,
    PIECES,
    TOKENIZER,
    WEIGHTS,
    Artifact,
    Manifest,
    hash_files,
    open_artifact,
    read_manifest,
    write_manifest,
    write_program,
)
from mllm_compile.artifact_store import (
    check_replaceable,
    compile_lock,
    mark_used,
    new_artifact_folder,
    runtimes_folder,
    sweep,
    using_compiler_cache,
)
from mllm_compile.bytecode import OF_A_COMPILE, compiled_ahead
from mllm_compile.cache_key import (
    MACHINE_FACTORS,
    PACKED_WEIGHTS,
    key_factors,
    key_of,
    machine_factors,
    max_traced_tokens,
)
from mllm_compile.compile_options import CompileOptions
from mllm_compile.config import EngineConfig
from mllm_compile.device_info import detect_device
from mllm_compile.errors import ArtifactError, CheckpointError, CompileError, ConfigError
from mllm_compile.explain import miss_note, nearest_runtime
from mllm_compile.model_folder import ModelFolder, open_model_folder
from mllm_compile.progress import Reporter
from mllm_compile.resolve import resolve
from mllm_compile.resolved import ResolvedConfig
from mllm_compile.runtime.device_memory import give_back_unused
from mllm_compile.runtime.pieces import PACKAGE_SUFFIX, SOURCE_SUFFIX
from mllm_compile.runtime.split_decode_shapes import OF_FEW
from mllm_compile.served_checkpoint import serves, serving, verified
from mllm_compile.timeline import Timeline, timeline_of
from mllm_compile.weight_files import WeightFiles, data_identity, weight_files
from mllm_compile.writable_place import place_of

if TYPE_CHECKING:
    from mllm_compile.cuda_kernels import KernelCompiler
    from mllm_compile.early_pieces import EarlyPiece
    from mllm_compile.hf_model import HFModel
    from mllm_compile.lowering import Lowered
    from mllm_compile.passes.pipeline import PassReport
    from mllm_compile.piece_workers import PieceWorkers


_NO_OPTIONS = CompileOptions()
_MAX_SLOTS = 2**31 - 1  # of a KV cache; known when it is allocated


@dataclass(frozen=True)
class CompiledRuntime:
    """A runtime that is ready to be loaded, and how it came about.

    Attributes:
        artifact: the opened folder.
        config: the config with no `auto` left.
        weights_root: the folder that weights are read from.
        was_cached: nothing had to be compiled.
        serves_same: the folder, opened by itself, serves with this very config and checkpoint.
        stages: (name, seconds), in order.
    """

    artifact: Artifact
    config: ResolvedConfig
    weights_root: Path
    was_cached: bool
    serves_same: bool
    stages: list[tuple[str, float]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.artifact.folder

    @property
    def num_pieces(self) -> int:
        return sum(hasattr(step, "piece") for step in self.artifact.program.steps)

    @property
    def num_distinct_pieces(self) -> int:
        return len(self.artifact.program.step_pieces())


@dataclass(frozen=True)
class Target:
    """What a config asks for, and where that lies or would lie."""

    config: ResolvedConfig
    model: ModelFolder
    weights: WeightFiles
    factors: Mapping[str, str]
    folder: Path


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
        artifact, was_cached = _compile_or_wait(target, options, timeline)
    place = place_of(artifact.folder, is_output=options.output is not None)
    if options.output is not None:
        artifact = serving(artifact, target.config, target.weights, place)
    if options.verify_weights:
        artifact = verified(artifact, target.weights, target.model.path, place, timeline)
    mark_used(artifact.folder)
    root = artifact.folder if artifact.manifest.weights.is_packed else target.model.path
    serves_same = serves(artifact.manifest, target.config, target.weights)
    return CompiledRuntime(artifact, target.config, root, was_cached, serves_same, _seconds(timeline))


def open_runtime(folder: Path, reporter: Reporter | None = None) -> CompiledRuntime:
    """Opens a runtime's folder; what it serves with is the config that it was compiled from.

    Raises:
        ArtifactError: it is not to be trusted, damaged, or made for another machine or version.
        CheckpointError: the weights are not where they were, or not those that were compiled for.
    """
    timeline = timeline_of(reporter)
    with timeline.stage("check runtime"):
        artifact = open_artifact(folder)
        try:
            config = ResolvedConfig.model_validate(artifact.manifest.config)
        except ValueError as error:
            raise ArtifactError(f"{folder}: its config is not one that this version writes ({error})") from None
        detect_device(config.runtime.device)
        _check_machine(artifact, config)
        weights = artifact.manifest.weights
        root = folder if weights.is_packed else Path(weights.folder)
        weights.check_headers(root)
    mark_used(folder)
    return CompiledRuntime(artifact, config, root, True, True, _seconds(timeline))


def find_target(config: EngineConfig, options: CompileOptions = _NO_OPTIONS) -> Target:
    """Resolves a config and computes its key; compiles nothing.

    A runtime that holds the weights of this checkpoint serves it also where that is not asked for.
    """
    model = open_model_folder(config.model)
    resolved = resolve(config, model, detect_device(config.runtime.device))
    _check_pass_names(resolved)
    weights = weight_files(model.path, model.weight_files)
    factors = key_factors(resolved, model, weights)
    packed = factors | {PACKED_WEIGHTS: data_identity(model.weight_files)}
    # Absolute: compilers run in other folders, and look for a relative one in caches of their own.
    output = None if options.output is None else options.output.absolute()
    folder = output or _cached_folder(resolved, model, packed)
    if options.pack_weights or _is_of(folder, packed):
        return Target(resolved, model, weights, packed, folder)
    return Target(resolved, model, weights, factors, output or _cached_folder(resolved, model, factors))


def _is_of(folder: Path, factors: Mapping[str, str]) -> bool:
    """Whether a runtime lies there that was compiled for these factors, as far as its manifest can be read."""
    try:
        return os.path.exists(folder / MANIFEST) and read_manifest(folder).factors == factors
    except ArtifactError:  # opening it says why
        return False


def inspect_model(config: EngineConfig, out_dir: Path, reporter: Reporter | None = None) -> list[PassReport]:
    """Writes the graph before and after every pass, and the program with its pieces, as numbered text files.

    Those of an earlier call are removed from the folder first; other files stay.

    Returns:
        One report a pass.

    Raises:
        ConfigError: the folder cannot be made; and as find_target.
    """
    from mllm_compile.lowering import build_model, lower, remove_graph_texts

    timeline = timeline_of(reporter)
    with timeline.stage("resolve"):
        target = find_target(config)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out_dir} cannot be made ({error.strerror}). Give another folder.") from error
    remove_graph_texts(out_dir)
    program_text = out_dir / "program.txt"
    program_text.unlink(missing_ok=True)
    lowered = lower(target.config, build_model(target.config, target.model, timeline), out_dir, timeline)
    lines = [step_line(step) for step in lowered.program.to_json()["steps"]]
    program_text.write_text("\n".join([*lines, f"logits = {lowered.program.output}", ""]), encoding="utf-8")
    return lowered.reports


def step_line(step: Mapping[str, Any]) -> str:
    """A step of program.json for people."""
    if step["op"] == "piece":
        return f"{', '.join(step['outputs'])} = {step['piece']}({', '.join(step['inputs'])})"
    unrotated = step["unrotated"]
    told = "" if unrotated is None else f", or, rotating itself, {', '.join(unrotated['values'])}"
    return f"{step['out']} = attention[{step['layer']}]({step['q']}, {step['k']}, {step['v']}{told})"


# Finding --------------------------------------------------------------------------------------------------------------


def _cached_folder(config: ResolvedConfig, model: ModelFolder, factors: Mapping[str, str]) -> Path:
    """Readable name, then the key. The name is the model's type: a hit must not depend on where the model lies."""
    kind = str(model.config.get("model_type", "model"))
    slug = "".join(c if c.isalnum() or c in "-_" else "-" for c in kind)
    return runtimes_folder(config.cache.dir) / f"{slug}-{key_of(factors)}"


def _check_pass_names(config: ResolvedConfig) -> None:
    if not config.compile.disable_passes:
        return
    from difflib import get_close_matches

    from mllm_compile.passes.pipeline import optional_pass_names

    known = optional_pass_names()
    for name in config.compile.disable_passes:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"compile.disable_passes: {name!r} is not a pass that can be left out; these can: {', '.join(known)}."
                f"{hint}"
            )


def _open_cached(target: Target, timeline: Timeline, tell: Callable[[str], None]) -> Artifact | None:
    if not os.path.exists(target.folder / MANIFEST):  # also where it may not be looked: compiling says so
        return None
    try:
        with timeline.stage("check runtime"):
            artifact = open_artifact(target.folder)
            if artifact.factors != target.factors:
                raise ArtifactError(f"{target.folder} was compiled for something else; it is compiled again")
            if artifact.manifest.weights.is_packed:
                artifact.manifest.weights.check_headers(target.folder)
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


def _seconds(timeline: Timeline) -> list[tuple[str, float]]:
    return [(span.name, span.seconds) for span in timeline.spans if span.depth == 0]


# Compiling ------------------------------------------------------------------------------------------------------------


def _compile_or_wait(target: Target, options: CompileOptions, timeline: Timeline) -> tuple[Artifact, bool]:
    """One process compiles a key at a time; the others wait and take what it made (True)."""
    if options.output is not None:
        check_replaceable(target.folder)
        return _compile(target, options, timeline), False
    sweep(target.folder.parent)

    def waiting() -> None:
        timeline.announce(f"another process is compiling {target.folder.name}: waiting for it")

    with compile_lock(target.folder, waiting):
        artifact = _open_cached(target, timeline, lambda text: None)  # what is wrong with it has been told
        if artifact is not None:
            return artifact, True
        return _compile(target, options, timeline), False


def _compile(target: Target, options: CompileOptions, timeline: Timeline) -> Artifact:
    config, folder = target.config, target.folder
    if options.output is not None and not os.path.exists(folder / MANIFEST):
        reason = "there is no runtime in this folder yet"
    else:
        reason = miss_note(target.factors, _nearest(target))
    timeline.announce(f"compiling {config.model.source} into {folder}: {reason}. This is done once.")
    with timeline.stage("check text files"):
        _check_text(target.model.path)
    with new_artifact_folder(folder, is_output=options.output is not None) as scratch:
        lowered, files, suffix = _fill(scratch, target, options, timeline)
        with timeline.stage("self-check"):
            from mllm_compile.self_check import self_check

            self_check(lowered, scratch, suffix, config.runtime.device, config.runtime.page_size)
        manifest = Manifest(
            factors=target.factors,
            config=config.model_dump(mode="json"),
            sizes=lowered.hf_model.sizes(lowered.program.layers),
            piece_suffix=suffix,
            weights=files,
            about=_about(lowered, timeline),
            files=hash_files(scratch),
        )
        write_manifest(scratch, manifest)
    del lowered  # with the self-check's weights: an engine of this process counts what is free
    give_back_unused(config.runtime.device)
    with timeline.stage("check runtime"):
        return open_artifact(folder)


def _fill(
    scratch: Path, target: Target, options: CompileOptions, timeline: Timeline
) -> tuple[Lowered, WeightFiles, str]:
    """Writes all but the manifest; returns what was lowered, the weights' files, and the suffix of pieces that run."""
    config, model = target.config, target.model
    from mllm_compile.cuda_kernels import KernelCompiler

    with (
        TemporaryDirectory(dir=scratch) as folder,  # left when the workers, which write into it, have ended
        _workers(config, Path(folder)) as workers,
        KernelCompiler() as compiler,
    ):
        from mllm_compile.lowering import build_model, lower, plan_lowered_weights

        hf_model = build_model(config, model, timeline)
        early = _start_early_pieces(config, hf_model, workers, compiler, Path(folder), timeline)
        (scratch / GRAPHS).mkdir()
        lowered = lower(config, hf_model, scratch / GRAPHS, timeline)
        with timeline.stage("plan weights"):
            constants, weights = plan_lowered_weights(config, model, lowered)
            files = target.weights
        if options.pack_weights:
            from mllm_compile.weight_packing import pack_weights

            weights, files = pack_weights(config, weights, model.path, scratch / WEIGHTS, timeline)
        write_program(scratch, lowered.program, weights, constants)
        _export_text(model, scratch, config)
        return lowered, files, _build_pieces(config, lowered, scratch, workers, compiler, early, timeline)


def _nearest(target: Target) -> Manifest | None:
    return nearest_runtime(target.factors, target.config.cache.dir)


def _about(lowered: Lowered, timeline: Timeline) -> dict[str, Any]:
    return {
        "compiled": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "stages": _seconds(timeline),
        "passes": [asdict(report) for report in lowered.reports],
    }


def _check_text(folder: Path) -> None:
    """Loads what an engine will: a file that is broken is found before the time that a compile takes.

    Raises:
        CheckpointError, ConfigError: one is.
    """
    from mllm_compile.generation_defaults import default_params, load_generation_defaults
    from mllm_compile.tokenizer import load_tokenizer

    load_tokenizer(folder)
    default_params(load_generation_defaults(folder), folder)


def _export_text(model: ModelFolder, scratch: Path, config: ResolvedConfig) -> None:
    """The tokenizer, and the model's own config files for whoever reads the folder."""
    from mllm_compile.tokenizer import export_tokenizer

    tokenizer = scratch / TOKENIZER
    tokenizer.mkdir()
    if not export_tokenizer(model.path, tokenizer, trust_remote_code=config.model.trust_remote_code):
        tokenizer.rmdir()
    for name in ("config.json", "generation_config.json"):
        if (model.path / name).is_file():
            (scratch / name).write_bytes((model.path / name).read_bytes())


@contextmanager
def _workers(config: ResolvedConfig, scratch: Path) -> Iterator[PieceWorkers | None]:
    """The compiler process, started first of all so that its imports overlap with the trace."""
    if config.compile.backend == "eager":
        yield None
        return
    from mllm_compile.piece_workers import PieceWorkers

    largest = max_traced_tokens(config)
    sizes = {"T": largest, "S": largest, "L": largest, "P": _MAX_SLOTS, "W": _MAX_SLOTS, "N": OF_FEW.most}
    sizes |= {"M": largest, "R": _MAX_SLOTS, "C": _MAX_SLOTS}
    with (
        compiled_ahead(OF_A_COMPILE),
        using_compiler_cache(config.cache.dir) as folder,
        PieceWorkers(config.runtime.device, sizes, folder, scratch) as workers,
    ):
        yield workers


def _start_early_pieces(
    config: ResolvedConfig,
    hf_model: HFModel,
    workers: PieceWorkers | None,
    compiler: KernelCompiler,
    folder: Path,
    timeline: Timeline,
) -> dict[str, EarlyPiece]:
    if workers is None:
        return {}
    from mllm_compile.early_pieces import start_early_pieces

    return start_early_pieces(config, hf_model, workers, compiler, folder, timeline)


def _build_pieces(
    config: ResolvedConfig,
    lowered: Lowered,
    scratch: Path,
    workers: PieceWorkers | None,
    compiler: KernelCompiler,
    early: Mapping[str, EarlyPiece],
    timeline: Timeline,
) -> str:
    """Writes every distinct piece, and beside that the kernels; returns the suffix of the files that run."""
    from mllm_compile.lowering import write_pieces

    (scratch / PIECES).mkdir()
    jobs = write_pieces(lowered, scratch / PIECES)
    with _kernels(config, lowered, scratch, compiler, timeline):
        if workers is None:
            return SOURCE_SUFFIX
        from mllm_compile.early_pieces import compile_pieces

        with timeline.stage("compile pieces", total=len(jobs)) as stage:
            compile_pieces(jobs, early, workers, stage.advance)
    for job in jobs:
        if not job.package_path.is_file():
            raise CompileError(f"piece {job.piece}: Inductor reported success but wrote no package")
    return PACKAGE_SUFFIX


@contextmanager
def _kernels(
    config: ResolvedConfig, lowered: Lowered, scratch: Path, compiler: KernelCompiler, timeline: Timeline
) -> Iterator[None]:
    """Builds beside the pieces what they and the engine call: attention's kernels by nvcc (or only copied, where
    FlashInfer has them), the program's own by NVRTC."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2, thread_name_prefix="kernels") as threads:
        running = []
        if config.runtime.attention_backend == "flashinfer":
            from mllm_compile.attention_kernels import collect_kernels

            running.append(threads.submit(collect_kernels, config, lowered.program, scratch / KERNELS, timeline))
        own = lowered.program.cuda_kernels()
        if own:
            (scratch / CUBINS).mkdir()
            running.append(threads.submit(compiler.write, own, scratch / CUBINS, timeline))
        yield
        for built in running:
            built.result()
