"""The models whose figures the pages have: a short name for the command line, the pages' name, and the config."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
RESULTS = ROOT / "docs" / "lab" / "results"


class Shape(NamedTuple):
    """A model's shape, with random weights."""

    name: str
    title: str
    config: Path

    @property
    def model(self) -> str:
        """The model's name in a result."""
        return self.config.stem


SHAPES = tuple(
    Shape(name, title, CONFIGS / f"{config}.yaml")
    for name, title, config in (
        ("0.6b", "Qwen3-0.6B", "qwen-shape"),
        ("8b", "Qwen3-8B", "qwen-8b-shape"),
        ("8b-fp8", "Qwen3-8B, fp8", "qwen-8b-fp8-shape"),
        ("8b-int4", "Qwen3-8B, int4", "qwen-8b-int4-shape"),
        ("30b", "Qwen3-30B-A3B", "qwen-30b-a3b-shape"),
        ("gpt-oss", "gpt-oss-20b, MXFP4", "gpt-oss-20b-shape"),
        ("nemotron-h", "Nemotron-H-8B", "nemotron-h-8b-shape"),
    )
)
