"""A config and an engine that stand in for real ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.stand_ins import StandInEngine


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "model.yaml"
    path.write_text("model: {path: ./m}")
    return str(path)


@pytest.fixture
def engine(monkeypatch) -> StandInEngine:
    engine = StandInEngine()

    def make(config: object, reporter: object) -> StandInEngine:
        engine.config = config
        return engine

    monkeypatch.setitem(sys.modules, "mllm_compile.engine.engine", SimpleNamespace(Engine=make))
    return engine
