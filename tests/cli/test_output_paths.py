"""Paths that cannot be written to are refused before a command's work."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mllm_compile.bench.limits import roofline_report
from mllm_compile.bench.measure import harness
from mllm_compile.cli import run
from mllm_compile.cli.output_paths import check_output_file, check_output_folder
from mllm_compile.errors import ConfigError
from tests.bench.result_cases import result, tpot
from tests.bench.result_cases import run as engine_run

WORK = {
    "run_latency": harness,
    "run_throughput": harness,
    "run_startup": harness,
    "run_roofline": roofline_report,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "model.yaml"
    path.write_text("model: {path: ./m}")
    return str(path)


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: object) -> None:
        pytest.fail("the work was begun")

    for name, module in WORK.items():
        monkeypatch.setattr(module, name, work)
    for name, function in {"compile": "load_or_compile", "inspect_model": "inspect_model"}.items():
        monkeypatch.setitem(sys.modules, f"mllm_compile.{name}", SimpleNamespace(**{function: work}))


def test_files_that_can_be_written_pass(tmp_path, monkeypatch):
    (tmp_path / "there").touch()
    monkeypatch.chdir(tmp_path)
    for path in (None, Path("new"), tmp_path / "new", tmp_path / "there", Path("/dev/null")):
        check_output_file("--json", path)
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "nothing is made"


def test_folders_that_can_be_made_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, Path("new"), Path("inspect/tiny"), tmp_path / "a" / "b" / "c"):
        check_output_folder("--out", path)
    assert not list(tmp_path.iterdir()), "nothing is made"


@pytest.mark.parametrize("command", ["latency", "throughput", "startup", "roofline"])
def test_a_benchmark_is_not_begun_when_its_result_would_be_lost(command, config, tmp_path, no_work, capsys):
    options = ["--json", "--plot"] if command == "latency" else ["--json"]
    for option in options:
        missing = tmp_path / "none" / "x"
        assert run(["bench", command, config, option, str(missing)]) == 2
        assert f"{option} {missing}: there is no folder {missing.parent}. Make it first" in capsys.readouterr().err
        assert run(["bench", command, config, option, str(tmp_path)]) == 2
        assert f"{option} {tmp_path} is a folder; expected a file" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "name"), [("--html", "none/p.html"), ("--out", "model.yaml/graphs")])
def test_nothing_is_inspected_for_a_place_that_cannot_be_written(option, name, config, tmp_path, no_work, capsys):
    assert run(["inspect", config, option, str(tmp_path / name)]) == 2
    said = {"--html": f"there is no folder {tmp_path / 'none'}", "--out": f"{config} is a file; expected a folder"}
    assert said[option] in capsys.readouterr().err


def test_what_may_not_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "there").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a mode would not stop root
    for name, place in (("there", tmp_path / "there"), ("new", tmp_path)):
        with pytest.raises(ConfigError, match=f"{place} is not writable for you"):
            check_output_file("--json", tmp_path / name)
    with pytest.raises(ConfigError, match=f"{tmp_path} is not writable for you"):
        check_output_folder("--out", tmp_path / "new" / "deep")


def test_the_table_is_printed_before_the_file_is_written(config, monkeypatch, tmp_path, capsys):
    measured = result(engine_run("mllm", tpot(1, 4.0)))
    path = tmp_path / "r.json"

    def lose_the_folder(*_: object) -> object:
        path.mkdir()
        return measured

    monkeypatch.setattr(harness, "run_latency", lose_the_folder)
    monkeypatch.setattr(harness, "serves_on_cpu", lambda source: True)
    with pytest.raises(OSError, match="directory"):
        run(["bench", "latency", config, "--json", str(path)])
    assert "tpot b=1" in capsys.readouterr().out
