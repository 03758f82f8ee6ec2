"""The figures of /metrics, for Prometheus: the front's, and the engine's last ones.

Names begin with `mllm:` and do not change. Figures that dashboards and routers read from vLLM have its names too, with
its labels `model_name` and `engine`; figures of the process are Prometheus' own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from mllm_compile.server.flow.job import Job

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_TOKENS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))
# Of requests: name, vLLM's name, what it is, bounds. A request of several answers counts once.
_REQUESTS = (
    ("queue_seconds", "request_queue_time_seconds", "From arrival to the first step.", _SECONDS),
    ("prefill_seconds", "request_prefill_time_seconds", "From there to the first token.", _SECONDS),
    ("decode_seconds", "request_decode_time_seconds", "From the first token to the last.", _SECONDS),
    ("inference_seconds", "request_inference_time_seconds", "From the first step to the last token.", _SECONDS),
    ("e2e_seconds", "e2e_request_latency_seconds", "From arrival to the end.", _SECONDS),
    ("output_token_seconds", "request_time_per_output_token_seconds", "A token, but for the first.", _SECONDS),
    ("prompt_tokens", "request_prompt_tokens", "Tokens of the prompts.", _TOKENS),
    ("generated_tokens", "request_generation_tokens", "Tokens of the answers.", _TOKENS),
    ("max_tokens", "request_params_max_tokens", "What max_tokens asks for.", _TOKENS),
    ("answers", "request_params_n", "Answers of a prompt.", (1, 2, 5, 10, 20)),
)
# Of EngineStats: name, vLLM's name, what it is, how it is read.
_Read = Callable[[Mapping[str, Any]], float]
_GAUGES: tuple[tuple[str, str | None, str, _Read], ...] = (
    ("requests_running", "num_requests_running", "Completions that hold KV pages.", lambda s: s["running"]),
    ("kv_usage", "kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.", lambda s: _share(s)),
    ("prefix_hit_rate", "gpu_prefix_cache_hit_rate", "Share of prompt tokens found, 0 to 1.", lambda s: _hit_rate(s)),
    ("sessions", None, "Sessions that are known.", lambda s: s["sessions"]),
    ("held_seconds", None, "How long a pause, an update or sleep has held all steps.", lambda s: s["held_seconds"]),
    ("tokens_per_second", None, "Generated tokens a second, of the last ten.", lambda s: s["tokens_per_second"]),
    ("inter_token_latency_longest_seconds", None, "The longest such gap since the start.", lambda s: _longest_gap(s)),
)
_COUNTERS: tuple[tuple[str, str | None, str, _Read], ...] = (
    ("prefix_query_tokens", "prefix_cache_queries", "Prompt tokens looked up.", lambda s: s["prefix_query_tokens"]),
    ("prefix_hit_tokens", "prefix_cache_hits", "Prompt tokens found in the cache.", lambda s: s["prefix_hit_tokens"]),
    ("preemptions", "num_preemptions", "Requests put back, as pages ran out.", lambda s: s["preemptions"]),
    ("sessions_ended", None, "Sessions that clients have ended.", lambda s: s["sessions_ended"]),
    ("ended_pages_evicted", None, "Evicted pages of no further use.", lambda s: s["ended_pages_evicted"]),
    ("steps", None, "Steps of the engine.", lambda s: s["steps"]),
    ("drafts", "spec_decode_num_drafts", "Drafts that were checked.", lambda s: s["drafts"]),
    ("drafted_tokens", "spec_decode_num_draft_tokens", "Tokens that were drafted.", lambda s: s["drafted_tokens"]),
    ("accepted_tokens", "spec_decode_num_accepted_tokens", "Those accepted.", lambda s: s["accepted_tokens"]),
)
# Of vLLM's names, the older ones that routers still read.
_OLDER = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
}
# Of TierFigures: field, and what it is.
_OF_TIERS = {
    "pages": "Pages that a tier holds.",
    "capacity": "Pages that it can hold.",
    "states": "States of prefixes that it holds.",
    "hit_tokens": "Tokens of prompts that came from it.",
    "loaded_bytes": "Bytes that were copied from it.",
    "stored_bytes": "Bytes that were copied to it.",
    "load_seconds": "Seconds of copies from it.",
    "store_seconds": "Seconds of copies to it.",
    "evictions": "Pages and states that were given up.",
    "failed_loads": "Pages and states that did not arrive, and were computed.",
}
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "time_to_first_token", "From arrival at the engine to the first token."),
    ("inter_token_latency_seconds", "time_between_tokens", "From one token of a request to its next."),
)


def _share(stats: Mapping[str, Any]) -> float:
    share: float = stats["kv_pages_used"] / max(1, stats["kv_pages_total"])
    return share


def _hit_rate(stats: Mapping[str, Any]) -> float:
    share: float = stats["prefix_hit_tokens"] / max(1, stats["prefix_query_tokens"])
    return share


def _longest_gap(stats: Mapping[str, Any]) -> float:
    largest: float = stats["time_between_tokens"]["largest"]
    return largest


class Metrics:
    """The figures of one server.

    Args:
        model: the label of vLLM's names.
        live: the front's figures by name, with what each is; a counter's name ends in _total.
        engine: the engine's last figures, {} before the first.
        cache_config: of the KV cache, as vLLM names it; {} before an engine was ready.
    """

    def __init__(
        self,
        model: Callable[[], str],
        live: Mapping[str, tuple[str, str | None, Callable[[], float]]],
        engine: Callable[[], Mapping[str, Any]],
        cache_config: Callable[[], Mapping[str, str]],
    ) -> None:
        prometheus_client.disable_created_metrics()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_EngineFigures(model, live, engine, cache_config, self))
        self.prompt_tokens = self.generated_tokens = 0
        self.finished: dict[str, int] = {}
        self._responses = self._counter("responses", "Responses of requests that generate, by status.", ["status"])
        self._requests = {
            name: Histogram(f"mllm:request_{name}", what, registry=self._registry, buckets=bounds)
            for name, _, what, bounds in _REQUESTS
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
        self._observe(e2e_seconds=time.monotonic() - job.arrived_s)
        if job.first_token_s is None:
            return
        timing = job.timing()
        queue, prefill, decode = (timing[name] / 1e3 for name in ("queue", "prefill", "decode"))
        self._observe(queue_seconds=queue, prefill_seconds=prefill, decode_seconds=decode)
        self._observe(inference_seconds=prefill + decode, answers=len(job.choices) / len(job.prompts))
        self._observe(prompt_tokens=job.num_prompt_tokens, generated_tokens=job.num_output_tokens)
        if job.num_steps > 1:
            self._observe(output_token_seconds=decode / (job.num_steps - 1))
        if job.params.max_tokens is not None:
            self._observe(max_tokens=job.params.max_tokens)

    def _observe(self, **values: float) -> None:
        for name, value in values.items():
            self._requests[name].observe(value)

    def of_vllm(self, label: Mapping[str, str]) -> Iterator[Metric]:
        """The figures of requests by vLLM's names."""
        for name, alias, what, _ in _REQUESTS:
            (family,) = self._requests[name].collect()
            copy = Metric(f"vllm:{alias}", what, "histogram")
            for sample in family.samples:
                suffix = sample.name.removeprefix(family.name)
                copy.add_sample(copy.name + suffix, {**label, **sample.labels}, sample.value)
            yield copy

    def families(self) -> Iterator[Metric]:
        """The figures by name."""
        return iter(self._registry.collect())

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
        cache_config: Callable[[], Mapping[str, str]],
        own: Metrics,
    ) -> None:
        self._model = model
        self._live = live
        self._engine = engine
        self._cache_config = cache_config
        self._own = own

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._engine()
        label = {"model_name": self._model(), "engine": "0"}
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
        yield from self._own.of_vllm(label)
        cache = self._cache_config()
        if cache:
            info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=[*cache, "engine"])
            info.add_metric([*cache.values(), "0"], 1)
            yield info
        if not stats:
            return
        for name, alias, what, of in _GAUGES:
            yield from _both(GaugeMetricFamily, name, alias, what, of(stats), label)
        for name, alias, what, of in _COUNTERS:
            yield from _both(CounterMetricFamily, name, alias, what, of(stats), label)
        yield from _by_position(stats["accepted_by_position"], label)
        for name, field, what in _HISTOGRAMS:
            yield from _histograms(name, what, stats[field], label)
        if stats.get("adapters") is not None:
            yield _adapters(stats["adapters"])
        if stats.get("tiers"):
            yield from tier_families(stats, label)

    def _finished(self, label: dict[str, str]) -> Iterator[Metric]:
        for prefix, labels in (("mllm:completions", {}), ("vllm:request_success", label)):
            family = CounterMetricFamily(prefix, "Completions by their end.", labels=["finished_reason", *labels])
            for reason, count in self._own.finished.items():
                family.add_metric([reason, *labels.values()], count)
            yield family


