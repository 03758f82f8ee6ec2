"""Scripts that measure a GPU say so in one line where there is none, whatever else is not installed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples" / "measure"
ATTENTION = [
    *("decode_attention_speed.py", "latent_attention_speed.py", "prefill_attention_speed.py"),
    *("long_attention_speed.py", "tower_speed.py", "unpadded_decode_speed.py"),
]
HOPPER = ["mixed_graphs_speed.py"]
ENGINES = ["cascade_speed.py", "graph_modes_speed.py", "image_step.py", "step_gaps.py", "step_power.py"]
ENGINES += ["two_streams_speed.py"]


@pytest.mark.parametrize("name", [*ATTENTION, *HOPPER, *ENGINES])
def test_a_script_for_a_gpu_ends_with_one_line_on_a_machine_without(name, monkeypatch):
    config = [] if name in ATTENTION else ["configs/tiny.yaml"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for package in ("flashinfer", "triton"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", [name, *config])
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert ended.value.code == f"needs an NVIDIA {'Hopper ' if name in HOPPER else ''}GPU"
