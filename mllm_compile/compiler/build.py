"""A compile: lower → plan weights → pieces and kernels → self-check → a published folder.

The modules that this one calls do the stages' work. Imported only for a compile.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mllm_compile.check.few_rows import FAMILY as FEW_ROWS_FAMILY
from mllm_compile.check.few_rows import compared, unlike_few_rows
from mllm_compile.check.pooling import check_pooling
from mllm_compile.check.program import self_check
from mllm_compile.check.rows import check_rows
from mllm_compile.check.sources import check_sources
from mllm_compile.check.tokenizer import tokenizer_difference
from mllm_compile.checkpoint.files import WeightFiles
from mllm_compile.checkpoint.pack import pack_weights
from mllm_compile.compiler.draft_model import (
    check_draft_program,
    check_hidden_sizes,
    check_tokenizers,
    check_vocabularies,
    told_of_draft_model,
)
from mllm_compile.compiler.early_pieces import EarlyPiece, compile_pieces, start_early_pieces
from mllm_compile.compiler.lora import with_lora
from mllm_compile.compiler.lowered import BuiltModel, Lowered
from mllm_compile.compiler.lowering import build_model, lower, private_inductor_cache
from mllm_compile.compiler.media import with_media
from mllm_compile.compiler.pieces import write_pieces
from mllm_compile.compiler.pooling import lower_pooling
from mllm_compile.compiler.seen_images import with_seen_images
from mllm_compile.compiler.sources import with_source
from mllm_compile.compiler.target import Target
from mllm_compile.compiler.weight_plan import plan_lowered_weights
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import CheckpointError, CompileError, UnsupportedModelError
from mllm_compile.files.json_file import read_file
from mllm_compile.inductor.workers import PieceWorkers
from mllm_compile.kernels.cpu import write_libraries
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.kernels.flashinfer import collect_kernels
from mllm_compile.media.files import PROCESSOR_FILES
from mllm_compile.process.bytecode import OF_A_COMPILE, compiled_ahead
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.attention.split.splits import IN_ORDER, OF_FEW, OF_LATENTS
from mllm_compile.runtime.config_sections import LEAST_ROWS
from mllm_compile.runtime.device.memory import give_back_unused
from mllm_compile.runtime.media.tower import MAX_FEATURES
from mllm_compile.runtime.program.pieces import PACKAGE_SUFFIX, SOURCE_SUFFIX, PieceSuffix
from mllm_compile.store.artifact import (
    BINARIES,
    DRAFTER,
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
    write_manifest,
    write_program,
)
from mllm_compile.store.explain import miss_note, nearest_runtime
from mllm_compile.store.key import check_unchanged, max_traced_tokens
from mllm_compile.store.locks import using_compiler_cache
from mllm_compile.store.publish import new_artifact_folder
from mllm_compile.text.generation_defaults import default_params, load_generation_defaults
from mllm_compile.text.tokenizer import export_tokenizer, load_tokenizer

_MAX_SLOTS = 2**31 - 1  # of a KV cache; known when it is allocated


def build_runtime(target: Target, options: CompileOptions, timeline: Timeline) -> Artifact:
    """Compiles what `target` asks for and opens it. The folder is there when it is whole, and not before.

    Raises:
        MllmError: the model cannot be compiled, or what was compiled computes something else, or disk or memory end.
    """
    folder = target.folder
    if options.output is not None and not os.path.exists(folder / MANIFEST):
        reason = "there is no runtime in this folder yet"
    else:
        reason = miss_note(target.factors, nearest_runtime(target.factors, target.config.cache.dir))
    timeline.announce(f"compiling {target.config.model.source}: {reason}. This is done once.")
    if line := target.config.line_on_cpu():
        timeline.announce(line)
    with timeline.stage("check text files"):
        _check_text(target.model.path)
    with new_artifact_folder(folder, is_output=options.output is not None) as scratch:
        target, drafter = _with_drafter(scratch / DRAFTER, target, options, timeline)
        manifest = _write(scratch, target, options, timeline)
        if drafter is not None:
            check_vocabularies(target.config, manifest.sizes.vocab_size, drafter.sizes.vocab_size)
            if drafter.program.projection is not None:
                check_hidden_sizes(target.config, manifest.sizes.hidden_size, drafter.sizes.hidden_size)
    give_back_unused(target.config.runtime.device)  # an engine of this process counts what is free
    with timeline.stage("check runtime"):
        return open_artifact(folder)


def _with_drafter(
    folder: Path, target: Target, options: CompileOptions, timeline: Timeline
) -> tuple[Target, Artifact | None]:
    """The target and its draft model, compiled into a new folder of the runtime's. One that a rule chose is left out
    with a line where it is refused; such a runtime's config names another method, under the same key."""
    if target.drafter is None:
        return target, None
    timeline.announce(f"compiling its draft model {target.drafter.config.model.source} first")
    check_tokenizers(target.config, target.model.path, target.drafter.model.path)
    try:
        return target, _write_drafter(folder, target.config, target.drafter, options, timeline)
    except (UnsupportedModelError, CheckpointError, CompileError) as error:
        other = target.without_drafter
        if other is None:
            raise
        shutil.rmtree(folder, ignore_errors=True)
        method = other.config.speculative.method
        timeline.announce(f"speculative.method is {method}, as {target.config.speculative.method} is refused: {error}")
        return other, None