def _adapters(stats: Mapping[str, Any]) -> Metric:
    """The adapters in use and waited for, as gateways read them of vLLM: labels, and the time as the value."""
    labels = {
        "max_lora": str(stats["most"]),
        "waiting_lora_adapters": ",".join(stats["waiting"]),
        "running_lora_adapters": ",".join(stats["running"]),
    }
    family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of requests.", labels=list(labels))
    family.add_metric(list(labels.values()), time.time())
    return family


def tier_families(stats: Mapping[str, Any], label: Mapping[str, str]) -> Iterator[Metric]:
    """The memory behind the KV cache."""
    for name, what in _OF_TIERS.items():
        kind = GaugeMetricFamily if name in ("pages", "capacity", "states") else CounterMetricFamily
        family = kind(f"mllm:kv_tier_{name}", what, labels=["tier"])
        for tier in stats["tiers"]:
            family.add_metric([tier["name"]], tier[name])
        yield family
    hits = sum(tier["hit_tokens"] for tier in stats["tiers"])
    lacking = stats["prefix_query_tokens"] - stats["prefix_hit_tokens"] + hits
    for name, value in (("queries", lacking), ("hits", hits)):
        family = CounterMetricFamily(f"vllm:external_prefix_cache_{name}", "Of tiers, in tokens.", labels=list(label))
        family.add_metric(list(label.values()), value)
        yield family


