"""The figures of /metrics, for Prometheus: those of the front, and the engine's last ones.

Names begin with `mllm:` and do not change. The dozen that routers and autoscalers read from vLLM are there by its names
too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from mllm_compile.server.flow.job import Job

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
# Of EngineStats: name, vLLM's name, what it is, how it is read.
_Read = Callable[[Mapping[str, Any]], float]
_GAUGES: tuple[tuple[str, str | None, str, _Read], ...] = (
    ("requests_running", "num_requests_running", "Completions that hold KV pages.", lambda s: s["running"]),
    ("kv_usage", "kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.", lambda s: _share(s)),
    ("tokens_per_second", None, "Generated tokens a second, of the last ten.", lambda s: s["tokens_per_second"]),
    ("inter_token_latency_longest_seconds", None, "The longest such gap since the start.", lambda s: _longest_gap(s)),
)
_COUNTERS: tuple[tuple[str, str | None, str, _Read], ...] = (
    ("prefix_query_tokens", "prefix_cache_queries", "Prompt tokens looked up.", lambda s: s["prefix_query_tokens"]),
    ("prefix_hit_tokens", "prefix_cache_hits", "Prompt tokens found in the cache.", lambda s: s["prefix_hit_tokens"]),
    ("preemptions", "num_preemptions", "Requests put back, as pages ran out.", lambda s: s["preemptions"]),
    ("steps", None, "Steps of the engine.", lambda s: s["steps"]),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "time_to_first_token", "From arrival at the engine to the first token."),
    ("inter_token_latency_seconds", "time_between_tokens", "From one token of a request to its next."),
)


def _share(stats: Mapping[str, Any]) -> float:
    return stats["kv_pages_used"] / max(1, stats["kv_pages_total"])


def _longest_gap(stats: Mapping[str, Any]) -> float:
    return stats["time_between_tokens"]["largest"]


class Metrics:
    """The figures of one server.

    Args:
        model: the label of vLLM's names.
        live: the front's figures by name, with what each is; a counter's name ends in _total.
        engine: the engine's last figures, {} before the first.
    """

    def __init__(
        self,
        model: Callable[[], str],
        live: Mapping[str, tuple[str, str | None, Callable[[], float]]],
        engine: Callable[[], Mapping[str, Any]],
    ) -> None:
        prometheus_client.disable_created_metrics()
        self._registry = CollectorRegistry()
        self._registry.register(_EngineFigures(model, live, engine, self))
        self.prompt_tokens = self.generated_tokens = 0
        self.finished: dict[str, int] = {}
        self._responses = self._counter("responses", "Responses of requests that generate, by status.", ["status"])
        self._times = {
            name: Histogram(f"mllm:request_{name}_seconds", what, registry=self._registry, buckets=_SECONDS)
            for name, what in (
                ("queue", "From arrival to the first step."),
                ("prefill", "From there to the first token."),
                ("decode", "From the first token to the last."),
                ("e2e", "From arrival to the end."),
            )
        }

    def _counter(self, name: str, what: str, labels: list[str]) -> Counter:
        return Counter(f"mllm:{name}", what, labels, registry=self._registry)

    def response(self, status: int) -> None:
        """Counts a response of a request that was to generate."""
        self._responses.labels(str(status)).inc()

    def request_over(self, job: Job) -> None:
        """Counts a request that is over."""
        self.response(job.status)
        self.prompt_tokens += job.num_prompt_tokens
        self.generated_tokens += job.num_output_tokens
        for choice in job.choices:
            reason = "error" if job.error is not None else choice.finish_reason or "abort"
            self.finished[reason] = self.finished.get(reason, 0) + 1
        if job.first_token_s is not None:
            timing = job.timing()
            for name in ("queue", "prefill", "decode"):
                self._times[name].observe(timing[name] / 1e3)
        self._times["e2e"].observe(time.monotonic() - job.arrived_s)

    def text(self) -> bytes:
        """The figures in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineFigures(Collector):
    """Figures that are read when they are asked for."""

    def __init__(
        self,
        model: Callable[[], str],
        live: Mapping[str, tuple[str, str | None, Callable[[], float]]],
        engine: Callable[[], Mapping[str, Any]],
        own: Metrics,
    ) -> None:
        self._model = model
        self._live = live
        self._engine = engine
        self._own = own

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._engine()
        label = {"model_name": self._model()}
        for name, (what, alias, read) in self._live.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield from _both(family, name, alias, what, read(), label)
        yield from _both(
            CounterMetricFamily, "prompt_tokens", "prompt_tokens", "Prompt tokens.", self._own.prompt_tokens, label
        )
        yield from _both(
            CounterMetricFamily,
            "generated_tokens",
            "generation_tokens",
            "Output tokens.",
            self._own.generated_tokens,
            label,
        )
        yield from self._finished(label)
        if not stats:
            return
        for name, alias, what, of in _GAUGES:
            yield from _both(GaugeMetricFamily, name, alias, what, of(stats), label)
        for name, alias, what, of in _COUNTERS:
            yield from _both(CounterMetricFamily, name, alias, what, of(stats), label)
        for name, field, what in _HISTOGRAMS:
            yield from _histograms(name, what, stats[field], label)

    def _finished(self, label: dict[str, str]) -> Iterator[Metric]:
        for prefix, labels in (("mllm:completions", {}), ("vllm:request_success", label)):
            family = CounterMetricFamily(prefix, "Completions by their end.", labels=["finished_reason", *labels])
            for reason, count in self._own.finished.items():
                family.add_metric([reason, *labels.values()], count)
            yield family


def _both(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    alias: str | None,
    what: str,
    value: float,
    label: dict[str, str],
) -> Iterator[Metric]:
    yield family(f"mllm:{name}", what, value=value)
    if alias is not None:
        of_vllm = family(f"vllm:{alias}", what, labels=list(label))
        of_vllm.add_metric(list(label.values()), value)
        yield of_vllm


def _histograms(name: str, what: str, data: Mapping[str, Any], label: dict[str, str]) -> Iterator[Metric]:
    total = 0
    buckets = []
    for bound, count in zip([*map(str, data["bounds"]), "+Inf"], data["counts"], strict=True):
        total += count
        buckets.append((bound, total))
    yield HistogramMetricFamily(f"mllm:{name}", what, buckets=buckets, sum_value=data["total"])
    of_vllm = HistogramMetricFamily(f"vllm:{name}", what, labels=list(label))
    of_vllm.add_metric(list(label.values()), buckets, data["total"])
    yield of_vllm
