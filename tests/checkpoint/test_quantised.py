"""Quantised checkpoints of every format are read as the numbers that they stand for, bit for bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_compile.checkpoint.cache_scales import cache_scales
from mllm_compile.checkpoint.plan import plan_weights, read_checkpoint
from mllm_compile.model.hf_model import build_on_meta
from mllm_compile.passes.base import CacheScales, PackedPart
from mllm_compile.runtime.weights.formats import registry
from tests.checkpoint.quantised_folder import FILE, NAME, P, load, loaded, plan, random_weight, write
from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.quantised_checkpoints import LINEARS, MXFP4, Tensors, WrittenFormat, set_quantisation


@pytest.mark.parametrize("shape", [(320, 192), (24, 320)])
@pytest.mark.parametrize("name", LINEARS)
def test_a_weight_is_what_its_format_says_bit_for_bit(name, shape, tmp_path, monkeypatch):
    """Few values at once, so that rows are computed in several turns and the last is a short one."""
    monkeypatch.setattr(registry, "_MOST_VALUES", 128 * shape[1])
    expected = write(tmp_path, LINEARS[name], random_weight(*shape))
    found = load(tmp_path)
    assert torch.equal(found, expected)
    assert torch.equal(load(tmp_path, dtype=torch.bfloat16), expected.bfloat16())
    assert 0 < (found - random_weight(*shape)).abs().max() < 1.2  # quantised, and nothing shifted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_experts_are_what_transformers_makes_of_them(dtype, tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    base = "layers.0.mlp.experts.gate_up_proj"
    expected = write(tmp_path, MXFP4, random_weight(3, 96, 40), base)
    stored = load_file(tmp_path / FILE)
    theirs = convert_moe_packed_tensors(stored[base + "_blocks"], stored[base + "_scales"], dtype=dtype)
    assert torch.equal(load(tmp_path, base, dtype), theirs)
    assert torch.equal(theirs, expected.to(dtype))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_fp8_blocks_are_what_transformers_makes_of_them(scale_dtype, tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    write(tmp_path, LINEARS["fp8 blocks"], random_weight(256, 384))
    stored = load_file(tmp_path / FILE)
    scales = stored[NAME + "_scale_inv"]
    exponents = scales.to(torch.float8_e8m0fnu)
    scales = exponents.view(torch.uint8) if scale_dtype == torch.uint8 else scales.to(scale_dtype)
    save_file(stored | {NAME + "_scale_inv": scales}, tmp_path / FILE)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = Fp8Dequantize(None)._dequantize_one(stored[NAME], scales, dtype)
        assert torch.equal(load(tmp_path, dtype=dtype), theirs)


def test_stacked_experts_keep_their_own_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_MOST_VALUES", 1)
    one, two = (random_weight(160, 192 + 64 * index)[:, :192].contiguous() for index in range(2))
    parts = [LINEARS["fp8 blocks"].quantise(weight) for weight in (one, two)]
    stacked = {suffix: torch.stack([tensors[suffix] for tensors, _ in parts]) for suffix in parts[0][0]}
    write(tmp_path, WrittenFormat(LINEARS["fp8 blocks"].config, lambda weight: (stacked, weight)), one)
    assert torch.equal(load(tmp_path), torch.stack([stands_for for _, stands_for in parts]))


@pytest.mark.parametrize("name", ["fp8 blocks", "compressed-tensors int4", "gptq ordered"])
def test_experts_that_are_stored_one_by_one_are_stacked_and_joined(name, tmp_path):
    model = save_tiny_model(tiny_config("qwen3_moe", num_experts=3), tmp_path)
    state = model.state_dict()
    tensors: Tensors = {}
    for key, weight in load_file(tmp_path / FILE).items():
        if ".experts." in key:
            parts, stands_for = LINEARS[name].quantise(weight)
            base = key.removesuffix(".weight")
            tensors |= {base + suffix: part for suffix, part in parts.items()}
            _put(state, key, stands_for)
        else:
            tensors[key] = weight
    save_file(tensors, tmp_path / FILE)
    set_quantisation(tmp_path, LINEARS[name].config)
    table = read_checkpoint(plan(tmp_path), build_on_meta(tmp_path, torch.float32).model)
    shapes = {key: (tuple(value.shape), value.dtype) for key, value in state.items()}
    for spec in plan_weights(shapes, {}, table):
        assert torch.equal(loaded(spec, tmp_path), state[spec.name]), spec.name


def _put(state: Tensors, key: str, weight: torch.Tensor) -> None:
    """An expert's weight in its place among the stacked ones."""
    before, _, after = key.partition(".experts.")
    number, name, _ = after.split(".")
    if name == "down_proj":
        state[f"{before}.experts.down_proj"][int(number)] = weight
        return
    gate, up = state[f"{before}.experts.gate_up_proj"][int(number)].chunk(2)
    (gate if name == "gate_proj" else up).copy_(weight)


