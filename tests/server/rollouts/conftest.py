"""A server for rollouts over the embedded model, and a trainer of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Server, running
from tests.server.rollouts.trainer import Trainer, first_weights
from tests.tiny_model import TINY


@pytest.fixture(scope="session")
def weights_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the server reads weights below."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="session")
def rollout_server(tiny_yaml: Path, weights_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = [sys.executable, "-m", "mllm_compile", "serve", str(tiny_yaml), "--port", "0", "--enable-rl"]
    command += ["--enable-sleep-mode", "--logprobs-mode", "processed_logprobs", "--rl-folder", str(weights_folder)]
    with running(command, tmp_path_factory.mktemp("log") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def start():
    return first_weights(TINY)


@pytest.fixture
def trainer(rollout_server: Server) -> Trainer:
    return Trainer(rollout_server)
