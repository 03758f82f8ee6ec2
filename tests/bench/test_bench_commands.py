"""`mllm-compile bench …`: what is asked of the harness, what is printed; whole runs on the embedded model are slow."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mllm_compile.bench.measure import harness
from mllm_compile.bench.measure.results import BenchResult, EngineRun
from mllm_compile.bench.measure.workloads import LatencyWork, ThroughputWork
from mllm_compile.bench.show.plot import INSTALL
from mllm_compile.cli import run as command_line
from mllm_compile.cli.bench import _COMMANDS, _Outputs
from mllm_compile.compiler.target import find_target
from mllm_compile.config.schema import EngineConfig
from mllm_compile.store.artifact import open_artifact
from mllm_compile.store.measurements import MEASURED, device_key, read_measured
from tests.bench.result_cases import result, run, tpot
from tests.tiny_model import TINY

REPOSITORY = Path(__file__).parents[2]
RESULT = result(run("mllm", tpot(1, 4.0, limit=3.0)))


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_has_help(command, capsys):
    assert command_line(["bench", command, "--help"]) == 0
    assert f"mllm-compile bench {command}" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["file", "table"])
def test_a_table_is_shown_and_a_file_written_whichever_of_them_fails(tmp_path, fault):
    done = []

    def do(what: str) -> None:
        done.append(what)
        if what == fault:
            raise OSError(what)

    result = SimpleNamespace(write=lambda path: do("file"))
    with pytest.raises(OSError, match=fault):
        _Outputs(tmp_path / "r.json", None).take(result, lambda *_: do("table"))
    assert done == ["file", "table"]


def test_sizes_and_engines_are_handed_on(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(harness, "run_latency", lambda *args: asked.append(args) or RESULT)
    monkeypatch.setattr(harness, "serves_on_cpu", lambda source: False)
    assert command_line(["bench", "latency", "c.yaml", "--batch", "1,4", "--engine", "mllm,vllm,mllm"]) == 0
    assert command_line(["bench", "latency", "c.yaml", "--tensor-parallel-size", "2", "--processes", "3"]) == 0
    (config, engines, work, num_ranks, processes), (*_, asked_ranks, asked_processes) = asked
    assert (config, engines, work.batches, work.input_len) == ("c.yaml", ["mllm", "vllm"], (1, 4), 512)
    assert (num_ranks, asked_ranks, processes, asked_processes) == (None, 2, 1, 3)
    assert "tpot b=1" in capsys.readouterr().out


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(harness, "run_latency", lambda *args: pytest.fail("it was measured"))
    assert command_line(["bench", "latency", "c.yaml", "--plot", "p.png"]) == 2
    assert f"--plot needs matplotlib: {INSTALL} in the repository\n" in capsys.readouterr().err
    assert f"needs matplotlib: `{INSTALL}` in the repository" in (REPOSITORY / "docs" / "benchmarks.md").read_text(
        encoding="utf-8"
    )


@pytest.fixture
def kind(monkeypatch):
    """True if models would be served on a CPU, by the caller; returns the measured ones."""
    asked = []
    monkeypatch.setattr(harness, "run_latency", lambda source, engines, work, *ranks: asked.append(work) or RESULT)

    def measure(is_cpu: bool, *options: str) -> LatencyWork:
        monkeypatch.setattr(harness, "serves_on_cpu", lambda source: is_cpu)
        assert command_line(["bench", "latency", "c.yaml", *options]) == 0
        return asked.pop()

    return measure


def test_on_a_cpu_sizes_that_nobody_gave_are_small_and_said(kind, capsys):
    assert kind(False) == LatencyWork()
    assert "on a CPU" not in capsys.readouterr().err
    work = kind(True)
    assert (work.batches, work.input_len, work.output_len, work.repeats) == ((1, 8), 64, 33, 3)
    said = "on a CPU: batches of 1 and 8, prompts of 64 tokens, 33 new ones; --batch, --input-len and --output-len set"
    assert said in capsys.readouterr().err
    work = kind(True, "--input-len", "512", "--batch", "4")
    assert (work.batches, work.input_len, work.output_len) == ((4,), 512, 33)
    capsys.readouterr()
    sizes = ("--batch", "1,8,64,256", "--input-len", "512", "--output-len", "129")
    assert kind(True, *sizes) == LatencyWork()
    assert "on a CPU" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["p.xyz", "p"])
def test_a_picture_of_no_known_kind_is_refused_before_anything_is_measured(monkeypatch, capsys, tmp_path, name):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(harness, "run_latency", lambda *args: pytest.fail("it was measured"))
    assert command_line(["bench", "latency", "c.yaml", "--plot", str(tmp_path / name)]) == 2
    assert re.search(r"--plot .*: expected a file that ends in one of .*png", capsys.readouterr().err)


def test_throughput_takes_small_sizes_on_a_cpu_unless_told_otherwise(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(harness, "run_throughput", lambda source, engines, work, *_: asked.append(work) or RESULT)
    monkeypatch.setattr(harness, "serves_on_cpu", lambda source: True)
    assert command_line(["bench", "throughput", "c.yaml"]) == 0
    assert command_line(["bench", "throughput", "c.yaml", "--requests", "3", "--min-len", "5"]) == 0
    assert command_line(["bench", "throughput", "c.yaml", "--max-len", "32"]) == 0
    assert [work.mixed_requests for work in asked] == [16, 3, 16]
    assert [work.mixed_range for work in asked] == [(16, 128), (5, 128), (16, 32)]
    assert [(work.prefill_prompts, work.prefill_len) for work in asked] == [(4, 512)] * 3
    said = "on a CPU: 16 requests of 16 to 128 tokens, 4 prompts of 512; --requests, --max-len, --prefill-prompts and "
    assert said + "--prefill-len set others" in capsys.readouterr().err
    monkeypatch.setattr(harness, "serves_on_cpu", lambda source: False)
    assert command_line(["bench", "throughput", "c.yaml"]) == 0
    assert asked[3] == ThroughputWork()
    assert command_line(["bench", "throughput", "c.yaml", "--max-len", "200"]) == 0
    assert asked[4] == ThroughputWork(mixed_range=(100, 200))


def test_long_and_gaps_take_small_sizes_on_a_cpu_unless_told_otherwise(monkeypatch, capsys):
    asked = []
    for name in ("run_long", "run_gaps"):
        monkeypatch.setattr(harness, name, lambda source, engines, work, *ranks: asked.append(work) or RESULT)
    monkeypatch.setattr(harness, "serves_on_cpu", lambda source: True)
    assert command_line(["bench", "long", "c.yaml"]) == 0
    assert command_line(["bench", "long", "c.yaml", "--points", "1x20,4x10", "--output-len", "5"]) == 0
    assert command_line(["bench", "gaps", "c.yaml", "--prompt-len", "100"]) == 0
    assert [work.points for work in asked[:2]] == [((1, 256), (1, 1024), (4, 512)), ((1, 20), (4, 10))]
    assert (asked[2].decodes, asked[2].prompt_len) == (4, 100)
    told = capsys.readouterr().err
    assert "on a CPU: points 1x256,1x1024,4x512, 33 new tokens; --points and --output-len set others" in told
    assert "on a CPU: 4 answers, a prompt of 100 tokens; --decodes and --prompt-len set others" in told


@pytest.mark.parametrize("points", ["", "8", "1x2x3", "1xtwo"])
def test_malformed_points_are_refused(points, capsys):
    assert command_line(["bench", "long", "c.yaml", "--points", points]) == 2
    assert f"--points is {points!r}; expected requests x tokens" in capsys.readouterr().err


@pytest.mark.parametrize("batch", ["", "one", "1;2", "1,"])
def test_batches_that_are_no_numbers_are_refused(batch, capsys):
    assert command_line(["bench", "latency", "c.yaml", "--batch", batch]) == 2
    assert f"--batch is {batch!r}; expected whole numbers" in capsys.readouterr().err


def test_a_config_that_is_not_there_is_one_line(tmp_path, capfd):
    assert command_line(["bench", "throughput", str(tmp_path / "no.yaml")]) == 2
    assert "no such file" in capfd.readouterr().err


def test_results_become_markdown(tmp_path, capsys):
    RESULT.write(tmp_path / "r.json")
    assert command_line(["bench", "table", str(tmp_path / "r.json")]) == 0
    assert "| tpot b=1 | ms | 3.00 | 4.00 | 75% |" in capsys.readouterr().out


def test_an_ablation_becomes_a_table_of_its_own(tmp_path, capsys):
    result(run("all", tpot(1, 4.0)), run("without a", tpot(1, 5.0)), command="ablation").write(tmp_path / "a.json")
    RESULT.write(tmp_path / "r.json")
    assert command_line(["bench", "table", str(tmp_path / "a.json"), str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    assert "| without a | 5.00 (+25.0%) |" in out
    assert "| tpot b=1 | ms | 3.00 | 4.00 | 75% |" in out


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, compiled by the first test."""
    folder = tmp_path_factory.mktemp("embedded")
    path = folder / "tiny.yaml"
    path.write_text(
        f"model: {{path: {TINY}, dtype: float32}}\ncompile: {{backend: eager}}\nruntime: {{device: cpu}}\n"
        f"cache: {{dir: {folder}}}\n"
    )
    return path


