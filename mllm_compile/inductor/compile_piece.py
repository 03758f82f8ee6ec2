"""One piece from its source to an AOTInductor package. Runs in a fork of the compiler process (inductor/server.py).

The package is machine code with its kernels inside: weights are its inputs, T and S stay dynamic, and loading it needs
no Python compiler.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mllm_compile.inductor.patches.precompiled_header import is_shared, pays, share_header
from mllm_compile.inductor.patches.shared_host_code import share_interface
from mllm_compile.inductor.patches.unloadable import mark_nothing_unique
from mllm_compile.runtime import ops
from mllm_compile.runtime.program.pieces import piece_class

SYSTEM_CXX = "/usr/bin/g++"

# The dynamic sizes of all pieces, and what the example inputs have there. Distinct and not special (0, 1, multiples of
# 8), so that the exporter does not take one for another or for a constant. T tokens (of decode attention: requests), S
# rows of logits, L KV slots to write, P slots of the KV cache; in decode attention N splits of a request's keys and W
# pages of a request; in the decode loop M rows of the largest captured decode, R rows and C columns of the table of
# slots.
EXAMPLE_SIZES = {"T": 37, "S": 5, "P": 1013, "N": 3, "W": 19, "L": 29, "M": 41, "R": 43, "C": 307}
_MAY_BE_ZERO = "L"  # slots to write: none where attention writes them


@dataclass(frozen=True)
class PieceInput:
    """One input of a piece: sizes are numbers, or names of EXAMPLE_SIZES for the dynamic ones."""

    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    dtype: str

    @classmethod
    def contiguous(cls, shape: tuple[int | str, ...], dtype: str) -> PieceInput:
        strides: list[int | str] = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, _product(size, strides[0]))
        return cls(shape, tuple(strides), dtype)

    def of_one(self, name: str) -> PieceInput:
        """The same input where the size `name` is 1."""

        def fixed(size: int | str) -> int | str:
            if not isinstance(size, str) or name not in size.split("*"):
                return size
            return math.prod(int(factor) for factor in size.replace(name, "1").split("*"))

        return PieceInput(tuple(fixed(n) for n in self.shape), tuple(fixed(n) for n in self.stride), self.dtype)

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "stride": list(self.stride), "dtype": self.dtype}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PieceInput:
        return cls(tuple(data["shape"]), tuple(data["stride"]), data["dtype"])


def _product(first: int | str, second: int | str) -> int | str:
    if isinstance(first, int) and isinstance(second, int):
        return first * second
    return "*".join(str(factor) for factor in (first, second) if factor != 1)


# Imported by Inductor at its first compile: once before the forks, not once in each fork.
_IMPORTED_LATE = (
    "sympy.physics.units",
    "sympy.tensor.tensor",
    "torch._inductor.choices",
    "torch._inductor.fx_passes.freezing_patterns",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.fx_passes.quantization",
    "torch._inductor.package",
    "torch._inductor.runtime.caching",
    "torch.export._trace",
    "torch.export._unlift",
    "torch.utils.cpp_extension",
)


# The wrapper around the kernels is compiled without optimisation: it only calls them, and its compile time is most of a
# package's (CPU, one decoder layer: 31 s → 11 s, same time a call).
WRAPPER_OPTIONS = {"aot_inductor.compile_wrapper_opt_level": "O0"}


def inductor_options(device: str) -> dict[str, Any]:
    """Inductor's options, for every piece."""
    options: dict[str, Any] = {
        **WRAPPER_OPTIONS,
        "aot_inductor.precompile_headers": is_shared(),
        "aot_inductor.use_runtime_constant_folding": False,
    }
    if device.startswith("cuda"):
        from mllm_compile.inductor.patches.early_launch import use_dependent_launch

        options["triton.autotune_at_compile_time"] = True
        options["triton.enable_pdl"] = use_dependent_launch()
        # Templates would start as early and not wait, so an environment that asks for some is not heard.
        options["max_autotune"] = options["max_autotune_gemm"] = False
    return options


