"""A header says where each tensor is; a file that is not what its header says is truncated or corrupt, by name."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.weights.header import read_header

TENSORS = {"a.weight": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.tensor(1)}


def with_header(header: object, data: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes


def test_names_types_shapes_and_places(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    header = read_header(path)
    assert set(header.tensors) == set(TENSORS)
    data = path.read_bytes()
    for name, value in TENSORS.items():
        found = header.tensors[name]
        assert (found.dtype, found.shape) == (value.dtype, tuple(value.shape))
        assert data[found.begin : found.end] == value.view(-1).view(torch.uint8).numpy().tobytes()
    assert header.raw in data


BROKEN = {
    "empty": (b"", "its header would be 0 bytes of a file of 0"),
    "shorter than its header": (with_header({"w": entry()})[:20], "its header would be .* of a file of 20"),
    "no JSON": (with_header(b"{not json"), "its header is not JSON"),
    "no text": (with_header(b"\xff\xfe{}"), "its header is not JSON"),
    "nested without end": (with_header(b"[" * 100_000), "its header is not JSON"),
    "a list": (with_header([1, 2]), "its header is not an object of objects"),
    "data cut off": (with_header({"w": entry()}, bytes(15)), "tensor 'w' ends at byte .* of a file of"),
    "bytes that do not fit the shape": (with_header({"w": entry(data_offsets=[0, 12])}), "takes 12 bytes"),
    "negative size": (with_header({"w": entry(shape=[-2, -2])}), r"tensor 'w' has shape \[-2, -2\]"),
    "one offset": (with_header({"w": entry(data_offsets=[16])}), r"at \[16\]"),
    "a truth for a size": (with_header({"w": entry(shape=[True, 4])}), "tensor 'w' has shape"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong(damage, tmp_path):
    content, message = BROKEN[damage]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path} is truncated or corrupt: .*{message}.*Download it again"):
        read_header(path)


def test_a_pointer_of_git_lfs_is_told_from_weights(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CheckpointError, match=f"{path} is a Git LFS pointer and not the weights. Run `git lfs pull`"):
        read_header(path)


def test_a_type_that_is_not_known_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(with_header({"w": entry(dtype="F4_X")}))
    with pytest.raises(CheckpointError, match="tensor 'w' has dtype 'F4_X'; known: F64, F32"):
        read_header(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*gone\.safetensors"):
        read_header(tmp_path / "gone.safetensors")


@settings(max_examples=200)
@given(st.integers(0, 400), st.integers(0, 255), st.integers(0, 400))
def test_no_damage_raises_anything_but_a_checkpoint_error(tmp_path_factory, position, byte, length):
    data = bytearray(save(TENSORS))
    data[position % len(data)] = byte
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    path.write_bytes(bytes(data[: length or None]))
    try:
        header = read_header(path)
    except CheckpointError:
        return
    assert all(found.end <= path.stat().st_size for found in header.tensors.values())