def test_packed_weights_are_dequantised_into_their_rows(tmp_path):
    """Two weights of one, whose blocks of 128 rows do not meet."""
    parts, weights = {}, {}
    for name, rows in (("q", 160), ("k", 96)):
        tensors, weights[f"{name}.weight"] = LINEARS["fp8 blocks"].quantise(random_weight(rows, 192))
        parts |= {name + suffix: tensor for suffix, tensor in tensors.items()}
    write(
        tmp_path, WrittenFormat(LINEARS["fp8 blocks"].config, lambda weight: (parts, weight)), weights["q.weight"], ""
    )
    packed = (PackedPart("q.weight", 0, 160), PackedPart("k.weight", 160, 96))
    [spec] = plan_weights({"qk": ((256, 192), torch.float32)}, {"qk": packed}, plan(tmp_path).planned)
    assert torch.equal(loaded(spec, tmp_path), torch.cat(list(weights.values())))


def test_scales_may_be_in_another_file(tmp_path):
    expected = write(tmp_path, LINEARS["awq"], random_weight(320, 192))
    stored = load_file(tmp_path / FILE)
    save_file({P + ".scales": stored.pop(P + ".scales")}, tmp_path / "more.safetensors")
    save_file(stored, tmp_path / FILE)
    assert torch.equal(load(tmp_path), expected)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("k_proj.k_scale", "v_proj.v_scale"), CacheScales("a.k_proj.k_scale", "a.v_proj.v_scale")),
        (("k_scale", "v_scale"), CacheScales("a.k_scale", "a.v_scale")),
        (("qkv_proj.k_scale", "qkv_proj.v_scale"), CacheScales("a.qkv_proj.k_scale", "a.qkv_proj.v_scale")),
        (("kv_scale",), CacheScales("a.kv_scale", "a.kv_scale")),
        (("k_proj.output_scale",), CacheScales("a.k_proj.output_scale", None)),
    ],
)
def test_scales_of_the_cache_belong_to_the_weights_of_their_attention(names, found, tmp_path):
    written = LINEARS["modelopt fp8"]
    tensors = {
        f"{module}{suffix}": tensor
        for module in ("a.k_proj", "mlp.up")
        for suffix, tensor in written.quantise(random_weight(32, 64))[0].items()
    }
    tensors |= {f"a.{name}": torch.ones(1) for name in names} | {"mlp.up.input_scale": torch.ones(1)}
    write(tmp_path, WrittenFormat(written.config, lambda weight: (tensors, weight)), random_weight(32, 64), "")
    read = plan(tmp_path)
    assert cache_scales(read, read.planned) == {"a.k_proj.weight": found}


def test_scales_of_activations_and_of_the_cache_are_told_and_left_out(tmp_path):
    written = LINEARS["compressed-tensors fp8 tensor"]
    more = {".input_scale": torch.ones(1), ".k_scale": torch.ones(1)}
    write(
        tmp_path,
        WrittenFormat(written.config, lambda weight: (written.quantise(weight)[0] | more, weight)),
        random_weight(32, 64),
    )
    tensors = plan(tmp_path)
    assert set(tensors.unused) == {P + ".input_scale", P + ".k_scale"}
    assert set(tensors.planned) == {NAME}


def test_the_line_names_the_format_and_both_sizes(tmp_path):
    write(tmp_path, LINEARS["fp8 blocks"], random_weight(4096, 4096))
    assert plan(tmp_path).line(torch.bfloat16, are_kept=False) == (
        "weights: 0.02 GB, stored as fp8, are dequantised to bfloat16 while they are read and take 0.03 GB of memory"
    )
    assert plan(tmp_path).line(torch.bfloat16, are_kept=True) == (
        "weights: 0.02 GB, stored as fp8; linears keep them so in memory, elsewhere they are dequantised to bfloat16"
    )
