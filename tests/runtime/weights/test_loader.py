"""Weights in their places: packed parts, boxes, random values; a file that is not what was compiled for is named."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.weights import loader, reads, stream
from mllm_compile.runtime.weights.header import read_header
from mllm_compile.runtime.weights.loader import allocate_weights, fill_random, load_weights
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec, place_of
from mllm_compile.runtime.weights.stream import StraightRead

FILE = "model.safetensors"


def matrix(rows: int, columns: int, first: float = 0.0) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + first


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(
        {"q": matrix(4, 3), "k": matrix(2, 3, 100.0), "b": torch.ones(2), "s": torch.tensor(7.0)}, tmp_path / FILE
    )
    return tmp_path


def load(folder: Path, *specs: WeightSpec) -> dict[str, torch.Tensor]:
    weights = allocate_weights(specs, "cpu")
    load_weights(specs, weights, folder)
    return weights


def test_packed_parts_are_in_row_order(folder):
    parts = (WeightPart("q", FILE, 0, (4, 3)), WeightPart("k", FILE, 4, (2, 3)))
    weights = load(folder, WeightSpec("q+k", (6, 3), torch.float32, parts))
    assert torch.equal(weights["q+k"], torch.cat([matrix(4, 3), matrix(2, 3, 100.0)]))


def test_a_scalar_and_a_vector_are_weights_too(folder):
    weights = load(
        folder,
        WeightSpec("s", (), torch.float32, (WeightPart("s", FILE, 0, ()),)),
        WeightSpec("b", (2,), torch.bfloat16, (WeightPart("b", FILE, 0, (2,)),)),
    )
    assert weights["s"] == 7.0
    assert torch.equal(weights["b"], torch.ones(2, dtype=torch.bfloat16))


def test_what_the_parts_leave_of_a_vector_is_zeros_each_time(folder):
    """Memory that is filled again may hold anything."""
    half = WeightPart("b", FILE, 4, (2,), (("narrow", 0, 0, 1),))
    spec = WeightSpec("a+b+c.bias", (5,), torch.float32, (WeightPart("b", FILE, 1, (2,)), half))
    for fill in (
        lambda weights: load_weights([spec], weights, folder),
        lambda weights: fill_random([spec], weights, 0),
    ):
        weights = {spec.name: torch.full((5,), torch.nan)}
        fill(weights)
        assert weights[spec.name][[0, 3]].tolist() == [0.0, 0.0]
    load_weights([spec], weights, folder)
    assert weights[spec.name].tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]


def test_a_view_of_a_tensor_fills_a_box(folder):
    turned = WeightPart("q", FILE, 1, (4, 3), (("transpose", 0, 1), ("narrow", 1, 1, 2), ("unsqueeze", 0)), (0, 2))
    spec = WeightSpec("box", (2, 3, 4), torch.float32, (turned,))
    place = torch.zeros(2, 3, 4)
    load_weights([spec], {"box": place}, folder)
    assert torch.equal(place[1, :, 2:], matrix(4, 3).T[:, 1:3])
    assert place[0].sum() == 0
    assert place[1, :, :2].sum() == 0


ONE = (("unsqueeze", 0),)
PLACES = [
    ((4, 3), WeightPart("w", FILE, 0, (4, 3)), 0),
    ((4, 3), WeightPart("w", FILE, 2, (2, 3)), 6),
    ((4, 6), WeightPart("w", FILE, 0, (4, 3), (), (3,)), None),  # a part of each row
    ((4, 6), WeightPart("w", FILE, 3, (1, 3), (), (3,)), 21),  # of one row
    ((3, 4, 5), WeightPart("w", FILE, 1, (2, 5), ONE, (2, 0)), 30),
    ((3, 4, 5), WeightPart("w", FILE, 1, (4, 2), ONE, (0, 3)), None),
    ((3, 5, 4), WeightPart("w", FILE, 1, (4, 5), (("transpose", 0, 1), *ONE), (0, 0)), None),
    ((7,), WeightPart("w", FILE, 3, (2,)), 3),
    ((), WeightPart("w", FILE, 0, ()), 0),
]


def test_experts_that_are_stored_one_by_one_are_read_straight_into_their_places(folder, monkeypatch):
    offsets: list[int] = []
    stream_tensors = loader.stream_tensors

    def watched(reads, *others):
        reads = list(reads)
        offsets.extend(read.offset for read in reads if isinstance(read, StraightRead))
        stream_tensors(reads, *others)

    monkeypatch.setattr(loader, "stream_tensors", watched)
    parts = tuple(
        WeightPart("k", FILE, expert, (2, 3), (("unsqueeze", 0),), (row, 0)) for expert, row in ((0, 0), (1, 2))
    )
    place = torch.zeros(2, 4, 3)
    load_weights([WeightSpec("experts", (2, 4, 3), torch.float32, parts)], {"experts": place}, folder)
    assert offsets == [0, (4 + 2) * 3 * 4], "each is a stretch of the weight's bytes"
    assert torch.equal(place[0, :2], matrix(2, 3, 100.0)) and torch.equal(place[1, 2:], matrix(2, 3, 100.0))
    assert not place[0, 2:].any() and not place[1, :2].any()


def test_an_experts_gate_and_up_that_follow_each_other_go_to_their_place_at_once(tmp_path, monkeypatch):
    names = [f"{kind}{expert}" for expert in range(2) for kind in ("down", "gate", "up")]
    tensors = {name: matrix(2, 3, 10.0 * number) for number, name in enumerate(names)}
    save_file(tensors, tmp_path / FILE)  # in the order of names: down0, down1, gate0, …
    header = read_header(tmp_path / FILE).tensors
    order = sorted(names, key=lambda name: header[name].begin)
    sizes: list[int] = []
    read_exactly = stream._read_exactly

    def watched(file, offset, views):
        sizes.extend(map(len, views))
        read_exactly(file, offset, views)

    monkeypatch.setattr(stream, "_read_exactly", watched)
    # The weight has them in the order of the file, but for the last two, which change places.
    places = [*order[:4], order[5], order[4]]
    parts = tuple(
        WeightPart(name, FILE, place, (2, 3), (("unsqueeze", 0),), (0, 0)) for place, name in enumerate(places)
    )
    weights = load(tmp_path, WeightSpec("experts", (6, 2, 3), torch.float32, parts))
    assert torch.equal(weights["experts"], torch.stack([tensors[name] for name in places]))
    assert sorted(sizes) == [24, 24, 4 * 24]


def test_a_files_reads_are_found_one_by_one_while_the_file_before_it_is_read(tmp_path, monkeypatch):
    counts = {"a": 3, "b": 5, "c": 2}
    specs = []
    for file, count in counts.items():
        tensors = {f"{file}{number}": matrix(1, 2, number) for number in range(count)}
        save_file(tensors, tmp_path / file)
        specs += [WeightSpec(name, (1, 2), torch.float32, (WeightPart(name, file, 0, (1, 2)),)) for name in tensors]
    found: list[str] = []
    plain_read = reads._plain_read

    def watched(path, *others):
        found.append(path.name)
        return plain_read(path, *others)

    monkeypatch.setattr(reads, "_plain_read", watched)
    headers = {file: read_header(tmp_path / file) for file in counts}
    read, seen = [], []
    for one in reads.reads_in_order(specs, allocate_weights(specs, "cpu"), tmp_path, headers):
        read.append(one.path.name)
        seen.append("".join(found))
    assert "".join(read) == "aaabbbbbcc"
    of_c = ["", "c", "cc", "cc", "cc"]  # found behind each read of the longer b
    assert seen == ["aaa", "aaab", "aaabb", *("aaabbbbb" + some for some in of_c), "aaabbbbbcc", "aaabbbbbcc"]


OUTSIDE = [
    ((4, 3), WeightPart("q", FILE, -1, (4, 3))),
    ((4, 3), WeightPart("q", FILE, 1, (4, 3))),
    ((4, 3), WeightPart("q", FILE, 10**30, (4, 3))),
    ((2, 3), WeightPart("q", FILE, 0, (4, 3))),
    ((4, 3), WeightPart("q", FILE, 0, (4, 3), (), (1,))),
    ((4, 3), WeightPart("q", FILE, 0, (4, 3), (), (-1,))),
    ((6,), WeightPart("q", FILE, 0, (4, 3))),
    ((4, 4, 3), WeightPart("q", FILE, 4, (4, 3), (("unsqueeze", 0),))),
]


@pytest.mark.parametrize(("shape", "part"), OUTSIDE)
def test_a_part_that_lies_outside_of_its_weight_is_refused(folder, shape, part):
    around = torch.zeros(3 * math.prod(shape))
    place = around[math.prod(shape) :][: math.prod(shape)].view(shape)
    with pytest.raises(
        CheckpointError, match=r"tensor 'q': a weight of shape .* has no place for .* compile the model"
    ):
        load_weights([WeightSpec("w", shape, torch.float32, (part,))], {"w": place}, folder)
    assert not around.any()


@pytest.mark.parametrize(
    "steps",
    [
        *(("narrow", 0, -2, 1), ("narrow", 0, 9, 1), ("narrow", 10**30), ("narrow",)),
        *(("other", 1), ("reshape", "x"), ("rows",), ("rows", 4), ("rows", 0, -1)),
    ],
)
def test_views_that_a_tensor_does_not_have_are_refused(folder, steps):
    spec = WeightSpec("w", (1, 3), torch.float32, (WeightPart("q", FILE, 0, (4, 3), (steps,)),))
    with pytest.raises(CheckpointError, match=r"shape \[4, 3\] cannot be viewed by .* compile the model again"):
        load(folder, spec)


@pytest.mark.parametrize(("shape", "part", "offset"), PLACES)
def test_where_a_parts_numbers_follow_each_other_is_known_without_a_tensor(shape, part, offset):
    weight = torch.arange(math.prod(shape)).view(shape)
    place = place_of(weight, part)
    places = reads._places_of(part.shape, part.steps, part.inner_starts, shape)
    assert (places and places.of(part.start)) == offset
    if offset is not None:
        assert torch.equal(place.flatten(), torch.arange(offset, offset + place.numel()))


@pytest.mark.parametrize(("dim", "start", "length"), [(0, 1, 2), (1, 1, 2), (1, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_part_of_a_tensor_no_other_byte_is_read(folder, monkeypatch, dim, start, length, dtype):
    num_read, preadv = [], os.preadv

    def counted(*args):
        num_read.append(preadv(*args))
        return num_read[-1]

    monkeypatch.setattr("mllm_compile.runtime.weights.stream.os.preadv", counted)
    part = matrix(4, 3).narrow(dim, start, length)
    taken = WeightPart("q", FILE, 0, (4, 3), (("narrow", dim, start, length),))
    spec = WeightSpec("w", tuple(part.shape), dtype, (taken,))
    assert torch.equal(load(folder, spec)["w"], part.to(dtype))
    assert sum(num_read) == part.numel() * torch.float32.itemsize
    assert spec.num_bytes_read == part.numel() * dtype.itemsize


def test_random_weights_of_parts_match_the_whole():
    whole = WeightSpec("w", (6, 4), torch.float32, (WeightPart("w", "", 0, (6, 4)),))
    rows = tuple(WeightPart("w", "", place, (6, 4), (("narrow", 0, start, 1),)) for place, start in enumerate((1, 4)))
    columns = (WeightPart("w", "", 0, (6, 4), (("narrow", 1, 2, 2),)),)
    specs = [
        whole,
        WeightSpec("rows", (2, 4), torch.float32, rows),
        WeightSpec("columns", (6, 2), torch.float32, columns),
    ]
    weights = allocate_weights(specs, "cpu")
    fill_random(specs, weights, seed=3)
    assert torch.equal(weights["rows"], weights["w"][[1, 4]])
    assert torch.equal(weights["columns"], weights["w"][:, 2:])


def test_a_checkpoint_that_has_changed_since_is_named(folder):
    for tensor, shape, found in [("v", (4, 3), "no such tensor"), ("q", (3, 4), r"shape \[4, 3\]")]:
        spec = WeightSpec("w", shape, torch.float32, (WeightPart(tensor, FILE, 0, shape),))
        with pytest.raises(CheckpointError, match=f"expected tensor '{tensor}' of shape .* found {found}"):
            load(folder, spec)


def test_random_values_match_the_tensor_however_it_is_packed():
    q, k = WeightPart("q", "", 0, (4, 3)), WeightPart("k", "", 0, (2, 3))
    packed = WeightSpec("q+k", (6, 3), torch.float32, (q, WeightPart("k", "", 4, (2, 3))))
    specs = [packed, WeightSpec("k", (2, 3), torch.float32, (k,))]
    weights = allocate_weights(specs, "cpu")
    fill_random(specs, weights, seed=3)
    assert torch.equal(weights["q+k"][4:], weights["k"])
    again = allocate_weights(specs, "cpu")
    fill_random(specs, again, seed=4)
    assert not torch.equal(again["k"], weights["k"])


def test_random_norms_are_one_and_biases_zero():
    specs = [
        WeightSpec(name, (2,), torch.float32, (WeightPart(name, "", 0, (2,)),)) for name in ("norm.weight", "up.bias")
    ]
    weights = allocate_weights(specs, "cpu")
    fill_random(specs, weights, seed=0)
    assert weights["norm.weight"].tolist() == [1.0, 1.0]
    assert weights["up.bias"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_with_a_value_that_is_no_number_is_named(tmp_path, value, dtype):
    bad = matrix(2, 3)
    bad[1, 2] = value
    save_file({"q": matrix(4, 3), "k": bad, "i": torch.ones(2, dtype=torch.int64)}, tmp_path / FILE)
    parts = (WeightPart("q", FILE, 0, (4, 3)), WeightPart("k", FILE, 4, (2, 3)))
    numbers = WeightSpec("i", (2,), torch.int64, (WeightPart("i", FILE, 0, (2,)),))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=rf"{FILE}: tensor 'k' holds NaN or inf in 1 of its 6 values as {name}\."):
        load(tmp_path, WeightSpec("q+k", (6, 3), dtype, parts), numbers)


def test_a_value_that_the_models_type_does_not_hold_is_told_too(tmp_path):
    save_file({"w": torch.tensor([1.0, 1e6])}, tmp_path / FILE)
    spec = WeightSpec("w", (2,), torch.float16, (WeightPart("w", FILE, 0, (2,)),))
    with pytest.raises(CheckpointError, match=r"tensor 'w' holds NaN or inf in 1 .* set model\.dtype"):
        load(tmp_path, spec)


def test_values_whose_sum_overflows_are_values(tmp_path):
    save_file({"w": torch.full((64,), 3e38), "s": torch.tensor(65504.0)}, tmp_path / FILE)
    weights = load(
        tmp_path,
        WeightSpec("w", (64,), torch.float32, (WeightPart("w", FILE, 0, (64,)),)),
        WeightSpec("s", (), torch.float16, (WeightPart("s", FILE, 0, ()),)),
    )
    assert weights["w"].isfinite().all()
