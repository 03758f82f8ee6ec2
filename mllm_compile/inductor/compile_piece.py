"""One piece from its source to an AOTInductor package. Runs in a fork of the compiler process (inductor/server.py).

The package is machine code with its kernels inside: weights are its inputs, T and S stay dynamic, and loading it needs
no Python compiler.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from mllm_compile.inductor.job import EXAMPLE_SIZES, PieceInput
from mllm_compile.inductor.patches import applies
from mllm_compile.inductor.patches.precompiled_header import is_shared, pays, share_header
from mllm_compile.inductor.patches.quick_start import skip_attention_patterns, skip_vector_instructions
from mllm_compile.inductor.patches.shared_host_code import share_interface
from mllm_compile.inductor.patches.unload_packages import mark_nothing_unique
from mllm_compile.inductor.patches.whole_rows import keep_whole_rows
from mllm_compile.inductor.toolchain import WRAPPER_OPTIONS, system_compiler
from mllm_compile.runtime import ops
from mllm_compile.runtime.program.pieces import piece_class

_MAY_BE_ZERO = "L"  # slots to write: none where attention writes them


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


def inductor_options(device: str) -> dict[str, Any]:
    """Inductor's options, for every piece."""
    options: dict[str, Any] = {
        **WRAPPER_OPTIONS,
        "aot_inductor.precompile_headers": is_shared(),
        "aot_inductor.use_runtime_constant_folding": False,
        # A product whose width is not a multiple of 8 would be padded where a benchmark finds that faster, which varies
        # by run. Its output then has other strides than the trace, for which the next piece was compiled (torch 2.11 to
        # 2.13).
        "shape_padding": False,
    }
    if device.startswith("cuda"):
        from mllm_compile.inductor.patches.early_launch import use_dependent_launch

        options["triton.autotune_at_compile_time"] = True
        options["triton.enable_pdl"] = applies("early_launch") and use_dependent_launch()
        # Templates would start as early and not wait, so an environment that asks for some is not heard.
        options["max_autotune"] = options["max_autotune_gemm"] = False
    else:
        # A package may run with other threads than there are here: it asks for their number when it is called. Of 1
        # Inductor would write loops that no other number helps.
        options["cpp.dynamic_threads"] = True
        options["cpp.threads"] = 2
    return options


def prepare_compiler(device: str, scratch: Path) -> None:
    """Does what every compile needs and a fork of this process keeps, before there is a piece: while the model is
    traced.

    Imports Inductor; finds out what the CPU can do, where pieces run on it. Does not touch the GPU. Where something is
    missing, compiling a piece says so.

    Args:
        scratch: an empty folder for what forks share; it outlives them.
    """
    if applies("unload_packages"):
        mark_nothing_unique()
    shares = [share_interface] if applies("shared_host_code") else []
    shares += [share_header] if pays(device) and applies("precompiled_header") else []
    for share in shares:
        with contextlib.suppress(OSError):  # no locks on this file system, no room for a process
            share(scratch, device)
    import torch._higher_order_ops.triton_kernel_wrap
    import torch._inductor.compile_fx
    import torch.export  # noqa: F401
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codecache import torch_key
    from torch._inductor.codegen.common import init_backend_registration

    init_backend_registration()
    for name in _IMPORTED_LATE:
        with contextlib.suppress(ImportError):  # of another torch
            importlib.import_module(name)
    torch_key()  # reads all of Inductor's source, and Triton's below: they remember it
    if applies("quick_start"):
        skip_attention_patterns()
    if device.startswith("cuda"):
        with contextlib.suppress(ImportError):  # there is no Triton, or another
            ops.define()
            from triton.runtime.cache import triton_key

            triton_key()
        if applies("quick_start"):
            skip_vector_instructions()
        if applies("whole_rows"):
            keep_whole_rows()
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
        from mllm_compile.inductor.patches.hidden_waits import hide_waits_from_analysis

        if applies("hidden_waits"):
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

    def dynamic(size: str) -> Any:
        factor, _, name = size.rpartition("*")
        return int(factor) * dims[name] if factor else dims[name]

    shapes = ({dim: dynamic(size) for dim, size in enumerate(spec.shape) if isinstance(size, str)} for spec in inputs)
    return tuple(shape or None for shape in shapes)
