"""A start's measurements for the next one with the same config, beside other starts'."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.store.artifact import read_manifest
from mllm_compile.store.measurements import start_with, with_start


@pytest.fixture(scope="module")
def config(eager_folder) -> ResolvedConfig:
    return ResolvedConfig.model_validate(read_manifest(eager_folder).config)


def serving(config: ResolvedConfig, max_running_requests: int) -> ResolvedConfig:
    runtime = replace(config.runtime, max_running_requests=max_running_requests)
    return config.model_copy(update={"runtime": runtime})


def test_each_config_finds_its_own_last_start(config):
    values = {"ceilings": "kept"}
    for requests, tokens in ((1, 10), (2, 20), (1, 11)):
        values = with_start(values, serving(config, requests), {"kv_tokens": tokens})
    assert start_with(values, serving(config, 1))["kv_tokens"] == 11
    assert start_with(values, serving(config, 2))["kv_tokens"] == 20
    assert start_with(values, serving(config, 3)) == {}
    assert values["ceilings"] == "kept" and len(values["starts"]) == 2


def test_only_the_last_few_configs_are_kept(config):
    values: dict = {}
    for requests in range(1, 31):
        values = with_start(values, serving(config, requests), {"kv_tokens": requests})
    assert [start["kv_tokens"] for start in values["starts"]] == list(range(23, 31))


@pytest.mark.parametrize("starts", [None, 5, "text", [5, None], {"settings": 1}])
def test_a_malformed_start_counts_as_none(config, starts):
    assert start_with({"starts": starts}, config) == {}
    assert start_with(with_start({"starts": starts}, config, {"kv_tokens": 1}), config)["kv_tokens"] == 1
