"""Quantised checkpoints of every format are read as the numbers that they stand for, bit for bit; what does not fit
together is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_compile.checkpoint.cache_scales import cache_scales, planned_factors
from mllm_compile.checkpoint.plan import as_linear, can_be_quantised, plan_weights, read_checkpoint, scheme_of
from mllm_compile.checkpoint.quantised import read_tensors
from mllm_compile.config.quantisation import read_scheme
from mllm_compile.errors import CheckpointError
from mllm_compile.model.hf_model import build_on_meta
from mllm_compile.passes.base import CacheScales, PackedPart, QuantisedTensor, WeightFactor
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import MXFP4 as MXFP4_SCHEME
from mllm_compile.runtime.quantised.scheme import NVFP4, WeightScheme, quantised_as, tensor_name
from mllm_compile.runtime.weights import reads
from mllm_compile.runtime.weights.formats import gptq, registry
from mllm_compile.runtime.weights.loader import allocate_weights, fill_random, load_weights
from mllm_compile.runtime.weights.spec import Factor, WeightSpec
from mllm_compile.runtime.weights.table import weights_from_json, weights_to_json
from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.quantised_checkpoints import LINEARS, MXFP4, Tensors, WrittenFormat, set_quantisation

FILE = "model.safetensors"
P = "layers.0.up"
NAME = P + ".weight"


def write(folder: Path, written: WrittenFormat, weight: torch.Tensor, base: str = P) -> torch.Tensor:
    tensors, stands_for = written.quantise(weight)
    save_file({base + suffix: tensor for suffix, tensor in tensors.items()}, folder / FILE)
    (folder / "config.json").write_text(json.dumps({"quantization_config": dict(written.config)}))
    return stands_for


def plan(folder: Path) -> Any:
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    scheme = read_scheme(folder, json.loads((folder / "config.json").read_text()))
    return read_tensors(folder, files, scheme)


def load(folder: Path, name: str = NAME, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight as a compiled model's is, by the JSON of its spec."""
    tensors = plan(folder).planned
    [spec] = plan_weights({name: (tuple(tensors[name].shape), dtype)}, {}, tensors)
    return loaded(spec, folder)


def loaded(spec: WeightSpec, folder: Path) -> torch.Tensor:
    [spec] = weights_from_json(json.loads(json.dumps(weights_to_json([spec]))))
    weights = allocate_weights([spec], "cpu")
    load_weights([spec], weights, folder)
    return weights[spec.name]


def random_weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


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


def without(suffix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != P + suffix}


