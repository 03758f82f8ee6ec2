"""Servers of several models over fakes, in processes of their own."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.server.harness import Server, running


@contextmanager
def fake_models(
    settings: Mapping[str, Mapping[str, Any]],
    models: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    num_bytes: int = 1 << 40,
    waits: bool = True,
) -> Iterator[Server]:
    """A server of models.

    Args:
        settings: of fake_backend.py, by name.
        models: of ModelsOptions.
        options: of ServeOptions.
        num_bytes: of the device, which refuses to give more.
        waits: until it is ready.
    """
    with tempfile.TemporaryDirectory() as folder:
        device = Path(folder) / "device"
        device.mkdir()
        command = [
            sys.executable, "-m", "tests.server.models.fake_front", json.dumps({"port": 0, **(options or {})}),
            json.dumps(models or {}), json.dumps(settings),
        ]  # fmt: skip
        environment = {"MLLM_FAKE_DEVICE": str(device), "MLLM_FAKE_DEVICE_BYTES": str(num_bytes)}
        with running(command, Path(folder) / "log", environment, waits=waits) as server:
            yield server


def states(server: Server) -> dict[str, str]:
    """The models' states, as /v1/models has them."""
    return {card["id"]: card["state"] for card in server.get("/v1/models").json["data"]}


def switches(server: Server, model: str) -> float:
    return server.figure(f'mllm:model_switches_total{{model="{model}"}}')
