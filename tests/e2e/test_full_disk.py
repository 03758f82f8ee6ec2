"""A full disk is reported with its place and its room, for any writer; a compile leaves nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import yaml

from mllm_compile.inductor.job import PieceJob
from mllm_compile.inductor.workers import PieceWorkers
from mllm_compile.model.refusals import refusing
from mllm_compile.runtime.files.disk_space import full_disk_said
from tests.fresh_process import FreshProcess, fresh_process
from tests.tiny_model import shallow_tiny, tiny_config

EAGER = {"backend": "eager"}
FULL = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG]


@pytest.mark.parametrize("number", FULL)
def test_it_is_not_told_as_the_models_fault(number):
    with pytest.raises(OSError) as raised, refusing("'llama' models cannot be rewritten"):
        try:
            raise OSError(number, os.strerror(number), "/cache/graphs/01.txt")
        except OSError as error:
            raise RuntimeError("a pass failed") from error
    assert (raised.value.errno, raised.value.filename) == (number, "/cache/graphs/01.txt")


# Modules that a compile of the embedded model imports.
IMPORTS = """
import torch._dynamo, transformers.models.qwen3.modeling_qwen3
import mllm_compile.cli.compile, mllm_compile.compiler.build, mllm_compile.compiler.load_or_compile
"""
IN_A_FOLDER = """
import os, sys, tempfile
sys.dont_write_bytecode = True
os.environ["TMPDIR"], tempfile.tempdir = FOLDER, None
os.chdir(FOLDER + "/..")
from mllm_compile.cli import run
"""
WITH_SMALL_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
"""


@pytest.fixture(scope="module")
def compilers() -> Iterator[FreshProcess]:
    with fresh_process(IMPORTS) as process:
        yield process


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """The folder for temporary files of what `compilers` runs."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


def test_a_compile_without_room_is_one_line_and_leaves_nothing(compilers, temporary, tmp_path):
    """The kernel refuses the writes, as a full disk does."""
    config, cache = tmp_path / "config.yaml", tmp_path / "cache"
    model = {"path": str(shallow_tiny(tmp_path / "tiny"))}
    config.write_text(yaml.safe_dump(tiny_config(cache, compile=EAGER, model=model).model_dump(mode="json")))
    code = WITH_SMALL_FILES + IN_A_FOLDER + "print(run([CONFIG]))"
    said = compilers.run(code.replace("FOLDER", repr(str(temporary))).replace("CONFIG", repr(str(config))))
    *_, line, exit_code = said.strip().splitlines()
    assert exit_code == "2", said
    assert f"cache.dir {cache} cannot be written: a file in {cache} would be larger" in line
    assert "MiB free" in line
    assert "make room" in line
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    assert list(temporary.iterdir()) == []


def test_a_trace_leaves_nothing_in_the_folder_for_temporary_files(compilers, temporary, tmp_path):
    """Neither a compile's, nor one that is looked at: both by one process."""
    model = {"path": str(shallow_tiny(tmp_path / "tiny"))}
    config = tmp_path / "model.yaml"
    config.write_text(
        yaml.safe_dump(tiny_config(tmp_path / "cache", compile=EAGER, model=model).model_dump(mode="json"))
    )
    code = IN_A_FOLDER + "print(run([CONFIG]), run(['inspect', '--out', 'graphs', CONFIG]))"
    said = compilers.run(code.replace("FOLDER", repr(str(temporary))).replace("CONFIG", repr(str(config))))
    assert said.splitlines()[-1] == "0 0", said
    assert list((tmp_path / "graphs").iterdir())
    assert list(temporary.iterdir()) == []


def test_what_a_compiler_says_of_a_full_disk_is_told_with_the_disk(tmp_path, monkeypatch):
    said = "C++ compile error: fatal error: error writing to /elsewhere/cc1.s: No space left on device"
    error = full_disk_said(said, [tmp_path, Path("/elsewhere")])
    assert error is not None
    assert (error.errno, error.filename) == (errno.ENOSPC, "/elsewhere")
    roomless = full_disk_said("ld: final link failed: No space left on device", [tmp_path, Path("/proc")])
    assert roomless is not None
    assert roomless.filename == "/proc", "the one with the least room"
    assert full_disk_said("error: expected ';'", [tmp_path]) is None


class _Answers:
    """In place of the compiler process."""

    def __init__(self, *_: object) -> None:
        pass

    def ask(self, request: dict[str, Any]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        future.set_result({"job": 0, "error": "[Errno 28] No space left on device"})
        return future

    def kill(self) -> None:
        pass

    close = kill


def test_a_piece_without_room_ends_in_an_error_of_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("mllm_compile.inductor.workers._CompilerProcess", _Answers)
    job = PieceJob("piece_1", tmp_path / "piece_1.py", (), tmp_path / "piece_1.pt2")
    with PieceWorkers("cpu", {}, tmp_path / "cache", tmp_path, 1) as workers, pytest.raises(OSError) as raised:
        workers.submit(job).result()
    assert raised.value.errno == errno.ENOSPC
