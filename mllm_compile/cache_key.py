"""The key of a cached runtime: an explicit list of factors with their values, and the hash over them.

A factor is whatever changes the program, its pieces or where its weights lie. Nothing else is in the key: no path, no
file time, no environment, no size of a batch.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import mllm_compile
from mllm_compile.model_folder import ModelFolder
from mllm_compile.resolve import ResolvedConfig
from mllm_compile.runtime.safetensors_header import read_header

FORMAT_VERSION = 1
# Sources that decide what is compiled; a change in any of them is a miss.
_SHAPING_SOURCES = (
    "passes/*.py",
    "models/*.py",
    "hf_model.py",
    "trace.py",
    "compile.py",
    "weights.py",
    "piece_source.py",
    "piece_compiler.py",
    "runtime/trace_ops.py",
    "runtime/program.py",
)
_MIN_TRACED_TOKENS = 8192


def max_traced_tokens(config: ResolvedConfig) -> int:
    """The largest T and S that pieces are compiled for; bounds let Inductor prove that 32-bit indices suffice."""
    return max(_MIN_TRACED_TOKENS, config.runtime.max_num_batched_tokens)


def key_factors(config: ResolvedConfig, model: ModelFolder) -> dict[str, str]:
    """Every factor by name, as text."""
    is_cuda = config.runtime.device.startswith("cuda")
    return {
        "format": str(FORMAT_VERSION),
        "mllm_compile": mllm_compile.__version__,
        "sources": _sources_hash(),
        "model config": _hash(json.dumps(model.config, sort_keys=True).encode()),
        "weights": _weights_hash(config, model),
        "dtype": config.model.dtype,
        "backend": config.compile.backend,
        "disabled passes": ", ".join(sorted(config.compile.disable_passes)) or "none",
        "max traced tokens": str(max_traced_tokens(config)),
        "torch": torch.__version__,
        "triton": _version("triton") if is_cuda else "unused",
        "transformers": _version("transformers"),
        "cuda": str(torch.version.cuda) if is_cuda else "unused",
        "architecture": _architecture(config.runtime.device),
    }


def key_of(factors: Mapping[str, str]) -> str:
    """16 hex digits over all factors."""
    return _hash(json.dumps(factors, sort_keys=True).encode())


def _architecture(device: str) -> str:
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(torch.device(device))
        return f"sm_{major}{minor}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _weights_hash(config: ResolvedConfig, model: ModelFolder) -> str:
    """Headers say every tensor's name, dtype, shape and place; the data itself is not part of what is compiled."""
    if config.model.load_format == "dummy":
        return "random"
    digest = hashlib.sha256()
    for path in model.weight_files:
        digest.update(path.name.encode())
        digest.update(read_header(path).raw)
    return digest.hexdigest()[:16]


@cache
def _sources_hash() -> str:
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for pattern in _SHAPING_SOURCES:
        for path in sorted(root.glob(pattern)):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
