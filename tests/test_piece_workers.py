"""Compiler processes: what they keep is private, and what goes wrong in them is told with the piece's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mllm_compile.errors import CompileError, ConfigError
from mllm_compile.piece_compiler import PieceInput
from mllm_compile.piece_workers import PieceJob, PieceWorkers

SIZES = {"T": 8192, "S": 8192}


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "compilers").mkdir()
    (tmp_path / "compilers").chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others; what compilers keep there is executed"):
        PieceWorkers("cpu", SIZES, tmp_path / "compilers", count=1)


def test_a_link_to_a_folder_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "compilers").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"Remove it, or set cache\.dir to a folder of your own"):
        PieceWorkers("cpu", SIZES, tmp_path / "compilers", count=1)


@pytest.mark.slow  # what every first compile on a machine needs: ten seconds of test programs
def test_an_error_in_a_piece_names_it_and_the_next_one_is_compiled_on(tmp_path):
    source = tmp_path / "piece_x.py"
    source.write_text(
        "import torch\nclass Piece(torch.nn.Module):\n    def forward(self, x):\n        return x.no_such()\n"
    )
    job = PieceJob("piece_x", source, (PieceInput(("T",), (1,), "float32"),), Path(tmp_path / "x.pt2"))
    with PieceWorkers("cpu", SIZES, tmp_path / "compilers", count=1) as workers:
        assert (tmp_path / "compilers").stat().st_mode & 0o777 == 0o700
        for _ in range(2):
            with pytest.raises(CompileError, match=r"piece piece_x does not compile: .*no_such"):
                workers.compile([job], lambda job: None)
