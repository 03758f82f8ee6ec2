"""The script that compares log-probabilities: on a CPU no switch changes them, and float32 is the reference itself."""

from __future__ import annotations

import re

import pytest
import yaml

from benchmarks.steps.switch_error import documents, main
from tests.tiny_model import TINY, shallow_tiny


def test_there_are_texts_for_many_requests():
    texts = documents(64)
    assert len(set(texts)) == 64


def test_random_weights_are_refused(tmp_path):
    config = tmp_path / "model.yaml"
    config.write_text(yaml.safe_dump({"model": {"path": str(TINY), "load_format": "dummy"}}))
    with pytest.raises(SystemExit, match="random weights of two types are two models"):
        main([str(config)])


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_each_variant_has_a_row_and_bfloat16_is_seen_to_round(dtype, tmp_path, capsys):
    config = tmp_path / "model.yaml"
    model = {"path": str(shallow_tiny(tmp_path / "model"))}
    sections = {"model": model, "compile": {"backend": "eager"}, "cache": {"dir": str(tmp_path)}}
    config.write_text(yaml.safe_dump(sections))
    main([str(config), "--dtype", dtype, "--switches", "pack_projections", "--requests", "2", "--tokens", "4"])
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = {line.split("  ")[1]: re.findall(r"(\d\.\d+), \d", line) for line in lines if line.startswith("  ")}
    assert list(rows) == ["all", "without pack_projections", "none"]
    means = [float(mean) for row in rows.values() for mean in row]
    assert len(means) == 3 * 2
    assert max(means) < 1e-4 if dtype == "float32" else min(means) > 1e-4
