"""A config that is wrong ends a script with one line."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "measure"


@pytest.mark.parametrize(
    "name", ["deterministic_cost.py", "fp8_kv_error.py", "image_start.py", "lever_error.py", "quantised_tpot.py"]
)
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


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--batch", "1,0"], "argument --batch: '0'; expected a number of at least 1"),
        (["--variants", "fp8,fp9"], "argument --variants: 'fp9'; expected some of bf16, fp8, fp8-kv, int4"),
    ],
)
def test_a_list_with_something_else_in_it_is_told_with_its_option(options, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quantised_tpot.py", *options])
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / "quantised_tpot.py"), run_name="__main__")
    assert told in capsys.readouterr().err
