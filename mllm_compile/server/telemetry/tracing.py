"""Traces of requests: a span each, by OpenTelemetry's own package, under the names that vLLM gives its figures.

The package's environment variables hold: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and the
rest. Spans go out in batches from a thread of the package's; what a collector does not take is dropped. No prompt and
no answer is in them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mllm_compile.errors import ConfigError
from mllm_compile.server.flow.job import Job

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger("mllm_compile.server")

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_INSTALL = "traces need OpenTelemetry's SDK and exporter, not installed: pip install 'mllm-compile[otel]'"
_CLOSE_S = 2.0


class Tracing:
    """Makes a span of each request.

    Args:
        exporter: takes the spans.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({SERVICE_NAME: _service_name()})
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("mllm_compile.server")

    def parent_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Context:
        """The span that a request's headers name as its own's parent, if they do."""
        from opentelemetry.propagate import extract

        return extract({name.decode("latin-1"): value.decode("latin-1") for name, value in headers})

    def request_over(self, job: Job, model: str | None, parent: Context) -> None:
        """Makes the span of a request that is over."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now_s, now_ns = time.monotonic(), time.time_ns()
        begin_ns = now_ns - round(1e9 * (now_s - job.arrived_s))
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, start_time=begin_ns)
        if span.is_recording():
            span.set_attributes(_attributes(job, model, now_s))
            if job.status >= 500:
                span.set_status(Status(StatusCode.ERROR, None if job.error is None else job.error.code))
        span.end(now_ns)

    def close(self) -> None:
        """Sends what is left, if the collector takes it soon: the package's own bounds are longer."""
        ends = threading.Thread(target=self._provider.shutdown, daemon=True)
        ends.start()
        ends.join(_CLOSE_S)


def make_tracing(endpoint: str | None) -> Tracing | None:
    """Traces that go to an endpoint, or to the environment's; None where neither asks for any.

    Raises:
        ConfigError: the endpoint is malformed, or the packages are not installed.
    """
    by_environment = any(os.environ.get(name) for name in _VARIABLES)
    if endpoint is None and not (by_environment and os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"):
        return None
    url = None if endpoint is None else _whole(endpoint)
    if not all(_is_installed(name) for name in _NEEDED):
        if endpoint is not None:
            raise ConfigError(f"--otlp-traces-endpoint: {_INSTALL}")
        logger.warning("%s is set, and no traces are sent: %s", " or ".join(_VARIABLES), _INSTALL)
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Tracing(OTLPSpanExporter(endpoint=url))


def _whole(endpoint: str) -> str:
    """An endpoint with OTLP's path, where it has none."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"--otlp-traces-endpoint: expected the URL of a collector's OTLP over HTTP, such as "
            f"http://127.0.0.1:4318/v1/traces, got {endpoint!r}"
        )
    return endpoint if parts.path not in ("", "/") else f"{endpoint.rstrip('/')}/v1/traces"


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _service_name() -> str:
    """The environment's name of the service, which one given in code would hide; or ours."""
    pairs = (pair.partition("=") for pair in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    given = {key.strip(): value.strip() for key, _, value in pairs}
    return os.environ.get("OTEL_SERVICE_NAME") or given.get("service.name") or "mllm-compile"


def _attributes(job: Job, model: str | None, now_s: float) -> dict[str, Any]:
    params = job.params
    timing = job.timing()
    queue, prefill, decode = (timing[name] / 1e3 for name in ("queue", "prefill", "decode"))
    attributes = {
        "gen_ai.response.model": model,
        "gen_ai.request.id": job.name,
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.num_sequences": len(job.choices),
        "gen_ai.usage.prompt_tokens": job.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": job.num_output_tokens,
        "gen_ai.usage.cached_tokens": job.num_cached_tokens,
        "gen_ai.response.finish_reasons": [choice.finish_reason or "abort" for choice in job.choices],
        "gen_ai.latency.e2e": now_s - job.arrived_s,
        "http.response.status_code": job.status,
    }
    if job.first_token_s is not None:
        attributes |= {
            "gen_ai.latency.time_in_queue": queue,
            "gen_ai.latency.time_to_first_token": queue + prefill,
            "gen_ai.latency.time_in_model_prefill": prefill,
            "gen_ai.latency.time_in_model_decode": decode,
            "gen_ai.latency.time_in_model_inference": prefill + decode,
        }
    return {name: value for name, value in attributes.items() if value is not None}
