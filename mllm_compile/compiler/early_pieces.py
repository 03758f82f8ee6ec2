"""Compiles pieces while the model is still being traced: the pieces of a two-layer copy, mostly the same as its own.

A trace takes a fraction of a second a layer, and nothing is compiled before its end. A copy of the model with two
layers is traced in a second or two, and layers that are alike make the same pieces however many there are. So its
pieces are compiled beside the trace of the whole model.

That trace stays the truth. A piece compiled here is taken only where the model has one of the same name, source and
inputs; any other is dropped. Whatever goes wrong here only means that pieces are compiled later.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import CompileError, UnsupportedModelError
from mllm_compile.inductor.job import PieceJob
from mllm_compile.inductor.workers import PieceWorkers
from mllm_compile.process.no_gc import gc_paused
from mllm_compile.process.progress import Reporter
from mllm_compile.store.key import max_traced_tokens

if TYPE_CHECKING:
    from mllm_compile.compiler.lowered import BuiltModel
    from mllm_compile.kernels.cuda import KernelCompiler
    from mllm_compile.model.hf_model import HFModel

logger = logging.getLogger(__name__)

_LAYERS = 2  # the fewest that have all kinds of pieces: before the first attention, between two, after the last
_MIN_LAYERS = 8  # a model with fewer is traced almost as soon as its copy
_MIN_CORES = 4  # with fewer the compilers only take from the trace what they gain (2 cores, 28 layers: no faster)


@dataclass(frozen=True)
class EarlyPiece:
    """A piece that is being compiled before it is known whether the model has it."""

    job: PieceJob
    compiled: Future[None]

    def is_for(self, job: PieceJob) -> bool:
        """True if compiling `job` would repeat this one."""
        return self.job.inputs == job.inputs and self.job.source_path.read_bytes() == job.source_path.read_bytes()

    def move_to(self, package_path: Path) -> bool:
        """Waits for the package and puts it in its place; False without one."""
        try:
            self.compiled.result()
            self.job.package_path.rename(package_path)
        except (CompileError, OSError):
            logger.info("%s was not compiled early", self.job.piece, exc_info=True)
            return False
        return True


def start_early_pieces(
    config: ResolvedConfig,
    built: BuiltModel,
    workers: PieceWorkers,
    compiler: KernelCompiler,
    folder: Path,
    reporter: Reporter,
) -> dict[str, EarlyPiece]:
    """Hands the pieces of a shallow copy of the model to the workers, and the CUDA kernels to theirs,
    and does not wait for them.

    Args:
        folder: gets sources and packages; it must outlive the workers.

    Returns:
        Pieces by name; none where it would not pay, or the copy cannot be made, traced or rewritten.
    """
    from mllm_compile.compiler.lowering import rewrite
    from mllm_compile.compiler.pieces import write_pieces
    from mllm_compile.model.trace import trace_model

    try:
        if (
            built.hf_model.cross is not None
            or built.hf_model.text_config.num_hidden_layers < _MIN_LAYERS
            or (os.cpu_count() or 1) < _MIN_CORES
        ):
            return {}
        with reporter.stage(f"trace {_LAYERS} layers"), gc_paused():
            shallow = _shallow_copy(built.hf_model, config)
            trace = trace_model(shallow, config.runtime.device, max_traced_tokens(config))
            lowered = rewrite(config, replace(built, hf_model=shallow), trace)
            compiler.start(lowered.program.cuda_kernels())
            jobs = write_pieces(lowered, folder)
    except Exception:  # a model is code that we have not written, and here nothing depends on it
        logger.info("no pieces are compiled early", exc_info=True)
        return {}
    return {job.piece: EarlyPiece(job, workers.submit(job)) for job in jobs}


def compile_pieces(
    jobs: Sequence[PieceJob], early: Mapping[str, EarlyPiece], workers: PieceWorkers, done: Callable[[], None]
) -> None:
    """Compiles every job, or takes what was compiled early; `done` is called as each ends, from any thread.

    Raises:
        CompileError: naming the piece and the first line of the compiler's error.
    """
    wanted = [job for job in jobs if job.piece in early and early[job.piece].is_for(job)]
    for piece in early.keys() - {job.piece for job in wanted}:
        early[piece].compiled.cancel()

    def submit(job: PieceJob) -> Future[None]:
        future = workers.submit(job)
        future.add_done_callback(lambda future: done())
        return future

    running = [submit(job) for job in jobs if job not in wanted]
    for job in wanted:
        if early[job.piece].move_to(job.package_path):
            done()
        else:
            running.append(submit(job))  # the model's own piece raises the error
    for future in running:
        future.result()


def _shallow_copy(hf_model: HFModel, config: ResolvedConfig) -> HFModel:
    """The model with its first layers only. Lists with an entry a layer (`layer_types`) are cut as well.

    Raises:
        Exception: whatever the config or the model say to that.
    """
    from mllm_compile.model.hf_model import build_config_on_meta

    hf_config = deepcopy(hf_model.model.config)
    text_config = hf_config.get_text_config(decoder=True)
    depth = text_config.num_hidden_layers
    for name, value in list(vars(text_config).items()):
        if isinstance(value, list | tuple) and len(value) == depth:
            setattr(text_config, name, value[:_LAYERS])
    text_config.num_hidden_layers = _LAYERS
    shallow = build_config_on_meta(hf_config, getattr(torch, config.model.dtype), config.model.trust_remote_code)
    if 2 * _num_modules(shallow) > _num_modules(hf_model):
        raise UnsupportedModelError("num_hidden_layers is not what makes this model deep")
    return shallow


def _num_modules(hf_model: HFModel) -> int:
    return sum(1 for _ in hf_model.model.modules())
