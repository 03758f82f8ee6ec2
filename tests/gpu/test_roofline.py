"""`bench roofline` over the pieces that only a GPU has: fused linears, and a KV write inside a piece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from mllm_compile.cli import run as command_line
from tests.gpu.small_shape import SHAPE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roofline")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    path = folder / "model.yaml"
    values = {
        "model": {"path": str(folder), "load_format": "dummy"},
        "runtime": {"max_model_len": 1024, "mem_fraction_static": 0.3},
        "cache": {"dir": str(folder / "cache")},
    }
    path.write_text(yaml.safe_dump(values))
    return path


def test_every_linear_is_named_in_each_variant_of_the_pieces(config, tmp_path):
    options = ["--batch", "1,8,40", "--context", "100", "--steps", "4", "--json", str(tmp_path / "r.json")]
    assert command_line(["bench", "roofline", str(config), *options]) == 0
    steps = json.loads((tmp_path / "r.json").read_text())["steps"]
    assert [step["batch"] for step in steps] == [1, 8, 40]
    for step in steps:
        counts = {}
        for row in step["rows"]:
            counts[row["label"]] = counts.get(row["label"], 0) + row["count"] * (row["flops"] > 0)
        linears = {label: count for label, count in counts.items() if count}
        assert sum(linears.values()) == 4 * 3 + 1, linears
        assert counts["attention self_attn"] == 0 and "lm_head" in linears
