"""The stages of this tree alone, by pytest-benchmark, for a record or a profile:

    python -m pytest benchmarks/guard/bench_stages.py [-k sampler] [--benchmark-json=FILE]

Nothing fails here for being slow: `make bench` compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.guard.registry import STAGES
from benchmarks.guard.stage import Stage, Tree

KIND = "gpu" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    tree = Tree(Path(tmp_path_factory.mktemp("stages")))
    with tree.ending:
        yield tree


@pytest.mark.parametrize("stage", STAGES[KIND], ids=lambda stage: stage.name)
def test_stage(benchmark: Any, tree: Tree, stage: Stage) -> None:
    ready = stage.ready(tree)
    benchmark._timer = ready.clock
    benchmark.pedantic(ready.run, setup=lambda: (ready.setup(), {}), rounds=stage.rounds, warmup_rounds=1)
