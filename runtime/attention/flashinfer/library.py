"""FlashInfer itself, imported when a backend is made; the folder of its kernels; the memory that backends share."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from types import ModuleType

import torch

from mllm_compile.runtime.attention.flashinfer.private_names import check_version
from mllm_compile.runtime.errors import DeviceError

# Shared by the backends that are alive, freed with the last of them: it holds nothing between kernels. Parts of a step
# (runtime/ubatch) run beside each other, so each has its own.
_workspaces: weakref.WeakValueDictionary[tuple[str, torch.device, int, int], torch.Tensor] = (
    weakref.WeakValueDictionary()
)


def import_flashinfer(device: torch.device) -> ModuleType:
    """The library.

    Raises:
        DeviceError: it is not installed, its version is not known, or `device` is no CUDA device.
    """
    if device.type != "cuda":
        raise DeviceError(
            f"runtime.attention_backend: flashinfer needs an NVIDIA GPU, but runtime.device is {device}. "
            "Set runtime.attention_backend: torch."
        )
    try:
        import flashinfer
        import flashinfer.decode
    except ImportError as error:
        raise DeviceError(
            f"runtime.attention_backend: flashinfer, but FlashInfer cannot be imported ({error}). "
            "Install it with `pip install mllm-compile[cuda]`, or set runtime.attention_backend: torch."
        ) from error
    check_version(flashinfer.__version__)
    library: ModuleType = flashinfer
    return library


def use_kernels_from(folder: Path) -> None:
    """Points FlashInfer at prebuilt kernels, so that it neither compiles nor needs nvcc.

    From now on it loads `folder`/<kernel>/<kernel>.so where that exists, and builds what does not.

    Nothing happens where FlashInfer cannot be imported: the attention backend says what to install.
    """
    try:
        from flashinfer.jit import env
    except ImportError:
        return
    # A handle that stays open: FlashInfer loads some kernels late, from this very folder whatever its name is then.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # FlashInfer reads it anew for every kernel ("This helps AOT script to override envs", flashinfer/jit/env.py).
    env.FLASHINFER_AOT_DIR = Path(f"/proc/self/fd/{handle}")


def float_workspace(device: torch.device, num_bytes: int, part: int) -> torch.Tensor:
    """[num_bytes] uint8 for partial results of a part of steps; see kernels.workspace_bytes."""
    return _shared("partial results", device, num_bytes, part)


def copy_space(device: torch.device, num_bytes: int, part: int) -> torch.Tensor:
    """[num_bytes] uint8 for a copy of one layer's keys and values, of a part of steps; see copied.py."""
    return _shared("copies", device, num_bytes, part)


def _shared(purpose: str, device: torch.device, num_bytes: int, part: int) -> torch.Tensor:
    key = (purpose, device, num_bytes, part)
    workspace = _workspaces.get(key)
    if workspace is None:
        workspace = _workspaces[key] = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return workspace
