"""Replacements inside torch and Inductor, each with its gain, its switch, and what happens where it does not fit.

Each file here is one of PATCHES, and whatever of torch's own names is replaced is in its `replaces`: this is the
list to go through for a new torch. Nothing else replaces a name of Inductor. `applies` says which fit the torch that is
installed.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from mllm_compile.errors import CompileError, ConfigError

logger = logging.getLogger("mllm_compile.inductor")

SWITCH = "MLLM_COMPILE_WITHOUT_PATCHES"  # names of patches that are left out, with commas between


@dataclass(frozen=True)
class Patch:
    """One replacement.

    Attributes:
        name: its file's.
        replaces: full names of torch's own; of names with `|` between, torch has one, by its version.
        torch: the first and the last version that it was seen to work with, and that it is applied to.
        gain: what it saves, and where that was measured.
        without: what happens where it is left out, or torch is not as it is known.
        can_be_left_out: by SWITCH.
    """

    name: str
    replaces: tuple[str, ...]
    torch: tuple[str, str]
    gain: str
    without: str
    can_be_left_out: bool = True

    @property
    def versions(self) -> str:
        return " to ".join(self.torch)

    def version_obstacle(self, version: str) -> str | None:
        """Why it is not for this version of torch; None: it is."""
        first, last = map(_release, self.torch)
        is_known = first <= _release(version) <= last
        return None if is_known else f"it is for torch {self.versions}, and this is {version}"

    def obstacle(self, version: str) -> str | None:
        """Why it does not fit torch here, which is of this version; None: it fits. Imports what it replaces."""
        missing = [names for names in self.replaces if all(find(name) is None for name in names.split("|"))]
        return self.version_obstacle(version) or (f"torch {version} has no {missing[0]}" if missing else None)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


def find(full_name: str) -> Any:
    """The object of a full name, or None where there is no such name."""
    parts = full_name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            at: Any = import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            at = getattr(at, part, None)
        return at
    return None


PATCHES = (
    Patch(
        "shared_host_code",
        ("torch._inductor.codecache.AotCodeCompiler.compile", "torch._inductor.codecache.CppBuilder"),
        ("2.11", "2.15"),
        "2.2 s of g++ a package (3.0 → 0.75; CPU, torch 2.13)",
        "a package is compiled whole, as Inductor does it",
    ),
    Patch(
        "precompiled_header",
        ("torch._inductor.codecache._precompile_header",),
        ("2.11", "2.13"),
        "0.75 s of g++ a package (1.7 → 0.95 for its headers; CUDA, torch 2.11, four cores or more)",
        "each package reads its headers itself",
    ),
    Patch(
        "unload_packages",
        ("torch._inductor.cpp_builder._get_shared_cflags",),
        ("2.11", "2.15"),
        "5 MiB and four unlinked files an engine that was closed (CPU, torch 2.13)",
        "packages stay in memory until the process ends",
    ),
    Patch(
        "early_launch",
        (
            "torch._inductor.codegen.cuda.device_op_overrides.CUDADeviceOpOverrides.kernel_driver",
            "torch._inductor.codegen.triton.TritonKernel._handle_pdl_before_access",
        ),
        ("2.11", "2.13"),
        "the start of each kernel overlaps the end of the one before, from Hopper on",
        "kernels start one after the other, as on older GPUs",
    ),
    Patch(
        "hidden_waits",
        (
            "torch._higher_order_ops.triton_kernel_wrap.identify_accessed_tensors"
            "|torch._higher_order_ops.triton_kernel_wrap.identify_mutated_tensors",
        ),
        ("2.11", "2.15"),
        "pieces whose own kernels wait do not copy their weights and the KV cache",
        "a piece with such a kernel does not compile",
        can_be_left_out=False,
    ),
    Patch(
        "quick_start",
        ("torch._inductor.fx_passes.fuse_attention._sfdp_init", "torch._inductor.cpu_vec_isa.valid_vec_isa_list"),
        ("2.11", "2.15"),
        "9 to 28 s of g++ a first compile for a GPU (an H200's host), and patterns of attention in each process",
        "Inductor tries the CPU's vector instructions and prepares its patterns",
    ),
    Patch(
        "whole_rows",
        ("torch._inductor.choices.InductorChoices.should_use_persistent_reduction",),
        ("2.11", "2.13"),
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


def applies(name: str) -> bool:
    """True if the patch applies here; where it does not fit, the log says why and what happens instead.

    Raises:
        CompileError: it does not fit, and nothing compiles without it.
        ConfigError: as left_out.
    """
    return name not in left_out() and _fits(name)


@cache
def _fits(name: str) -> bool:
    import torch

    patch = next(patch for patch in PATCHES if patch.name == name)
    obstacle = patch.obstacle(torch.__version__)
    if obstacle is None:
        return True
    if not patch.can_be_left_out:
        raise CompileError(f"{name}: {obstacle}, and {patch.without}. Install torch {patch.versions}.")
    logger.warning("%s is left out, as %s: %s", name, obstacle, patch.without)
    return False
