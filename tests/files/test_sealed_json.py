"""A JSON file with its own hash: every changed byte is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mllm_compile.errors import ArtifactError
from mllm_compile.files.sealed_json import seal, unseal, write_sealed

BODY = {"format": 2, "seconds": 0.1, "names": ["a", "ü"], "nested": {"none": None, "yes": True}}


def test_what_was_sealed_comes_back(tmp_path):
    write_sealed(tmp_path / "file.json", BODY)
    data = (tmp_path / "file.json").read_bytes()
    assert unseal(data, Path("file.json")) == BODY
    assert json.loads(data)["format"] == 2, "people and other tools read it"
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]


def test_every_flipped_byte_is_seen():
    data = seal(BODY)
    for place in range(len(data)):
        for bit in (1, 32, 128):
            damaged = bytearray(data)
            damaged[place] ^= bit
            with pytest.raises(ArtifactError):
                unseal(bytes(damaged), Path("file.json"))


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"null", b"[" * 100_000, b"\xff", seal(BODY)[:-1], seal(BODY) + b" "]
)
def test_what_was_never_sealed_is_refused(data):
    with pytest.raises(ArtifactError):
        unseal(data, Path("file.json"))
