"""Values of `auto` on a CPU and on a GPU, and contradictions."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from mllm_compile.config.resolution.device import DeviceInfo, check_ranks, detect_device
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.schema import CudaGraphConfig
from mllm_compile.config.schema_runtime import KVEventsConfig, RuntimeConfig
from mllm_compile.errors import CaptureSizeError, ConfigError, DeviceError
from mllm_compile.process.progress import PlainReporter
from mllm_compile.runtime.config_sections import (
    CudaGraphSection,
    KVEventsSection,
    RuntimeSection,
)
from mllm_compile.store.source import runner_config
from tests.config.resolving import CPU, H200, OF_TIERS, ONE_SIZE, QWEN, resolved


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


def test_ranks_are_refused_where_activations_are_sparse():
    ranks = {"tensor_parallel_size": 2}
    for pattern in ([0.95, 0.0], 0.5):
        model = QWEN | {"text_config": {"activation_sparsity_pattern": pattern}}
        assert resolved(config_json=model).runtime.tensor_parallel_size == 1
        with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, and .* activation_sparsity_pattern: layers"):
            resolved(config_json=model, runtime=ranks)
    assert resolved(config_json=QWEN | {"activation_sparsity_pattern": [0.0]}, runtime=ranks)


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
        (CudaGraphConfig, CudaGraphSection, {"mixed_tokens_asked", "sample_in_graph", "whole_prompts", "few_sizes"}),
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
        *OF_TIERS,
    } - {"kv_offloading_write_policy"}
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


def test_sizes_for_a_gpu_do_not_hinder_a_cpu():
    assert resolved(cudagraph={"decode_requests": [1, 2]}).cudagraph.decode_requests == ()


def test_the_cache_folder_follows_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert resolved().cache.dir == "/somewhere/mllm_compile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert resolved().cache.dir == str(Path.home() / ".cache" / "mllm_compile")


def test_the_cpu_is_detected_without_torch():
    code = "import sys; from mllm_compile.config.resolution.device import detect_device as d\n"
    code += "import mllm_compile.config.resolution.resolve"
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
