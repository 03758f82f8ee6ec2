"""The figures of several engines in one text: each one's under a label, `model` or `engine`, and what brokers do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from mllm_compile.server.models.engines import EnginesFront
from mllm_compile.server.models.front import ModelsFront

_STATES = ("running", "parked", "loading", "failed")
_OF_PROCESS = "process_"  # the front's, which all engines share


def figures(server: EnginesFront[Any]) -> bytes:
    """The figures in Prometheus' text format."""
    return generate_latest(_Figures(server))


class _Figures(Collector):
    """The figures, made when they are asked for."""

    def __init__(self, server: EnginesFront[Any]) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        kind = self._server.kind
        families: dict[str, Metric] = {}
        for name, engine in self._server.engines.items():
            for family in engine.front.metrics.families():
                _add(families, family, {kind: name})
        yield from families.values()
        state = GaugeMetricFamily(f"mllm:{kind}_state", f"1: the {kind}'s state.", labels=[kind, "state"])
        for name, now in self._server.states().items():
            for one in _STATES:
                state.add_metric([name, one], now == one)
        yield state
        if isinstance(self._server, ModelsFront):
            yield from _of_brokers(self._server)


def _of_brokers(server: ModelsFront) -> Iterator[Metric]:
    switches = CounterMetricFamily("mllm:model_switches", "How often it was woken.", labels=["model"])
    for name, tenant in server.engines.items():
        switches.add_metric([name], tenant.switches)
    yield switches
    whole = GaugeMetricFamily("mllm:device_bytes", "Memory for all models.", labels=["device"])
    given = GaugeMetricFamily("mllm:device_given_bytes", "Memory that models hold.", labels=["device"])
    for broker in server.brokers:
        whole.add_metric([broker.name], broker.num_bytes)
        given.add_metric([broker.name], broker.given_bytes)
    yield from (whole, given)


def _add(families: dict[str, Metric], family: Metric, label: dict[str, str]) -> None:
    if family.name.startswith(_OF_PROCESS):
        families.setdefault(family.name, family)
        return
    whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
    for sample in family.samples:
        whole.samples.append(sample._replace(labels={**sample.labels, **label}))
