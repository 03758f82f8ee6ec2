"""A file read in blocks by several threads: its bytes, its digest, and the largest of its numbers."""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mllm_compile.adapters import whole_file as module
from mllm_compile.adapters.base_model import pageable_bytes
from mllm_compile.adapters.whole_file import WholeFile, whole_file
from mllm_compile.errors import CheckpointError
from mllm_compile.runtime.cuda import host_pages
from mllm_compile.runtime.weights.safetensors_header import read_safetensors

BLOCK = 64


def read(folder: Path, tensors: dict[str, torch.Tensor], padding: int = 0) -> WholeFile:
    """The file of these tensors, whose header has some spaces more."""
    path = folder / "file.safetensors"
    save_file(tensors, path)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    path.write_bytes((size + padding).to_bytes(8, "little") + data[8 : 8 + size] + b" " * padding + data[8 + size :])
    return whole_file(path, read_safetensors(path, is_kept=False), pageable_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [0, 17, 99])
def test_the_largest_number_of_any_block_is_found_and_what_is_no_number(tmp_path, monkeypatch, dtype, place):
    monkeypatch.setattr(module, "_BLOCK", BLOCK)
    values = torch.linspace(-0.5, 0.25, 100).to(dtype)
    for largest in (-3.0, 2.5):
        values[place] = largest
        whole = read(tmp_path, {"a": values[:60].clone(), "b": values[60:].clone()})
        assert whole.largest == abs(largest)
    data = (tmp_path / "file.safetensors").read_bytes()
    assert bytes(whole.data.tolist()) == data
    blocks = (hashlib.sha256(data[at : at + BLOCK]).digest() for at in range(0, len(data), BLOCK))
    assert whole.digest == hashlib.sha256(b"".join(blocks)).digest()
    for none in (torch.nan, torch.inf, -torch.inf):
        values[place] = none
        assert read(tmp_path, {"a": values}).largest is None


def test_numbers_of_several_types_or_at_odd_places_are_not_looked_at(tmp_path):
    numbers = torch.ones(8)
    assert read(tmp_path, {"a": numbers}).largest == 1
    assert read(tmp_path, {"a": numbers, "b": numbers.half()}).largest is None
    assert read(tmp_path, {"a": numbers.half()}, padding=1).largest is None


def test_a_file_that_is_shorter_than_its_header_said_is_refused(tmp_path):
    read(tmp_path, {"a": torch.ones(8)})
    path = tmp_path / "file.safetensors"
    header = read_safetensors(path, is_kept=False)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="has changed while it was read"):
        whole_file(path, header, pageable_bytes)


def test_large_pages_are_asked_for_within_the_memory_of_a_large_file(monkeypatch):
    asked = []
    monkeypatch.setattr(host_pages, "_advise", lambda advice, *place: asked.append((advice, *place)))
    pageable_bytes(1000)
    assert not asked
    memory = pageable_bytes(5 << 20)
    ((advice, start, size),) = asked
    assert advice == mmap.MADV_HUGEPAGE
    assert start % mmap.PAGESIZE == 0
    assert memory.data_ptr() <= start < memory.data_ptr() + mmap.PAGESIZE
    assert start + size == memory.data_ptr() + len(memory)
