"""Steps whose results depend on no other request: their sizes and graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.folders.quantisation import Scheme
from mllm_compile.config.resolution.layer_checks import check_any_rows
from mllm_compile.config.resolution.resolve import resolve
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import UnlikeRowsError
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.config_sections import (
    LEAST_ROWS,
    CudaGraphSection,
)
from mllm_compile.runtime.weights.formats.settings import Settings
from tests.config.resolving import A100, CPU, H200, ONE_SIZE, QWEN, resolved


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


# The table of docs/lab/serving.md: its rows, and what is set for each of what a row names.
OF_PAGE: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "dense, experts, [states](../state.md), drafts, `tensor_parallel_size`": [
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
    page = (Path(__file__).parents[2] / "docs" / "lab" / "serving.md").read_text()
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


def test_decodes_of_any_rows_have_a_graph_of_the_least_rows_of_products():
    few = 1, 2, 4, 8, 16, 24, 32, 40, 48, 56
    for most, sizes in ((4, (*few[:3], 64)), (11, (*few[:4], 11, 64)), (64, (*few, 64)), (90, (*few, 64, 80, 90))):
        config = resolved(H200, runtime={"deterministic": True, "max_running_requests": most})
        assert config.cudagraph.decode_requests == sizes and config.cudagraph.piecewise_tokens[0] == 64
    config = resolved(H200, runtime={"deterministic": True}, cudagraph={"decode_requests": [8, 40, 96]})
    assert config.cudagraph.decode_requests == (8, 40, 96)


def test_a_layer_without_a_kernel_of_the_program_is_no_surprise_of_any_rows():
    config, layer = resolved(H200, runtime={"deterministic": True}), LayerSpec("l", 0, 4, 2, 64, 64, 0.1, 0.0, -1, None)
    check_any_rows(config, [layer], {"l"})
    with pytest.raises(UnlikeRowsError, match="the model has l, whose decodes are not by kernels of the program"):
        check_any_rows(config, [layer], set())


def test_deterministic_steps_can_be_captured_piece_by_piece():
    sections = {"runtime": ONE_SIZE | {"max_num_batched_tokens": 64}, "cudagraph": {"mode": "piecewise"}}
    graphs = resolved(H200, **sections).cudagraph
    assert (graphs.piecewise_tokens, graphs.decode_requests) == ((64,), ())
