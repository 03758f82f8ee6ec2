"""The stores behind the prefix cache that a config may name, and what they need."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.schema_runtime import KVTransferConfig
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.config_sections import (
    KVTransferSection,
)
from tests.config.resolving import OF_TIERS, resolved


@pytest.mark.parametrize("key", ["expert_parallel_size", "pipeline_parallel_size", "nnodes", "routed_experts"])
def test_memory_behind_the_cache_is_refused_beside_what_it_does_not_work_with(key):
    assert resolved(runtime=OF_TIERS).runtime.kv_offloading_size == 1.5
    with pytest.raises(ConfigError, match=f"kv_offloading_size is 1.5, which runtime.{key} excludes"):
        resolved(runtime=OF_TIERS | {key: True if key == "routed_experts" else 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_offloading_disk_size": 0.0}, "Set both, or none"),
        ({"kv_offloading_disk_path": None}, "Set both, or none"),
        ({"kv_offloading_size": 0.0}, "through that memory"),
        ({"skip_compiled": True}, "skip_compiled are set"),
        (
            {"tensor_parallel_size": 2},
            "memory_file is set, which runtime.tensor_parallel_size: 2 excludes: ranks share",
        ),
        (
            {"tensor_parallel_size": 2, "kv_offloading_memory_file": None, "distributed_executor_backend": "ray"},
            "disk_path is set, which runtime.distributed_executor_backend: ray excludes",
        ),
    ],
)
def test_a_folder_behind_the_cache_needs_what_it_is_reached_through(changes, message):
    with pytest.raises(ConfigError, match=message):
        resolved(runtime=OF_TIERS | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_offloading_size": 0.0}, "memory_file is set, and runtime.kv_offloading_size is 0"),
        ({"skip_compiled": True}, "memory_file and runtime.skip_compiled are set"),
        ({"tensor_parallel_size": 2}, "memory_file is set, which runtime.tensor_parallel_size: 2 excludes"),
    ],
)
def test_a_file_in_memory_needs_what_it_is_reached_through(changes, message):
    with pytest.raises(ConfigError, match=message):
        resolved(runtime={"kv_offloading_size": 1.0, "kv_offloading_memory_file": "/dev/shm/kv"} | changes)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_write_policy_without_memory_to_write_to_is_refused(policy):
    with pytest.raises(ConfigError, match=r"write_policy is set, and runtime\.kv_offloading_size is 0"):
        resolved(runtime={"kv_offloading_write_policy": policy})


@pytest.mark.parametrize(("size", "policy"), [(0.0, None), (1.0, "write_back")])
def test_what_a_policy_resolves_to_resolves_to_itself(size, policy):
    found = resolved(runtime={"kv_offloading_size": size}).runtime.kv_offloading_write_policy
    again = resolved(runtime={"kv_offloading_size": size, "kv_offloading_write_policy": found})
    assert found == again.runtime.kv_offloading_write_policy == policy


_STORE = {"kv_connector": "package.module.Store", "trust_local_code": True}


@pytest.mark.parametrize(
    ("store", "changes", "message"),
    [
        (_STORE | {"trust_local_code": False}, {}, "package.module.Store, which is imported and run as this user"),
        ({"kv_connector_module_path": "package.module"}, {}, "module_path is set, and kv_connector is not"),
        ({"kv_connector_extra_config": {"a": 1}}, {}, "extra_config is set, and kv_connector is not"),
        (_STORE | {"kv_connector": "NixlConnector"}, {}, "NixlConnector, without a module: vLLM's own"),
        (_STORE, {"kv_offloading_size": 0.0}, "kv_transfer_config is set, and runtime.kv_offloading_size is 0"),
        (_STORE, {"skip_compiled": True}, "kv_transfer_config and runtime.skip_compiled"),
        (_STORE, {"kv_offloading_disk_path": "/tmp/kv", "kv_offloading_disk_size": 1.0}, "one is behind the host's"),
    ],
)
def test_a_store_of_others_is_trusted_and_alone_behind_the_hosts_memory(store, changes, message):
    with pytest.raises(ConfigError, match=message):
        resolved(runtime={"kv_offloading_size": 1.0, "kv_transfer_config": store} | changes)


def test_a_store_is_named_as_vllm_names_it():
    named = {"kv_connector": "Store", "kv_connector_module_path": "package.module", "kv_role": "kv_both"}
    asked = _STORE | named | {"kv_connector_extra_config": {"a": [1]}}
    config = resolved(runtime={"kv_offloading_size": 1.0, "kv_transfer_config": asked})
    section = config.runtime.kv_transfer_config
    assert (section.import_path, section.kv_connector_extra_config) == ("package.module.Store", {"a": [1]})
    assert ResolvedConfig.model_validate(config.model_dump(mode="json")).runtime.kv_transfer_config == section
    assert {field.name for field in fields(KVTransferSection)} == set(KVTransferConfig.model_fields)
    assert KVTransferConfig().model_dump() == asdict(KVTransferSection())


@pytest.mark.parametrize(
    ("changes", "policy"),
    [
        ({}, "write_back"),
        ({"kv_offloading_disk_path": "/tmp/kv", "kv_offloading_disk_size": 3.0}, "write_through"),
        ({"kv_transfer_config": _STORE}, "write_through"),
        ({"kv_offloading_write_policy": "write_through"}, "write_through"),
    ],
)
def test_pages_are_written_through_where_something_is_behind_the_hosts_memory(changes, policy):
    found = resolved(runtime={"kv_offloading_size": 1.0} | changes)
    assert found.runtime.kv_offloading_write_policy == policy
