"""Work that Inductor does at the start of a compile, and that no piece here needs."""

from __future__ import annotations


def skip_attention_patterns() -> None:
    """Leaves out dozens of patterns of attention, which each fork would prepare and no piece holds."""
    from torch._inductor.fx_passes import fuse_attention

    fuse_attention._sfdp_init = lambda *device: None  # type: ignore[assignment]


def skip_vector_instructions() -> None:
    """Leaves the CPU's vector instructions unknown: the host part of a package for a GPU only launches kernels.

    Inductor would compile half a dozen test programs to find them (28 s on a machine with an H200, 9 s on another).
    """
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]
