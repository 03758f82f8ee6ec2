"""Counts the experts that decode steps choose, in a worker process.

The kernels that are measured do not count: a program of its own does, of the same weights and prompts, with its pieces
as traced. Its roundings are others, so single tokens may choose otherwise, and the mean does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.trace.decode_steps import endless_requests, model_runner, prefilled
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.engine.start.parts import EngineParts
from mllm_compile.process.progress import reporter_for


def count_experts(setting: Setting, batches: Sequence[int], prompt_len: int, steps: int) -> list[float | None]:
    """Counts the share of a layer's experts that a step chooses.

    Returns:
        Of each batch, the mean of `steps` decode steps and all layers; None: its requests do not fit at once, or
        nothing counts this model's experts.
    """
    counting = setting.without_graphs().changed("compile", backend="eager")
    counting = counting.changed("runtime", expert_stats=True, expert_parallel_size=1)  # one rank sees all tokens
    parts = assemble(counting.engine_config(), reporter_for(plain_lines=True))
    try:
        return [_share(parts, setting, batch, prompt_len, steps) for batch in batches]
    finally:
        parts.shutdown()


def _share(parts: EngineParts, setting: Setting, batch: int, prompt_len: int, steps: int) -> float | None:
    runner = model_runner(parts)
    pool = runner.token_to_kv_pool
    pages_of_one = -(-(prompt_len + steps + 1) // runner.config.runtime.page_size)
    if not runner.expert_counts or batch * pages_of_one >= pool.num_pages:
        return None
    counts: list[torch.Tensor] = list(runner.expert_counts.values())
    requests = endless_requests(setting, batch, prompt_len)
    step = prefilled(parts, requests)
    shares = []
    for _ in range(steps):
        for of_layer in counts:
            of_layer.zero_()
        step()
        shares += [(of_layer > 0).float().mean() for of_layer in counts]
    for request in requests:
        parts.scheduler.abort(request)
    return statistics.fmean(torch.stack(shares).tolist())