def _write_drafter(
    folder: Path, config: ResolvedConfig, drafter: Target, options: CompileOptions, timeline: Timeline
) -> Artifact:
    """Compiles a draft model, which is faster than the model of `config`, and those that draft on from it, into a new
    folder of the runtime's; opens it."""
    folder.mkdir(mode=0o700)
    if drafter.drafter is not None:
        _write_drafter(folder / DRAFTER, config, drafter.drafter, options, timeline)
    with told_of_draft_model(config):
        _write(folder, drafter, options, timeline)
        artifact = open_artifact(folder)
    check_draft_program(config, artifact.sizes, artifact.program)
    return artifact


def _write(scratch: Path, target: Target, options: CompileOptions, timeline: Timeline) -> Manifest:
    """Compiles into a folder, all but a draft model; returns its manifest."""
    config, runtime = target.config, target.config.runtime
    lowered, files, suffix = _fill(scratch, target, options, timeline)
    check_unchanged(config, target.model, target.factors)
    with timeline.stage("self-check"):
        if lowered.program.pooling is not None:
            check_pooling(lowered, scratch, suffix, runtime.device)
            return _write_manifest(scratch, target, lowered, files, suffix, timeline)
        if lowered.program.source is not None:
            check_sources(lowered, scratch, suffix, runtime.device, runtime.page_size, runtime.kv_cache_dtype)
            return _write_manifest(scratch, target, lowered, files, suffix, timeline)
        types = runtime.state_dtype, runtime.kv_cache_dtype
        fault = self_check(lowered, scratch, suffix, runtime.device, runtime.page_size, *types)
    if fault is not None:
        timeline.announce(f"its text is served without images: {fault}")
        lowered = lowered.without_images()
        shutil.rmtree(scratch / WEIGHTS, ignore_errors=True)  # packed with the tower's
        files = _write_weights(scratch, target, options, lowered, timeline)
        _remove_pieces(scratch, lowered)
    return _write_manifest(scratch, target, lowered, files, suffix, timeline)


def _write_manifest(
    scratch: Path, target: Target, lowered: Lowered, files: WeightFiles, suffix: PieceSuffix, timeline: Timeline
) -> Manifest:
    manifest = Manifest(
        factors=target.factors,
        config=target.config.model_dump(mode="json"),
        sizes=lowered.hf_model.sizes(lowered.program.layers),
        piece_suffix=suffix,
        weights=files,
        about=_about(lowered, timeline),
        files=hash_files(scratch),
    )
    write_manifest(scratch, manifest)
    return manifest


