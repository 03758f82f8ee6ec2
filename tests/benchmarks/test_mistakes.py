"""A config or a number that is wrong ends a script with one line."""

from __future__ import annotations

import json
import re
import runpy
import sys

import pytest
import torch

from benchmarks.server.agent_trace import PRESETS, Generator

ENDED_BY_A_WRONG_KEY = (
    "steps.deterministic_cost",
    "steps.fp8_kv_error",
    "steps.switch_error",
    "steps.quantised_tpot",
    "server.image_start",
)


def told(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a script ends, as the command line does for a user's mistake: with code 2."""
    with pytest.raises(SystemExit) as ended:
        run(name, monkeypatch, *arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Runs a script as `python -m benchmarks.NAME` does."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)  # processes find its functions


@pytest.mark.parametrize("name", ENDED_BY_A_WRONG_KEY)
def test_a_misspelled_key_is_told_in_one_line(name, tmp_path, monkeypatch, capsys):
    config = tmp_path / "model.yaml"
    config.write_text("model: {pathh: ./tiny}")
    assert re.match(r"error: .*model\.pathh", told(name, monkeypatch, capsys, str(config)))


def test_a_config_that_is_missing_is_told_in_one_line(monkeypatch, capsys):
    assert told("steps.update_speed", monkeypatch, capsys, "/nowhere.yaml").startswith("error: /nowhere.yaml")


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_a_malformed_number_is_told_with_its_option(value, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("steps.fp8_kv_error", monkeypatch, "configs/tiny.yaml", "--tokens", value)
    assert f"argument --tokens: '{value}'; expected a number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["steps.recited_drafts", "steps.agents_speed", "server.session_eviction"])
def test_a_file_that_is_missing_is_told_with_its_argument(name, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(name, monkeypatch, *["configs/tiny.yaml"] * name.startswith("steps"), "/nowhere")
    assert ": '/nowhere'; expected a file" in capsys.readouterr().err


def test_a_file_without_replies_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    other = tmp_path / "replies.json.xz"
    other.write_text("[]")
    line = told("steps.recited_drafts", monkeypatch, capsys, "configs/tiny.yaml", str(other))
    assert re.match(r"error: .*replies\.json\.xz has no replies", line)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "1,0"], "argument --batch: '0'; expected a number of at least 1"),
        (
            ["--variants", "fp8,fp9"],
            "argument --variants: 'fp9'; expected some of bf16, fp8, fp8-head, fp8-kv, int4, int4-head, int4-head-fp8",
        ),
    ],
)
def test_a_list_with_something_else_in_it_is_told_with_its_option(options, said, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("steps.quantised_tpot", monkeypatch, *options)
    assert said in capsys.readouterr().err


def test_weights_of_a_second_gpu_need_two(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="needs 2 NVIDIA GPUs"):
        run("steps.update_speed", monkeypatch, "configs/tiny.yaml", "--ways", "staged,nccl direct")


@pytest.mark.parametrize(
    ("more", "said"), [("", "at most 31 together"), ("--stepped", "KV pages of 1 tokens, but only 31 exist")]
)
def test_an_engine_too_small_for_a_call_is_told_in_one_line(more, said, monkeypatch, capsys):
    work = f"--engines 1 --sessions 1 --at-once 1 --fold 64 --rules served --kv-tokens 2000 {more}"
    assert re.match(f"error: a prompt of .* {said}", told("fleet.__main__", monkeypatch, capsys, *work.split()))


def test_a_simulated_cache_too_small_for_a_call_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    trace = tmp_path / "calls.jsonl"
    calls = Generator(PRESETS["agentx"], 1, 0.05, 0.05, 3.0).sessions(1)
    trace.write_text("\n".join(map(json.dumps, calls)))
    line = told("steps.agents_simulation", monkeypatch, capsys, str(trace), "--total-tokens", "1000")
    assert re.match(r"error: the prompt has \d+ tokens, but max_model_len is 1000 ", line)
