"""Accounts for each request at its end: a line in the log, and the figures of /metrics. No prompt, no answer."""

from __future__ import annotations

import logging
import time

from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.flow.job import Job
from mllm_compile.server.metrics import Metrics

logger = logging.getLogger("mllm_compile.server")


def request_refused(error: ApiError, metrics: Metrics, client: str) -> None:
    """Logs and counts a request that was refused at the door; not the message, which may quote it."""
    metrics.response(error.status)
    logger.info("- %d %s client %s", error.status, " ".join(filter(None, (error.code, error.param))) or "-", client)


def request_over(job: Job, metrics: Metrics, client: str) -> None:
    """Logs and counts a request that is over."""
    metrics.request_over(job)
    timing = job.timing()
    num_out = job.num_output_tokens
    parts = [f"{job.name} {job.status}", f"in {job.num_prompt_tokens} out {num_out}"]
    parts.append(f"queue {timing['queue']:.0f} ms prefill {timing['prefill']:.0f} ms")
    if num_out > 1:
        parts.append(f"{timing['decode'] / (num_out - 1):.1f} ms/token")
    parts.append(f"cached {timing['cached']}")
    if timing["preempted"]:
        parts.append(f"preempted {timing['preempted']}")
    parts.append(f"all {1e3 * (time.monotonic() - job.arrived_s):.0f} ms client {client}")
    if job.error is not None and job.error.status >= 500:
        parts.append(f"error: {job.error.message}")
    logger.info("%s", " ".join(parts))
