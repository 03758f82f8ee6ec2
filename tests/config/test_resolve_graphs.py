"""The graphs, kernels and sizes of steps that a config gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mllm_compile.config.resolution.graphs import MIXED_TOKENS
from mllm_compile.config.resolution.layer_checks import check_cascade_layers
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import CaptureSizeError, ConfigError
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.config_sections import (
    SWITCHES,
    CudaGraphSection,
)
from tests.config.resolving import A100, CPU, H200, ONE_SIZE, QWEN, resolved


def test_auto_on_a_cpu_is_float32_torch_and_no_graphs():
    config = resolved()
    assert config.model.dtype == config.runtime.kv_cache_dtype == "float32"
    assert (config.runtime.device, config.runtime.attention_backend) == ("cpu", "torch")
    assert (config.runtime.page_size, config.runtime.max_model_len) == (16, 8192)
    assert (config.runtime.max_running_requests, config.runtime.max_num_batched_tokens) == (64, 2048)
    assert config.cudagraph == CudaGraphSection(mode="none", piecewise_tokens=(), decode_requests=())
    assert config.model.load_format == "safetensors"


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


@pytest.mark.parametrize(("width", "largest"), [(384, 8192), (768, 8192), (1024, 4608), (4096, 512)])
def test_whole_steps_of_texts_are_captured_as_far_as_that_is_faster(width, largest):
    config_json = QWEN | {"hidden_size": width}
    assert resolved(H200, config_json, model={"path": "m", "task": "embed"}).cudagraph.piecewise_tokens[-1] == largest


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


def test_the_eager_model_runs_without_graphs():
    assert resolved(H200, runtime={"skip_compiled": True}).cudagraph.mode == "none"


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
