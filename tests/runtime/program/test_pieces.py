"""Loading pieces: from the bytes that were checked, and from no package that holds anything unexpected."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile

import pytest
import torch

from mllm_compile.runtime.errors import ArtifactError
from mllm_compile.runtime.program import pieces
from mllm_compile.runtime.program.pieces import check_members, load_piece

SOURCE = """
import torch
class Piece(torch.nn.Module):
    def forward(self, x):
        return (x * 2, x.sum())
"""
OURS = (
    "piece/data/aotinductor/model/c.wrapper.so",
    "piece/data/aotinductor/model/c.kernel.cpp",
    "piece/data/aotinductor/model/c.wrapper_metadata.json",
    "piece/data/aotinductor/model/k.cubin",
    "piece/archive_format",
    "piece/archive_version",
    "piece/byteorder",
    "piece/.data/version",
    "piece/.data/serialization_id",
)


def package(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return buffer.getvalue()


def test_a_source_runs_as_written():
    double, total = load_piece("piece.py", SOURCE.encode())([torch.ones(3)])
    assert double.tolist() == [2, 2, 2]
    assert total.item() == 3


def test_a_package_has_the_ops_defined_that_it_calls_by_name_and_no_others():
    calls = {"nodes": [{"name": "buf1", "node": {"target": "mllm::expert_linear", "inputs": []}}]}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("piece/data/aotinductor/model/c.wrapper.json", json.dumps(calls))
    code = (
        "import contextlib, sys, torch; from mllm_compile.runtime.errors import ArtifactError\n"
        "from mllm_compile.runtime.program.pieces import load_piece\n"
        "with contextlib.suppress(ArtifactError): load_piece('piece.pt2', sys.stdin.buffer.read())  # it has no code\n"
        "print(hasattr(torch.ops.mllm, 'expert_linear'), hasattr(torch.ops.mllm, 'gated_linear'))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=buffer.getvalue(), capture_output=True, check=True)
    assert done.stdout.split() == [b"True", b"False"]


def test_what_inductor_packs_is_accepted():
    check_members("piece", package(*OURS))


@pytest.mark.parametrize(
    "name",
    [
        "piece/data/constants/weights.pkl",
        "piece/data.pkl",
        "piece/data/weights/w.pt",
        "piece/model.pth",
        "piece/run.py",
        "piece/../../evil.so",
        "/etc/evil.so",
        "..\\evil.so",
        "piece/noname",
    ],
)
def test_any_other_member_is_refused_by_name(name):
    with pytest.raises(ArtifactError, match=r"holds '.*', which no package of ours does: not loaded"):
        load_piece("piece.pt2", package(*OURS, name))


@pytest.mark.parametrize("data", [b"", b"PK\x05\x06", b"no zip at all", package(*OURS)[:-30]])
def test_another_file_than_a_package_is_refused(data):
    with pytest.raises(ArtifactError, match=r"is no package|cannot be loaded"):
        load_piece("piece.pt2", data)


def test_a_package_that_torch_cannot_load_is_an_error_of_ours():
    with pytest.raises(ArtifactError, match=r"piece piece\.pt2 cannot be loaded"):
        load_piece("piece.pt2", package(*OURS))


def test_a_package_that_would_fill_the_disk_is_refused(monkeypatch):
    monkeypatch.setattr(pieces, "_MAX_UNPACKED_BYTES", 16 << 20)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("piece/a.so", "w") as member:
        for _ in range(17):
            member.write(bytes(1 << 20))
    assert len(buffer.getvalue()) < 1 << 20
    with pytest.raises(ArtifactError, match="unpacks to more than 16 MiB"):
        check_members("piece", buffer.getvalue())
