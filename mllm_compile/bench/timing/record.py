"""Writes the figures of a script as a line of JSON, with the commit, the machine and the settings."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from mllm_compile.bench.measure.environment import describe_environment


def machine_line(device: str = "cuda") -> str:
    """The device, the version of torch and the commit, as figures begin with them."""
    facts = describe_environment(torch.device(device))
    return f"{facts['device']}, torch {facts['torch']}, commit {facts['commit']}"


def append_record(path: Path, script: str, settings: Namespace, figures: Any, device: str = "cuda") -> None:
    """Adds a line to the file: {"script": …, "environment": …, "settings": …, "figures": …}.

    Args:
        script: its __doc__, whose first line names what was measured.
        settings: the arguments as argparse gives them.
    """
    record = {
        "script": script.partition("\n")[0],
        "environment": describe_environment(torch.device(device)),
        "settings": vars(settings),
        "figures": figures,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, default=str) + "\n")
