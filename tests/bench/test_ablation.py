import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.limits.limits import ModelFigures
from mllm_compile.bench.measure.harness import Probe
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.measure.workloads import LatencyWork
from mllm_compile.bench.show import ablation
from mllm_compile.bench.show.ablation import print_ablation, run_ablation, switch_names, without
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.config_sections import SWITCHES
from tests.bench.result_cases import CEILINGS, result, run, tpot
from tests.bench.test_worker import SETTING
from tests.tiny_model import TINY


@pytest.fixture
def setting(tmp_path) -> Setting:
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {{path: {TINY}}}\n")
    return replace(SETTING, source=str(config), changes={"runtime": {"max_model_len": 64}})


def test_every_optional_pass_and_choice_is_a_switch_that_can_be_switched_off(setting):
    for name in switch_names():
        config = without(setting, [name]).engine_config()
        assert config.runtime.max_model_len == 64, "the benchmark's rules hold"
        switched = {
            "full_graphs": config.cudagraph.mode == "piecewise",
            "mixed_graphs": config.cudagraph.mixed_tokens == (),
        }
        left_out = (*config.compile.disable_passes, *config.runtime.without)
        assert [*left_out, *(kind for kind, is_off in switched.items() if is_off)] == [name]


def test_what_the_config_leaves_out_stays_out(setting):
    setting = setting.changed("compile", disable_passes=("fuse_silu_mul",))
    config = without(setting, switch_names()).engine_config()
    assert set(switch_names()) - set(config.compile.disable_passes) == {*SWITCHES, *ablation.GRAPHS}
    setting = setting.changed("runtime", without=("copy_prefix",))
    assert without(setting, ["split_decode"]).engine_config().runtime.without == ("copy_prefix", "split_decode")
    assert without(setting, ["pack_projections"]).engine_config().compile.disable_passes == (
        "fuse_silu_mul",
        "pack_projections",
    )


def settings_on_hopper(config: EngineConfig) -> dict[str, Any]:
    """The part of a resolved config that switches read, as a worker process gives it."""
    mode = "full_and_piecewise" if config.cudagraph.mode == "auto" else config.cudagraph.mode
    mixed_tokens = config.cudagraph.mixed_tokens
    if mixed_tokens == "auto":
        mixed_tokens = (64,) if mode == "full_and_piecewise" else ()
    without = config.runtime.without
    compiled = {name: name not in without for name in ("split_decode", "hopper_decode")}
    graphs = {"mode": mode, "mixed_tokens": mixed_tokens}
    graphs |= {name: name not in without for name in ("sample_in_graph", "whole_prompts")}
    return json.loads(json.dumps({"compile": compiled, "cudagraph": graphs, "runtime": {"without": without}}))


@pytest.fixture
def compiled() -> list[Setting]:
    """The settings that were compiled side by side."""
    return []


@pytest.fixture
def ablate(setting, compiled, monkeypatch):
    """Runs it with an engine that takes no time, refuses what `refused` says and has nothing to do for the switches of
    `idle`; (names of the runs, settings)."""
    figures = ModelFigures(**dict.fromkeys(ModelFigures.__dataclass_fields__, 1))

    def ablate(switches, refused=lambda config: False, idle=(), **changes):
        base = setting
        for section, values in changes.items():
            base = base.changed(section, **values)
        asked = []
        compiled.clear()

        def measure(engine, setting, work, probe):
            config = setting.engine_config()
            asked.append(setting)
            if refused(config):
                raise BenchmarkError("no piece without its norm")
            return replace(run(engine), settings=settings_on_hopper(config))

        probe = Probe(base, {"commit": "abc"}, CEILINGS, figures)
        monkeypatch.setattr(ablation, "probe_machine", lambda *args: probe)

        def compile_ahead(settings):
            compiled.extend(settings)
            return ["no piece without its norm" if refused(one.engine_config()) else None for one in settings]

        monkeypatch.setattr(ablation, "compile_ahead", compile_ahead)

        def switches_at_work(setting):
            return set(switch_names()) - set(idle) - set(setting.engine_config().compile.disable_passes)

        monkeypatch.setattr(ablation, "measure_latency", measure)
        monkeypatch.setattr(ablation, "switches_at_work", switches_at_work)
        measured = run_ablation(Path(setting.source), switches, LatencyWork())
        return [run.engine for run in measured.runs], asked

    return ablate


def test_variants_are_all_each_left_out_all_left_out_and_all_again(setting, ablate, compiled):
    names, asked = ablate(["pack_projections", "full_graphs"])
    assert names == ["all", "without pack_projections", "without full_graphs", "without any of them", "all, again"]
    assert asked[0] == asked[-1] == setting
    assert asked[3] == without(setting, ["pack_projections", "full_graphs"])
    assert compiled == asked[1:4], "before they are measured"


def test_a_switch_that_cannot_be_left_out_costs_its_own_variant_alone(ablate, capsys):
    def refused(config):
        return "fuse_rope_cache" in config.compile.disable_passes

    names, asked = ablate(["fuse_rope_cache", "pack_projections", "fuse_silu_mul"], refused)
    assert names == ["all", "without pack_projections", "without fuse_silu_mul", "without any of them", "all, again"]
    assert not refused(asked[-2].engine_config())
    assert "without fuse_rope_cache: no piece without its norm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("switch", "changes"),
    [
        ("full_graphs", {"cudagraph": {"mode": "none"}}),
        ("full_graphs", {"cudagraph": {"mode": "piecewise"}}),
        ("mixed_graphs", {"cudagraph": {"mixed_tokens": ()}}),
        ("mixed_graphs", {"cudagraph": {"mode": "piecewise"}}),
        ("split_decode", {"runtime": {"without": ("split_decode",)}}),
        ("copy_prefix", {"runtime": {"without": ("copy_prefix",)}}),
        ("fuse_silu_mul", {"compile": {"disable_passes": ("fuse_silu_mul",)}}),
    ],
)
def test_what_the_engine_does_without_has_no_variant(ablate, capsys, switch, changes):
    assert ablate([switch], **changes)[0] == ["all", "all, again"]
    assert f"without {switch}: skipped, as this engine does without it already" in capsys.readouterr().err


def test_a_switch_that_changes_nothing_in_the_runtime_has_no_variant(ablate, capsys):
    idle = ["fuse_silu_mul", "sample_in_graph"]
    names, _ = ablate([*idle, "pack_projections"], idle=idle)
    assert names == ["all", "without pack_projections", "all, again"]
    told = capsys.readouterr().err
    assert all(f"without {switch}: skipped, as this engine does without it already" in told for switch in idle)


def test_a_switch_that_is_not_there_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(
        ConfigError, match=r"--switch 'fuse_all' is not known; expected some of multiply_outer_products"
    ):
        run_ablation(tmp_path / "no.yaml", ["fuse_all"], LatencyWork())


def test_changes_are_against_all_switches():
    stream = io.StringIO()
    variants = run("all", tpot(1, 4.0), tpot(8, 5.0)), run("without a", tpot(1, 5.0), tpot(8, 4.5))
    print_ablation(result(*variants, command="ablation"), stream)
    lines = stream.getvalue().splitlines()
    assert "  tpot b=1, ms  " in lines[1] and lines[1].endswith("  tpot b=8, ms")
    assert lines[2].split() == ["all", "4.00", "5.00"]
    assert lines[3].split() == ["without", "a", "5.00", "(+25.0%)", "4.50", "(-10.0%)"]
    assert lines[4].startswith("mllm 1: commit abc")
