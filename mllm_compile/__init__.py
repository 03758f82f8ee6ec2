"""mllm_compile: an inference compiler for large language models.

Owns the public names. They are imported on first use, so that ``import mllm_compile`` (and every module of the
runtime, whose package this is the parent of) costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from sys import modules
from typing import TYPE_CHECKING

from mllm_compile.version import __version__

if TYPE_CHECKING:
    from mllm_compile.config.schema import EngineConfig
    from mllm_compile.engine.async_engine import AsyncEngine
    from mllm_compile.engine.engine import Engine
    from mllm_compile.engine.low_level import OpenModel, ReadPrompt, open_model
    from mllm_compile.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from mllm_compile.engine.sessions import Session
    from mllm_compile.engine.stats import EngineStats
    from mllm_compile.errors import ConfigError, DeviceMemoryError, EngineDeadError, MllmError, RequestError
    from mllm_compile.runtime.sampling.params import SamplingParams
    from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
    from mllm_compile.train.trainable import Trainable, trainable

__all__ = [
    "AsyncEngine",
    "CompletionOutput",
    "ConfigError",
    "DeviceMemoryError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "Logprob",
    "MllmError",
    "OpenModel",
    "ReadPrompt",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Session",
    "StructuredOutputsParams",
    "Trainable",
    "__version__",
    "open_model",
    "trainable",
]

_ERRORS = ("ConfigError", "DeviceMemoryError", "EngineDeadError", "MllmError", "RequestError")
_HOMES = {
    **dict.fromkeys(_ERRORS, "mllm_compile.errors"),
    "AsyncEngine": "mllm_compile.engine.async_engine",
    "CompletionOutput": "mllm_compile.engine.outputs",
    "Engine": "mllm_compile.engine.engine",
    "EngineConfig": "mllm_compile.config.schema",
    "EngineStats": "mllm_compile.engine.stats",
    "Logprob": "mllm_compile.engine.outputs",
    "OpenModel": "mllm_compile.engine.low_level",
    "ReadPrompt": "mllm_compile.engine.low_level",
    "RequestOutput": "mllm_compile.engine.outputs",
    "Session": "mllm_compile.engine.sessions",
    "SamplingParams": "mllm_compile.runtime.sampling.params",
    "StructuredOutputsParams": "mllm_compile.runtime.sampling.structured_params",
    "Trainable": "mllm_compile.train.trainable",
    "open_model": "mllm_compile.engine.low_level",
    "trainable": "mllm_compile.train.trainable",
}


# vLLM's names, by our counterparts.
_ELSEWHERE = {
    **dict.fromkeys(("LLM", "LLMEngine", "EngineArgs"), "Engine"),
    **dict.fromkeys(("AsyncLLM", "AsyncLLMEngine", "AsyncEngineArgs"), "AsyncEngine"),
    **dict.fromkeys(("TextPrompt", "TokensPrompt"), "Engine"),
    "GuidedDecodingParams": "StructuredOutputsParams",
}


def __getattr__(name: str) -> object:
    if name in _HOMES and _HOMES[name] in modules:
        return getattr(import_module(_HOMES[name]), name)  # which waits for a thread that imports it
    if name in _HOMES:
        from mllm_compile.process.bytecode import kept_bytecode
        from mllm_compile.process.no_gc import imports_unseen

        with kept_bytecode(), imports_unseen():
            return getattr(import_module(_HOMES[name]), name)
    if name in _ELSEWHERE:  # an AttributeError's words `from mllm_compile import …` would leave out
        ours = _ELSEWHERE[name]
        raise ImportError(
            f"mllm_compile has no {name}; its place has {ours}: from mllm_compile import {ours} "
            "(docs/coming-from-vllm.md)",
            name=name,
        )
    raise AttributeError(f"module 'mllm_compile' has no attribute {name!r}")
