"""Compiles that are killed at any moment, and several at once: a runtime is whole or absent, and never in the way.

The full counts (30 kills, 4 processes) are slow; a sample always runs (two at once: test_artifact.py). Pieces are
eager: what is tested is how files get to their place.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.store.artifact import open_artifact
from mllm_compile.store.publish import runtimes_folder
from tests.process.test_group import is_alive, wait_for_end
from tests.tiny_model import tiny_config


def compile_process(config_path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mllm_compile", str(config_path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "model.yaml"
    config = tiny_config(tmp_path / "cache", compile={"backend": "eager"})
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def visible_runtimes(cache: Path) -> list[Path]:
    runtimes = runtimes_folder(cache)
    return [path for path in runtimes.iterdir() if path.name[0] != "."] if runtimes.is_dir() else []


def kill_compiles(config_path: Path, count: int, whole_s: float) -> None:
    """Kills `count` compiles, each at a random moment of the `whole_s` seconds that one takes."""
    cache = config_path.parent / "cache"
    chance = random.Random(count)
    for _ in range(count):
        for folder in visible_runtimes(cache):
            folder.rename(folder.with_name(f".{folder.name}.old.part"))
        process = compile_process(config_path)
        try:
            process.wait(chance.uniform(0.3, 1.1) * whole_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.communicate()
        for folder in visible_runtimes(cache):
            open_artifact(folder)
    load_or_compile(tiny_config(cache, compile={"backend": "eager"}))
    left = sorted(path.name for path in runtimes_folder(cache).iterdir())
    assert [name for name in left if name.endswith(".part")] == [], "a later compile removes what was left"
    assert load_or_compile(tiny_config(cache, compile={"backend": "eager"})).was_cached


def race(config_path: Path, count: int) -> None:
    processes = [compile_process(config_path) for _ in range(count)]
    said = []
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        said.append(out)
    assert sum("already compiled" not in out for out in said) == 1, "one compiles, the others wait for it"
    (folder,) = visible_runtimes(config_path.parent / "cache")
    open_artifact(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no lock and no scratch folder is left"


def test_a_killed_compile_leaves_no_half_runtime(config_path):
    kill_compiles(config_path, 1, whole_s=6.0)


@pytest.mark.slow
def test_thirty_killed_compiles_leave_no_half_runtime(config_path):
    begin = time.monotonic()
    assert compile_process(config_path).wait() == 0
    kill_compiles(config_path, 30, whole_s=time.monotonic() - begin)


@pytest.mark.slow
def test_four_processes_compile_the_same_at_once(config_path):
    race(config_path, 4)


HOLDS_WORKERS = """
import sys
from pathlib import Path
from mllm_compile.inductor.workers import PieceWorkers
workers = PieceWorkers("cpu", {}, Path(sys.argv[1]) / "cache", Path(sys.argv[1]), 1)
print(workers._compiler._process.pid, flush=True)
sys.stdin.read()
"""


def test_the_compiler_process_ends_with_a_killed_compile_also_while_it_imports(tmp_path):
    """Before it takes requests it does not look at its input: imports take seconds, or a minute on a busy machine."""
    compiling = subprocess.Popen(
        [sys.executable, "-c", HOLDS_WORKERS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert compiling.stdout is not None
    pid = int(compiling.stdout.readline())
    assert is_alive(pid)
    compiling.send_signal(signal.SIGKILL)
    compiling.communicate()
    wait_for_end(pid)
