"""`mllm-compile MODEL` and `inspect`: what they print. Compiling itself is shown in the tests of compile."""

from __future__ import annotations

import errno
import sys
from types import SimpleNamespace

import pytest

from mllm_compile.cli import run
from mllm_compile.config.schema import EngineConfig
from tests.cli.stand_ins import TINY, stand_in_compiler


@pytest.mark.parametrize("command", [[], ["compile"]])
def test_compiling_ends_with_a_line_and_the_place_and_a_table_where_it_is_asked_for(
    monkeypatch, config, capsys, command
):
    runtime = SimpleNamespace(
        folder="/cache/r",
        was_cached=False,
        stages=[("trace", 1.5), ("passes", 0.25)],
        num_pieces=9,
        num_distinct_pieces=3,
    )
    stand_in_compiler(monkeypatch, load_or_compile=lambda config, reporter, options: runtime)
    assert run([*command, config]) == 0
    said = ["compiled in 1.8 s: 9 pieces, 3 of them distinct", "runtime: /cache/r"]
    assert capsys.readouterr().out.splitlines() == said
    assert run([*command, config, "-v"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compiled"
    assert [line.split() for line in lines[1:5]] == [
        ["stage", "seconds"],
        ["trace", "1.50"],
        ["passes", "0.25"],
        ["total", "1.75"],
    ]
    assert lines[5:] == said


def test_a_full_disk_is_one_line(monkeypatch, config, capsys):
    def fill(config, reporter, options):
        raise OSError(errno.ENOSPC, "No space left on device", "/mnt/r.json")

    stand_in_compiler(monkeypatch, load_or_compile=fill)
    assert run([config]) == 2
    assert "/mnt/r.json: No space left on device. Make room, or write to another place." in capsys.readouterr().err


@pytest.mark.parametrize("serves_same", [True, False])
def test_a_second_call_says_that_it_found_the_runtime_and_whether_its_folder_is_the_same(
    monkeypatch, config, capsys, serves_same
):
    runtime = SimpleNamespace(folder="/cache/r", was_cached=True, serves_same=serves_same)
    stand_in_compiler(monkeypatch, load_or_compile=lambda config, reporter, options: runtime)
    assert run([config]) == 0
    first, *more = capsys.readouterr().out.splitlines()
    assert first == "already compiled: /cache/r"
    assert bool(more) != serves_same and all("another config or checkpoint: see --output" in line for line in more)


def test_a_compile_takes_the_section_of_speculation(monkeypatch, config, capsys):
    asked = []
    found = SimpleNamespace(folder="/cache/r", was_cached=True, serves_same=True)
    stand_in_compiler(monkeypatch, load_or_compile=lambda config, reporter, options: asked.append(config) or found)
    assert run([config, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}']) == 0
    assert (asked[0].speculative.method, asked[0].speculative.num_speculative_tokens) == ("ngram", 2)
    assert run([config, "--speculative-config", "ngram"]) == 2
    assert "expected a JSON object" in capsys.readouterr().err


def test_a_page_and_a_folder_of_graphs_are_not_asked_for_at_once(config, tmp_path, capsys):
    assert run(["inspect", config, "--html", str(tmp_path / "p.html"), "--out", str(tmp_path)]) == 2
    assert "--html writes one page, --out a folder of graphs; give one of them" in capsys.readouterr().err


def test_inspecting_prints_the_passes_and_why_others_were_left_out(monkeypatch, config, capsys, tmp_path):
    def inspect_model(config, out_dir, reporter):
        with reporter.stage("trace"):
            report = SimpleNamespace(name="pack_linears", matches=4, nodes_before=90, nodes_after=70, ms=1.25)
            left_out = {"fuse_linears": "its kernels run elsewhere"}
            return SimpleNamespace(reports=[report], left_out=left_out, cut=["9 weights are cut"], pieces=[])

    monkeypatch.setitem(sys.modules, "mllm_compile.report.inspect", SimpleNamespace(inspect_model=inspect_model))
    assert run(["inspect", config, "--out", str(tmp_path / "graphs")]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[2].split() == ["pack_linears", "4", "90", "70", "1.2"]
    assert lines[3:5] == ["left out: fuse_linears: its kernels run elsewhere", "9 weights are cut"]
    assert lines[-1] == f"graphs: {tmp_path / 'graphs'}"
    assert err == ""
    assert run(["inspect", config, "--out", str(tmp_path / "graphs"), "-v"]) == 0
    assert capsys.readouterr().err.startswith("trace: ")


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "gpt2", TINY])
def test_a_hub_id_or_a_folder_is_a_model_of_default_settings(monkeypatch, capsys, model):
    asked = []

    def load_or_compile(config, reporter, options):
        asked.append(config)
        return SimpleNamespace(folder="/cache/r", was_cached=True, serves_same=True)

    stand_in_compiler(monkeypatch, load_or_compile=load_or_compile)
    assert run([model]) == run(["compile", model]) == 0
    assert asked == [EngineConfig(model={"path": model})] * 2


def test_a_runtime_is_checked_and_not_compiled_again(monkeypatch, tmp_path, capsys):
    (tmp_path / "manifest.json").touch()
    runtime = SimpleNamespace(folder=tmp_path, was_cached=True, serves_same=True)
    stand_in_compiler(monkeypatch, open_runtime=lambda folder, reporter: runtime)
    assert run([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"already compiled: {tmp_path}\n"
    assert run([str(tmp_path), "--output", str(tmp_path / "other")]) == 2
    assert "take the model or config that it was compiled from" in capsys.readouterr().err
