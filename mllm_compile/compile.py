"""The compiler's driver: a config becomes a cached runtime, by stages that can each be looked at.

resolve → (found? done) → build on meta → trace → gate → passes → pieces → self-check → publish. The stages' own work is
in the modules that this one calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.artifact import (
    GRAPHS,
    PIECES,
    TOKENIZER,
    Artifact,
    new_artifact_folder,
    open_artifact,
    write_manifest,
    write_program,
)
from mllm_compile.cache_key import key_factors, key_of, max_traced_tokens
from mllm_compile.config import EngineConfig
from mllm_compile.device_info import detect_device
from mllm_compile.errors import ArtifactError, CompileError, ConfigError
from mllm_compile.model_folder import ModelFolder, check_remote_code, open_model_folder
from mllm_compile.progress import NullReporter, Reporter
from mllm_compile.resolve import ResolvedConfig, resolve
from mllm_compile.runtime.pieces import PACKAGE_SUFFIX, SOURCE_SUFFIX
from mllm_compile.runtime.program import Program

if TYPE_CHECKING:
    from torch import fx

    from mllm_compile.hf_model import HFModel
    from mllm_compile.passes.base import PackedPart
    from mllm_compile.passes.pipeline import PassReport
    from mllm_compile.piece_workers import PieceWorkers


@dataclass(frozen=True)
class CompiledRuntime:
    """A runtime that is ready to be loaded, and how it came about.

    Attributes:
        artifact: the opened folder.
        config: the config with no `auto` left.
        model: the model folder that weights are read from.
        was_cached: nothing had to be compiled.
        stages: (name, seconds), in order.
    """

    artifact: Artifact
    config: ResolvedConfig
    model: ModelFolder
    was_cached: bool
    stages: list[tuple[str, float]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.artifact.folder

    @property
    def num_pieces(self) -> int:
        return sum(hasattr(step, "piece") for step in self.artifact.program.steps)

    @property
    def num_distinct_pieces(self) -> int:
        return len(self.artifact.program.piece_ids())


def load_or_compile(config: EngineConfig, reporter: Reporter | None = None) -> CompiledRuntime:
    """Finds the cached runtime of `config`, or compiles it.

    Raises:
        MllmError: whatever makes the config, the model or the device unusable, in one clear message.
    """
    stages = _Stages(reporter or NullReporter())
    with stages("resolve"):
        device = detect_device(config.runtime.device)
        model = open_model_folder(config.model)
        resolved = resolve(config, model, device)
        _check_pass_names(resolved)
        factors = key_factors(resolved, model)
        folder = runtime_folder(resolved, factors)
    resolved.report(stages.reporter)
    artifact = _open_cached(folder, stages)
    was_cached = artifact is not None
    if artifact is None:
        stages.reporter.note(f"no cached runtime fits: compiling {resolved.model.source} into {folder}")
        artifact = _compile(resolved, model, factors, folder, stages)
    return CompiledRuntime(artifact, resolved, model, was_cached, stages.seconds)


def runtime_folder(config: ResolvedConfig, factors: dict[str, str]) -> Path:
    """Where the runtime of these factors lies: readable name, then the key."""
    slug = "".join(c if c.isalnum() or c in "-._" else "-" for c in Path(config.model.source).name) or "model"
    return Path(config.cache.dir) / "runtimes" / f"{slug}-{key_of(factors)}"


def inspect_model(config: EngineConfig, out_dir: Path, reporter: Reporter | None = None) -> list[PassReport]:
    """Writes the graph before and after every pass, and the program with its pieces, as numbered text files.

    Returns:
        One report a pass.
    """
    stages = _Stages(reporter or NullReporter())
    with stages("resolve"):
        model = open_model_folder(config.model)
        resolved = resolve(config, model, detect_device(config.runtime.device))
        _check_pass_names(resolved)
    out_dir.mkdir(parents=True, exist_ok=True)
    lowered = _lower(resolved, model, out_dir, stages)
    lines = [_step_line(step) for step in lowered.program.to_json()["steps"]]
    (out_dir / "program.txt").write_text(
        "\n".join([*lines, f"logits = {lowered.program.output}", ""]), encoding="utf-8"
    )
    return lowered.reports


@dataclass(frozen=True)
class _Lowered:
    """A model after the passes."""

    hf_model: HFModel
    graph: fx.GraphModule
    program: Program
    reports: list[PassReport]
    symbols: dict[str, str]  # the trace's size symbols → T, S

    @property
    def packed(self) -> dict[str, tuple[PackedPart, ...]]:
        from mllm_compile.passes.base import PACKED_WEIGHTS

        return self.graph.meta.get(PACKED_WEIGHTS, {})


class _Stages:
    """Times stages and shows them."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str, total: int | None = None) -> Iterator[Any]:
        start = time.perf_counter()
        with self.reporter.stage(name, total) as stage:
            yield stage
        self.seconds.append((name, time.perf_counter() - start))


def _check_pass_names(config: ResolvedConfig) -> None:
    from difflib import get_close_matches

    from mllm_compile.passes.pipeline import optional_pass_names

    known = optional_pass_names()
    for name in config.compile.disable_passes:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"compile.disable_passes: {name!r} is not a pass that can be left out; these can: {', '.join(known)}.{hint}"
            )


def _open_cached(folder: Path, stages: _Stages) -> Artifact | None:
    if not folder.exists():
        return None
    try:
        with stages("check runtime"):
            return open_artifact(folder)
    except ArtifactError as error:
        stages.reporter.note(f"the cached runtime is not used: {error}")
        return None


