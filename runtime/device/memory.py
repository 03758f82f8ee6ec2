"""Measures a device's memory, and decides how much of it the KV pages get.

On CUDA the budget is what mem_fraction_static leaves after the weights, what the libraries hold, and the peak of a real
run of the largest batch. On a CPU it is a share of the free memory, and no more than all requests together can use.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mllm_compile.runtime.config_sections import RuntimeSection
from mllm_compile.runtime.errors import DeviceMemoryError

GIB = 1 << 30
# The rest is for weights of other processes, the page cache that weights are read through, and activations.
CPU_KV_SHARE = 0.25


def give_back_unused(device: torch.device | str) -> None:
    """Frees memory that is no longer reachable, for other processes and for what asks the driver too.

    Modules hold each other in circles, and torch keeps what was freed.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """(free, total)."""
    return torch.cuda.mem_get_info(device.index or 0) if device.type == "cuda" else _host_memory_bytes()


def _host_memory_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """(available, total) of the machine, or of the control group that holds this process if that is less."""
    fields = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, value, *_ = line.split()
        fields[name.rstrip(":")] = int(value) * 1024
    available, total = fields["MemAvailable"], fields["MemTotal"]
    group = root / "sys/fs/cgroup"
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text()) - _unread_file_bytes(group)
    except (OSError, ValueError):  # no such group, or "max": no limit
        return available, total
    return min(available, max(0, limit - used)), min(total, limit)


def _unread_file_bytes(group: Path) -> int:
    """Bytes of files that the system keeps of a control group, and gives up first where others want memory."""
    lines = (group / "memory.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def check_weights_fit(weight_bytes: int, runtime: RuntimeSection, device: torch.device) -> None:
    """Refuses weights that do not fit before loading them, rather than fail amid it.

    Raises:
        DeviceMemoryError: the weights need more than the device has free, or than mem_fraction_static allows.
    """
    free, total = memory_bytes(device)
    share = total * runtime.mem_fraction_static if device.type == "cuda" else total
    allowed = min(free, share)
    if weight_bytes > allowed:
        raise DeviceMemoryError(
            f"the weights need {_gib(weight_bytes)}; {device} has {_gib(free)} free of {_gib(total)}, of which "
            f"{_gib(allowed)} may be used. Free memory on it, raise runtime.mem_fraction_static "
            f"(now {runtime.mem_fraction_static}), or take a smaller model or dtype."
        )


def check_fits(num_bytes: int, what: str, remedy: str, device: torch.device) -> None:
    """Refuses an allocation before it is made.

    Args:
        what: what needs the memory, with its verb; remedy: what to change, a sentence.

    Raises:
        DeviceMemoryError: it needs more than the device has free.
    """
    free, _ = memory_bytes(device)
    if num_bytes > free:
        raise DeviceMemoryError(f"{what} {_gib(num_bytes)}; {device} has {_gib(free)} free. {remedy}")


@dataclass(frozen=True)
class KVBudget:
    """The bytes that pages may take, and why."""

    kv_bytes: int
    explanation: str  # "… GiB free, …": how kv_bytes came about, for errors and logs

    def without(self, num_bytes: int, what: str) -> KVBudget:
        """The budget when `what` takes `num_bytes` of it."""
        if not num_bytes:
            return self
        return KVBudget(self.kv_bytes - num_bytes, f"{self.explanation}, {what} {_gib(num_bytes)}")

    def num_pages(self, bytes_per_page: int, runtime: RuntimeSection, source_len: int = 0) -> int:
        """Pages with the dummy page: what fits, at most what all requests can use together, or max_total_tokens.

        Args:
            source_len: states of a request's source, which are in pages of their own.

        Raises:
            DeviceMemoryError: not even one request of max_model_len tokens fits.
        """
        pages_per_request = sum(-(-most // runtime.page_size) for most in (runtime.max_model_len, source_len))
        useful = 1 + runtime.max_running_requests * pages_per_request
        # Without attention a page holds nothing: it is how the scheduler counts tokens.
        fitting = self.kv_bytes // bytes_per_page if bytes_per_page else useful
        if fitting < 1 + pages_per_request:
            raise DeviceMemoryError(
                f"the KV cache of one request of {runtime.max_model_len} tokens needs "
                f"{_gib((1 + pages_per_request) * bytes_per_page)}, but {_gib(max(0, self.kv_bytes))} are left for it: "
                f"{self.explanation}. Lower runtime.max_model_len, runtime.max_num_batched_tokens "
                f"(now {runtime.max_num_batched_tokens}) or runtime.max_running_requests "
                f"(now {runtime.max_running_requests}), or raise runtime.mem_fraction_static "
                f"(now {runtime.mem_fraction_static})."
            )
        if runtime.max_total_tokens is not None:
            useful = min(useful, 1 + -(-runtime.max_total_tokens // runtime.page_size))
        return min(fitting, useful)


def most_kv_budget(weight_bytes: int, runtime: RuntimeSection, device: torch.device) -> KVBudget:
    """The budget as far as it is known before anything is loaded; on CUDA it will be less.

    Raises:
        DeviceMemoryError: the weights alone do not fit.
    """
    check_weights_fit(weight_bytes, runtime, device)
    if device.type != "cuda":
        return cpu_kv_budget()
    free, total = memory_bytes(device)
    share = min(free, int(total * runtime.mem_fraction_static))
    return KVBudget(
        share - weight_bytes,
        f"at most: of {_gib(share)} that may be used weights take {_gib(weight_bytes)}, and a step and graphs some",
    )


def cpu_kv_budget(num_ranks: int = 1) -> KVBudget:
    """The budget on a CPU: CPU_KV_SHARE of what is available, for all ranks together."""
    available, _ = _host_memory_bytes()
    of_rank = "" if num_ranks == 1 else f", divided by {num_ranks} ranks"
    explanation = f"{CPU_KV_SHARE:.0%} of {_gib(available)} available memory{of_rank}"
    return KVBudget(int(available * CPU_KV_SHARE) // num_ranks, explanation)


def cuda_kv_budget(runtime: RuntimeSection, device: torch.device, run_largest_batch: Callable[[], None]) -> KVBudget:
    """The rest of the static share after a real run of the largest batch.

    Args:
        run_largest_batch: runs it; its transient memory is what every later step may need again.

    Raises:
        DeviceMemoryError: the largest batch itself does not fit.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        run_largest_batch()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        free, total = memory_bytes(device)
        raise DeviceMemoryError(
            f"a step of {runtime.max_num_batched_tokens} tokens and {runtime.max_running_requests} requests does not "
            f"fit into what the weights leave of {_gib(total)} ({_gib(free)} are free now). Lower "
            "runtime.max_num_batched_tokens or runtime.max_running_requests."
        ) from error
    peak_reserved = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    # Reserved, not allocated: what fragmentation costs is in it.
    transient = peak_reserved - torch.cuda.memory_reserved(device)
    free, total = memory_bytes(device)
    share = int(total * runtime.mem_fraction_static)
    resident = total - free
    return KVBudget(
        share - resident - transient,
        f"{runtime.mem_fraction_static:.0%} of {_gib(total)} is {_gib(share)}, of which weights, libraries and other "
        f"processes hold {_gib(resident)} and the largest step takes {_gib(transient)}",
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
