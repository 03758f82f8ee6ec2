"""models_speed on the embedded model: two engines behind one server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.server.models_speed import models_of
from tests.benchmarks.test_mistakes import run
from tests.tiny_model import tiny_config


def test_models_of_one_config_are_numbered():
    assert models_of("a=one.yaml") == [("a", "one.yaml")]
    assert models_of("a=one.yaml*2") == [("a1", "one.yaml"), ("a2", "one.yaml")]


@pytest.mark.parametrize("text", ["one.yaml", "a=", "=one.yaml*2"])
def test_other_models_are_told_in_one_line(text, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("server.models_speed", monkeypatch, text)
    assert f"{text!r}; expected NAME=CONFIG or NAME=CONFIG*COUNT" in capsys.readouterr().err


def test_models_of_one_name_are_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("server.models_speed", monkeypatch, "a=one.yaml*2", "a2=two.yaml")
    assert "two models have the same name" in capsys.readouterr().err


@pytest.mark.slow
def test_two_models_answer_alone_and_beside_each_other(eager_cache: Path, tmp_path: Path, monkeypatch, capsys):
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(tiny_config(eager_cache, compile={"backend": "eager"}).model_dump(mode="json")))
    run("server.models_speed", monkeypatch, f"tiny={path}*2", "--tokens", "8", "--rounds", "2")
    said = capsys.readouterr().out
    assert "2 of 2 models served" in said
    assert re.search(r"(?m)^ *tiny2 +\d+ +\d+\.\d +\d+\.\d", said), said
    assert re.search(r"all at once: \d+ tokens a second, rounds of \d", said), said
