"""An engine with memory behind its KV cache, from inside: what scripts have it forget, and read of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from mllm_compile import Engine
from mllm_compile.runtime.schedule.pages.watch import CacheWatcher
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.schedule.tiers.tiers import Tiers
from mllm_compile.runtime.tiers.copies import SlotCopies


def scheduler_of(engine: Engine) -> Scheduler:
    scheduler = engine.core._scheduler
    assert isinstance(scheduler, Scheduler), "tiers are of one rank"
    return scheduler


def tiers_of(engine: Engine) -> tuple[Tiers, SlotCopies]:
    tiers = scheduler_of(engine).tiers
    assert tiers is not None, "the script has put one behind it"
    assert isinstance(tiers._copies, SlotCopies)
    return tiers, tiers._copies


def drop_kv(engine: Engine) -> None:
    """Lets go of all pages; what was published is stored first."""
    engine.core.while_still(lambda requests: requests.drop_kv())


def forget_cached(engine: Engine) -> None:
    """Lets the prefix cache go of what nobody uses, beside running requests; the memory behind it keeps its own."""

    def forget() -> None:
        tiers_of(engine)[0].settle()
        scheduler_of(engine).rows.flush_prefix_cache()

    engine.core.between_steps(forget)


@contextmanager
def without_tiers(engine: Engine) -> Iterator[None]:
    """Has an engine do meanwhile as if it had none."""
    scheduler = scheduler_of(engine)
    tiers, watchers = scheduler.tiers, list(scheduler.pages.cache.watchers)

    def put(found: Tiers | None, watching: list[CacheWatcher]) -> None:
        scheduler.drop_kv()
        scheduler.tiers = scheduler.admission.tiers = found
        scheduler.pages.cache.watchers[:] = watching

    engine.core.while_still(lambda requests: put(None, []))
    try:
        yield
    finally:
        engine.core.while_still(lambda requests: put(tiers, watchers))


def kv_of(engine: Engine, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    """The bytes of all pages that the prefix cache has of prompts, [pages, n] of each layer's keys, and values."""
    scheduler, found = scheduler_of(engine), list[torch.Tensor]()
    sections = tiers_of(engine)[1]._places[False][0].sections

    def read() -> None:
        matched = [scheduler.pages.cache.match_prefix(np.array(prompt, dtype=np.int64))[1] for prompt in prompts]
        pages = torch.from_numpy(np.concatenate(matched).astype(np.int64))
        found.extend(section.rows[pages.to(section.rows.device)].clone() for section in sections)

    engine.core.while_still(lambda requests: read())
    return found


def link_rates() -> tuple[float, float]:
    """Bytes a second from the host and to it, of one large copy."""
    if not torch.cuda.is_available():
        return float("nan"), float("nan")
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates = []
    for target, source in ((device, host), (host, device)):
        times = []
        for _ in range(4):
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        rates.append(host.nbytes / min(times))
    return rates[0], rates[1]
