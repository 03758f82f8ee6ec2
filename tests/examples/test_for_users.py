"""The examples that a user begins with, on the embedded models; what they take by themselves is the demo's model."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from mllm_compile import MllmError
from tests.server.harness import fake_server
from tests.tiny_model import TINY

EXAMPLES = Path(__file__).parents[2] / "examples"


def main_of(name: str) -> Any:
    return runpy.run_path(str(EXAMPLES / name))["main"]


@pytest.fixture
def config(eager_cache: Path, tmp_path: Path) -> str:
    sections = {
        "model": {"path": str(TINY), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "cache": {"dir": str(eager_cache)},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(sections))
    return str(tmp_path / "tiny.yaml")


def test_chats_are_answered_together_and_a_stream_as_it_comes(config, capsys) -> None:
    asyncio.run(main_of("stream_chats.py")(config))
    told = capsys.readouterr().out
    assert re.search(r"What is the capital of France\?\n  \w", told)
    assert "[first token after 0." in told


def test_answers_have_the_form_that_was_asked_for(config, capsys) -> None:
    main_of("json_answers.py")(config)
    name, _, person = capsys.readouterr().out.partition(" of ")
    person, _, sure = person.strip().rpartition("\n")
    assert json.loads(person).keys() == {"name", "age", "city"} and json.loads(person)["name"] == name
    assert sure in ("yes", "no")


def test_openais_client_reads_a_served_model(capsys) -> None:
    with fake_server() as server:
        main_of("openai_client.py")(server.url)
    assert "[queue=" in capsys.readouterr().out


@pytest.mark.slow
def test_questions_about_an_image_are_answered(monkeypatch, capsys) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    main_of("about_images.py")()
    assert "How many red circles? 3 red circles." in capsys.readouterr().out


def test_a_mistake_is_told_by_the_projects_own_error(tmp_path) -> None:
    with pytest.raises(MllmError, match="there is no such file"):
        main_of("json_answers.py")(str(tmp_path / "none.yaml"))
