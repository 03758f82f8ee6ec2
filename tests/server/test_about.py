"""A server about itself: probes, load, settings, its interface, and figures by the names that others read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import prometheus_client.parser
import pytest

from mllm_compile.server.app import paths_of
from mllm_compile.server.openapi import document
from mllm_compile.server.options import ServeOptions
from tests.server.harness import Server, eventually, fake_server

# Of vLLM's v1/metrics/loggers.py (005a810b), and of Prometheus' clients.
FIGURES = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:prefix_cache_queries_total
vllm:prefix_cache_hits_total vllm:num_preemptions_total vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:request_success_total vllm:cache_config_info
vllm:e2e_request_latency_seconds_count vllm:request_queue_time_seconds_count vllm:request_inference_time_seconds_count
vllm:request_prefill_time_seconds_count vllm:request_decode_time_seconds_count vllm:request_prompt_tokens_count
vllm:request_generation_tokens_count vllm:request_params_max_tokens_count vllm:request_params_n_count
vllm:request_time_per_output_token_seconds_count vllm:time_to_first_token_seconds_count
vllm:inter_token_latency_seconds_count vllm:time_per_output_token_seconds_count
process_cpu_seconds_total process_resident_memory_bytes process_start_time_seconds process_open_fds
""".split
KEY = "secret"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server({"api_keys": [KEY], "max_queue_s": 77.0}) as server:
        yield server


def get(server: Server, path: str) -> Any:
    return server.get(path, headers={"authorization": f"Bearer {KEY}"})


def samples(server: Server) -> list[Any]:
    text = get(server, "/metrics").body.decode()
    return [
        sample for family in prometheus_client.parser.text_string_to_metric_families(text) for sample in family.samples
    ]


def test_figures_are_there_by_the_names_that_dashboards_and_routers_read(server):
    asked = {"prompt": [5, 6, 7], "max_tokens": 9, "n": 2, "ignore_eos": True}
    assert server.post("/v1/completions", asked, headers={"x-api-key": KEY}).status == 200
    counts = ("vllm:e2e_request_latency_seconds_count", "vllm:inter_token_latency_seconds_count")
    eventually(
        lambda: all(one.value for one in samples(server) if one.name in counts)
    )  # the engine tells its own later
    found = {one.name: one for one in samples(server)}
    assert not set(FIGURES()) - found.keys()
    for name in FIGURES():
        if name.startswith("vllm:") and name != "vllm:cache_config_info":
            assert found[name].labels["model_name"] == "fake", name
        if name.endswith("_count"):
            assert found[name].value >= 1, name
    assert found["vllm:request_prompt_tokens_sum"].value == 3
    assert found["vllm:request_generation_tokens_sum"].value == 18
    assert found["vllm:request_params_max_tokens_sum"].value == 9
    assert found["vllm:request_params_n_sum"].value == 2
    info = found["vllm:cache_config_info"].labels
    assert (
        int(info["block_size"]) * int(info["num_gpu_blocks"]) == get(server, "/server_info").json["engine"]["kv_tokens"]
    )


def test_a_histogram_of_vllms_has_the_buckets_of_ours(server):
    def buckets(name: str) -> list[tuple[str, float]]:
        return [(one.labels["le"], one.value) for one in samples(server) if one.name == name]

    ours = buckets("mllm:request_e2e_seconds_bucket")
    assert len(ours) > 10 and ours == buckets("vllm:e2e_request_latency_seconds_bucket")


def test_sagemakers_probe_needs_no_key_and_waits_for_the_engine(server, tmp_path):
    for method in ("GET", "POST"):
        assert server.ask(method, "/ping").status == 200
    gate = tmp_path / "gate"
    gate.touch()
    with fake_server(environment={"MLLM_FAKE_SLOW_START": str(gate)}, waits=False) as starting:
        assert starting.get("/ping").status == 503
        info = starting.get("/server_info").json
        assert (info["state"], info["engine"]) == ("starting", None)


def test_its_load_is_what_is_in_work(server):
    assert get(server, "/load").json == {"server_load": 0, "running": 0, "waiting": 0}
    long = {"prompt": [5], "max_tokens": 400, "ignore_eos": True}
    with fake_server(settings={"delay_s": 0.05}) as slow, ThreadPoolExecutor() as threads:
        threads.submit(slow.post, "/v1/completions", long)
        eventually(lambda: slow.get("/load").json == {"server_load": 1, "running": 1, "waiting": 0})
        slow.process.kill()


def test_it_says_what_it_is_without_its_keys(server):
    answer = get(server, "/server_info")
    info = answer.json
    assert info["server"]["max_queue_s"] == 77.0
    assert info["engine"]["max_model_len"] == 512
    assert info["engine"]["model"][0]["id"] == "fake"
    assert KEY not in answer.body.decode()
    assert server.get("/server_info").status == 401


def test_its_interface_is_described_for_programs(server):
    told = get(server, "/openapi.json").json
    assert told["openapi"].startswith("3.1")
    assert {(m.upper(), path) for path, methods in told["paths"].items() for m in methods} == {
        (method, path.replace(":path", "")) for method, path in paths_of(ServeOptions(model="m"))
    }
    schemas = told["components"]["schemas"]
    refs = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(told)))
    assert refs <= schemas.keys()
    fields = schemas["ChatFields"]["properties"]
    assert {"type": "number"} in fields["temperature"]["anyOf"] and {"type": "null"} in fields["temperature"]["anyOf"]
    assert schemas["ChatFields"]["required"] == ["messages"]
    assert all("operationId" in one for methods in told["paths"].values() for one in methods.values())


def test_a_path_without_a_body_has_none_in_the_description():
    class Body(msgspec.Struct):
        """Words."""

        number: int

    told = document([("GET", "/a/{name:path}"), ("POST", "/b")], {"/b": Body})
    assert "requestBody" not in told["paths"]["/a/{name}"]["get"]
    assert told["paths"]["/a/{name}"]["get"]["parameters"][0]["name"] == "name"
    assert told["paths"]["/b"]["post"]["requestBody"]["required"] is True
