"""Describes where a figure was taken: the commit, the machine, the libraries, the date."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from mllm_compile.runtime.device.cpu_threads import cpu_model

COMMIT_VARIABLE = "MLLM_COMPILE_COMMIT"
_PACKAGES = ("triton", "flashinfer-python", "transformers")


def describe_environment(device: torch.device) -> dict[str, str]:
    """Facts by name, as text."""
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": str(os.cpu_count()),
    }
    if device.type == "cuda":
        facts["cuda"] = str(torch.version.cuda)
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def _commit() -> str:
    """The commit of the sources that run: $MLLM_COMPILE_COMMIT, as they may be a copy, and that in a repository of
    something else; or their repository's."""
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE]
    folder = str(Path(__file__).parent)
    commit = _output("git", "-C", folder, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("+changes" if _output("git", "-C", folder, "status", "--porcelain", "-uno") else "")


def device_name(device: torch.device) -> str:
    """A GPU's name, or the CPU's with torch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{cpu_model()}, {threads} thread{'s' * (threads != 1)}"


def _output(*command: str) -> str:
    """The output of a command; empty if it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
