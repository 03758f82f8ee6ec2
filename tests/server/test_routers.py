"""Routers find their figures in /metrics."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mllm_compile.runtime.schedule.tiers.figures import TierFigures
from mllm_compile.server.telemetry.metrics import tier_families
from tests.server.harness import eventually, fake_server

LLM_D = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")
PRODUCTION_STACK = (
    "num_requests_running", "num_requests_waiting", "gpu_prefix_cache_hit_rate", "gpu_prefix_cache_hits_total",
    "gpu_prefix_cache_queries_total", "gpu_cache_usage_perc",
)  # fmt: skip


@pytest.fixture(scope="module")
def samples():
    with fake_server() as server:
        for _ in range(2):
            server.complete(prompt="A prompt that is longer than one page of the cache, and asked twice.")
        found = {}

        def has_hits():
            text = server.get("/metrics").body.decode()
            families = list(text_string_to_metric_families(text))
            found.update({one.name: one for family in families for one in family.samples})
            return found["vllm:prefix_cache_hits_total"].value > 0

        eventually(has_hits, "the figures of both requests")
        return found


@pytest.mark.parametrize("name", sorted({*LLM_D, *PRODUCTION_STACK}))
def test_a_router_finds_the_figure(samples, name):
    assert samples[f"vllm:{name}"].labels["engine"] == "0"


def test_older_names_have_the_same_values(samples):
    for older, newer in [
        ("gpu_prefix_cache_hits_total", "prefix_cache_hits_total"),
        ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
    ]:
        assert samples[f"vllm:{older}"].value == samples[f"vllm:{newer}"].value
    hits, queries = (samples[f"vllm:gpu_prefix_cache_{name}_total"].value for name in ("hits", "queries"))
    assert samples["vllm:gpu_prefix_cache_hit_rate"].value == pytest.approx(hits / queries)


def test_tiers_have_figures_each_and_vllms_names_together():
    tiers = [asdict(TierFigures(name, 3, 8, hit_tokens=hits)) for name, hits in (("host", 64), ("disk", 16))]
    stats = {"tiers": tiers, "prefix_query_tokens": 200, "prefix_hit_tokens": 100}
    found = {
        (sample.name, sample.labels.get("tier")): sample.value
        for family in tier_families(stats, {"model_name": "m", "engine": "0"})
        for sample in family.samples
    }
    assert found["mllm:kv_tier_hit_tokens_total", "host"] == 64
    assert found["mllm:kv_tier_capacity", "disk"] == 8
    assert found["vllm:external_prefix_cache_hits_total", None] == 80
    assert found["vllm:external_prefix_cache_queries_total", None] == 180