BOTH = ["--engine", "mllm,transformers"]


def measured(command: str, config: Path, file: Path, *sizes: str) -> tuple[EngineRun, ...]:
    """The runs of a whole command."""
    assert command_line(["bench", command, str(config), *sizes, "--json", str(file)]) == 0
    return BenchResult.read(file).runs


@pytest.mark.slow
def test_latencies_have_a_limit_and_are_kept_beside_the_runtime(config, tmp_path):
    sizes = ["--batch", "1,2", "--input-len", "8", "--output-len", "3", "--repeats", "2"]
    runs = measured("latency", config, tmp_path / "r.json", *sizes, *BOTH)
    assert [run.engine for run in runs] == ["mllm", "transformers"]
    assert all(line.limit is not None and line.median > 0 for run in runs for line in run.measurements)
    kept = read_measured(find_target(EngineConfig.from_yaml(config)).folder / MEASURED, device_key("cpu"))
    assert [batch for batch, _ in kept["latency"]["tpot_ms"]] == [1, 2] and kept["ceilings"]["read_bytes_s"] > 0


@pytest.mark.slow
def test_an_ablation_leaves_out_what_the_device_has_no_use_for(config, tmp_path):
    switches = ["--switch", "stream_linears,pack_projections"]
    sizes = ["--batch", "1", "--input-len", "8", "--output-len", "3", "--repeats", "2"]
    variants = [run.engine for run in measured("ablation", config, tmp_path / "r.json", *switches, *sizes)]
    assert variants == ["all", "without pack_projections", "all, again"], "a CPU has no use for the other"


