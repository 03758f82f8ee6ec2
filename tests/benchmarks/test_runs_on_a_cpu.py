"""Scripts that need no GPU, run on the embedded model with the smallest work that they take."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mllm_compile.runtime.schedule.pace import Pace
from tests.benchmarks.test_mistakes import run
from tests.tiny_model import tiny_config


@pytest.fixture
def config(eager_cache: Path, tmp_path: Path) -> str:
    """A config of the embedded model that is compiled already."""
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(tiny_config(eager_cache, compile={"backend": "eager"}).model_dump(mode="json")))
    return str(path)


RUNS = (
    ("steps.prefix_hit_speed", "--tokens 40 --prompts 1", r"a hit behind other hits takes \d+\.\d\d ms \("),
    ("steps.short_prompts_speed", "--counts 2 --single 8 --repeats 2", r"2 prompts of \d+ tokens in \d+\.\d\d ms \("),
    ("steps.update_speed", "--rounds 1 --requests 1 --ways staged,values", r"values, pause of steps +first +\d+\.\d"),
    ("steps.structured_speed", "--requests 2 --prompt 8 --tokens 4 --rounds 2", r"(?m)^ +2 \| +2 \| +\d+\.\d"),
)
# These compile or start processes of their own.
LONG_RUNS = (
    ("steps.deterministic_cost", "--requests 1 2 --prompt 8 --tokens 4", r"(?m)^ +2 \| +\d+ \| +\d+ \| +\d+%"),
    ("steps.chunk_steps", "--bounds none --prompt 300 --decodes 2", r"(?s)max_step_ms none: .*\d+ steps with its"),
    ("steps.draft_depth_speed", "--requests 2 --new 4 --rounds 1 --deterministic", r"new \| 2 \| auto \| \d"),
    ("steps.one_run", "--requests 2 --prompt 16 --tokens 24", r"tpot \d+\.\d\d ms over \d+ steps"),
    ("steps.layers_speed", "--layers 2 --batches 1 --prompts 2x16", r"(?s)1 decodes: \d+ µs.*2 prompts of 16: "),
    ("server.start_stages", "--ranks 1 --repeats 1", r"warm starts of 1 ranks"),
    ("server.server_speed", "--requests 2 --prompt 8 --tokens 8 --rounds 1", r"(?m)^ +2 \| +\d+\.\d \| +\d+\.\d"),
)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        *(pytest.param(*one, id=one[0]) for one in RUNS),
        *(pytest.param(*one, id=one[0], marks=pytest.mark.slow) for one in LONG_RUNS),
    ],
)
def test_a_script_measures_the_embedded_model(name, options, said, config, monkeypatch, capsys):
    monkeypatch.setattr(Pace, "took", Pace.took)  # which chunk_steps replaces
    try:
        run(name, monkeypatch, config, *options.split())
    except SystemExit as ended:
        assert not ended.code
    out = capsys.readouterr().out
    assert re.search(said, out), out