def _fill(
    scratch: Path, target: Target, options: CompileOptions, timeline: Timeline
) -> tuple[Lowered, WeightFiles, PieceSuffix]:
    """Writes all but the manifest; returns what was lowered, the weights' files, and the suffix of pieces that run."""
    config, model = target.config, target.model
    with (
        TemporaryDirectory(dir=scratch) as folder,  # left when the workers, which write into it, have ended
        private_inductor_cache(Path(folder)),
        _workers(config, Path(folder)) as workers,
        KernelCompiler() as compiler,
    ):
        built = build_model(config, model, timeline)
        (scratch / GRAPHS).mkdir()
        early: dict[str, EarlyPiece] = {}
        if config.model.pools:
            lowered = lower_pooling(config, built, model, scratch / GRAPHS, timeline)
        else:
            early = _start_early_pieces(config, built, workers, compiler, Path(folder), timeline)
            lowered = with_media(config, lower(config, built, scratch / GRAPHS, timeline), scratch / GRAPHS, timeline)
            lowered = with_lora(config, lowered, scratch / GRAPHS, timeline)
            lowered = with_source(config, lowered, scratch / GRAPHS, timeline)
            lowered = with_seen_images(config, lowered, scratch / GRAPHS, timeline)
        if config.runtime.any_rows:
            with timeline.stage("try rows"):
                check_rows(lowered.graph, config.runtime.device)
                lowered = _with_alike_rows(config, lowered, compiler, timeline)
        files = _write_weights(scratch, target, options, lowered, timeline)
        _export_text(model, scratch, config)
        _compare_tokenizers(model, scratch / TOKENIZER, config, timeline)
        return lowered, files, _build_pieces(config, lowered, scratch, workers, compiler, early, timeline)


def _with_alike_rows(config: ResolvedConfig, lowered: Lowered, compiler: KernelCompiler, timeline: Timeline) -> Lowered:
    """The program without the kernels of few rows where one of them adds up in another order than products of many."""
    kernels = compared(lowered.program.kernels)
    if not kernels:
        return lowered
    binaries = compiler.binaries(kernel for members in kernels.values() for kernel in members)
    unlike = unlike_few_rows(kernels, binaries, config.runtime.device)
    if unlike is None:
        return lowered
    timeline.announce(f"deterministic steps have at least {LEAST_ROWS} rows: {unlike} differs by kernels of few rows")
    left = {name: members for name, members in lowered.program.kernels.items() if name != FEW_ROWS_FAMILY}
    return replace(lowered, program=replace(lowered.program, kernels=left))


def _write_weights(
    scratch: Path, target: Target, options: CompileOptions, lowered: Lowered, timeline: Timeline
) -> WeightFiles:
    """Writes the program, and the weights if they are to be packed; returns their files."""
    with timeline.stage("plan weights"):
        constants, weights, names = plan_lowered_weights(lowered)
        files = target.weights
    if options.pack_weights:
        names = replace(names, checkpoint=weights)
        weights, files = pack_weights(target.config, weights, target.model.path, scratch / WEIGHTS, timeline)
    write_program(scratch, lowered.program, weights, constants, names)
    return files


def _remove_pieces(scratch: Path, lowered: Lowered) -> None:
    """Removes the pieces that the program does not call."""
    called = set(lowered.program.every_piece_id())
    for path in (scratch / PIECES).iterdir():
        if path.name.partition(".")[0] not in called:
            path.unlink()


def _about(lowered: Lowered, timeline: Timeline) -> dict[str, Any]:
    return {
        "compiled": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "stages": timeline.stages,
        "passes": [asdict(report) for report in lowered.reports],
        "passes left out": dict(lowered.left_out),
        "ranks": lowered.cut_lines(),
    }


def _check_text(folder: Path) -> None:
    """Loads what an engine will load, so that a broken file is found before the time that a compile takes.

    Raises:
        CheckpointError, ConfigError: one is.
    """
    load_tokenizer(folder)
    default_params(load_generation_defaults(folder), folder)


