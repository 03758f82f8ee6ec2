"""The figures of several models in one text: each model's under the label `model`, and what their brokers do."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from mllm_compile.server.models.front import ModelsFront

_STATES = ("running", "parked", "loading", "failed")
_OF_PROCESS = "process_"  # the front's, which all models share


def figures(server: ModelsFront) -> bytes:
    """The figures in Prometheus' text format."""
    return generate_latest(_Figures(server))


class _Figures(Collector):
    """The figures, made when they are asked for."""

    def __init__(self, server: ModelsFront) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, tenant in self._server.tenants.items():
            for family in tenant.front.metrics.families():
                _add(families, family, name)
        yield from families.values()
        yield from self._own()

    def _own(self) -> Iterator[Metric]:
        state = GaugeMetricFamily("mllm:model_state", "1: the model's state.", labels=["model", "state"])
        switches = CounterMetricFamily("mllm:model_switches", "How often it was woken.", labels=["model"])
        for name, tenant in self._server.tenants.items():
            for one in _STATES:
                state.add_metric([name, one], tenant.state == one)
            switches.add_metric([name], tenant.switches)
        yield from (state, switches)
        whole = GaugeMetricFamily("mllm:device_bytes", "Memory for all models.", labels=["device"])
        given = GaugeMetricFamily("mllm:device_given_bytes", "Memory that models hold.", labels=["device"])
        for broker in self._server.brokers:
            whole.add_metric([broker.name], broker.num_bytes)
            given.add_metric([broker.name], broker.given_bytes)
        yield from (whole, given)


def _add(families: dict[str, Metric], family: Metric, model: str) -> None:
    if family.name.startswith(_OF_PROCESS):
        families.setdefault(family.name, family)
        return
    whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
    for sample in family.samples:
        whole.samples.append(sample._replace(labels={"model": model, **sample.labels}))
