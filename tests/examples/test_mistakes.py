"""A config that is wrong ends a script with one line."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "measure"


@pytest.mark.parametrize("name", ["deterministic_cost.py", "fp8_kv_error.py", "lever_error.py"])
def test_a_misspelled_key_is_told_in_one_line(name, tmp_path, monkeypatch):
    config = tmp_path / "model.yaml"
    config.write_text("model: {pathh: ./tiny}")
    monkeypatch.setattr(sys, "argv", [name, str(config)])
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit, match=r"error: .*model\.pathh") as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert "\n" not in str(ended.value)


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_a_number_that_is_none_is_told_with_its_option(value, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fp8_kv_error.py", "configs/tiny.yaml", "--tokens", value])
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / "fp8_kv_error.py"), run_name="__main__")
    assert f"argument --tokens: '{value}'; expected a number of at least 1" in capsys.readouterr().err
