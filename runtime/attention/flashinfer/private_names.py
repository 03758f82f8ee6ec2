"""FlashInfer's names that are not its interface, each with its use, and what happens without it.

Nothing else of FlashInfer's inside is used: this is the list to go through for a new FlashInfer. All were read in the
version below, and a backend is made with that version alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from mllm_compile.runtime.errors import DeviceError

VERSION = "0.6.18"  # and its .post releases, which change no kernel


@dataclass(frozen=True)
class PrivateName:
    """One of them.

    Attributes:
        name: an attribute of a wrapper begins with `wrapper.`; others are full names, or structs of its C++.
        why: what it is used for here.
        without: what happens where it is gone, or means something else.
    """

    name: str
    why: str
    without: str


PRIVATE_NAMES = (
    PrivateName(
        "wrapper._int_workspace_buffer",
        "the plan on the device, which wrappers of one step share (plan.py), and where a captured kernel reads it",
        "each wrapper takes 8 MiB of its own; a captured kernel reads an old plan",
    ),
    PrivateName(
        "wrapper._pin_memory_int_workspace_buffer",
        "the plan on the host: the next one is written elsewhere while this one is copied (plan.py)",
        "a plan is overwritten before it is copied, and answers are wrong",
    ),
    PrivateName(
        "wrapper._float_workspace_buffer",
        "partial results, an argument of the kernel's own plan (prefill.py)",
        "steps with more pieces than blocks cannot be replayed",
    ),
    PrivateName(
        "wrapper._plan_info",
        "where the plan is: PrefillPlanSM90Info of fa3, PrefillPlanInfo of fa2 (prefill.py)",
        "a list of work is written where no kernel reads it",
    ),
    PrivateName(
        "wrapper._cached_module",
        "its `plan`, with 16 arguments by position: the wrapper's own takes a millisecond for 256 rows (prefill.py)",
        "steps with more pieces than blocks cannot be replayed",
    ),
    PrivateName(
        "wrapper._qo_indptr_last",
        "the number of queries, which `run` compares with q's (prefill.py)",
        "a wrapper refuses a batch whose list of work was written here",
    ),
    PrivateName(
        "PrefillPlanSM90Info",
        "the layout of fa3's list of work, 9 numbers; fa3 reads no more of a batch but page ids (work_list.WorkList)",
        "a kernel reads other pieces than were written",
    ),
    PrivateName(
        "PrefillPlanInfo",
        "the layout of fa2's list of work, 15 numbers (work_list.SplitList)",
        "a kernel reads other pieces than were written",
    ),
    PrivateName(
        "flashinfer.jit.env.FLASHINFER_AOT_DIR",
        "kernels are loaded from a runtime's folder (library.py)",
        "a machine without nvcc cannot serve",
    ),
    PrivateName(
        "flashinfer.jit.core.jit_spec_registry",
        "the kernels that were loaded, to be copied into a runtime (mllm_compile/kernels/flashinfer.py)",
        "a machine without nvcc cannot serve",
    ),
    PrivateName(
        "flashinfer.jit.gen_batch_prefill_module",
        "its 11 arguments by position: kernels that are missing are known ahead (mllm_compile/kernels/flashinfer.py)",
        "they are built one after another, when each is first planned",
    ),
    PrivateName(
        "flashinfer.jit.build_jit_specs",
        "it builds them at once",
        "likewise",
    ),
    PrivateName(
        "flashinfer.page.get_page_module",
        "the kernel is loaded before it is copied (mllm_compile/kernels/flashinfer.py)",
        "a machine without nvcc cannot serve",
    ),
    PrivateName(
        "flashinfer.sampling.get_sampling_module",
        "likewise",
        "a machine without nvcc cannot serve",
    ),
)


def check_version(installed: str) -> None:
    """
    Raises:
        DeviceError: this FlashInfer's private names are not known.
    """
    if installed.partition("+")[0].partition(".post")[0] != VERSION:
        raise DeviceError(
            f"FlashInfer {installed} is installed; expected {VERSION}, as its private names are used "
            "(runtime/attention/flashinfer/private_names.py). Install it with `pip install 'mllm-compile[cuda]'`, or "
            "set runtime.attention_backend: torch."
        )
