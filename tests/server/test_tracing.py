"""Spans of requests: made by OpenTelemetry's package, below the caller's span, with figures and no texts."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from mllm_compile.errors import ConfigError
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.flow.job import Job
from mllm_compile.server.telemetry import tracing
from mllm_compile.server.telemetry.tracing import Tracing, make_tracing
from tests.adapters.fake_device import adapter_folder
from tests.server.audio.test_form import TYPE, form_of
from tests.server.harness import eventually, fake_server
from tests.server.test_flow import Client, Engine
from tests.sounds import tone, wav_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = [(b"host", b"x"), (b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())]
ENDPOINT = "--otlp-traces-endpoint"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


def ended_job(error: ApiError | None = None) -> Job:
    """A request that is over: two tokens, or an error."""

    async def run() -> Job:
        engine = Engine()
        job = engine.start(Client(), row=1, temperature=0.5, top_p=0.9, max_tokens=2)
        if error is not None:
            job.fail(error)
            return job
        engine.step({1: "a"})
        engine.step({1: "b"})
        engine.end(job, "length")
        return job

    return asyncio.run(run())


def span_of(job: Job, headers: Any) -> Any:
    exporter = InMemorySpanExporter()
    made = Tracing(exporter)
    made.request_over(job, "model", made.parent_of(headers))
    made.close()
    (span,) = exporter.get_finished_spans()
    return span


def test_a_request_is_a_span_below_the_callers_with_figures_and_no_texts():
    job = ended_job()
    span = span_of(job, PARENT)
    assert (span.name, span.kind) == ("llm_request", SpanKind.SERVER)
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    told = dict(span.attributes)
    assert (told["gen_ai.usage.prompt_tokens"], told["gen_ai.usage.completion_tokens"]) == (1, 2)
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert (told["gen_ai.response.model"], told["gen_ai.request.id"]) == ("model", job.name)
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert told["gen_ai.latency.e2e"] + 0.1 > told["gen_ai.latency.time_to_first_token"] >= 0  # by other clocks
    assert abs((span.end_time - span.start_time) / 1e9 - told["gen_ai.latency.e2e"]) < 1e-3
    assert "ab" not in map(str, told.values())
    assert span.resource.attributes["service.name"] == "mllm-compile"
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(("status", "code"), [(500, StatusCode.ERROR), (408, StatusCode.UNSET)])
def test_a_request_that_has_failed_says_so(status, code):
    span = span_of(ended_job(ApiError(status, "it failed", code="engine_error")), [])
    assert span.status.status_code is code
    assert span.parent is None
    assert span.attributes["http.response.status_code"] == status
    assert "gen_ai.latency.time_to_first_token" not in span.attributes


def test_the_environment_names_the_service_and_the_sampler(monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "a=b, service.name = mine")
    assert span_of(ended_job(), []).resource.attributes["service.name"] == "mine"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "other")
    assert span_of(ended_job(), []).resource.attributes["service.name"] == "other"
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with pytest.raises(ValueError, match="not enough values"):
        span_of(ended_job(), PARENT)


def test_there_are_spans_only_where_they_are_asked_for(monkeypatch, caplog):
    assert make_tracing(None) is None
    for wrong in ("localhost:4318", "grpc://localhost:4317", "http://", ""):
        with pytest.raises(ConfigError, match=f"{ENDPOINT}: expected the URL of a collector's OTLP over HTTP"):
            make_tracing(wrong)
    monkeypatch.setattr(tracing, "_is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=rf"{ENDPOINT}: .*pip install 'mllm-compile\[otel\]'"):
        make_tracing("http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert make_tracing(None) is None
    assert "no traces are sent" in caplog.text
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    caplog.clear()
    assert make_tracing(None) is None and not caplog.text


@pytest.mark.parametrize(
    ("given", "whole"),
    [("http://a:4318", "http://a:4318/v1/traces"), ("https://a/", "https://a/v1/traces"), ("http://a/x", "http://a/x")],
)
def test_an_endpoint_without_a_path_gets_otlps(given, whole):
    assert tracing._whole(given) == whole


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []
    handler = type("Kept", (Collector,), {"bodies": bodies})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", bodies
        server.shutdown()


def test_a_server_sends_its_spans_to_a_collector_with_the_adapter_that_answered(collector, tmp_path):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    url, bodies = collector
    adapters = {"sql-adapter": str(adapter_folder(tmp_path, 1))}
    with fake_server({"otlp_traces_endpoint": url}, {"adapters": adapters}) as server:
        headers = {name.decode(): value.decode() for name, value in PARENT[1:]}
        body = {"prompt": "def", "max_tokens": 2, "model": "sql-adapter"}
        assert server.post("/v1/completions", body, headers=headers).status == 200
        assert server.end() == 0  # what is left is sent at the end
    assert all(part in b"".join(bodies) for part in (bytes.fromhex(TRACE), b"llm_request", b"sql-adapter"))


def test_each_window_of_a_sound_that_follows_another_has_a_span(collector):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    url, bodies = collector
    with fake_server({"otlp_traces_endpoint": url}, {"speech": True}) as server:
        headers = {name.decode(): value.decode() for name, value in PARENT[1:]} | {"content-type": TYPE}
        form = form_of(("file", wav_of(tone(2.5, 300.0))), ("language", "en"), ("sequential", "true"))
        assert server.post("/v1/audio/transcriptions", form, headers=headers).status == 200
        assert server.end() == 0
    assert b"".join(bodies).count(bytes.fromhex(TRACE)) == 3


def test_a_collector_that_is_not_there_holds_nothing_up():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    with fake_server(environment=environment) as server:
        for _ in range(5):
            assert server.complete().status == 200
        eventually(server.is_ready)
        assert server.end() == 0
