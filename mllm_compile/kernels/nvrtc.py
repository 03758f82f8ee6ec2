"""Compiles CUDA C++ to machine code by NVRTC, which comes with torch: no nvcc is needed."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import torch

from mllm_compile.errors import CompileError


@cache
def find_nvrtc() -> ctypes.CDLL | None:
    """The library of torch's CUDA version, from the system or from NVIDIA's packages beside torch; None without one."""
    if torch.version.cuda is None:
        return None
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    for path in (Path(name), *(found for folder in folders for found in sorted(folder.glob(f"*/lib/{name}")))):
        try:
            return _open(path)
        except OSError:
            continue
    return None


def _open(path: Path) -> ctypes.CDLL:
    """Opens NVRTC. NVIDIA's package finds its second library only if it is loaded already."""
    for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")) if path.is_absolute() else ():
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(path))


def compile_cuda(source: str, name: str, architecture: str) -> bytes:
    """
    Args:
        source: CUDA C++ without includes.
        name: for messages.
        architecture: "sm_90a".

    Returns:
        A cubin.

    Raises:
        CompileError: there is no NVRTC, or it refuses the source; with its first error.
    """
    library = find_nvrtc()
    if library is None:
        raise CompileError("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    program = ctypes.c_void_p()
    made = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    if made:
        raise CompileError(f"NVRTC answers {made} to a program of its own making: is it the one that torch came with?")
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"-default-device"]
        if library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            log = _get(library, program, "ProgramLog").decode(errors="replace").rstrip("\0")
            first = next((line for line in log.splitlines() if "error" in line), log.strip() or "no reason given")
            raise CompileError(f"NVRTC refuses the kernel {name}: {first}")
        return _get(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _get(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, data)
    return data.raw
