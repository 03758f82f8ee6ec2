"""A runtime's table of quantised weights is refused where it contradicts itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile.checkpoint.plan import plan_weights, scheme_of
from mllm_compile.passes.base import QuantisedTensor
from mllm_compile.runtime.quantised.scheme import SCALES, VALUES, WeightScheme, tensor_name
from mllm_compile.runtime.weights.consistency import check_quantised
from mllm_compile.runtime.weights.table import weights_from_json, weights_to_json
from tests.checkpoint.quantised_folder import NAME, plan, random_weight, write
from tests.quantised_checkpoints import LINEARS

SHAPE = (256, 512)


def table(name: str, folder: Path, is_kept: bool) -> list[Any]:
    """The JSON of a weight in this format, as a linear keeps it or dequantised."""
    write(folder, LINEARS[name], random_weight(*SHAPE))
    planned = plan(folder).planned
    scheme = scheme_of(planned[NAME])
    if not is_kept or scheme is None:
        return json.loads(json.dumps(weights_to_json(plan_weights({NAME: (SHAPE, torch.float32)}, {}, planned))))
    scheme = scheme.of_linear(SHAPE[1])
    told = {tensor_name(NAME, role): QuantisedTensor(NAME, role, scheme, SHAPE) for role in scheme.roles}
    shapes = {name: (scheme.shape(one.role, *SHAPE), scheme.dtype(one.role)) for name, one in told.items()}
    return json.loads(json.dumps(weights_to_json(plan_weights(shapes, {}, planned, told))))


def check(tables: list[Any]) -> None:
    check_quantised(weights_from_json(tables))


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("name", LINEARS)
def test_what_a_compile_writes_is_consistent(name, is_kept, tmp_path):
    check(table(name, tmp_path, is_kept))


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    inner = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else None
    if inner is None:
        yield path, value
        return
    for key, item in inner:
        yield from leaves(item, (*path, key))


OTHER: dict[type, Callable[[Any], Any]] = {
    str: lambda text: {"float32": "float16", "torch": "uint8"}.get(text, text + "x"),
    int: lambda number: 2 * number + 1,
    float: lambda number: number,
    bool: lambda flag: not flag,
}
# Facts without a second source in the table: files may be several, and only the config tells how zero points are
# stored. That a scale is in another type changes what a dequantised weight is only by rounding.
FREE = {"file", "zero_offset", "in_order", "offset"}
# Tensors of any size: the state is JSON; where each input names its group there may be any number of these.
FREE_SIZES = {("bitsandbytes nf4", "state"), ("compressed-tensors int4 ordered", "scales")}
FREE_SIZES |= {("bitsandbytes nf4, twice", "state")}


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("name", LINEARS)
def test_a_changed_field_of_a_quantised_weight_is_refused(name, is_kept, tmp_path):
    whole = table(name, tmp_path, is_kept)
    for index, one in enumerate(whole):
        parts = one["parts"].get("fields") or one["parts"]["all"]
        for path, value in leaves({key: parts[key] for key in ("quantised", "kept")}):
            is_free = FREE & set(path) or (path[-1] == "dtype" and "scales" in path)
            if is_free or value is None or ("shape" in path[3:] and (name, path[2]) in FREE_SIZES):
                continue
            damaged = json.loads(json.dumps(whole))
            inner = damaged[index]["parts"].get("fields") or damaged[index]["parts"]["all"]
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value // 2 if "numbers" in path else OTHER[type(value)](value)
            with pytest.raises(ValueError, match=r"."):
                check(damaged)
                pytest.fail(f"{one['name']}: {path} may be {inner[path[-1]]!r} in place of {value!r}")


FP8 = {"kind": "fp8", "group": 128, "scale_dtype": "float32", "has_zeros": False}
FORGED: dict[str, tuple[str, Callable[[list[Any]], Any], str]] = {
    "a format that is none": ("awq", lambda parts: parts[0]["quantised"].update(format="awk"), "no format is called"),
    "a tensor too few": ("awq", lambda parts: parts[0]["quantised"]["tensors"].pop("zeros"), "awq has values, zeros"),
    "another weight's scales": (
        "fp8 blocks",
        lambda parts: parts[1]["quantised"]["tensors"]["scales"].update(name="layers.1.up.weight_scale_inv"),
        "'layers.1.up.weight_scale_inv' is not the tensor of scales that goes with 'layers.0.up.weight'",
    ),
    "blocks of nothing": (
        "fp8 blocks",
        lambda parts: parts[0]["quantised"]["numbers"].update(block_rows=0),
        "'block_rows' is 0",
    ),
    "groups of other sizes": (
        "gptq",
        lambda parts: parts[0]["quantised"]["numbers"].update(group=256),
        "512 inputs have 4 groups; the config's sizes of a group: 256",
    ),
    "another scheme": ("awq", lambda parts: parts[0]["kept"].update(scheme=FP8), "has values in .*float8_e4m3fn, not"),
    "groups that the scheme has and the weight has not": (
        "fp8 blocks",
        lambda parts: [part["kept"]["scheme"].update(group=64) for part in parts],
        "weights as fp8 has this one are not in memory as .*group=64",
    ),
    "a group of nothing": (
        "fp8 blocks",
        lambda parts: parts[0]["kept"]["scheme"].update(group=0),
        "no weight lies in memory as .*group=0",
    ),
    "roles that are swapped": ("fp8 blocks", lambda parts: parts[0]["kept"].update(role=SCALES), "has scales in"),
    "a part of another tensor": (
        "fp8 blocks",
        lambda parts: parts[1].update(tensor=NAME),
        f"'{NAME}' of 'model.safetensors' is not what it is made of",
    ),
    "a factor of many numbers": (
        "fp8 blocks",
        lambda parts: parts[1].update(
            factor={
                "tensor": {"name": "k", "file": "f", "shape": [7], "dtype": "float32"},
                "is_divided": True,
            }
        ),
        "no factor of one number",
    ),
    "a factor of values": (
        "fp8 blocks",
        lambda parts: parts[0].update(
            factor={"tensor": {"name": "k", "file": "f", "shape": [], "dtype": "float32"}, "is_divided": True}
        ),
        "its values are multiplied by 'k'",
    ),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_table_is_refused_by_the_name_of_its_weight(forged, tmp_path):
    name, change, message = FORGED[forged]
    tables = table(name, tmp_path, is_kept=True)
    change([one["parts"]["all"] for one in tables])
    with pytest.raises(ValueError, match=rf"^'layers.0.up.weight\w*': .*{message}"):
        check(tables)


def test_parts_of_one_weight_are_in_memory_alike(tmp_path):
    [values, _] = table("fp8 blocks", tmp_path, is_kept=True)
    part = values["parts"]["all"]
    plain = part | {"kept": None, "quantised": None}
    with pytest.raises(ValueError, match="its parts are in memory in several ways"):
        check([values | {"num_parts": 2, "parts": {"each": [part, plain]}}])


def test_a_plain_weight_that_is_quantised_while_it_is_read_has_a_scheme_that_there_is(tmp_path):
    part = {"tensor": NAME, "file": "f", "start": 0, "shape": [4, 256], "steps": [], "inner_starts": []}
    part |= {"quantised": None, "kept": {"role": VALUES, "scheme": FP8}, "factor": None}
    values = {"name": NAME, "shape": [4, 256], "dtype": "float8_e4m3fn", "byte_sum": None, "num_parts": 1}
    check([values | {"parts": {"all": part}}])
    assert WeightScheme("fp8", 128) == weights_from_json([values | {"parts": {"all": part}}])[0].parts[0].kept.scheme
    part["kept"] = {"role": VALUES, "scheme": FP8 | {"has_zeros": True}}
    with pytest.raises(ValueError, match="no weight lies in memory as"):
        check([values | {"parts": {"all": part}}])