@pytest.mark.slow
def test_throughput_is_of_prompts_and_of_requests_of_many_lengths(config, tmp_path):
    lengths = ["--requests", "3", "--min-len", "4", "--max-len", "9", "--repeats", "2"]
    sizes = [*lengths, "--prefill-prompts", "2", "--prefill-len", "16"]
    runs = measured("throughput", config, tmp_path / "r.json", *sizes, *BOTH)
    assert [line.name for line in runs[0].measurements] == ["prefill2x16", "mixed3"]


@pytest.mark.slow
def test_long_contexts_have_a_limit(config, tmp_path):
    sizes = ["--points", "1x40,2x20", "--output-len", "3", "--repeats", "2"]
    lines = measured("long", config, tmp_path / "r.json", *sizes, *BOTH)[0].measurements
    assert [line.key for line in lines][1::2] == [("prefill of 40", 1), ("prefill of 20", 2)]
    assert all(line.limit is not None for line in lines)


@pytest.mark.slow
def test_gaps_beside_a_prompt_are_measured(config, tmp_path):
    sizes = ["--decodes", "2", "--decode-len", "8", "--tokens", "6", "--prompt-len", "200", "--repeats", "2"]
    lines = measured("gaps", config, tmp_path / "r.json", *sizes)[0].measurements
    assert len(lines) == 8 and all(line.median > 0 and len(line.samples) == 2 for line in lines)


@pytest.mark.slow
def test_a_start_is_measured_by_its_parts(config, tmp_path):
    runs = measured("startup", config, tmp_path / "r.json", "--repeats", "1")
    cold, _, warm, _, *parts = runs[0].measurements
    assert cold.median > warm.median
    assert {"cold: trace", "warm: import torch", "warm: load model"} <= {part.name for part in parts}


@pytest.mark.slow
def test_a_roofline_has_a_time_for_each_step_of_the_program(config, tmp_path, capfd):
    sizes = ["--batch", "2,1", "--context", "40", "--steps", "3"]
    assert command_line(["bench", "roofline", str(config), *sizes, "--json", str(tmp_path / "r.json")]) == 0
    steps = json.loads((tmp_path / "r.json").read_text())["steps"]
    assert [step["batch"] for step in steps] == [2, 1]
    for step in steps:
        labels = {row["label"] for row in step["rows"]}
        assert {"self_attn.o_proj", "mlp.down_proj", "attention self_attn"} <= labels
    folder = find_target(EngineConfig.from_yaml(config)).folder
    kept = read_measured(folder / MEASURED, device_key("cpu"))
    assert [(step["batch"], step["context"]) for step in kept["decode steps"]] == [(2, 40), (1, 40)]
    program = open_artifact(folder).program
    for step in kept["decode steps"]:
        assert [index for index, us in step["parts"] if us > 0] == list(range(len(program.steps)))
    out = capfd.readouterr().out
    assert out.count("parts of the step") == 2 and "µs of all kernels of a job" in out