def _by_position(counts: Sequence[int], label: Mapping[str, str]) -> Iterator[Metric]:
    """Accepted tokens by their place in the draft."""
    what = "Accepted tokens by their place in the draft."
    for prefix, labels in (("mllm:accepted_tokens", {}), ("vllm:spec_decode_num_accepted_tokens", label)):
        family = CounterMetricFamily(f"{prefix}_per_pos", what, labels=["position", *labels])
        for place, count in enumerate(counts):
            family.add_metric([str(place), *labels.values()], count)
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
    for of_theirs in filter(None, (alias, _OLDER.get(alias or ""))):
        of_vllm = family(f"vllm:{of_theirs}", what, labels=list(label))
        of_vllm.add_metric(list(label.values()), value)
        yield of_vllm


def _histograms(name: str, what: str, data: Mapping[str, Any], label: dict[str, str]) -> Iterator[Metric]:
    total = 0
    buckets = []
    for bound, count in zip([*map(str, data["bounds"]), "+Inf"], data["counts"], strict=True):
        total += count
        buckets.append((bound, total))
    yield HistogramMetricFamily(f"mllm:{name}", what, buckets=buckets, sum_value=data["total"])
    aliases = (name, "time_per_output_token_seconds") if name == "inter_token_latency_seconds" else (name,)
    for alias in aliases:  # vLLM's, the older one too, which dashboards still read
        of_vllm = HistogramMetricFamily(f"vllm:{alias}", what, labels=list(label))
        of_vllm.add_metric(list(label.values()), buckets, data["total"])
        yield of_vllm
