"""A config's quantisation is understood, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mllm_compile.config.folders.quantisation import Scheme, read_scheme
from mllm_compile.errors import CheckpointError
from tests.quantised_checkpoints import LINEARS, MXFP4, compressed


def scheme(section: Any, key: str = "quantization_config", folder: Any = None) -> Scheme | None:
    return read_scheme(folder, {key: section})


NAMES = {
    "fp8 blocks": "fp8 in blocks of 128 x 128",
    "compressed-tensors fp8 channel": "compressed-tensors fp8, a scale a channel",
    "compressed-tensors int4": "compressed-tensors integers of 4 bits, groups of 64",
    "compressed-tensors mxfp4": "compressed-tensors mxfp4",
    "compressed-tensors nvfp4": "compressed-tensors nvfp4",
    "gptq v2 of 8 bits": "gptq in 8 bits, groups of 128",
    "modelopt fp8": "modelopt fp8",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_scheme_is_called_what_it_is(name, tmp_path):
    found = scheme(LINEARS[name].config, folder=tmp_path)
    assert found is not None
    assert found.name == NAMES[name]


def test_the_section_may_be_in_the_text_models_and_have_the_older_name(tmp_path):
    nested = read_scheme(tmp_path, {"text_config": {"quantization_config": MXFP4.config}})
    assert nested == scheme(MXFP4.config, folder=tmp_path) == scheme(MXFP4.config, "compression_config", tmp_path)


def test_modelopts_own_file_counts_where_config_json_says_nothing(tmp_path):
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    assert read_scheme(tmp_path, {}) == scheme(LINEARS["modelopt nvfp4"].config, folder=tmp_path)


@pytest.mark.parametrize(
    ("section", "same_as"),
    [
        ({**LINEARS["fp8 blocks"].config, "fmt": "float8_e4m3fn"}, "fp8 blocks"),  # MiniMax-M2
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "modelopt nvfp4"),
        ({"quant_method": "modelopt_fp8", "quant_algo": "FP8"}, "modelopt fp8"),
        ({"quant_algo": "FP8"}, "modelopt fp8"),
    ],
)
def test_other_spellings_are_the_same(section, same_as, tmp_path):
    assert scheme(section, folder=tmp_path) == scheme(LINEARS[same_as].config, folder=tmp_path)


@pytest.mark.parametrize(
    ("order", "is_ordered"), [("group", True), ("dynamic", True), ("weight", False), (None, False)]
)
def test_an_order_of_inputs_is_asked_for_where_the_config_names_one(order, is_ordered, tmp_path):
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 64, "actorder": order}
    found = scheme(compressed("pack-quantized", **weights), folder=tmp_path)
    assert found is not None and found.settings.is_ordered is is_ordered
    assert found.kinds == (() if is_ordered else ("int4",))


def test_several_groups_of_compressed_tensors_are_read_together(tmp_path):
    section = compressed("mixed-precision", type="float", num_bits=8, strategy="channel")
    section["config_groups"]["group_0"]["format"] = "float-quantized"
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 64}
    section["config_groups"]["group_1"] = {"weights": weights, "format": "pack-quantized"}
    found = scheme(section, folder=tmp_path)
    assert found is not None
    assert found.formats == ("compressed-tensors fp8", "compressed-tensors packed integers")
    assert found.settings.groups == (64,)


_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_PER_HEAD = {**_CACHE, "strategy": "attn_head"}


@pytest.mark.parametrize(
    "section",
    [
        {"config_groups": {}, "kv_cache_scheme": _CACHE},
        {"config_groups": None, "kv_cache_scheme": _PER_HEAD},
        {"kv_cache_scheme": _CACHE},
        {"config_groups": {"group_0": {"targets": [], "weights": None}}, "kv_cache_scheme": _CACHE},
        {"config_groups": {"group_0": {"targets": ["Qwen3Attention"], "input_activations": _CACHE}}},
        {"config_groups": {"group_0": {"targets": ["re:.*self_attn$"], "weights": None, "output_activations": _CACHE}}},
    ],
)
def test_compressed_tensors_of_a_kv_cache_or_of_activations_alone_have_plain_weights(section, tmp_path):
    found = scheme({"quant_method": "compressed-tensors", "format": "dense", **section}, folder=tmp_path)
    assert found is not None and found.is_plain
    assert {".k_scale", ".v_scale"} < set(found.unused)


@pytest.mark.parametrize("says", [{"kv_cache_quant_algo": "FP8"}, {"kv_cache_scheme": _CACHE, "quant_algo": None}])
def test_modelopts_of_a_kv_cache_alone_have_plain_weights(says, tmp_path):
    found = scheme({"quant_method": "modelopt", **says}, folder=tmp_path)
    assert found is not None and found.is_plain
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None, **says}}))
    assert read_scheme(tmp_path, {}) == found


def test_a_group_of_attention_beside_one_of_weights_changes_no_weight(tmp_path):
    of_weights = LINEARS["compressed-tensors fp8 channel"].config
    groups = {**of_weights["config_groups"], "group_1": {"targets": ["Qwen3Attention"], "input_activations": _CACHE}}
    both = {**of_weights, "config_groups": groups}
    assert scheme(both, folder=tmp_path) == scheme(of_weights, folder=tmp_path)


def test_a_folder_that_names_none_has_none(tmp_path):
    assert read_scheme(tmp_path, {"quantization_config": None}) is None


_GPTQ = LINEARS["gptq"].config
_AWQ = LINEARS["awq"].config
_NF4 = LINEARS["bitsandbytes nf4"].config
_INT4 = LINEARS["compressed-tensors int4"].config
REFUSED: dict[str, tuple[Any, str]] = {
    "an unknown method": (
        {"quant_method": "quip"},
        r"\(quantization_config: 'quip'\): its method .* awq, bitsandbytes",
    ),
    "a group of nothing at all": (
        {**_INT4, "config_groups": {"group_0": {"weights": None}}},
        "config_groups.group_0 is not read",
    ),
    "modelopt of nothing": ({"quant_method": "modelopt", "quant_algo": None}, "quant_algo: None is not read"),
    "no method": ({"bits": 4}, r"\(quantization_config: unnamed\): its method"),
    "no section": ("gptq", r"unnamed\): its method"),
    "gptq of three bits": ({**_GPTQ, "bits": 3}, "'gptq'.: bits: 3 is not read: expected 4, 8"),
    "gptq for one kernel": ({**_GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' is not read"),
    "gptq of several bits": ({**_GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic with several numbers of bits"),
    "nvfp4 of other groups": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        "group_size: 32 is not read: expected 16, which nvfp4 has",
    ),
    "mxfp4 of other groups": (
        compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=16),
        r"config_groups.group_0.weights.group_size: 16 is not read: expected 32, which mxfp4 has",
    ),
    "an order of another kind": (
        compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=64, actorder="row"),
        r"weights.actorder: 'row' is not read: expected group, weight",
    ),
    "symmetry of another kind": (
        compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=64, symmetric=1),
        r"weights.symmetric: 1 is not read: expected true or false",
    ),
    "rules that are none": ({**_GPTQ, "dynamic": ["+:.*"]}, r"dynamic: \['\+:\.\*'\] is not read: expected rules"),
    "an order that is neither": (
        {**_GPTQ, "desc_act": "no"},
        "desc_act: 'no' is not read: expected nothing, False, True",
    ),
    "a group of nothing": ({**_GPTQ, "group_size": 0}, "group_size: 0 is not read: expected a positive number"),
    "a group of text": ({**_AWQ, "group_size": "128"}, "group_size: '128' is not read"),
    "awq for another kernel": ({**_AWQ, "version": "gemv"}, "version: 'gemv' is not read: expected gemm"),
    "bitsandbytes in 8 bits": ({**_NF4, "load_in_8bit": True}, "load_in_8bit: True is not read"),
    "bitsandbytes fp4": ({**_NF4, "bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type: 'fp4' is not read"),
    "a modelopt of another kind": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo: 'W4A8_AWQ'"),
    "fp8 of another kind": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: 'e5m2' is not read"),
    "experts in four bits": ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype: 'fp4' is not read"),
    "blocks that are none": ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: .* two sizes"),
    "rotated activations": ({**_INT4, "transform_config": {"a": 1}}, "transform_config is not read"),
    "sparse weights": ({**_INT4, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config of format 'sparse-24'"),
    "no groups": ({**_INT4, "config_groups": {}}, "without config_groups"),
    "a group without weights": ({**_INT4, "config_groups": {"group_0": {}}}, "config_groups.group_0 is not read"),
    "eight-bit integers as they are": (
        compressed("int-quantized", type="int", num_bits=8, strategy="channel"),
        r"config_groups.group_0 \('int' of 8 bits, strategy 'channel', format int-quantized\) is not read",
    ),
}


ODD = (None, True, -1, 1.5, "x", [1], {"a": 1}, {"a": {"group_size": "x", "bits": [1]}}, float("nan"), 2**70)
OPTIONAL = {"dynamic": {"+:y": {"group_size": 64}}, "sparsity_config": {"format": "dense"}, "is_marlin_format": False}


def with_odd_values(value: Any) -> Iterator[Any]:
    """The value with each part of it in turn replaced by something odd."""
    yield from ODD
    for key, item in value.items() if isinstance(value, dict) else ():
        yield from ({**value, key: other} for other in with_odd_values(item))


@pytest.mark.parametrize("name", LINEARS)
def test_an_odd_value_anywhere_in_the_section_is_read_or_refused_in_one_short_line(name, tmp_path):
    for section in with_odd_values({**LINEARS[name].config, **OPTIONAL}):
        try:
            scheme(section, folder=tmp_path)
        except CheckpointError as error:
            assert len(str(error)) < 1500 and "\n" not in str(error)


@pytest.mark.parametrize("what", REFUSED)
def test_unread_keys_are_refused_by_name(what, tmp_path):
    section, message = REFUSED[what]
    with pytest.raises(CheckpointError, match=message):
        scheme(section, folder=tmp_path)
