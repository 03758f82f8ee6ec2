"""A server over the embedded model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.server.harness import Server, running
from tests.tiny_model import tiny_config


@pytest.fixture(scope="session")
def tiny_yaml(eager_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(eager_cache, compile={"backend": "eager"})
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    return path


@pytest.fixture(scope="session")
def tiny_server(tiny_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = [sys.executable, "-m", "mllm_compile", "serve", str(tiny_yaml), "--port", "0"]
    with running(command, tmp_path_factory.mktemp("log") / "log") as server:
        yield server