def _export_text(model: ModelFolder, scratch: Path, config: ResolvedConfig) -> None:
    """Writes the tokenizer, the processor's files beside it, and copies of the model's own config files."""
    tokenizer = scratch / TOKENIZER
    tokenizer.mkdir()
    places = [(name, scratch) for name in ("config.json", "generation_config.json")]
    if export_tokenizer(model.path, tokenizer, trust_remote_code=config.model.trust_remote_code):
        places += [(name, tokenizer) for name in PROCESSOR_FILES]
    else:
        tokenizer.rmdir()
    for name, folder in places:
        if (data := read_file(model.path / name, CheckpointError)) is not None:
            (folder / name).write_bytes(data)


def _compare_tokenizers(model: ModelFolder, exported: Path, config: ResolvedConfig, timeline: Timeline) -> None:
    """Warns where Transformers reads texts otherwise than what was exported, which is served."""
    tokenizer = load_tokenizer(exported) if exported.is_dir() else None
    if tokenizer is None:
        return
    with timeline.stage("compare tokenizers"):
        difference = tokenizer_difference(model.path, tokenizer, trust_remote_code=config.model.trust_remote_code)
    if difference is not None:
        timeline.announce(difference)


@contextmanager
def _workers(config: ResolvedConfig, scratch: Path) -> Iterator[PieceWorkers | None]:
    """Starts the compiler process, before all else, so that its imports overlap with the trace."""
    if config.compile.backend == "eager":
        yield None
        return
    largest = max_traced_tokens(config)
    most_splits = max(splits.most for splits in (IN_ORDER, OF_FEW, OF_LATENTS))
    sizes = {"T": largest, "S": largest, "L": largest, "P": _MAX_SLOTS, "W": _MAX_SLOTS, "N": most_splits}
    sizes |= {"M": largest, "R": _MAX_SLOTS, "C": _MAX_SLOTS, "B": largest}
    sizes |= {"F": MAX_FEATURES, "G": MAX_FEATURES}
    with (
        compiled_ahead(OF_A_COMPILE),
        using_compiler_cache(config.cache.dir) as folder,
        PieceWorkers(config.runtime.device, sizes, folder, scratch) as workers,
    ):
        yield workers


def _start_early_pieces(
    config: ResolvedConfig,
    built: BuiltModel,
    workers: PieceWorkers | None,
    compiler: KernelCompiler,
    folder: Path,
    timeline: Timeline,
) -> dict[str, EarlyPiece]:
    if workers is None:
        return {}
    return start_early_pieces(config, built, workers, compiler, folder, timeline)


def _build_pieces(
    config: ResolvedConfig,
    lowered: Lowered,
    scratch: Path,
    workers: PieceWorkers | None,
    compiler: KernelCompiler,
    early: Mapping[str, EarlyPiece],
    timeline: Timeline,
) -> PieceSuffix:
    """Writes every distinct piece, and beside that the kernels; returns the suffix of the files that run."""
    (scratch / PIECES).mkdir()
    jobs = write_pieces(lowered, scratch / PIECES)
    with _kernels(config, lowered, scratch, compiler, timeline):
        if workers is None:
            return SOURCE_SUFFIX
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
    """Builds kernels that the pieces and the engine call, beside the pieces.

    Attention's are built by nvcc, or only copied where FlashInfer has them. The program's own are built by NVRTC, and
    its C++ for the CPU.
    """
    with ThreadPoolExecutor(2, thread_name_prefix="kernels") as threads:
        running = []
        if config.runtime.attention_backend == "flashinfer":
            running.append(threads.submit(collect_kernels, config, lowered.program, scratch / KERNELS, timeline))
        own, libraries = lowered.program.every_cuda_kernel(), lowered.program.every_library()
        if own or libraries:
            (scratch / BINARIES).mkdir()
        if own:
            running.append(threads.submit(compiler.write, own, scratch / BINARIES, timeline))
        if libraries:
            running.append(threads.submit(write_libraries, config, libraries, scratch / BINARIES, timeline))
        yield
        for built in running:
            built.result()
