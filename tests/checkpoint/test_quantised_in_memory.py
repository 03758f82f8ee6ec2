"""Quantised weights keep their numbers in memory, in the tensors of their scheme."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_compile.checkpoint.cache_scales import planned_factors
from mllm_compile.checkpoint.plan import as_linear, can_be_quantised, plan_weights, read_checkpoint, scheme_of
from mllm_compile.checkpoint.quantised import read_tensors
from mllm_compile.errors import CheckpointError
from mllm_compile.model.hf_model import build_on_meta
from mllm_compile.passes.base import PackedPart, QuantisedTensor, WeightFactor
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import MXFP4 as MXFP4_SCHEME
from mllm_compile.runtime.quantised.scheme import NVFP4, WeightScheme, quantised_as, tensor_name
from mllm_compile.runtime.weights import reads
from mllm_compile.runtime.weights.formats import gptq
from mllm_compile.runtime.weights.loader import allocate_weights, fill_random, load_weights
from mllm_compile.runtime.weights.spec import Factor, WeightSpec
from mllm_compile.runtime.weights.table import weights_from_json, weights_to_json
from tests.checkpoint.quantised_folder import FILE, NAME, P, load, loaded, plan, random_weight, write
from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.quantised_checkpoints import LINEARS, MXFP4, Tensors, WrittenFormat, set_quantisation


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