def _compile(
    config: ResolvedConfig, model: ModelFolder, factors: dict[str, str], folder: Path, stages: _Stages
) -> Artifact:
    with _workers(config) as workers, new_artifact_folder(folder) as scratch:
        (scratch / GRAPHS).mkdir()
        lowered = _lower(config, model, scratch / GRAPHS, stages)
        with stages("plan weights"):
            constants, weights = _plan_weights(config, model, lowered)
            write_program(scratch, lowered.program, weights, constants)
            _export_text(model, scratch, config)
        suffix = _build_pieces(config, lowered, scratch / PIECES, workers, stages)
        with stages("self-check"):
            from mllm_compile.self_check import self_check

            self_check(
                lowered.hf_model, lowered.program, scratch / PIECES, suffix, lowered.packed, config.runtime.device
            )
        about = {"stages": stages.seconds, "passes": [asdict(report) for report in lowered.reports]}
        write_manifest(scratch, factors, lowered.hf_model.sizes(), suffix, about)
    with stages("check runtime"):
        return open_artifact(folder)


def _lower(config: ResolvedConfig, model: ModelFolder, dump_dir: Path, stages: _Stages) -> _Lowered:
    """From a model folder to pieces; every graph on the way is written to `dump_dir`."""
    with stages("import transformers"):
        from mllm_compile.gate import check_trace
        from mllm_compile.hf_model import build_on_meta
        from mllm_compile.passes.pipeline import run_passes
        from mllm_compile.program_builder import build_program, size_symbols
        from mllm_compile.trace import trace_model
    with stages("build on meta"):
        check_remote_code(model, config.model.trust_remote_code)
        hf_model = build_on_meta(model.path, getattr(torch, config.model.dtype), config.model.trust_remote_code)
    with stages("trace"):
        trace = trace_model(hf_model, config.runtime.device, max_traced_tokens(config))
        check_trace(trace, hf_model)
        symbols = size_symbols(trace.graph_module)
    dump = _GraphDumper(dump_dir)
    dump("trace", trace.graph_module, "as captured")
    with stages("passes"):
        graph, reports = run_passes(
            trace.graph_module,
            config.compile.disable_passes,
            observer=lambda report, gm: dump(
                report.name,
                gm,
                f"{report.matches} matches, {report.nodes_before} -> {report.nodes_after} nodes, {report.ms:.1f} ms",
            ),
        )
        program = build_program(graph)
    return _Lowered(hf_model, graph, program, reports, symbols)


class _GraphDumper:
    """Numbered files, one a stage: `02_pack_projections.txt`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def __call__(self, name: str, gm: fx.GraphModule, remark: str) -> None:
        text = [f"# {name}: {remark}", gm.code.strip()]
        text += [f"# {child}\n{piece.code.strip()}" for child, piece in gm.named_children() if hasattr(piece, "code")]
        path = self._folder / f"{self._count:02d}_{name}.txt"
        path.write_text("\n\n".join(text) + "\n", encoding="utf-8")
        self._count += 1


def _plan_weights(
    config: ResolvedConfig, model: ModelFolder, lowered: _Lowered
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    from mllm_compile.program_builder import weight_shapes
    from mllm_compile.weights import plan_weights, read_checkpoint

    table = None
    if config.model.load_format != "dummy":
        names = [path.relative_to(model.path).as_posix() for path in model.weight_files]
        table = read_checkpoint(model.path, names, lowered.hf_model.model)
    needed = set(lowered.program.weights)
    constants = {name: value for name, value in lowered.hf_model.constants.items() if name in needed}
    shapes = {name: shape for name, shape in weight_shapes(lowered.graph).items() if name not in constants}
    return constants, tuple(plan_weights(shapes, lowered.packed, table))


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
def _workers(config: ResolvedConfig) -> Iterator[PieceWorkers | None]:
    """Compiler processes, started first of all so that their imports overlap with the trace."""
    if config.compile.backend == "eager":
        yield None
        return
    from mllm_compile.piece_workers import PieceWorkers

    largest = max_traced_tokens(config)
    with PieceWorkers(config.runtime.device, {"T": largest, "S": largest}) as workers:
        yield workers


def _build_pieces(
    config: ResolvedConfig, lowered: _Lowered, folder: Path, workers: PieceWorkers | None, stages: _Stages
) -> str:
    """Writes every distinct piece; returns the suffix of the files that run."""
    from mllm_compile.piece_source import piece_source
    from mllm_compile.piece_workers import PieceJob
    from mllm_compile.program_builder import piece_inputs

    folder.mkdir()
    jobs = []
    for piece in lowered.program.piece_ids():
        graph: Any = lowered.graph.get_submodule(piece)
        source_path = folder / (piece + SOURCE_SUFFIX)
        source_path.write_text(piece_source(graph, piece, lowered.symbols), encoding="utf-8")
        jobs.append(
            PieceJob(piece, source_path, piece_inputs(graph, lowered.symbols), folder / (piece + PACKAGE_SUFFIX))
        )
    if workers is None:
        return SOURCE_SUFFIX
    with stages("compile pieces", total=len(jobs)) as stage:
        workers.compile(jobs, lambda job: stage.advance())
    for job in jobs:
        if not job.package_path.is_file():
            raise CompileError(f"piece {job.piece}: Inductor reported success but wrote no package")
    return PACKAGE_SUFFIX


def _step_line(step: dict[str, Any]) -> str:
    if step["op"] == "piece":
        return f"{', '.join(step['outputs'])} = {step['piece']}({', '.join(step['inputs'])})"
    return f"{step['out']} = attention[{step['layer']}]({step['q']}, {step['k']}, {step['v']})"
