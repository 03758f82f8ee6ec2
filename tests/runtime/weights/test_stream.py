"""Bytes from files into tensors: whole, converted, viewed, in pieces, and files that are not as long as they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.weights import stream
from mllm_compile.runtime.weights.header import read_header
from mllm_compile.runtime.weights.stream import StraightRead, TensorRead, stream_tensors

CPU = torch.device("cpu")
CHUNK = 64  # so that every tensor takes several


def random_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(17, 5, generator=generator),
        "half": torch.randn(9, 7, generator=generator).bfloat16(),
        "vector": torch.randn(3, generator=generator),
        "scalar": torch.tensor(4.5),
        "empty": torch.zeros(0, 5),
        "flags": torch.tensor([True, False, True]),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(random_tensors(), path)
    return path


def read_of(path: Path, name: str, place: torch.Tensor, view=None) -> TensorRead:
    return TensorRead(path, read_header(path).tensors[name], place, view)


def in_order(path: Path, places: dict[str, torch.Tensor]) -> list[TensorRead]:
    """Of some of a file's tensors, as its bytes have them."""
    return sorted((read_of(path, *place) for place in places.items()), key=lambda read: read.entry.begin)


def test_every_tensor_arrives_whole(file):
    expected = random_tensors()
    places = {name: torch.empty_like(value) for name, value in expected.items()}
    advanced: list[int] = []
    stream_tensors(in_order(file, places), CPU, advanced.append, CHUNK)
    for name, value in expected.items():
        assert torch.equal(places[name], value), name
    assert sum(advanced) == sum(value.nbytes for value in expected.values())


def test_contiguous_small_tensors_are_read_at_once(tmp_path, monkeypatch):
    tensors = {f"expert{number}": torch.randn(5, 3) for number in range(10)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    left_out = "expert4"  # a hole in the file's bytes
    places = {name: torch.empty(5, 3) for name in tensors if name != left_out}
    chunks: list[int] = []
    bring = stream._bring
    monkeypatch.setattr(stream, "_bring", lambda chunk: chunks.append(len(chunk.stretches)) or bring(chunk))
    stream_tensors(in_order(path, places), CPU, chunk_bytes=2 * 60 + 30)
    for name, place in places.items():
        assert torch.equal(place, tensors[name]), name
    # Of 60 bytes each: two and a half a chunk, and none over the hole.
    assert sorted(chunks) == [2, 3, 3, 3]


def test_another_dtype_is_converted_and_a_view_is_taken(file):
    expected = random_tensors()
    as_float, turned = torch.empty(9, 7), torch.empty(5, 17)
    reads = [
        read_of(file, "half", as_float),
        read_of(file, "matrix", turned, lambda tensor: tensor.transpose(0, 1)),
    ]
    stream_tensors(sorted(reads, key=lambda read: read.entry.begin), CPU, chunk_bytes=CHUNK)
    assert torch.equal(as_float, expected["half"].float())
    assert torch.equal(turned, expected["matrix"].T)


def test_a_box_inside_a_weight_is_filled_and_the_rest_left_alone(file):
    weight = torch.full((20, 10), -1.0)
    stream_tensors([read_of(file, "matrix", weight[2:19, 3:8])], CPU, chunk_bytes=CHUNK)
    assert torch.equal(weight[2:19, 3:8], random_tensors()["matrix"])
    assert (weight[:2] == -1).all() and (weight[:, :3] == -1).all() and (weight[:, 8:] == -1).all()


def many_bytes(tmp_path: Path, count: int) -> tuple[Path, bytes]:
    path, content = tmp_path / "bytes", bytes(number * 37 % 251 for number in range(count))
    path.write_bytes(content)
    return path, content


def read_straight(path: Path, sizes: list[int], memory: torch.Tensor, chunk_bytes: int) -> None:
    """Reads stretches that follow each other in the file and are in memory the other way round."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    places = [sum(sizes[number + 1 :]) for number in range(len(sizes))]
    reads = (StraightRead(path, *one) for one in zip(starts, sizes, [memory] * len(sizes), places, strict=True))
    stream_tensors(reads, memory.device, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("chunk_bytes", [7, 64, 1 << 20])
def test_more_stretches_than_a_system_call_fills_are_all_filled(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(stream, "_MOST_VIEWS", 5)
    sizes = [1 + number % 4 for number in range(60)]
    path, content = many_bytes(tmp_path, sum(sizes))
    memory = torch.zeros(sum(sizes), dtype=torch.uint8)
    read_straight(path, sizes, memory, chunk_bytes)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    stretches = [content[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert bytes(memory) == b"".join(reversed(stretches))


def test_chunks_are_found_while_others_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "_MOST_WAITING", 0)
    sizes = [5] * 40
    path, content = many_bytes(tmp_path, sum(sizes))
    memory = torch.zeros(sum(sizes), dtype=torch.uint8)
    read_straight(path, sizes, memory, 5)
    assert bytes(memory) == b"".join(content[start : start + 5] for start in range(195, -1, -5))
    path.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match="the file ends at byte"):
        read_straight(path, sizes, memory, 5)


def test_a_call_that_reads_less_than_it_was_asked_for_is_repeated(tmp_path, monkeypatch):
    path, content = many_bytes(tmp_path, 50)
    preadv = stream.os.preadv
    monkeypatch.setattr(stream.os, "preadv", lambda file, views, offset: preadv(file, [views[0][:3]], offset))
    memory = torch.zeros(50, dtype=torch.uint8)
    read_straight(path, [20, 10, 20], memory, 64)
    assert bytes(memory) == content[30:] + content[20:30] + content[:20]


def test_stretches_that_follow_each_other_in_file_and_memory_are_one(tmp_path):
    path, _ = many_bytes(tmp_path, 40)
    memory, other = torch.zeros(40, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)
    reads = [
        StraightRead(path, 0, 8, memory, 16),
        StraightRead(path, 8, 8, memory, 24),
        StraightRead(path, 16, 8, other, 32),  # another weight
        StraightRead(path, 24, 4, other, 0),  # not behind it
        StraightRead(path, 32, 4, other, 4),  # a hole in the file
    ]
    chunks = [(begin, [place[1:] for place in places]) for _, begin, _, _, places in stream._split(reads, 64)]
    assert chunks == [(0, [(16, 16), (32, 8), (0, 4)]), (32, [(4, 4)])]
    cut = [[place[1:] for place in places] for *_, places in stream._split(reads, 12)]
    assert cut == [[(16, 12)], [(28, 4), (32, 8)], [(0, 4)], [(4, 4)]]


def test_what_fails_while_reads_are_made_ends_the_readers(file):
    def broken():
        yield read_of(file, "vector", torch.empty(3))
        raise CheckpointError("a read that cannot be made")

    with pytest.raises(CheckpointError, match="a read that cannot be made"):
        stream_tensors(broken(), CPU)


def test_nothing_to_read_is_no_error():
    stream_tensors([], CPU)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_that_names_it(file):
    reads = [read_of(file, "matrix", torch.empty(17, 5))]
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: the file ends at byte"):
        stream_tensors(reads, CPU, chunk_bytes=CHUNK)


def test_a_file_that_is_gone_is_an_error_that_names_it(file):
    reads = [read_of(file, "vector", torch.empty(3))]
    file.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: No such file"):
        stream_tensors(reads, CPU)