def changed(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {P + suffix: change(tensors[P + suffix]).contiguous()}


DAMAGES: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "a weight without its scale": (
        "fp8 blocks",
        without(".weight_scale_inv"),
        rf"'{NAME}' \(float8_e4m3fn \[320, 192\]\) is a weight as fp8 has them; .* lacks '{NAME}_scale_inv'",
    ),
    "a scale without its weight": (
        "fp8 blocks",
        without(".weight"),
        rf"'{NAME}_scale_inv' .* goes with a weight as fp8 has them, but there is no '{NAME}'",
    ),
    "a scale of a plain weight": (
        "fp8 blocks",
        changed(".weight", lambda weight: weight.bfloat16()),
        rf"'{NAME}_scale_inv' .* but '{NAME}' \(bfloat16 \[320, 192\]\) is not quantised that way",
    ),
    "scales of other blocks": (
        "fp8 blocks",
        changed(".weight_scale_inv", lambda scales: scales[:2]),
        rf"'{NAME}_scale_inv' \(float32 \[2, 2\]\) and '{NAME}' .* do not fit together: .* block of 128 x 128",
    ),
    "one scale in place of blocks'": (
        "fp8 blocks",
        changed(".weight_scale_inv", lambda scales: scales[:1, :1]),
        rf"'{NAME}_scale_inv' \(float32 \[1, 1\]\) and '{NAME}' .* the config says a scale a block of 128 x 128",
    ),
    "one scale in place of rows'": (
        "compressed-tensors fp8 channel",
        changed(".weight_scale", lambda scales: scales[0]),
        rf"'{NAME}_scale' \(bfloat16 \[1\]\) and '{NAME}' .* the config says a scale a row",
    ),
    "one scale in place of groups'": (
        "compressed-tensors int4",
        changed(".weight_scale", lambda scales: scales[:, :1]),
        rf"'{NAME}_scale' .* and '{NAME}_packed' .* 192 inputs have 1 groups; the config's sizes of a group: 64",
    ),
    "a weight of nothing": (
        "fp8 blocks",
        changed(".weight", lambda weight: weight[:0]),
        rf"'{NAME}' \(float8_e4m3fn \[0, 192\]\) holds no values",
    ),
    "packed integers without dimensions": (
        "compressed-tensors int4",
        changed(".weight_packed", lambda packed: packed[0, 0]),
        rf"'{NAME}_packed' \(int32 \[\]\): expected 2 dimensions",
    ),
    "scales of an odd type": (
        "compressed-tensors fp8 channel",
        changed(".weight_scale", lambda scales: scales.int()),
        rf"'{NAME}_scale' \(int32 \[320, 1\]\): expected float32 or float16 or bfloat16",
    ),
    "packed integers of another shape": (
        "compressed-tensors int4",
        changed(".weight_shape", lambda shape: shape + torch.tensor([0, 64])),
        rf"'{NAME}_packed' \(int32 \[320, 24\]\) and '{NAME}_shape' .* 256 values of 4 bits",
    ),
    "packed integers of other groups": (
        "compressed-tensors int4",
        changed(".weight_scale", lambda scales: scales[:, :2]),
        rf"'{NAME}_scale' .* and '{NAME}_packed' .* 192 inputs have 2 groups; the config's sizes of a group: 64",
    ),
    "zero points of another shape": (
        "gptq",
        changed(".qzeros", lambda zeros: zeros[:, :7]),
        rf"'{P}.qzeros' \(int32 \[2, 7\]\) and '{P}.scales' .* expected \[2, 40\]",
    ),
    "two scales of one weight": (
        "fp8 by weight_scale",
        lambda tensors: tensors | {NAME + "_scale_inv": torch.ones(1)},
        rf"'{NAME}_scale' .* goes with a weight as fp8 by weight_scale has them, but '{NAME}' .* not quantised",
    ),
    "integers that lack their zero points": (
        "compressed-tensors int4 asymmetric",
        without(".weight_zero_point"),
        rf"'{NAME}_packed' .* have them with symmetric: false; the checkpoint lacks '{NAME}_zero_point'",
    ),
    "zero points of symmetric integers": (
        "compressed-tensors int4",
        lambda tensors: tensors | {NAME + "_zero_point": torch.zeros(40, 3, dtype=torch.int32)},
        rf"'{NAME}_zero_point' .* and '{NAME}_packed' .* the config says symmetric: true",
    ),
    "integers that lack their order": (
        "compressed-tensors int4 ordered",
        without(".weight_g_idx"),
        rf"'{NAME}_packed' .* have them with actorder: group; the checkpoint lacks '{NAME}_g_idx'",
    ),
    "gptq that lacks its order": (
        "gptq ordered",
        without(".g_idx"),
        rf"'{P}.qweight' .* has them with desc_act: true; the checkpoint lacks '{P}.g_idx'",
    ),
    "nf4 of other numbers": (
        "bitsandbytes nf4",
        changed(".weight.quant_map", lambda table: table.flip(0)),
        rf"'{NAME}.quant_map' \(float32 \[16\]\) does not hold nf4's numbers",
    ),
    "nf4 whose state says fp4": (
        "bitsandbytes nf4",
        changed(".weight.quant_state.bitsandbytes__nf4", lambda state: torch.where(state == ord("n"), ord("f"), state)),
        "is not the state of a weight of two dimensions",
    ),
    "gptq without zero points": ("gptq", without(".qzeros"), rf"'{P}.qweight' .* lacks '{P}.qzeros'"),
    "an order of fewer inputs": (
        "gptq ordered",
        changed(".g_idx", lambda order: order[:100]),
        rf"'{P}.g_idx' \(int32 \[100\]\) and '{P}.qweight' .* a group for each of 192 inputs",
    ),
    "awq of other groups": (
        "awq",
        lambda tensors: changed(".scales", lambda one: one[:2])(changed(".qzeros", lambda one: one[:2])(tensors)),
        rf"'{P}.scales' .* and '{P}.qweight' .* 192 inputs have 2 groups; the config's sizes of a group: 64",
    ),
    "nvfp4 without its scale of all": (
        "modelopt nvfp4",
        without(".weight_scale_2"),
        rf"'{NAME}' \(uint8 \[320, 96\]\) .* lacks '{NAME}_scale_2'",
    ),
    "nf4 of another shape": (
        "bitsandbytes nf4",
        changed(".weight", lambda weight: weight[:-5]),
        rf"'{NAME}' .* and '{NAME}.quant_state.bitsandbytes__nf4' .* half a byte for each of \[320, 192\]",
    ),
    "nf4 whose state is no JSON": (
        "bitsandbytes nf4",
        changed(".weight.quant_state.bitsandbytes__nf4", lambda state: state + 1),
        "is not the state of a weight of two dimensions",
    ),
    "half of a double quantisation": (
        "bitsandbytes nf4, twice",
        without(".weight.nested_quant_map"),
        rf"'{NAME}.absmax' \(uint8 \[960\]\): expected float32",
    ),
    "a plain weight beside the packed one": (
        "gptq",
        lambda tensors: tensors | {NAME: torch.ones(320, 192)},
        rf"'{NAME}' and '{P}.qweight' both stand for '{NAME}'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_together_is_named(damage, tmp_path):
    name, change, message = DAMAGES[damage]
    write(tmp_path, LINEARS[name], random_weight(320, 192))
    save_file(change(load_file(tmp_path / FILE)), tmp_path / FILE)
    with pytest.raises(CheckpointError, match=message):
        plan(tmp_path)


@pytest.mark.parametrize(
    ("name", "suffix", "place", "value"),
    [
        ("gptq ordered", ".g_idx", 7, 9),
        ("compressed-tensors int4 ordered", ".weight_g_idx", 7, -1),
        ("fp8 blocks", ".weight_scale_inv", (0, 1), float("nan")),
        ("awq", ".scales", (0, 1), float("inf")),
        ("fp8 blocks", ".weight_scale_inv", (0, 1), -1.0),
        ("fp8 by weight_scale", ".weight_scale", (), 0.0),
        ("compressed-tensors fp8 channel", ".weight_scale", (3, 0), -0.5),
        ("modelopt nvfp4", ".weight_scale", (0, 1), -2.0),
        ("modelopt nvfp4", ".weight_scale_2", (), 0.0),
        ("compressed-tensors nvfp4", ".weight_global_scale", 0, -1.0),
        ("compressed-tensors nvfp4", ".weight_global_scale", 0, float("inf")),  # divided by it all would be zeros
        ("gptq", ".g_idx", 7, 1),  # desc_act is false
        ("gptq v2 of 8 bits", ".g_idx", 7, 1),
        ("bitsandbytes nf4", ".weight.absmax", 7, -1.0),
        ("bitsandbytes nf4, twice", ".weight.nested_absmax", 1, float("nan")),
    ],
)
def test_a_group_that_is_not_there_and_a_scale_that_is_no_number_are_refused(name, suffix, place, value, tmp_path):
    write(tmp_path, LINEARS[name], random_weight(320, 192))
    stored = load_file(tmp_path / FILE)
    stored[P + suffix][place] = value
    save_file(stored, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=r"holds NaN or inf in \d+ of its 61440 values .*: a scale is no number"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8 blocks", without(".weight_scale_inv"), "expected tensor 'layers.0.up.weight_scale_inv' of shape"),
        ("fp8 blocks", changed(".weight", lambda weight: weight.view(torch.uint8)), "in float8_e4m3fn, found uint8"),
        (
            "compressed-tensors int4",
            changed(".weight_shape", lambda shape: shape - torch.tensor([0, 1])),
            "expected columns to be 192, found 191",
        ),
    ],
)
def test_a_checkpoint_that_has_changed_since_the_compile_is_refused(name, change, message, tmp_path):
    write(tmp_path, LINEARS[name], random_weight(320, 192))
    [spec] = plan_weights({NAME: ((320, 192), torch.float32)}, {}, plan(tmp_path).planned)
    save_file(change(load_file(tmp_path / FILE)), tmp_path / FILE)
    with pytest.raises(CheckpointError, match=message + ".*compile it again"):
        loaded(spec, tmp_path)


@pytest.mark.parametrize("scales", [{}, {"_scale_inv": torch.ones(1, 1)}], ids=["alone", "with scales"])
def test_weights_of_eight_bits_in_a_folder_that_names_no_scheme_are_refused(scales, tmp_path):
    save_tiny_model(tiny_config("qwen3"), tmp_path)
    stored = load_file(tmp_path / FILE)
    key = next(name for name in stored if name.endswith("q_proj.weight"))
    stored[key] = stored[key].to(torch.float8_e4m3fn)
    save_file(stored | {key + suffix: scale for suffix, scale in scales.items()}, tmp_path / FILE)
    tensors = read_tensors(tmp_path, [FILE], None)
    with pytest.raises(
        CheckpointError, match=f"'{key}' is float8_e4m3fn, as quantised weights are; .*quantization_config"
    ):
        read_checkpoint(tensors, build_on_meta(tmp_path, torch.float32).model)


# As they are in memory ------------------------------------------------------------------------------------------------


def kept_specs(
    scheme: WeightScheme, members: dict[str, int], columns: int, table: Any, factors: dict[str, Factor] | None = None
) -> list[WeightSpec]:
    """Specs of the tensors of weights (name → rows) that are packed into one."""
    shapes, packed, told = {}, {}, {}
    for role in scheme.roles:
        shapes[tensor_name("joined", role)] = scheme.shape(role, sum(members.values()), columns), scheme.dtype(role)
        parts, start = [], 0
        for name, rows in members.items():
            told[tensor_name(name, role)] = QuantisedTensor(name, role, scheme, (rows, columns))
            parts.append(PackedPart(tensor_name(name, role), start, rows))
            start += rows
        packed[tensor_name("joined", role)] = tuple(parts)
    specs = plan_weights(shapes, packed, table, told, factors=factors)
    return list(weights_from_json(json.loads(json.dumps(weights_to_json(specs)))))


def load_kept(folder: Path, specs: list[WeightSpec], scheme: WeightScheme, columns: int) -> torch.Tensor:
    """The numbers that a weight's tensors encode, in float32."""
    weights = allocate_weights(specs, "cpu")
    load_weights(specs, weights, folder)
    return meaning(weights, scheme, columns)


def meaning(weights: Tensors, scheme: WeightScheme, columns: int) -> torch.Tensor:
    tensors = {role: weights[tensor_name("joined", role)] for role in scheme.roles}
    return dequantised(tensors, scheme.kind, scheme.group, columns, torch.float32)


@pytest.mark.parametrize("name", ["fp8 blocks", "compressed-tensors int4"])
def test_experts_that_are_stored_one_by_one_are_read_straight_into_their_schemes_tensors(name, tmp_path, monkeypatch):
    """The same bytes as by tensors of their own."""
    model = save_tiny_model(tiny_config("qwen3_moe", num_experts=3, hidden_size=128), tmp_path)
    tensors: Tensors = {}
    for key, weight in load_file(tmp_path / FILE).items():
        tensors[key] = weight
        if ".experts." in key:
            parts, _ = LINEARS[name].quantise(tensors.pop(key))
            tensors |= {key.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
    save_file(tensors, tmp_path / FILE)
    set_quantisation(tmp_path, LINEARS[name].config)
    table = read_checkpoint(plan(tmp_path), build_on_meta(tmp_path, torch.float32).model)
    shapes, told = {}, {}
    for key, value in model.state_dict().items():
        scheme = scheme_wanted(name, value.shape[-1])
        for role in scheme.roles if ".experts." in key else ():
            told[tensor_name(key, role)] = QuantisedTensor(key, role, scheme, tuple(value.shape))
            shapes[tensor_name(key, role)] = scheme.shape(role, *value.shape), scheme.dtype(role)
    specs = plan_weights(shapes, {}, table, told)
    straight, general = allocate_weights(specs, "cpu"), allocate_weights(specs, "cpu")
    made: list[bool] = []
    small_read = reads._kept_read
    monkeypatch.setattr(reads, "_kept_read", lambda *of: made.append(small_read(*of) is not None) or small_read(*of))
    load_weights(specs, straight, tmp_path)
    assert any(made) == (name == "fp8 blocks"), "numbers in four bits lie in words of another type"
    monkeypatch.setattr(reads, "_kept_read", lambda *of: None)
    load_weights(specs, general, tmp_path)
    for spec in specs:
        assert torch.equal(straight[spec.name].view(torch.uint8), general[spec.name].view(torch.uint8)), spec.name


GROUPS = {
    "gptq": 128,
    "gptq symmetric": 128,
    "gptq without groups": None,
    "awq": 64,
    "compressed-tensors int4": 64,
    "compressed-tensors int4 asymmetric": 128,
    "fp8 blocks": 128,
    "fp8 one scale": None,
    "fp8 by weight_scale": None,
    "compressed-tensors fp8 channel": None,
    "compressed-tensors fp8 tensor": None,
    "compressed-tensors fp8 block": 128,
    "modelopt fp8": None,
}


def scheme_wanted(name: str, columns: int) -> WeightScheme:
    group = min(GROUPS[name] or columns, columns)
    if "fp8" in name:
        return WeightScheme("fp8", group)
    is_packed = name.startswith("compressed")
    scale_dtype = torch.bfloat16 if is_packed else torch.float16
    return WeightScheme("int4", group, scale_dtype, has_zeros=not is_packed or "asymmetric" in name)


@pytest.mark.parametrize("shape", [(320, 192), (24, 320), (24, 104), (24, 256)])
@pytest.mark.parametrize("name", GROUPS)
def test_a_weight_keeps_its_numbers_in_memory(name, shape, tmp_path, monkeypatch):
    monkeypatch.setattr(gptq, "_MOST_VALUES", 8 * shape[1])
    expected = write(tmp_path, LINEARS[name], random_weight(*shape))
    table = plan(tmp_path).planned
    scheme = scheme_of(table[NAME])
    assert scheme == scheme_wanted(name, shape[1])
    scheme = scheme.of_linear(shape[1])
    assert (scheme.kind == "int4_lanes") == ("fp8" not in name and scheme.group == 128 and shape[1] == 256)
    specs = kept_specs(scheme, {NAME: shape[0]}, shape[1], table)
    assert sum(spec.num_bytes for spec in specs) == scheme.num_bytes(*shape)
    assert 0 <= plan_bytes(table) - sum(spec.num_bytes_read for spec in specs) <= 16, "but for the shape all is read"
    found = load_kept(tmp_path, specs, scheme, shape[1])
    # Some compute in the scales' type; here products are not rounded to it.
    precision = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}
    rounding = max(precision[one.dtype] for one in plan(tmp_path).stored.values() if one.dtype in precision)
    assert ((found - expected).abs() <= expected.abs() * rounding).all()


def plan_bytes(table: Any) -> int:
    return sum(block.quantised.num_bytes for planned in table.values() for block in planned.blocks)


@pytest.mark.parametrize("name", ["fp8 blocks", "awq", "gptq", "compressed-tensors int4 asymmetric"])
def test_packed_weights_keep_their_scales_whatever_their_blocks(name, tmp_path):
    """Blocks of 128 rows that do not meet."""
    members, tensors, stand_for = {"q.weight": 160, "k.weight": 96, "v.weight": 40}, {}, []
    for member, rows in members.items():
        parts, weight = LINEARS[name].quantise(random_weight(rows, 192))
        tensors |= {member.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
        stand_for.append(weight)
    whole = WrittenFormat(LINEARS[name].config, lambda weight: (tensors, weight))
    write(tmp_path, whole, stand_for[0], "")
    scheme = scheme_wanted(name, 192)
    specs = kept_specs(scheme, members, 192, plan(tmp_path).planned)
    found, expected = load_kept(tmp_path, specs, scheme, 192), torch.cat(stand_for)
    assert ((found - expected).abs() <= expected.abs() * 2**-8).all()


def test_an_order_of_inputs_that_the_config_denies_is_refused(tmp_path):
    """desc_act is false, and an input has another group than its place says."""
    write(tmp_path, LINEARS["gptq"], random_weight(320, 192))
    stored = load_file(tmp_path / FILE)
    stored[P + ".g_idx"][7] = 1
    save_file(stored, tmp_path / FILE)
    scheme = scheme_wanted("gptq", 192)
    specs = kept_specs(scheme, {NAME: 320}, 192, plan(tmp_path).planned)
    with pytest.raises(CheckpointError, match=f"tensor '{P}.scales' holds NaN or inf in 640 of its 640 values"):
        load_kept(tmp_path, specs, scheme, 192)


FLOATS_OF_FOUR_BITS = {
    "compressed-tensors mxfp4": MXFP4_SCHEME,
    "compressed-tensors nvfp4": NVFP4,
    "modelopt nvfp4": NVFP4,
}


@pytest.mark.parametrize("name", FLOATS_OF_FOUR_BITS)
def test_floats_of_four_bits_keep_their_numbers_in_memory(name, tmp_path):
    """Also where weights of several factors are packed; a factor that is divided by becomes one to multiply with."""
    members, tensors, stand_for = {"q.weight": 40, "k.weight": 24}, {}, []
    for member, rows in members.items():
        parts, weight = LINEARS[name].quantise(random_weight(rows, 320) * rows)
        tensors |= {member.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
        stand_for.append(weight)
    write(tmp_path, WrittenFormat(LINEARS[name].config, lambda weight: (tensors, weight)), stand_for[0], "")
    table, scheme = plan(tmp_path).planned, FLOATS_OF_FOUR_BITS[name]
    assert all(scheme_of(table[member]) == scheme for member in members)
    specs = kept_specs(scheme, members, 320, table)
    assert sum(spec.num_bytes for spec in specs) == scheme.num_bytes(64, 320)
    found, expected = load_kept(tmp_path, specs, scheme, 320), torch.cat(stand_for)
    rounding = 2**-22 if name == "compressed-tensors nvfp4" else 0.0
    assert ((found - expected).abs() <= expected.abs() * rounding).all()


def with_scale(folder: Path, number: float) -> dict[str, Factor]:
    """Writes an fp8 weight and a scale of the cache beside it; gives the factor that divides by that."""
    written, key = LINEARS["modelopt fp8"], P + ".k_scale"
    more = {".k_scale": torch.tensor(number)}
    write(
        folder,
        WrittenFormat(written.config, lambda weight: (written.quantise(weight)[0] | more, weight)),
        random_weight(32, 64),
    )
    return planned_factors({NAME: WeightFactor(key, True)}, plan(folder))


def test_a_scale_of_the_cache_divides_a_weight_as_the_next_power_of_two(tmp_path):
    factors = with_scale(tmp_path, 1000.0)
    plain, table, scheme = load(tmp_path), plan(tmp_path).planned, WeightScheme("fp8", 64)
    [spec] = plan_weights({NAME: ((32, 64), torch.float32)}, {}, table, factors=factors)
    assert torch.equal(loaded(spec, tmp_path), plain / 1024)
    specs = kept_specs(scheme, {NAME: 32}, 64, table, factors)
    assert [part.factor is not None for spec in specs for part in spec.parts] == [False, True], "scales have it"
    assert torch.equal(load_kept(tmp_path, specs, scheme, 64), plain / 1024)


@pytest.mark.parametrize("number", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_of_the_cache_that_is_no_positive_number_is_refused(number, tmp_path):
    factors = with_scale(tmp_path, number)
    [spec] = plan_weights({NAME: ((32, 64), torch.float32)}, {}, plan(tmp_path).planned, factors=factors)
    with pytest.raises(CheckpointError, match=r"up.k_scale': expected a positive number.*disable_passes"):
        loaded(spec, tmp_path)


@pytest.mark.parametrize("name", [name for name in LINEARS if name not in {*GROUPS, *FLOATS_OF_FOUR_BITS}])
def test_what_linears_do_not_compute_with_has_no_scheme(name, tmp_path):
    write(tmp_path, LINEARS[name], random_weight(320, 192))
    assert scheme_of(plan(tmp_path).planned[NAME]) is None


def test_transposed_experts_have_a_scheme_as_linears_and_plain_weights_have_none(tmp_path):
    write(tmp_path, MXFP4, random_weight(3, 96, 40), "layers.0.mlp.experts.down_proj")
    (planned,) = plan(tmp_path).planned.values()
    assert scheme_of(planned) is None and not can_be_quantised(planned)
    assert scheme_of(as_linear(planned, True)) == MXFP4_SCHEME, "published as linears have theirs"
    save_file({NAME: random_weight(24, 40)}, tmp_path / FILE)
    (planned,) = read_tensors(tmp_path, [FILE], None).planned.values()
    assert scheme_of(planned) is None and can_be_quantised(planned)
    assert scheme_of(planned.narrow(1, 0, 8)) is None
    halves = torch.cat((planned.narrow(1, 0, 8), planned.narrow(1, 8, 32)), 1)
    assert not can_be_quantised(halves), "rows of two parts would be two quantised ones"


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        ("", f"tensor '{NAME}' holds NaN among its values in eight bits"),
        ("_scale_inv", rf"tensor '{NAME}_scale_inv' holds NaN or inf in \d+ of its"),
    ],
)
def test_a_value_or_scale_that_is_no_number_is_refused_by_its_name(suffix, message, tmp_path):
    write(tmp_path, LINEARS["fp8 blocks"], random_weight(320, 192))
    stored = load_file(tmp_path / FILE)
    if suffix:
        stored[NAME + suffix][1, 0] = float("nan")
    else:
        stored[NAME].view(torch.uint8)[300, 100] = 0xFF
    save_file(stored, tmp_path / FILE)
    scheme = WeightScheme("fp8", 128)
    specs = kept_specs(scheme, {NAME: 320}, 192, plan(tmp_path).planned)
    with pytest.raises(CheckpointError, match=message):
        load_kept(tmp_path, specs, scheme, 192)


@pytest.mark.parametrize(
    ("name", "suffix", "place", "value", "message"),
    [
        ("fp8 blocks", ".weight_scale_inv", (0, 1), -1.0, rf"'{NAME}_scale_inv' holds NaN or inf in \d+ of its"),
        ("fp8 by weight_scale", ".weight_scale", (), 0.0, rf"'{NAME}_scale' holds NaN or inf in 320 of its 320"),
        ("modelopt nvfp4", ".weight_scale", (3, 1), -2.0, rf"'{NAME}_scale' holds a negative scale"),
        ("modelopt nvfp4", ".weight_scale_2", (), 0.0, rf"'{NAME}_scale_2' holds NaN or inf in 320 of its 320"),
        ("compressed-tensors nvfp4", ".weight_global_scale", 0, -1.0, rf"'{NAME}_global_scale' holds NaN or inf"),
        ("compressed-tensors nvfp4", ".weight_global_scale", 0, float("inf"), rf"'{NAME}_global_scale' holds NaN"),
    ],
)
def test_a_scale_that_is_not_positive_is_refused_where_the_weight_stays_small(
    name, suffix, place, value, message, tmp_path
):
    write(tmp_path, LINEARS[name], random_weight(320, 192))
    stored = load_file(tmp_path / FILE)
    stored[P + suffix][place] = value
    save_file(stored, tmp_path / FILE)
    table = plan(tmp_path).planned
    scheme = scheme_of(table[NAME])
    assert scheme is not None
    with pytest.raises(CheckpointError, match=message):
        load_kept(tmp_path, kept_specs(scheme, {NAME: 320}, 192, table), scheme, 192)


def test_a_group_of_zeros_may_have_a_scale_that_is_zero(tmp_path):
    weight = random_weight(320, 192)
    weight[3, 16:32] = 0
    expected = write(tmp_path, LINEARS["modelopt nvfp4"], weight)
    assert load_file(tmp_path / FILE)[NAME + "_scale"][3, 1].float() == 0
    assert torch.equal(load(tmp_path), expected)


def test_values_of_another_type_than_those_that_were_compiled_for_are_refused(tmp_path):
    write(tmp_path, LINEARS["fp8 blocks"], random_weight(320, 192))
    scheme = WeightScheme("fp8", 128)
    specs = kept_specs(scheme, {NAME: 320}, 192, plan(tmp_path).planned)
    stored = load_file(tmp_path / FILE)
    save_file(stored | {NAME: stored[NAME].bfloat16()}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=r"in float8_e4m3fn, found bfloat16.*compile it again"):
        load_kept(tmp_path, specs, scheme, 192)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_plain_weight_is_quantised_while_it_is_read(kind, tmp_path):
    members = {"q.weight": 40, "k.weight": 24}
    stored = {name: random_weight(rows, 200).bfloat16() for name, rows in members.items()}
    save_file(stored, tmp_path / FILE)
    scheme = quantised_as(kind, 200)
    specs = kept_specs(scheme, members, 200, read_tensors(tmp_path, [FILE], None).planned)
    expected = {role: torch.cat([quantised(stored[name], scheme)[role] for name in members]) for role in scheme.roles}
    weights = allocate_weights(specs, "cpu")
    load_weights(specs, weights, tmp_path)
    for role, tensor in expected.items():
        assert torch.equal(weights[tensor_name("joined", role)].view(torch.uint8), tensor.view(torch.uint8))
    assert sum(spec.num_bytes_read for spec in specs) == 2 * 64 * 200, "each is read once"


def test_a_plain_weight_with_inf_is_refused_where_it_is_quantised(tmp_path):
    weight = random_weight(24, 200)
    weight[3, 3] = float("inf")
    save_file({NAME: weight}, tmp_path / FILE)
    scheme = quantised_as("fp8", 200)
    specs = kept_specs(scheme, {NAME: 24}, 200, read_tensors(tmp_path, [FILE], None).planned)
    with pytest.raises(CheckpointError, match=f"tensor '{NAME}' holds NaN"):
        load_kept(tmp_path, specs, scheme, 200)


@pytest.mark.parametrize("kind", ["fp8", "int4", "mxfp4"])
def test_dummy_weights_are_random_ones_quantised(kind):
    scheme = quantised_as(kind, 200)
    specs = kept_specs(scheme, {NAME: 640}, 200, None)
    weights = allocate_weights(specs, "cpu")
    fill_random(specs, weights, 0)
    found = meaning(weights, scheme, 200)
    assert found.std() == pytest.approx(0.02, rel=0.02) and abs(found.mean()) < 1e-3
    again = allocate_weights(specs, "cpu")
    fill_random(specs[::-1], again, 0)
    assert torch.equal(meaning(again, scheme, 200), found)
    fill_random(specs, again, 1)
    assert not torch.equal(meaning(again, scheme, 200), found)
