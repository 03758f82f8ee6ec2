"""`mllm-compile config`: a YAML with every key, which is the config of all defaults."""

from __future__ import annotations

import re

import pytest
import yaml

from mllm_compile import EngineConfig
from mllm_compile.cli import run

SECTIONS = {name: field.annotation for name, field in EngineConfig.model_fields.items()}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["config", *words]) == 0
    return capsys.readouterr().out


def test_what_is_printed_is_a_config_of_defaults(capsys):
    config = EngineConfig.from_dict(yaml.safe_load(printed(capsys)))
    assert config == EngineConfig.from_dict({"model": {"path": "Qwen/Qwen3-0.6B"}})


def test_every_key_is_there_with_its_default_and_says_something(capsys):
    text = printed(capsys)
    # A key with a default is a comment: as a key it is taken, and is the default.
    told = yaml.safe_load(re.sub(r"^  # (\w+: \S.*)$", _as_key, text, flags=re.MULTILINE))
    assert told.keys() == SECTIONS.keys()
    for name, section in SECTIONS.items():
        assert told[name].keys() == section.model_fields.keys(), name
    assert EngineConfig.from_dict(told) == EngineConfig.from_dict({"model": told["model"]})
    assert "\n  # Most tokens of one request, prompt and answer together.\n" in text
    assert "\n  # max_model_len: auto  # auto or a whole number from 2\n" in text
    assert "\n  # mem_fraction_static: 0.9  # a number above 0.0 below 1.0\n" in text


def _as_key(line: re.Match[str]) -> str:
    name = line[1].partition(":")[0]
    return f"  {line[1]}" if any(name in section.model_fields for section in SECTIONS.values()) else line[0]


def test_a_section_alone(capsys):
    assert set(yaml.safe_load(printed(capsys, "runtime"))) == {"runtime"}
    assert run(["config", "runtim"]) == 2
    assert "there is no section runtim; expected one of model, compile" in capsys.readouterr().err
