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
                workers.submit(job).result()


def job_of(folder: Path, name: str) -> PieceJob:
    return PieceJob(name, folder / f"{name}.py", (), folder / f"{name}.pt2")


def test_leaving_ends_what_runs_and_what_waits(tmp_path):
    with PieceWorkers("cpu", SIZES, tmp_path / "compilers", count=2) as workers:
        futures = [workers.submit(job_of(tmp_path, f"piece_{number}")) for number in range(5)]
    assert all(future.done() for future in futures)
    assert [future.cancelled() for future in futures[2:]] == [True] * 3
    assert not any(worker.is_running for worker in workers._workers)


def test_a_process_that_has_ended_gets_no_more_jobs(tmp_path, monkeypatch):
    with PieceWorkers("cpu", SIZES, tmp_path / "compilers", count=2) as workers:
        ended, other = workers._workers
        monkeypatch.setattr(other, "_ask", lambda line: {})
        ended.kill()
        with pytest.raises(CompileError, match=r"piece_0 does not compile: .* ended \(exit code -9\)"):
            workers.submit(job_of(tmp_path, "piece_0")).result()
        for number in range(1, 5):
            workers.submit(job_of(tmp_path, f"piece_{number}")).result()
        other.kill()
        other._process.wait()
        monkeypatch.undo()
        with pytest.raises(CompileError, match="piece_5 does not compile"):
            workers.submit(job_of(tmp_path, "piece_5")).result()
