"""Replacements inside torch and Inductor, each with its gain, its switch, and what happens where it does not fit.

Each file here is one of PATCHES, and whatever of torch's own names is replaced stands in its `replaces`: this is the
list to go through for a new torch. Nothing else replaces a name of Inductor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mllm_compile.errors import ConfigError

SWITCH = "MLLM_COMPILE_WITHOUT_PATCHES"  # names of patches that are left out, with commas between


@dataclass(frozen=True)
class Patch:
    """One replacement.

    Attributes:
        name: its file's.
        replaces: full names of torch's own; of names with `|` between, torch has one, by its version.
        torch: versions it was seen to work with.
        gain: what it saves, and where that was measured.
        without: what happens where it is left out, or torch is not as it is known.
        can_be_left_out: by SWITCH.
    """

    name: str
    replaces: tuple[str, ...]
    torch: str
    gain: str
    without: str
    can_be_left_out: bool = True


PATCHES = (
    Patch(
        "shared_host_code",
        ("torch._inductor.codecache.AotCodeCompiler.compile", "torch._inductor.codecache.CppBuilder"),
        "2.11 to 2.15",
        "2.2 s of g++ a package (3.0 → 0.75; CPU, torch 2.13)",
        "a package is compiled whole, as Inductor does it",
    ),
    Patch(
        "precompiled_header",
        ("torch._inductor.codecache._precompile_header",),
        "2.11 to 2.13",
        "0.75 s of g++ a package (1.7 → 0.95 for its headers; CUDA, torch 2.11, four cores or more)",
        "each package reads its headers itself",
    ),
    Patch(
        "unload_packages",
        ("torch._inductor.cpp_builder._get_shared_cflags",),
        "2.11 to 2.15",
        "5 MiB and four unlinked files an engine that was closed (CPU, torch 2.13)",
        "packages stay in memory until the process ends",
    ),
    Patch(
        "early_launch",
        (
            "torch._inductor.codegen.cuda.device_op_overrides.CUDADeviceOpOverrides.kernel_driver",
            "torch._inductor.codegen.triton.TritonKernel._handle_pdl_before_access",
        ),
        "2.11 to 2.13",
        "the start of each kernel overlaps the end of the one before, from Hopper on",
        "kernels start one after the other, as on older GPUs",
    ),
    Patch(
        "hidden_waits",
        (
            "torch._higher_order_ops.triton_kernel_wrap.identify_accessed_tensors"
            "|torch._higher_order_ops.triton_kernel_wrap.identify_mutated_tensors",
        ),
        "2.11 to 2.13",
        "pieces whose own kernels wait do not copy their weights and the KV cache",
        "a piece with such a kernel does not compile",
        can_be_left_out=False,
    ),
    Patch(
        "quick_start",
        ("torch._inductor.fx_passes.fuse_attention._sfdp_init", "torch._inductor.cpu_vec_isa.valid_vec_isa_list"),
        "2.11 to 2.13",
        "9 to 28 s of g++ a first compile for a GPU (an H200's host), and patterns of attention in each process",
        "Inductor tries the CPU's vector instructions and prepares its patterns",
    ),
    Patch(
        "whole_rows",
        ("torch._inductor.choices.InductorChoices.should_use_persistent_reduction",),
        "2.11",
        "half of the time of a layer norm of 1152 features, as towers of images have two a layer",
        "such a norm goes through its rows twice, and what makes inputs of fp8 three times",
    ),
)


def left_out() -> frozenset[str]:
    """The names in SWITCH.

    Raises:
        ConfigError: there is no such patch, or nothing would compile without it.
    """
    names = [name.strip() for name in os.environ.get(SWITCH, "").split(",") if name.strip()]
    known = [patch.name for patch in PATCHES if patch.can_be_left_out]
    for name in names:
        if name not in known:
            raise ConfigError(f"{SWITCH} has {name!r}; expected names of {', '.join(known)}")
    return frozenset(names)
