"""The device of a runner: found by its name, and what the process sets for it."""

from __future__ import annotations

import os

import torch

from mllm_compile.runtime.errors import DeviceError


def open_device(name: str) -> torch.device:
    """The device of a name such as cpu or cuda:0.

    Raises:
        DeviceError: it is not there.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise DeviceError(f"runtime.device: expected cpu, cuda or cuda:N, got {name!r}")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"runtime.device is {name}, but torch sees no NVIDIA GPU (torch {torch.__version__}). Install a driver and "
            "a CUDA build of torch, or set runtime.device: cpu."
        )
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise DeviceError(f"runtime.device is {name}, but there are {torch.cuda.device_count()} GPUs, cuda:0 onwards")
    return torch.device("cuda", index)


def sum_in_one_order() -> None:
    """Keeps the process's products in 16 bits from dividing their inputs among blocks.

    cuBLASLt alone can be told so. On Hopper its kernels for LEAST_ROWS rows or more then add up in one order
    (tests/gpu/test_any_rows.py).
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    for name in ("bf16", "fp16"):
        setattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", (False, False))


def prefer_cublaslt() -> None:
    """Make cuBLASLt the process's choice. Among the same kernels it chooses better for steps of 17 to 256 tokens with
    wide weights (Qwen3-8B, 64 requests: 6.37 -> 6.18 ms a step), and elsewhere no worse.

    torch warns of this call, but not of its environment variable, which the command line sets. A variable that is 0
    stays in force.
    """
    is_chosen = torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Cublaslt
    if not is_chosen and os.environ.get("TORCH_BLAS_PREFER_CUBLASLT") != "0":
        torch.backends.cuda.preferred_blas_library("cublaslt")
