"""A compiler and an engine that do nothing but what a test of a command says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mllm_compile.model
from mllm_compile.engine.outputs import CompletionOutput, RequestOutput
from mllm_compile.errors import RequestError
from mllm_compile.runtime.sampling.params import SamplingParams

TINY = str(Path(mllm_compile.model.__file__).parent / "tiny")
CONFIGS = Path(__file__).parents[2] / "configs"


def stand_in_compiler(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    """Replaces what the command calls by `functions`; what is not among them fails a test that calls it."""

    def not_expected(*arguments: object) -> None:
        raise AssertionError(f"called with {arguments}, which the test does not expect")

    both = dict.fromkeys(("open_runtime", "load_or_compile"), not_expected)
    monkeypatch.setitem(sys.modules, "mllm_compile.compiler.load_or_compile", SimpleNamespace(**both | functions))


@dataclass
class StandInEngine:
    """Streams fixed text; keeps what it was asked for."""

    default_params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.6, top_k=20))
    tokenizer: object | None = field(default_factory=lambda: SimpleNamespace(has_chat_template=True))
    refusal: RequestError | None = None
    starts: int = 0
    config: Any = None
    answered_by: str | None = None
    adapters: dict[str, Path] = field(default_factory=dict)
    asked: list[tuple[object, SamplingParams]] = field(default_factory=list)

    def __enter__(self) -> StandInEngine:
        self.starts += 1
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def load_adapter(self, name: str, folder: Path) -> None:
        self.adapters[name] = folder

    def stream(self, prompt: object, params: SamplingParams, adapter: str | None = None) -> Iterator[RequestOutput]:
        self.asked.append((prompt, params))
        self.answered_by = adapter
        if self.refusal is not None:
            raise self.refusal
        for text in ("to", "ken"):
            yield RequestOutput("r", None, [1], [CompletionOutput(0, text, [1])], finished=text == "ken")

    stream_chat = stream