def prepare_compiler(device: str, scratch: Path) -> None:
    """Does what every compile needs and a fork of this process keeps, before there is a piece: while the model is
    traced.

    Imports Inductor; finds out what the CPU can do, where pieces run on it. Does not touch the GPU. Where something is
    missing, compiling a piece says so.

    Args:
        scratch: an empty folder for what forks share; it outlives them.
    """
    mark_nothing_unique()
    for share in (share_interface, share_header) if pays(device) else (share_interface,):
        with contextlib.suppress(OSError):  # no locks on this file system, no room for a process
            share(scratch, device)
    import torch._higher_order_ops.triton_kernel_wrap
    import torch._inductor.compile_fx
    import torch.export  # noqa: F401
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codecache import torch_key
    from torch._inductor.codegen.common import init_backend_registration
    from torch._inductor.fx_passes import fuse_attention

    init_backend_registration()
    for name in _IMPORTED_LATE:
        with contextlib.suppress(ImportError):  # of another torch
            importlib.import_module(name)
    torch_key()  # reads all of Inductor's source, and Triton's below: they remember it
    # Every fork would prepare dozens of patterns of attention, which no piece holds.
    fuse_attention._sfdp_init = lambda *device: None  # type: ignore[assignment]
    if device.startswith("cuda"):
        with contextlib.suppress(ImportError):  # there is no Triton, or another
            ops.define()
            from triton.runtime.cache import triton_key

            triton_key()
        # The host part of a package only launches kernels. Inductor would compile half a dozen test programs to find
        # the vector instructions for it (28 s on a machine with an H200, 9 s on another).
        cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]
        return
    with contextlib.suppress(Exception), system_compiler():
        cpu_vec_isa.pick_vec_isa()


def enter_device(device: str) -> None:
    """Makes this process' context on the GPU; the first use of the GPU raises an error, not this."""
    if device.startswith("cuda"):
        with contextlib.suppress(Exception):
            torch.empty(1, device=device)


def prepare_device(device: str) -> None:
    """Builds Triton's launcher, which stays in its cache, where pieces run on a GPU."""
    if device.startswith("cuda"):
        with contextlib.suppress(Exception):
            from triton.runtime import driver

            driver.active.get_current_target()


def compile_piece(
    source_path: Path,
    inputs: list[PieceInput],
    device: str,
    max_sizes: dict[str, int],
    package_path: Path,
    scratch: Path,
) -> None:
    """Exports the piece with its dynamic sizes, compiles it, and writes the package.

    Args:
        scratch: a folder of the model's compile; what the package is made of gets a folder in it. Inductor would have
            it where another process that compiles an equal piece writes the same files, and one packs what the other
            has only begun. It must be absolute: Inductor would look for a relative one in its cache's folder.

    Raises:
        Exception: whatever torch.export or Inductor raises; the fork reports it.
    """
    from torch._inductor import config

    source = source_path.read_text(encoding="utf-8")
    if "torch.ops.mllm." in source:
        ops.define(source)
        from mllm_compile.inductor.patches.early_launch import hide_waits_from_analysis

        hide_waits_from_analysis()
    piece = piece_class(source, source_path)()
    with (
        system_compiler(),
        tempfile.TemporaryDirectory(dir=scratch, prefix="package-") as folder,
        # Not one of the options below: as such it is refused beside a package's path.
        config.patch({"aot_inductor.output_path": folder}),
    ):
        exported = torch.export.export(
            piece, _example_inputs(inputs, device), dynamic_shapes=_dynamic_shapes(inputs, max_sizes)
        )
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(package_path), inductor_configs=inductor_options(device)
        )


def _example_inputs(inputs: list[PieceInput], device: str) -> tuple[torch.Tensor, ...]:
    """Fake tensors: the largest weight of a piece is a gigabyte, and its values do not matter here."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()):
        return tuple(
            torch.empty_strided(
                [_example(size) for size in spec.shape],
                [_example(size) for size in spec.stride],
                dtype=getattr(torch, spec.dtype),
                device=device,
            )
            for spec in inputs
        )


def _example(size: int | str) -> int:
    if isinstance(size, int):
        return size
    return math.prod(EXAMPLE_SIZES.get(factor) or int(factor) for factor in size.split("*"))


def _dynamic_shapes(inputs: list[PieceInput], max_sizes: dict[str, int]) -> tuple[dict[int, Any] | None, ...]:
    dims = {
        name: torch.export.Dim(name, min=int(name != _MAY_BE_ZERO), max=largest) for name, largest in max_sizes.items()
    }
    shapes = ({dim: dims[size] for dim, size in enumerate(spec.shape) if isinstance(size, str)} for spec in inputs)
    return tuple(shape or None for shape in shapes)


@contextmanager
def system_compiler() -> Iterator[None]:
    """Inductor's host code is built with the system's g++: a wrapped CXX may link libstdc++ into the package, which
    then crashes in the loader (seen with an image whose CXX does so)."""
    before = {name: os.environ.get(name) for name in ("CXX", "CC")}
    for name, path in (("CXX", SYSTEM_CXX), ("CC", "/usr/bin/gcc")):
        if os.path.exists(path):
            os.environ[name] = path
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
