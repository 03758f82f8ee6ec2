"""Accounts for each request at its end: a line in the log, and the figures of /metrics. No prompt, no answer."""

from __future__ import annotations

import logging
import time

from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.flow.job import Job
from mllm_compile.server.telemetry.metrics import Metrics

logger = logging.getLogger("mllm_compile.server")


def request_refused(error: ApiError, metrics: Metrics, path: str, client: str) -> None:
    """Logs and counts a request that was refused on arrival; not the message, which may quote it."""
    metrics.response(error.status)
    fields = {"request": None, "status": error.status, "path": path, "code": error.code, "param": error.param}
    reason = " ".join(filter(None, (path, error.code, error.param)))
    logger.info("- %d %s client %s", error.status, reason, client, extra={"fields": fields | {"client": client}})


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
    all_ms = round(1e3 * (time.monotonic() - job.arrived_s), 1)
    parts.append(f"all {all_ms:.0f} ms client {client}")
    error = job.error.message if job.error is not None and job.error.status >= 500 else None
    if error is not None:
        parts.append(f"error: {error}")
    fields = {"request": job.name, "status": job.status, "client": client, "error": error}
    fields |= {"in": job.num_prompt_tokens, "out": num_out, "all": all_ms, **timing}
    logger.info("%s", " ".join(parts), extra={"fields": fields})
