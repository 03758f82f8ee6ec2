"""The memory behind an engine's KV cache, made of its config; an engine without it does not import this."""

from __future__ import annotations

import secrets

from mllm_compile.errors import ConfigError
from mllm_compile.files.byte_sizes import format_bytes
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.schedule.tiers.tiers import Tiers
from mllm_compile.runtime.tiers.copies import SlotCopies
from mllm_compile.runtime.tiers.layout import SlotLayout

_MOST_SLOTS = 1 << 20  # where pages hold nothing, as of models without attention
_STATES = 0.5  # of the memory, of a model whose layers carry one beside attention


def put_tiers_behind(scheduler: Scheduler, runner: ModelRunner) -> None:
    """Puts the memory that the config names behind a scheduler's prefix cache.

    Raises:
        ConfigError: it is smaller than a page.
        DeviceMemoryError: the system has too little.
    """
    runtime = runner.config.runtime
    num_bytes = int(runtime.kv_offloading_size * 2**30)
    runners = (runner, *runner.drafters)
    pages = SlotLayout([tensor for one in runners for tensor in one.token_to_kv_pool.tensors])
    states = SlotLayout(runner.state_pool.tensors if scheduler.config.num_snapshots else [])
    of_states = int(num_bytes * _STATES) if pages.slot_bytes else num_bytes
    num_states = of_states // states.slot_bytes if states.slot_bytes else 0
    rest = num_bytes - num_states * states.slot_bytes
    num_slots = rest // pages.slot_bytes if pages.slot_bytes else _MOST_SLOTS
    if not num_slots or (states.slot_bytes and not num_states):
        least = pages.slot_bytes + (max(pages.slot_bytes, 2 * states.slot_bytes) if states.slot_bytes else 0)
        raise ConfigError(
            f"runtime.kv_offloading_size is {format_bytes(num_bytes)}, and a page of runtime.page_size: "
            f"{runtime.page_size} tokens takes {format_bytes(pages.slot_bytes)}"
            + (f", a state {format_bytes(states.slot_bytes)}" if states.slot_bytes else "")
            + f". Set it to {least / 2**30:.3g} GiB or more."
        )
    copies = SlotCopies(pages, states, num_slots, num_states, runner.device)
    secret = secrets.token_bytes(32)
    scheduler.use_tiers(Tiers(scheduler.pages, copies, num_slots, num_states, secret, runtime.kv_offloading_min_gain))
