"""mllm_compile: an inference compiler for large language models.

Owns the public names. They are imported on first use, so that ``import mllm_compile`` (and every module of the
runtime, whose package this is the parent of) costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mllm_compile.async_engine import AsyncEngine
    from mllm_compile.config import EngineConfig
    from mllm_compile.engine import Engine
    from mllm_compile.errors import ConfigError, DeviceMemoryError, EngineDeadError, MllmError, RequestError
    from mllm_compile.outputs import CompletionOutput, Logprob, RequestOutput
    from mllm_compile.runtime.sampling_params import SamplingParams
    from mllm_compile.stats import EngineStats

__version__ = "0.1.0"
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
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_ERRORS = ("ConfigError", "DeviceMemoryError", "EngineDeadError", "MllmError", "RequestError")
_HOMES = {
    **dict.fromkeys(_ERRORS, "mllm_compile.errors"),
    "AsyncEngine": "mllm_compile.async_engine",
    "CompletionOutput": "mllm_compile.outputs",
    "Engine": "mllm_compile.engine",
    "EngineConfig": "mllm_compile.config",
    "EngineStats": "mllm_compile.stats",
    "Logprob": "mllm_compile.outputs",
    "RequestOutput": "mllm_compile.outputs",
    "SamplingParams": "mllm_compile.runtime.sampling_params",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from mllm_compile.bytecode import kept_bytecode

        with kept_bytecode():
            return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mllm_compile' has no attribute {name!r}")
