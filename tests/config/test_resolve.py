"""Values of `auto` on a CPU and on a GPU, and contradictions."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mllm_compile.config.device import DeviceInfo, check_ranks, detect_device
from mllm_compile.config.model_folder import ModelFolder
from mllm_compile.config.quantisation import Scheme
from mllm_compile.config.resolve import check_any_rows, check_cascade_layers, resolve
from mllm_compile.config.resolve_graphs import MIXED_TOKENS
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.schema import CudaGraphConfig, EngineConfig, KVEventsConfig, KVTransferConfig, RuntimeConfig
from mllm_compile.engine.assemble import runner_config
from mllm_compile.errors import CaptureSizeError, ConfigError, DeviceError, UnlikeRowsError
from mllm_compile.process.progress import PlainReporter
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.config_sections import (
    LEAST_ROWS,
    SWITCHES,
    CudaGraphSection,
    KVEventsSection,
    KVTransferSection,
    RuntimeSection,
)
from mllm_compile.runtime.weights.formats.settings import Settings

CPU = DeviceInfo("cpu", "x86_64")
H200 = DeviceInfo("cuda:0", "NVIDIA H200", has_flashinfer=True, is_hopper=True)
A100 = DeviceInfo("cuda:0", "NVIDIA A100", has_flashinfer=True)
ONE_SIZE = {"deterministic": True, "without": ["any_rows"]}
QWEN = {"dtype": "bfloat16", "max_position_embeddings": 40960}


def resolved(device: DeviceInfo = CPU, config_json: dict | None = None, **sections: dict) -> ResolvedConfig:
    config = EngineConfig.from_dict({"model": {"path": "m"}} | sections)
    return resolve(config, ModelFolder(Path("/models/m"), QWEN if config_json is None else config_json, ()), device)


def test_auto_on_a_cpu_is_float32_torch_and_no_graphs():
    config = resolved()
    assert config.model.dtype == config.runtime.kv_cache_dtype == "float32"
    assert (config.runtime.device, config.runtime.attention_backend) == ("cpu", "torch")
    assert (config.runtime.page_size, config.runtime.max_model_len) == (16, 8192)
    assert (config.runtime.max_running_requests, config.runtime.max_num_batched_tokens) == (64, 2048)
    assert config.cudagraph == CudaGraphSection(mode="none", piecewise_tokens=(), decode_requests=())
    assert config.model.load_format == "safetensors"


def test_what_a_config_says_for_gpus_alone_is_without_effect_on_a_cpu():
    sections = {
        "runtime": {"mem_fraction_static": 0.8, "page_size": 4, "without": ["sample_in_graph"]},
        "cudagraph": {"mode": "none", "decode_requests": [1, 2], "mixed_tokens": "auto"},
    }
    told = ("runtime.mem_fraction_static", "runtime.without", "cudagraph.decode_requests")
    assert resolved(CPU, **sections).without_effect == told
    assert resolved(CPU, runtime={"without": ["paged_attention"]}).without_effect == ()
    assert resolved(CPU).without_effect == ()
    sections["cudagraph"]["mode"] = "full"
    assert resolved(H200, **sections).without_effect == ()


def test_auto_on_a_gpu_is_the_checkpoints_dtype_flashinfer_and_both_kinds_of_graphs():
    config = resolved(H200)
    assert config.model.dtype == config.runtime.kv_cache_dtype == "bfloat16"
    assert (config.runtime.device, config.runtime.attention_backend) == ("cuda:0", "flashinfer")
    assert (config.runtime.page_size, config.runtime.max_model_len) == (64, 40960)
    assert (config.runtime.max_running_requests, config.runtime.max_num_batched_tokens) == (256, 8192)
    assert config.cudagraph.mode == "full_and_piecewise"
    assert config.cudagraph.piecewise_tokens[-1] == 512
    assert config.cudagraph.decode_requests[-1] == 256


@pytest.mark.parametrize(
    ("num_experts", "chosen", "tokens"),
    [(128, 8, 16384), (64, 8, 8192), (8, 2, 8192), (256, 8, 16384), ("many", 8, 8192)],
)
def test_a_step_has_more_tokens_where_each_expert_gets_few_of_them(num_experts, chosen, tokens):
    config_json = {"num_local_experts": num_experts, "num_experts_per_tok": chosen}
    assert resolved(H200, config_json).runtime.max_num_batched_tokens == tokens
    assert resolved(H200, config_json, runtime={"max_num_batched_tokens": 300}).runtime.max_num_batched_tokens == 300


@pytest.mark.parametrize(
    ("width", "largest"), [(64, 4096), (1024, 4096), (1152, 2048), (2048, 1024), (2560, 512), (4096, 512), ("?", 512)]
)
def test_the_smaller_a_model_the_longer_are_the_steps_whose_pieces_are_captured(width, largest):
    config_json = QWEN | {"hidden_size": width}
    assert resolved(H200, config_json).cudagraph.piecewise_tokens[-1] == largest
    few = resolved(H200, config_json, runtime={"max_num_batched_tokens": 300})
    assert few.cudagraph.piecewise_tokens[-1] == 256


def test_no_piece_is_captured_for_longer_steps_than_all_requests_can_make():
    narrow = QWEN | {"hidden_size": 64}
    few = resolved(H200, narrow, runtime={"max_running_requests": 2, "max_model_len": 1100})
    assert few.cudagraph.piecewise_tokens[-1] == 2048


@pytest.mark.parametrize(
    ("device", "width", "sections", "expected"),
    [
        (H200, 1024, {}, MIXED_TOKENS),
        (H200, 2048, {"cudagraph": {"mode": "full"}}, MIXED_TOKENS),
        (H200, 1024, {"runtime": {"max_num_batched_tokens": 200}}, (64, 128, 192)),
        (H200, 1024, {"runtime": {"max_num_batched_tokens": 50}}, ()),
        (H200, 2560, {}, ()),
        (H200, "?", {}, ()),
        (H200, 1024, {"cudagraph": {"mode": "piecewise"}}, ()),
        (H200, 1024, {"cudagraph": {"mode": "full_decode_only"}}, ()),
        (H200, 1024, {"runtime": {"attention_backend": "torch"}}, ()),
        (H200, 1024, {"runtime": {"deterministic": True}}, ()),
        (H200, 1024, {"runtime": {"kv_cache_dtype": "fp8_e4m3"}}, ()),
        (H200, 1024, {"runtime": {"without": ["split_decode"]}}, ()),
        (H200, 1024, {"cudagraph": {"mixed_tokens": []}}, ()),
        (A100, 1024, {"cudagraph": {"mixed_tokens": []}}, ()),
        (H200, 4096, {"cudagraph": {"mixed_tokens": [100, 30]}}, (30, 100)),
        (A100, 1024, {}, ()),
        (CPU, 1024, {}, ()),
        (CPU, 1024, {"cudagraph": {"mixed_tokens": [64]}}, ()),
    ],
)
def test_whole_steps_with_prompts_are_captured_of_small_models_on_hopper(device, width, sections, expected):
    graphs = resolved(device, QWEN | {"hidden_size": width}, **sections).cudagraph
    assert graphs.mixed_tokens == expected
    is_asked = device.is_cuda and "mixed_tokens" in sections.get("cudagraph", {})
    assert graphs.mixed_tokens_asked == is_asked


@pytest.mark.parametrize(
    ("device", "sections", "expected"),
    [
        (H200, {}, True),
        (H200, {"cudagraph": {"mode": "full", "mixed_tokens": []}}, True),
        (H200, {"runtime": {"without": ["whole_prompts"]}}, False),
        (H200, {"cudagraph": {"mode": "piecewise"}}, False),
        (H200, {"cudagraph": {"mode": "full_decode_only"}}, False),
        (H200, {"runtime": {"deterministic": True}}, False),
        (H200, {"runtime": {"kv_cache_dtype": "fp8_e4m3"}}, False),
        (H200, {"runtime": {"without": ["split_decode"]}}, False),
        (A100, {}, False),
        (CPU, {}, False),
    ],
)
def test_prompts_alone_are_captured_whole_on_hopper_of_any_width(device, sections, expected):
    assert resolved(device, QWEN | {"hidden_size": 8192}, **sections).cudagraph.whole_prompts is expected


def test_a_model_without_attention_needs_no_kernel_of_it_for_whole_steps():
    mamba = {name: value for name, value in QWEN.items() if "head" not in name} | {"state_size": 16}
    sections = {"runtime": {"without": ["split_decode"]}, "cudagraph": {"mixed_tokens": [64]}}
    assert resolved(H200, mamba, **sections).cudagraph.mixed_tokens == (64,)


@pytest.mark.parametrize(
    ("device", "sections", "error", "said"),
    [
        (H200, {"cudagraph": {"mode": "piecewise"}}, ConfigError, r"captures none .* full_and_piecewise"),
        (H200, {"cudagraph": {"mixed_tokens": [9000]}}, CaptureSizeError, r"holds 9000, but no batch .*: 8192"),
        (
            H200,
            {"runtime": {"without": ["split_decode"]}},
            ConfigError,
            r"\[64\], but decodes are .*Set it to auto or \[\]",
        ),
        (A100, {}, ConfigError, r"mixed_tokens is \[64\], but the GPU is NVIDIA A100"),
    ],
)
def test_whole_steps_that_cannot_be_are_refused(device, sections, error, said):
    graphs = {"mixed_tokens": [64]} | sections.get("cudagraph", {})
    with pytest.raises(error, match=said):
        resolved(device, **(sections | {"cudagraph": graphs}))


def test_attention_by_torch_is_not_run_on_long_prompts_for_a_capture():
    narrow = QWEN | {"hidden_size": 64}
    config = resolved(H200, narrow, runtime={"attention_backend": "torch"})
    assert (config.cudagraph.mode, config.cudagraph.piecewise_tokens[-1]) == ("piecewise", 512)


def test_a_bound_in_ms_is_a_rule_a_number_or_none():
    assert resolved(H200).runtime.max_step_ms == "none"
    assert resolved(H200, runtime={"max_step_ms": "auto"}).runtime.max_step_ms == "tenfold"
    assert resolved(H200, runtime={"max_step_ms": 25}).runtime.max_step_ms == 25
    assert resolved(H200, runtime={"max_step_ms": "none"}).runtime.max_step_ms == "none"
    assert resolved(H200, runtime=ONE_SIZE | {"max_step_ms": "auto"}).runtime.max_step_ms == "none"
    assert resolved(H200, runtime={"deterministic": True, "max_step_ms": 25}).runtime.max_step_ms == 25
    with pytest.raises(ConfigError, match=r"max_step_ms is 25, but with runtime\.deterministic .* auto or none"):
        resolved(H200, runtime=ONE_SIZE | {"max_step_ms": 25})


def test_a_resolved_bound_is_asked_for_again_as_it_was():
    for asked in ("auto", "none", 12.5):
        assert resolved(H200, runtime={"max_step_ms": asked}).as_config().runtime.max_step_ms == asked


@pytest.mark.parametrize(
    ("width", "by_rule", "bound"), [(1024, [1024, 2048, 4096], [2048, 3072, 4096]), (4096, [], [])]
)
def test_with_a_bound_in_ms_more_sizes_of_long_steps_are_captured(width, by_rule, bound):
    def long_sizes(**runtime):
        sizes = resolved(H200, QWEN | {"hidden_size": width}, runtime=runtime).cudagraph.piecewise_tokens
        return [size for size in sizes if size > 512]

    assert long_sizes() == long_sizes(max_step_ms="none") == by_rule
    assert long_sizes(max_step_ms=25) == [640, 768, 896, 1024, 1280, 1536, *bound]
    assert long_sizes(max_step_ms=25, max_num_batched_tokens=1000) == [640, 768, 896]


def test_drafts_of_a_rule_are_suffixes_of_a_length_by_cost():
    rule = resolved(speculative={"method": "auto"})
    assert (rule.speculative.method, rule.speculative.num_speculative_tokens) == ("suffix", "by_cost")
    assert ResolvedConfig.model_validate_json(rule.model_dump_json()).speculative == rule.speculative
    asked = resolved(speculative={"method": "ngram", "num_speculative_tokens": 5}).speculative
    assert (asked.method, asked.num_speculative_tokens) == ("ngram", 5)
    assert [one.as_config().speculative.method for one in (rule, resolved())] == ["suffix", "none"]


def test_the_section_of_adapters_is_asked_for_again_as_it_was():
    asked = {"max_adapters": 2, "targets": ["v_proj", "q_proj"], "adapters": {"sql": "/adapters/sql"}}
    config = resolved(lora=asked)
    assert (config.lora.max_rank, config.lora.targets) == (16, ("q_proj", "v_proj"))
    assert ResolvedConfig.model_validate_json(config.model_dump_json()).lora == config.lora
    for one in (config, resolved(lora={"max_adapters": 1}), resolved()):
        assert resolved(lora=one.as_config().lora.model_dump(exclude_unset=True)).lora == one.lora
        assert runner_config(one).lora == one.lora


def test_adapters_are_refused_by_the_eager_model():
    with pytest.raises(ConfigError, match=r"and runtime.skip_compiled is set: the eager model takes no adapters"):
        resolved(lora={"max_adapters": 2}, runtime={"skip_compiled": True})


@pytest.mark.parametrize(("num_requests", "rows"), [(1, 16), (16, 128), (64, 256), (256, 1024)])
def test_memory_is_kept_for_the_logits_of_drafts(num_requests, rows):
    sections = {"runtime": {"max_running_requests": num_requests}, "speculative": {"method": "auto"}}
    assert runner_config(resolved(**sections)).max_sampled == rows


def test_no_auto_is_left_and_json_keeps_everything():
    config = resolved(H200)
    assert "auto" not in str(config)
    assert ResolvedConfig.model_validate(config.model_dump(mode="json")) == config.model_copy(update={"choices": ()})


@pytest.mark.parametrize(
    ("asked", "section", "derived"),
    [
        (RuntimeConfig, RuntimeSection, {"any_rows"}),
        (CudaGraphConfig, CudaGraphSection, {"mixed_tokens_asked", "sample_in_graph", "whole_prompts"}),
    ],
)
def test_the_runner_is_told_every_key_of_its_sections(asked, section, derived):
    """A new key is a field here and there: what the runner reads is the section itself."""
    assert {field.name for field in fields(section)} == set(asked.model_fields) | derived
    config = resolved(H200)
    told = runner_config(config)
    assert (told.runtime, told.cudagraph) == (config.runtime, config.cudagraph)


def test_a_cache_smaller_than_a_request_is_refused():
    keys = {"max_model_len": 100, "max_total_tokens": 99}
    with pytest.raises(ConfigError, match=r"max_total_tokens is 99, .*max_model_len \(100\) exceeds"):
        resolved(runtime=keys)
    assert resolved(runtime=keys | {"max_total_tokens": 100}).runtime.max_total_tokens == 100


_OF_TIERS = {
    "kv_offloading_size": 1.5,
    "kv_offloading_min_gain": 0.0,
    "kv_offloading_memory_file": "/dev/shm/kv",
    "kv_offloading_disk_path": "/tmp/kv",
    "kv_offloading_disk_size": 3.0,
    "kv_offloading_write_policy": "write_back",
    "kv_load_failure_policy": "recompute",
}


@pytest.mark.parametrize("key", ["expert_parallel_size", "pipeline_parallel_size", "nnodes", "routed_experts"])
def test_memory_behind_the_cache_is_refused_beside_what_it_does_not_work_with(key):
    assert resolved(runtime=_OF_TIERS).runtime.kv_offloading_size == 1.5
    with pytest.raises(ConfigError, match=f"kv_offloading_size is 1.5, which runtime.{key} excludes"):
        resolved(runtime=_OF_TIERS | {key: True if key == "routed_experts" else 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_offloading_disk_size": 0.0}, "Set both, or none"),
        ({"kv_offloading_disk_path": None}, "Set both, or none"),
        ({"kv_offloading_size": 0.0}, "through that memory"),
        ({"skip_compiled": True}, "skip_compiled are set"),
        ({"tensor_parallel_size": 2}, "which runtime.tensor_parallel_size: 2 excludes: ranks keep pages in the host's"),
    ],
)
def test_a_folder_behind_the_cache_needs_what_it_is_reached_through(changes, message):
    with pytest.raises(ConfigError, match=message):
        resolved(runtime=_OF_TIERS | changes)


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


def test_a_key_without_auto_becomes_what_was_asked_for():
    keys = {
        "mem_fraction_static": 0.5,
        "max_total_tokens": 1 << 20,
        "enable_prefix_cache": False,
        "without": ("copy_prefix", "divide_prefix"),
        "enable_sleep_mode": False,
        "pinned": True,
        "expert_stats": True,
        "routed_experts": False,
        "tensor_parallel_size": 2,
        "expert_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "10.0.0.1",
        "master_port": 1234,
        "distributed_executor_backend": "ray",
        "enable_dbo": True,
        "dbo_prefill_token_threshold": 1024,
        "skip_compiled": True,
        "state_dtype": "bfloat16",
        "seed": 7,
        "logprobs_mode": "processed_logprobs",
        "max_step_ms": 25.0,
    }
    without_auto = {name for name, field in RuntimeConfig.model_fields.items() if field.default != "auto"}
    assert without_auto == {
        *keys,
        "deterministic",
        "expert_parallel_size",
        "pipeline_parallel_size",
        "kv_events_config",
        "kv_transfer_config",
        *_OF_TIERS,
    }
    runtime = resolved(runtime=keys).runtime
    assert {name: getattr(runtime, name) for name in keys} == keys
    assert resolved(runtime={"deterministic": True}).runtime.deterministic
    assert resolved(runtime={"expert_parallel_size": 2}).runtime.expert_parallel_size == 2


def test_the_section_of_kv_events_goes_over_whole():
    asked = {"enable_kv_cache_events": True, "endpoint": "ipc:///tmp/events", "buffer_steps": 7, "topic": "kv@a@b"}
    config = resolved(runtime={"kv_events_config": asked})
    section = config.runtime.kv_events_config
    assert section == KVEventsSection(**asked) and section.is_on
    assert {field.name for field in fields(KVEventsSection)} == set(KVEventsConfig.model_fields)
    assert KVEventsConfig().model_dump() == asdict(KVEventsSection())
    assert ResolvedConfig.model_validate(config.model_dump(mode="json")).runtime.kv_events_config == section
    with pytest.raises(ConfigError, match="enable_prefix_cache is false: there are no blocks to tell"):
        resolved(runtime={"kv_events_config": asked, "enable_prefix_cache": False})


@pytest.mark.parametrize(
    ("device", "sections", "expected"),
    [
        (H200, {}, (True, "of which enough is shared")),
        (A100, {}, (True, "of which enough is shared")),
        (CPU, {}, (False, "decodes are not captured")),
        (H200, {"compile": {"backend": "eager"}}, (False, "split_decode")),
        (H200, {"cudagraph": {"mode": "piecewise"}}, (False, "decodes are not captured")),
        (H200, {"runtime": {"kv_cache_dtype": "fp8_e4m3"}}, (False, "no KV cache of float8_e4m3fn")),
        (H200, {"runtime": {"tensor_parallel_size": 2}}, (False, "several GPUs")),
        (H200, {"runtime": {"deterministic": True}}, (False, "deterministic")),
        (H200, {"runtime": {"enable_prefix_cache": False}}, (False, "enable_prefix_cache")),
        (H200, {"runtime": {"max_running_requests": 1}}, (False, "no two requests")),
    ],
)
def test_cascades_are_chosen_where_their_graphs_are_captured(device, sections, expected):
    asked = sections | {"runtime": sections.get("runtime", {}) | {"cascade_attention": "auto"}}
    config = resolved(device, **asked)
    (why,) = (choice.why for choice in config.choices if choice.key == "runtime.cascade_attention")
    assert config.runtime.cascade_attention == expected[0]
    assert expected[1] in why


@pytest.mark.parametrize(
    ("device", "sections", "why"),
    [
        (H200, {"runtime": {"deterministic": True}}, "deterministic"),
        (H200, {"runtime": {"enable_prefix_cache": False}}, "enable_prefix_cache"),
        (H200, {"runtime": {"kv_cache_dtype": "fp8_e4m3"}}, "no KV cache of float8_e4m3fn"),
        (H200, {"compile": {"backend": "eager"}}, "split_decode"),
        (H200, {"runtime": {"without": ["split_decode"]}}, "split_decode"),
        (CPU, {"runtime": {"enable_prefix_cache": False}}, "enable_prefix_cache"),
    ],
)
def test_cascades_that_can_never_be_are_refused(device, sections, why):
    asked = sections | {"runtime": sections.get("runtime", {}) | {"cascade_attention": True}}
    with pytest.raises(ConfigError, match=rf"cascade_attention is true, but .*{why}.* Set it to auto or false\."):
        resolved(device, **asked)
    for graphs in ({}, {"mode": "piecewise"}):
        assert resolved(H200, runtime={"cascade_attention": True}, cudagraph=graphs).runtime.cascade_attention
    asked_for = resolved(CPU, runtime={"cascade_attention": True, "kv_cache_dtype": "fp8_e4m3"})
    assert asked_for.runtime.cascade_attention, "attention in plain torch needs no kernels for it"


@pytest.mark.parametrize(
    "changes",
    [
        {"is_latent": True, "head_dim": 576, "v_head_dim": 512},
        {"window_left": 127},
        {"logits_soft_cap": 30.0},
        {"sinks": "sinks"},
        {"alibi_slopes": (0.5,) * 4},
        {"chunk": 8192},
    ],
    ids=str,
)
def test_cascades_are_refused_for_a_model_without_a_layer_that_has_them(changes):
    plain = LayerSpec("a", 0, 4, 2, 128, 128, 0.1, 0.0, -1, None)
    asked = resolved(H200, runtime={"cascade_attention": True})
    with pytest.raises(ConfigError, match=r"cascade_attention is true, but no layer .*latents.* Set it to auto or fal"):
        check_cascade_layers(asked, [replace(plain, **changes)])
    check_cascade_layers(asked, [plain, replace(plain, **changes)])
    check_cascade_layers(resolved(H200), [replace(plain, **changes)])
    check_cascade_layers(resolved(H200, runtime={"cascade_attention": False}), [])
    with pytest.raises(ConfigError, match="no layer of this model"):
        check_cascade_layers(asked, [])


def test_a_stored_section_with_an_unknown_key_or_a_wrong_value_is_refused():
    stored = resolved(H200).model_dump(mode="json")
    for key, value in (("pages", 3), ("page_size", "many"), ("attention_backend", "flash")):
        with pytest.raises(ValidationError, match=rf"runtime\.{key}"):
            ResolvedConfig.model_validate({**stored, "runtime": {**stored["runtime"], key: value}})


def test_what_was_asked_for_is_kept_and_only_the_rest_is_reported():
    config = resolved(config_json={"n_positions": 1024}, runtime={"page_size": 4, "device": "cpu"}, cache={"dir": "/c"})
    assert config.runtime.page_size == 4
    keys = {choice.key for choice in config.choices}
    assert "runtime.max_model_len" in keys
    assert not keys & {"runtime.page_size", "runtime.device", "cache.dir"}
    stream = io.StringIO()
    config.report(PlainReporter(stream, details=True))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "auto values"
    assert any(line.split()[:2] == ["runtime.max_model_len", "1024"] for line in lines)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_types_are_served_on_a_cpu_when_asked_for(dtype):
    config = resolved(model={"path": "m", "dtype": dtype})
    assert config.model.dtype == config.runtime.kv_cache_dtype == dtype


def test_a_float32_checkpoint_on_a_gpu_is_served_in_bfloat16_unless_float32_is_asked_for():
    assert resolved(H200, {"dtype": "float32"}).model.dtype == "bfloat16"
    config = resolved(H200, model={"path": "m", "dtype": "float32"})
    assert (config.runtime.attention_backend, config.cudagraph.mode) == ("torch", "piecewise")


def test_ray_is_refused_where_it_would_start_nothing():
    with pytest.raises(ConfigError, match="ray, which starts further ranks, and there is one rank"):
        check_ranks(resolved(runtime={"distributed_executor_backend": "ray"}).runtime)
    check_ranks(resolved(runtime={"distributed_executor_backend": "ray", "tensor_parallel_size": 2}).runtime)


def test_gpus_that_stages_of_several_ranks_lack_are_told_with_each_size(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    runtime = resolved(runtime={"tensor_parallel_size": 2, "pipeline_parallel_size": 2}).runtime
    with pytest.raises(
        DeviceError,
        match=r"^runtime.tensor_parallel_size: 2, runtime.pipeline_parallel_size: 2: the 4 ranks of this host take as "
        r"many GPUs from cuda:0 on; torch sees 2",
    ):
        check_ranks(replace(runtime, device="cuda:0"))
    check_ranks(replace(runtime, device="cuda:0", nnodes=2))


def test_more_ranks_of_a_host_than_share_a_ring_are_refused():
    runtime = resolved(runtime={"tensor_parallel_size": 16, "pipeline_parallel_size": 8}).runtime
    with pytest.raises(ConfigError, match="128 ranks of a host; expected at most 16"):
        check_ranks(runtime)
    check_ranks(replace(runtime, nnodes=8))


def test_the_eager_model_runs_without_graphs():
    assert resolved(H200, runtime={"skip_compiled": True}).cudagraph.mode == "none"


@pytest.mark.parametrize(
    "damage",
    [
        {"index_topk": 512, "layer_types": 5},
        {"index_topk": 512, "layer_types": [{}]},
        {"rope_scaling": {"type": "dynamic", "factor": float("inf")}},
    ],
)
def test_a_config_json_that_is_damaged_is_left_to_what_reads_the_model(damage):
    assert resolved(H200, QWEN | damage).runtime.max_model_len in (512, 40960)


def test_small_limits_pull_the_other_automatic_ones_along():
    assert resolved(runtime={"max_num_batched_tokens": 8}).runtime.max_running_requests == 8
    assert resolved(runtime={"max_running_requests": 4096}).runtime.max_num_batched_tokens == 4096
    config = resolved(H200, runtime={"max_running_requests": 20, "max_num_batched_tokens": 60})
    assert config.cudagraph.decode_requests == (1, 2, 4, 8, 16, 20)
    assert config.cudagraph.piecewise_tokens[-1] == 32


@pytest.mark.parametrize(
    ("device", "sections", "error", "said"),
    [
        (CPU, {"cudagraph": {"mode": "full"}}, ConfigError, "the device is a CPU"),
        (CPU, {"runtime": {"attention_backend": "flashinfer"}}, ConfigError, "the device is a CPU"),
        (CPU, {"runtime": {"kv_cache_dtype": "bfloat16"}}, ConfigError, "own type or fp8_e4m3"),
        (CPU, {"runtime": {"max_model_len": 50000}}, ConfigError, "at most 40960 tokens"),
        (
            CPU,
            {"runtime": {"max_running_requests": 9, "max_num_batched_tokens": 8}},
            ConfigError,
            "each running request takes a token",
        ),
        (H200, {"cudagraph": {"mode": "none", "decode_requests": [1]}}, ConfigError, "captures none of that kind"),
        (
            H200,
            {"cudagraph": {"mode": "full"}, "runtime": {"skip_compiled": True}},
            ConfigError,
            "no pieces to capture",
        ),
        (H200, {"cudagraph": {"mode": "piecewise", "decode_requests": [1]}}, ConfigError, "captures none of that kind"),
        (H200, {"cudagraph": {"mode": "full", "piecewise_tokens": [1]}}, ConfigError, "captures none of that kind"),
        (H200, {"cudagraph": {"decode_requests": [1, 300]}}, CaptureSizeError, "holds 300"),
        (H200, {"cudagraph": {"piecewise_tokens": [9000]}}, CaptureSizeError, "runtime.max_num_batched_tokens: 8192"),
        (
            H200,
            {"runtime": {"attention_backend": "torch"}, "cudagraph": {"mode": "full"}},
            ConfigError,
            "cannot be captured",
        ),
        (
            H200,
            {"model": {"path": "m", "dtype": "float32"}, "runtime": {"attention_backend": "flashinfer"}},
            ConfigError,
            "no float32 kernels",
        ),
        (
            H200,
            {"runtime": ONE_SIZE, "cudagraph": {"mode": "full_and_piecewise"}},
            ConfigError,
            "the shape of one decode",
        ),
        (
            H200,
            {"runtime": ONE_SIZE, "cudagraph": {"decode_requests": [1, 2]}},
            CaptureSizeError,
            "every step has 512 tokens",
        ),
        (
            H200,
            {"runtime": ONE_SIZE, "cudagraph": {"mixed_tokens": [512]}},
            ConfigError,
            r"mixed_tokens is \[512\], but with runtime.deterministic no step .* Set it to auto or \[\]",
        ),
        (DeviceInfo("cuda:0", "GPU"), {}, DeviceError, r"pip install 'mllm-compile\[cuda\]'"),
    ],
)
def test_contradictions_are_refused_with_the_next_step(device, sections, error, said):
    with pytest.raises(error, match=said):
        resolved(device, **sections)


def test_an_fp8_cache_is_taken_on_every_device_and_keeps_the_model_s_dtype():
    for device in (CPU, H200):
        config = resolved(device, runtime={"kv_cache_dtype": "fp8_e4m3"})
        assert config.runtime.kv_cache_dtype == "float8_e4m3fn"
        assert config.model.dtype == resolved(device).model.dtype


@pytest.mark.parametrize(
    ("device", "kv_heads", "asked", "tokens", "requests"),
    [
        (CPU, 8, {}, 32, 16),
        (H200, 8, {}, 128, 64),
        (H200, 2, {}, 256, 128),  # fewer KV heads need more rows before attention never splits
        (H200, 8, {"max_num_batched_tokens": 64}, 64, 32),
        (H200, 8, {"max_running_requests": 200}, 200, 200),
        (H200, 8, {"max_running_requests": 7}, 128, 7),
    ],
)
def test_deterministic_steps_have_one_size_and_one_graph(device, kv_heads, asked, tokens, requests):
    config = resolved(device, QWEN | {"num_key_value_heads": kv_heads}, runtime=ONE_SIZE | asked)
    assert (config.runtime.max_num_batched_tokens, config.runtime.max_running_requests) == (tokens, requests)
    if device is CPU:
        assert config.cudagraph.mode == "none"
    else:
        graphs = CudaGraphSection(mode="full_decode_only", piecewise_tokens=(), decode_requests=(tokens,))
        assert config.cudagraph == graphs


@pytest.mark.parametrize(
    ("device", "model", "sections", "expected"),
    [
        (H200, {}, {}, True),
        (H200, {"layer_types": ["full_attention", "sliding_attention"]}, {}, True),
        (H200, {}, {"runtime": {"without": ["split_decode"]}}, False),
        (H200, {}, {"runtime": {"deterministic": False}}, False),
        (H200, {}, {"compile": {"backend": "eager"}}, False),
        (H200, {}, {"model": {"path": "m", "dtype": "float16"}}, False),
        (H200, {"layer_types": ["full_attention", "linear_attention"], "linear_num_key_heads": 2}, {}, True),
        (H200, {"text_config": {"mamba_d_state": 16}}, {}, True),
        (A100, {}, {}, False),
        (CPU, {}, {}, False),
    ],
)
def test_deterministic_steps_have_any_number_of_rows_where_no_product_depends_on_it(device, model, sections, expected):
    sections = sections | {"runtime": {"deterministic": True} | sections.get("runtime", {})}
    config = resolved(device, QWEN | model, **sections)
    assert config.runtime.any_rows is expected
    if expected:
        assert config.runtime.max_num_batched_tokens == 2048
        assert (config.cudagraph.mode, config.cudagraph.mixed_tokens) == ("full_and_piecewise", ())
        assert config.cudagraph.sample_in_graph and not config.cudagraph.whole_prompts
        assert config.cudagraph.decode_requests[-1] == config.runtime.max_running_requests == 256
        assert config.as_config().runtime.deterministic


# The table of docs/serving.md: its rows, and what is set for each of what a row names.
OF_PAGE: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "dense, experts, [states](state.md), drafts, `tensor_parallel_size`": [
        ({}, {}),
        ({"num_experts": 8}, {}),
        ({"layer_types": ["linear_attention", "full_attention"]}, {}),
        ({}, {"speculative": {"method": "ngram"}}),
        ({}, {"runtime": {"tensor_parallel_size": 2}}),
    ],
    "fp8 weights with a scale a row": [({}, {"model": {"path": "m", "quantization": "fp8"}})],
    "routers in float32, gates of one row (`n_routed_experts`, `shared_expert_…` in config.json)": [
        ({"n_routed_experts": 64}, {}),
        ({"num_experts": 8, "shared_expert_intermediate_size": 512}, {}),
    ],
    "other quantised weights, fp8 caches, images, latents, adapters": [
        ({}, {"model": {"path": "m", "quantization": "int4"}}),
        ({}, {"runtime": {"kv_cache_dtype": "fp8_e4m3"}}),
        ({"vision_config": {}}, {}),
        ({"kv_lora_rank": 512}, {}),
        ({}, {"lora": {"max_adapters": 1}}),
    ],
    "`max_num_batched_tokens` below 64, `runtime.without: [any_rows]`": [
        ({}, {"runtime": {"max_num_batched_tokens": LEAST_ROWS - 1}}),
        ({}, {"runtime": {"without": ["any_rows"]}}),
    ],
}


def test_the_page_s_table_of_deterministic_steps_is_what_is_resolved():
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    table = page.partition("| models | steps |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = dict(line.strip("| ").split(" | ") for line in table.splitlines())
    assert list(rows) == list(OF_PAGE) and LEAST_ROWS == 64
    for name, steps in rows.items():
        for model, sections in OF_PAGE[name]:
            runtime = {"deterministic": True} | sections.get("runtime", {})
            config = resolved(H200, QWEN | model, **sections | {"runtime": runtime})
            assert config.runtime.any_rows is steps.startswith("any number"), (name, model, sections)


@pytest.mark.parametrize(
    ("kinds", "blocks", "asked", "expected"),
    [
        (("fp8",), ((0, 0), (1, 0)), "auto", True),
        (("fp8",), ((128, 128),), "auto", False),
        (("fp8",), ((128, 128),), "dequantize", True),
        (("int4",), (), "auto", False),
    ],
)
def test_weights_in_fp8_with_scales_of_rows_have_steps_of_any_number_of_rows(kinds, blocks, asked, expected):
    scheme = Scheme("a scheme", ("fp8",), Settings(blocks=blocks), kinds)
    sections = {"model": {"path": "m", "quantization": asked}, "runtime": {"deterministic": True}}
    folder = ModelFolder(Path("/models/m"), QWEN, (), scheme=scheme)
    assert resolve(EngineConfig.from_dict(sections), folder, H200).runtime.any_rows is expected


def test_products_of_any_rows_have_at_least_so_many():
    for most, sizes in ((4, (64,)), (64, (64,)), (90, (64, 80, 90))):
        config = resolved(H200, runtime={"deterministic": True, "max_running_requests": most})
        assert config.cudagraph.decode_requests == sizes and config.cudagraph.piecewise_tokens[0] == 64
    with pytest.raises(CaptureSizeError, match=r"holds 8, but with .* a product has at least 64 rows"):
        resolved(H200, runtime={"deterministic": True}, cudagraph={"decode_requests": [8, 96]})


def test_a_layer_without_a_kernel_of_the_program_is_no_surprise_of_any_rows():
    config, layer = resolved(H200, runtime={"deterministic": True}), LayerSpec("l", 0, 4, 2, 64, 64, 0.1, 0.0, -1, None)
    check_any_rows(config, [layer], {"l"})
    with pytest.raises(UnlikeRowsError, match="the model has l, whose decodes are not by kernels of the program"):
        check_any_rows(config, [layer], set())


@pytest.mark.parametrize(
    ("device", "sections", "expected"),
    [
        (H200, {}, (True, True)),
        (A100, {}, (True, False)),
        (CPU, {}, (False, False)),
        (H200, {"compile": {"backend": "eager"}}, (False, False)),
        (H200, {"runtime": {"without": ["split_decode"]}}, (False, False)),
        (H200, {"runtime": {"without": ["hopper_decode"]}}, (True, False)),
        (H200, {"runtime": {"deterministic": True}}, (True, False)),
        (H200, {"model": {"path": "m", "dtype": "float16"}}, (True, False)),
        (H200, {"runtime": {"kv_cache_dtype": "fp8_e4m3"}}, (True, True)),
        (A100, {"runtime": {"kv_cache_dtype": "fp8_e4m3"}}, (False, False)),
        (
            H200,
            {"runtime": {"kv_cache_dtype": "fp8_e4m3"}, "model": {"path": "m", "dtype": "float16"}},
            (False, False),
        ),
    ],
)
def test_our_decode_kernels_are_taken_where_they_serve_and_are_not_left_out(device, sections, expected):
    compiled = resolved(device, **sections).compile
    assert (compiled.split_decode, compiled.hopper_decode) == expected


def test_each_switch_leaves_out_one_part():
    whole = resolved(H200)
    needs = {"split_decode": {"hopper_decode", "sample_in_graph", "whole_prompts"}}
    for switch in SWITCHES:
        config = resolved(H200, runtime={"without": [switch]})
        assert not config.runtime.takes(switch)
        facts = {name for name in SWITCHES if _serves(whole, name) and not _serves(config, name)}
        assert facts == {switch} | needs.get(switch, set())
        asked = config.as_config()
        assert asked.runtime.without == (switch,)


def _serves(config: ResolvedConfig, switch: str) -> bool:
    for section in (config.compile, config.cudagraph):
        if hasattr(section, switch):
            return getattr(section, switch)
    return config.runtime.takes(switch)


def test_the_reason_of_a_number_of_requests_is_the_bound_that_holds():
    why = {}
    for tokens in (64, 2048):
        config = resolved(H200, runtime=ONE_SIZE | {"max_num_batched_tokens": tokens})
        why[tokens] = next(c for c in config.choices if c.key == "runtime.max_running_requests")
    assert why[64].value == "32"
    assert "half of a step" in why[64].why
    assert (why[2048].value, why[2048].why) == ("256", "for cuda")


def test_deterministic_steps_can_be_captured_piece_by_piece():
    sections = {"runtime": ONE_SIZE | {"max_num_batched_tokens": 64}, "cudagraph": {"mode": "piecewise"}}
    graphs = resolved(H200, **sections).cudagraph
    assert (graphs.piecewise_tokens, graphs.decode_requests) == ((64,), ())


def test_sizes_for_a_gpu_do_not_hinder_a_cpu():
    assert resolved(cudagraph={"decode_requests": [1, 2]}).cudagraph.decode_requests == ()


def test_the_cache_folder_follows_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert resolved().cache.dir == "/somewhere/mllm_compile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert resolved().cache.dir == str(Path.home() / ".cache" / "mllm_compile")


def test_the_cpu_is_detected_without_torch():
    code = "import sys; from mllm_compile.config.device import detect_device as d; import mllm_compile.config.resolve"
    code += "; print(d('cpu').device, 'torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cpu", "False", "False"]


def test_a_gpu_that_is_not_there_is_a_clear_error():
    import torch

    if torch.cuda.is_available():
        with pytest.raises(DeviceError, match=r"runtime\.device is 'cuda:99', but there are"):
            detect_device("cuda:99")
    else:
        assert detect_device("auto").device == "cpu"
        with pytest.raises(DeviceError, match=r"runtime\.device is 'cuda:1'.*sees no GPU"):
            detect_device("cuda:1")


QUANTISED = Scheme("fp8 in blocks of 128 x 128", ("fp8",), kinds=("fp8",))
NOT_IN_LINEARS = Scheme("bitsandbytes nf4", ("bitsandbytes nf4",))


def quantization(asked: str, scheme: Scheme | None, *disabled: str) -> ResolvedConfig:
    model = {"path": "m", "quantization": asked}
    config = EngineConfig.from_dict({"model": model, "compile": {"disable_passes": list(disabled)}})
    return resolve(config, ModelFolder(Path("/models/m"), QWEN, (), scheme), H200)


INT4 = Scheme("awq in 4 bits, groups of 128", ("awq",), kinds=("int4",))


@pytest.mark.parametrize(
    ("device", "scheme", "asked", "becomes"),
    [
        (H200, INT4, {}, "bfloat16"),
        (H200, INT4, {"dtype": "float16"}, "float16"),
        (H200, INT4, {"quantization": "dequantize"}, "float16"),
        (H200, NOT_IN_LINEARS, {}, "float16"),
        (A100, INT4, {}, "float16"),
        (CPU, INT4, {}, "float32"),
    ],
)
def test_four_bit_weights_of_a_float16_checkpoint_are_served_in_the_type_that_their_kernels_take(
    device, scheme, asked, becomes
):
    folder = ModelFolder(Path("/models/m"), {**QWEN, "dtype": "float16"}, (), scheme)
    assert resolve(EngineConfig.from_dict({"model": {"path": "m", **asked}}), folder, device).model.dtype == becomes


CACHE_ALONE = Scheme("scales of a KV cache", ())


@pytest.mark.parametrize(
    ("asked", "scheme", "disabled", "becomes"),
    [
        ("auto", None, (), "none"),
        ("auto", QUANTISED, (), "keep"),
        ("auto", QUANTISED, ("quantise_linears",), "dequantize"),
        ("auto", NOT_IN_LINEARS, (), "dequantize"),
        ("none", None, (), "none"),
        ("dequantize", None, (), "none"),
        ("dequantize", QUANTISED, (), "dequantize"),
        ("fp8", None, (), "fp8"),
        ("fp8", QUANTISED, (), "keep"),
        ("int4", None, (), "int4"),
        ("auto", CACHE_ALONE, (), "none"),
        ("none", CACHE_ALONE, (), "none"),
        ("fp8", CACHE_ALONE, (), "fp8"),
    ],
)
def test_weights_are_kept_as_the_checkpoint_has_them_or_as_is_asked(asked, scheme, disabled, becomes):
    config = quantization(asked, scheme, *disabled)
    assert config.model.quantization == becomes
    again = resolve(config.as_config(), ModelFolder(Path("/models/m"), QWEN, (), scheme), H200)
    assert again.model.quantization == becomes


GGUF = Scheme("gguf Q4_1", ("gguf q4_1",), kinds=("int4", "int8"), is_for_cpus=True)


@pytest.mark.parametrize(
    ("device", "sections", "vectors", "becomes", "why"),
    [
        (CPU, {}, True, "keep", "the checkpoint's"),
        (CPU, {"model": {"dtype": "bfloat16"}}, True, "dequantize", "a CPU is faster in bfloat16"),
        (CPU, {}, False, "dequantize", "AVX2"),
        (CPU, {"compile": {"backend": "eager"}}, True, "dequantize", "eager"),
        (CPU, {"compile": {"disable_passes": ["pack_linears"]}}, True, "dequantize", "names pack_linears"),
        (H200, {}, False, "dequantize", "AVX2"),
    ],
)
def test_linears_compute_from_blocks_of_gguf_on_a_cpu(device, sections, vectors, becomes, why, monkeypatch):
    monkeypatch.setattr("mllm_compile.config.resolve_quantisation.has_panels", lambda device: vectors)
    monkeypatch.setattr("mllm_compile.config.resolve.has_amx", lambda device: False)
    found = resolved_of(GGUF, device, **sections)
    assert found.model.quantization == becomes
    assert why in next(choice.why for choice in found.choices if choice.key == "model.quantization")
    for asked in ("keep", "keep_a8"):
        by_name = {**sections, "model": {**sections.get("model", {}), "quantization": asked}}
        if becomes == "keep" or "bfloat16" in why:
            assert resolved_of(GGUF, device, **by_name).model.quantization == asked
        else:
            with pytest.raises(ConfigError, match=rf"quantization is {asked}, but .*{why}.*Set it to auto"):
                resolved_of(GGUF, device, **by_name)


@pytest.mark.parametrize(
    ("scheme", "asked", "device", "message"),
    [
        (None, "keep", CPU, "the checkpoint is not quantised. Set it to auto, or to int8 or int4"),
        (CACHE_ALONE, "keep_a8", CPU, "the checkpoint is not quantised"),
        (NOT_IN_LINEARS, "keep", H200, "linears do not compute with"),
        (QUANTISED, "keep_a8", CPU, "linears do not multiply .* with inputs of eight bits"),
        (INT4, "keep_a8", H200, "AVX2"),
    ],
)
def test_what_cannot_be_kept_is_refused(scheme, asked, device, message):
    with pytest.raises(ConfigError, match=message):
        resolved_of(scheme, device, model={"quantization": asked})


def test_a_cpu_without_float32_dequantises_integers_unless_it_is_asked_to_keep_them(monkeypatch):
    monkeypatch.setattr("mllm_compile.config.resolve_quantisation.has_panels", lambda device: True)
    for asked, becomes in (("auto", "dequantize"), ("keep", "keep"), ("keep_a8", "keep_a8")):
        found = resolved_of(INT4, CPU, model={"dtype": "bfloat16", "quantization": asked})
        assert found.model.quantization == becomes
        again = resolve(found.as_config(), ModelFolder(Path("/models/m"), QWEN, (), INT4), CPU)
        assert again.model.quantization == becomes
    assert resolved_of(INT4, CPU, model={"dtype": "float32"}).model.quantization == "keep"


def resolved_of(scheme: Scheme | None, device: DeviceInfo, **sections: dict[str, Any]) -> ResolvedConfig:
    config = EngineConfig.from_dict({**sections, "model": {"path": "m", **sections.get("model", {})}})
    return resolve(config, ModelFolder(Path("/models/m"), QWEN, (), scheme), device)


def test_int8_is_for_cpus():
    assert resolved(CPU, model={"path": "m", "quantization": "int8"}).model.quantization == "int8"
    with pytest.raises(ConfigError, match=r"is int8, which is for CPUs\. Set it to fp8"):
        resolved(H200, model={"path": "m", "quantization": "int8"})


@pytest.mark.parametrize(("amx", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_cpu_computes_in_what_it_is_fast_in_and_says_so(amx, dtype, monkeypatch):
    monkeypatch.setattr("mllm_compile.config.resolve.has_amx", lambda device: amx)
    config = resolved(CPU, model={"path": "m", "quantization": "int8"})
    assert config.model.dtype == dtype
    line = config.line_on_cpu()
    assert line.startswith(f"computing on the CPU in {dtype}: ")
    assert "AMX" in line
    assert line.endswith("; linears from int8, with inputs rounded to eight bits")
    assert resolved(H200).line_on_cpu() is None


MIXED = Scheme("compressed-tensors fp8 and integers", ("compressed-tensors fp8",), kinds=("fp8", "int4"))


@pytest.mark.parametrize(
    ("asked", "scheme"),
    [("fp8", INT4), ("int4", QUANTISED), ("fp8", NOT_IN_LINEARS), ("fp8", MIXED), ("int4", MIXED)],
)
def test_weights_that_are_quantised_in_another_way_are_not_quantised_again(asked, scheme):
    with pytest.raises(ConfigError, match=f"is {asked}, but the checkpoint is quantised already .*Set it to auto"):
        quantization(asked, scheme)
    assert quantization("auto", scheme).model.quantization in ("keep", "dequantize")
