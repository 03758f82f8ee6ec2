import io
from dataclasses import replace
from pathlib import Path

import pytest

from mllm_compile.bench import ablation
from mllm_compile.bench.ablation import lever_names, print_ablation, run_ablation, without
from mllm_compile.bench.harness import Probe
from mllm_compile.bench.limits import ModelFigures
from mllm_compile.bench.setting import Setting
from mllm_compile.bench.workloads import LatencyWork
from mllm_compile.errors import ConfigError
from tests.bench.result_cases import CEILINGS, result, run, tpot
from tests.bench.test_worker import SETTING
from tests.tiny_model import TINY


@pytest.fixture
def setting(tmp_path) -> Setting:
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {{path: {TINY}}}\ncompile: {{disable_passes: [fuse_silu_mul]}}\n")
    return replace(SETTING, config_path=str(config), changes={"runtime": {"max_model_len": 64}})


def test_every_optional_pass_and_choice_is_a_lever_that_can_be_switched_off(setting):
    for name in lever_names():
        config = without(setting, [name]).engine_config()
        assert config.runtime.max_model_len == 64, "the benchmark's rules hold"
        switched = {
            "hopper_decode": config.compile.hopper_decode is False,
            "split_decode": config.compile.split_decode is False,
            "full_graphs": config.cudagraph.mode == "piecewise",
        }
        assert switched.get(name, name in config.compile.disable_passes)
        assert sum(switched.values()) == (name in switched)


def test_what_the_config_leaves_out_stays_out(setting):
    config = without(setting, lever_names()).engine_config()
    assert set(lever_names()) - set(config.compile.disable_passes) == set(ablation.CHOICES)
    assert without(setting, ["pack_projections"]).engine_config().compile.disable_passes == (
        "fuse_silu_mul",
        "pack_projections",
    )


def test_variants_are_all_each_left_out_none_and_all_again(setting, monkeypatch):
    figures = ModelFigures(**dict.fromkeys(ModelFigures.__dataclass_fields__, 1))
    probe = Probe(setting, {"commit": "abc"}, CEILINGS, figures)
    asked = []
    monkeypatch.setattr(ablation, "probe_machine", lambda *args: probe)
    monkeypatch.setattr(
        ablation, "measure_latency", lambda engine, setting, work, probe: asked.append(setting) or run(engine)
    )
    measured = run_ablation(Path(setting.config_path), ["pack_projections", "full_graphs"], LatencyWork())
    names = [run.engine for run in measured.runs]
    assert names == ["all", "without pack_projections", "without full_graphs", "none", "all, again"]
    assert asked[0] == asked[-1] == setting
    assert asked[3] == without(setting, ["pack_projections", "full_graphs"])


def test_a_lever_that_is_not_there_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(ConfigError, match=r"--lever 'fuse_all' is not known; expected some of pack_projections"):
        run_ablation(tmp_path / "no.yaml", ["fuse_all"], LatencyWork())


def test_changes_are_against_all_levers():
    stream = io.StringIO()
    variants = run("all", tpot(1, 4.0), tpot(8, 5.0)), run("without a", tpot(1, 5.0), tpot(8, 4.5))
    print_ablation(result(*variants, command="ablation"), stream)
    lines = stream.getvalue().splitlines()
    assert lines[1].split("  ")[1:] and "tpot b=8, ms" in lines[1]
    assert lines[2].split() == ["all", "4.00", "5.00"]
    assert lines[3].split() == ["without", "a", "5.00", "(+25.0%)", "4.50", "(-10.0%)"]
    assert lines[4].startswith("mllm 1: commit abc")
