"""The table of weights comes back from JSON as it was, says once what is the same, and refuses what is no table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from mllm_compile.runtime.quantised.scheme import quantised_as
from mllm_compile.runtime.weights.formats.base import VALUES, Quantised, StoredTensor
from mllm_compile.runtime.weights.spec import Factor, QuantisedPart, WeightPart, WeightSpec
from mllm_compile.runtime.weights.table import weights_from_json, weights_to_json

FILE = "model.safetensors"


def experts(count: int) -> WeightSpec:
    parts = tuple(
        WeightPart(f"experts.{number}.down", FILE, number, (3, 2), (("unsqueeze", 0),), (0, 0))
        for number in range(count)
    )
    return WeightSpec("experts.down", (count, 3, 2), torch.bfloat16, parts)


def quantised_experts(count: int) -> WeightSpec:
    """Experts in eight bits, each with a scale of its own."""
    parts = []
    for number in range(count):
        tensors = {
            role: StoredTensor(f"experts.{number}.{role}", FILE, shape, dtype)
            for role, shape, dtype in ((VALUES, (3, 2), torch.float8_e4m3fn), ("scales", (), torch.float32))
        }
        part = WeightPart(f"experts.{number}.{VALUES}", FILE, number, (3, 2), (("unsqueeze", 0),), (0, 0))
        kept = QuantisedPart(VALUES, quantised_as("fp8", 2))
        parts.append(replace(part, quantised=Quantised("fp8", tensors, {"rows": 3, "scale": 0.5}), kept=kept))
    return WeightSpec("experts.down", (count, 3, 2), torch.float8_e4m3fn, tuple(parts), byte_sum=1 << 60)


def joined() -> WeightSpec:
    """Parts that are of different kinds in every field."""
    first = WeightPart("q", FILE, 1, (4, 3), (("transpose", 0, 1), ("reshape", 2, 6)), (0,))
    scale = StoredTensor("k_scale", "other.safetensors", (), torch.float32)
    second = WeightPart("k", "other.safetensors", 3, (2, 3), factor=Factor(scale, is_divided=True))
    third = quantised_experts(1).parts[0]
    return WeightSpec("w", (4, 6), torch.bfloat16, (first, second, third))


SPECS = [
    experts(4),
    quantised_experts(3),
    joined(),
    replace(experts(2), parts=experts(1).parts * 2),
    replace(experts(1), parts=()),
    WeightSpec("one", (), torch.float32, (WeightPart("one", "", 0, ()),)),
]


def test_weights_survive_json():
    assert weights_from_json(json.loads(json.dumps(weights_to_json(SPECS)))) == tuple(SPECS)
    assert weights_from_json([]) == ()


def test_what_is_the_same_of_all_experts_is_written_once():
    [table] = weights_to_json([quantised_experts(100)])
    text = json.dumps(table)
    assert text.count("unsqueeze") == text.count('"rows"') == 1
    assert text.count(FILE) == 3  # of the part, its values and its scale
    assert text.count("experts.7.values") == 2


COLUMN = "expected a column of 4 values"
DAMAGES = [
    (lambda table: table.pop("num_parts"), "expected a weight with 'parts' and 'num_parts'"),
    (lambda table: table.update(num_parts=-1), "at most 2,000,000 parts, got -1"),
    (lambda table: table.update(num_parts=10**9), "at most 2,000,000 parts"),
    (lambda table: table.update(num_parts=True), "expected int, got bool"),
    (lambda table: table.update(name=7), "name: expected str"),
    (lambda table: table.update(shape=[4, -3, 2]), r"'experts.down': expected a weight's shape, got \(4, -3, 2\)"),
    (lambda table: table.update(shape=[10**30, 3, 2]), "expected a weight's shape"),
    (lambda table: table.update(more=7), "expected no key 'more'"),
    (lambda table: table.update(num_parts=5), "expected a column of 5 values"),
    (lambda table: table.update(parts=[]), COLUMN),
    (lambda table: table.update(parts={"other": []}), COLUMN),
    (lambda table: table.update(parts={"fields": 7}), COLUMN),
    (lambda table: table.update(parts={"keys": {}}), "no column of columns"),
    (lambda table: table["parts"]["fields"].pop("file"), COLUMN),
    (lambda table: table["parts"]["fields"].update(more={"all": 7}), COLUMN),
    (lambda table: table["parts"]["fields"].update(file={"all": 7}), "expected str, got int 7"),
    (lambda table: table["parts"]["fields"].update(file={"fields": {}}), "no column of columns"),
    (lambda table: table["parts"]["fields"].update(start={"each": [0, 1, 2]}), COLUMN),
    (lambda table: table["parts"]["fields"].update(start={"each": [0, 1, 2, "3"]}), "expected int, got str '3'"),
    (lambda table: table["parts"]["fields"].update(start={"all": 0, "each": [0, 1, 2, 3]}), COLUMN),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_table_that_would_not_be_written_is_refused(damage, message):
    [table] = json.loads(json.dumps(weights_to_json([experts(4)])))
    damage(table)
    with pytest.raises(ValueError, match=message):
        weights_from_json([table])


def test_parts_of_all_weights_count_together():
    tables = json.loads(json.dumps(weights_to_json([replace(experts(1), parts=experts(1).parts * 4)] * 3)))
    for table, count in zip(tables, (4, 4, 1_999_993), strict=True):
        table["num_parts"] = count
    with pytest.raises(ValueError, match="at most 2,000,000 parts, got 2,000,001"):
        weights_from_json(tables)


def test_a_column_of_mappings_without_keys_does_not_lose_parts():
    [table] = json.loads(json.dumps(weights_to_json([quantised_experts(3)])))
    table["parts"]["fields"]["quantised"]["fields"]["numbers"] = {"keys": {}}
    with pytest.raises(ValueError, match="expected a column of 3 values"):
        weights_from_json([table])


@pytest.mark.parametrize("data", [{}, 7, None, [7], [[]]])
def test_a_malformed_list_of_tables_is_refused(data):
    with pytest.raises(ValueError, match="expected"):
        weights_from_json(data)
