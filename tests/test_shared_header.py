"""C++ headers that the pieces of a compile share: compiled once, never half, and read as they are where that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mllm_compile import shared_header
from mllm_compile.piece_compiler import SYSTEM_CXX, PieceInput
from mllm_compile.piece_workers import PieceJob, PieceWorkers
from mllm_compile.runtime.pieces import load_piece

SOURCE = """
import torch

class Piece(torch.nn.Module):
    def forward(self, x):
        return (torch.relu(x) * 3,)
"""

# Three forks ask for the same header. What is compiled in place of g++ takes a while.
FORKS = """
import os, sys, time
from pathlib import Path
from mllm_compile import shared_header
folder = Path(sys.argv[1])

def compile(path, options):
    with open(folder / "compiled", "a") as file:
        file.write(f"{path} {options}\\n")
    time.sleep(0.5)
    path.with_suffix(".h.gch").touch()

shared_header._compile = compile
for _ in range(3):
    if os.fork() == 0:
        path = Path(shared_header._compiled_once(folder, "vector", "g++ -O1", level=1))
        assert path.with_suffix(".h.gch").exists()
        os._exit(0)
ended = [os.wait()[1] for _ in range(3)]
shared_header._compiled_once(folder, "vector", "g++ -O2", level=1)
sys.exit(any(ended))
"""


def test_forks_wait_for_the_one_that_compiles_it(tmp_path):
    subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], check=True)
    first, other = (tmp_path / "compiled").read_text().splitlines()
    assert first.endswith("{'level': 1}")
    assert first != other, "other options make another header"
    assert [path.read_text() for path in tmp_path.glob("*.h")] == ["#include <vector>\n"] * 2


def test_what_cannot_be_compiled_is_read_as_it_is(tmp_path):
    path = Path(shared_header._compiled_once(tmp_path, "vector", "g++", no_such_option=1))
    assert path.read_text() == "#include <vector>\n"
    assert not list(tmp_path.glob("*.gch"))


@pytest.mark.skipif(not os.path.exists(SYSTEM_CXX), reason="asks g++")
@pytest.mark.slow  # half a minute of two cores: g++ and its headers
def test_pieces_are_compiled_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_header, "pays", lambda: True)
    source = tmp_path / "piece.py"
    source.write_text(SOURCE)
    job = PieceJob("piece", source, (PieceInput.contiguous(("T",), "float32"),), tmp_path / "piece.pt2")
    (tmp_path / "scratch").mkdir()
    with PieceWorkers("cpu", {"T": 64}, tmp_path / "compilers", tmp_path / "scratch") as workers:
        workers.submit(job).result()
    headers = {path.stem: path for path in (tmp_path / "scratch").glob("*.gch")}
    assert headers and all(path.stat().st_size > 1 << 20 for path in headers.values())
    assert not list((tmp_path / "scratch").glob("*.new*"))
    x = torch.linspace(-1, 1, 7)
    assert torch.equal(load_piece("piece.pt2", job.package_path.read_bytes())([x])[0], torch.relu(x) * 3)
