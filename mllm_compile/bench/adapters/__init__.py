"""Engines behind one interface: one file each, base.py says what they do, `open_engine` opens one by name."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.adapters.base import BenchEngine, ImageEngine, StreamEngine
from mllm_compile.bench.measure.setting import Setting

# engine → the package that it needs
ENGINES = {"mllm": "mllm_compile", "vllm": "vllm", "transformers": "transformers"}
_WITHOUT_STREAMS = ("transformers",)
_WITHOUT_IMAGES = ("transformers",)


def check_installed(engine: str) -> None:
    """
    Raises:
        BenchmarkError: no such engine, or it is not installed here.
    """
    if engine not in ENGINES:
        raise BenchmarkError(f"--engine {engine!r} is not known; known: {', '.join(ENGINES)}")
    if find_spec(ENGINES[engine]) is None:
        raise BenchmarkError(f"--engine {engine} is not installed here: pip install {ENGINES[engine]}, or leave it out")


def check_streams(engine: str) -> None:
    """
    Raises:
        BenchmarkError: the engine takes no requests while others run.
    """
    if engine in _WITHOUT_STREAMS:
        raise BenchmarkError(f"--engine {engine} takes no request while others run: leave it out")


def open_engine(engine: str, setting: Setting) -> BenchEngine:
    """Starts an engine in this process: loads, compiles, captures."""
    opened: BenchEngine = import_module(f"mllm_compile.bench.adapters.{engine}_engine").open_engine(setting)
    return opened


def check_images(engine: str) -> None:
    """
    Raises:
        BenchmarkError: the engine is not measured with images.
    """
    if engine in _WITHOUT_IMAGES:
        raise BenchmarkError(f"--engine {engine} is not measured with images: leave it out")


def open_images(engine: str, setting: Setting) -> ImageEngine:
    """The same, for prompts with images; `check_images` first.

    Raises:
        BenchmarkError: it takes none of this model.
    """
    opened: ImageEngine = import_module(f"mllm_compile.bench.adapters.{engine}_engine").open_images(setting)
    return opened


def open_streams(engine: str, setting: Setting) -> StreamEngine:
    """The same, to be read token by token; `check_streams` first."""
    opened: StreamEngine = import_module(f"mllm_compile.bench.adapters.{engine}_engine").open_streams(setting)
    return opened
