"""The memory that a model needs of a device that several share, and models that cannot be one of several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mllm_compile.engine import device_share
from mllm_compile.errors import ConfigError
from mllm_compile.process.progress import NullReporter


def test_ranks_are_refused_with_every_key_that_asks_for_them(monkeypatch):
    config = SimpleNamespace(model=SimpleNamespace(pools=False), runtime=SimpleNamespace(num_ranks=2))
    monkeypatch.setattr(device_share, "load_or_compile", lambda *_: SimpleNamespace(config=config))
    source: Any = None
    with pytest.raises(ConfigError, match="asks for 2 ranks") as refused:
        device_share.device_needs(source, NullReporter())
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        assert key in str(refused.value)
