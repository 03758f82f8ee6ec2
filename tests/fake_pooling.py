"""An engine that pools over a fake device: what it gives of a text follows from its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mllm_compile.engine.engine import Engine
from mllm_compile.engine.pooling.calls import PoolingCalls, TaskRules
from mllm_compile.engine.pooling.core import PoolingCore
from mllm_compile.engine.pooling.parts import PoolingParts
from mllm_compile.engine.pooling.texts import TextReader
from mllm_compile.runtime.pooling.facts import PoolingFacts
from mllm_compile.runtime.pooling.queue import TextQueue
from mllm_compile.runtime.pooling.texts import PackedText

WIDTH = 4
MOST_TOKENS = 64
MOST_TEXTS = 64  # of a step


def fake_numbers(ids: Sequence[int], count: int) -> np.ndarray:
    """The answer [count] to a text of these tokens."""
    generator = np.random.default_rng(list(ids))
    return generator.standard_normal(count).astype(np.float32)


class FakeStep:
    """A step that is over."""

    def __init__(self, found: list[np.ndarray]) -> None:
        self._found = found

    def is_over(self) -> bool:
        return True

    def answers(self) -> list[np.ndarray]:
        return self._found


class FakePooling:
    """A runner; see the module's header."""

    is_asynchronous = False

    def __init__(self, facts: PoolingFacts) -> None:
        self._facts = facts

    def launch(self, texts: Sequence[PackedText]) -> FakeStep:
        return FakeStep([self._answer(text) for text in texts])

    def _answer(self, text: PackedText) -> np.ndarray:
        count = text.params.dimensions or self._facts.outputs
        if text.params.is_of_tokens:
            return np.stack([fake_numbers([token], count) for token in text.ids.tolist()])
        found = fake_numbers(text.ids.tolist(), count)
        return 1 / (1 + np.exp(-found)) if "classify" in text.params.task and text.params.activates else found


def fake_pooling_engine(tokenizer: Any, files: Mapping[str, bytes], **facts: Any) -> Engine:
    """The engine; `facts` are PoolingFacts' fields."""
    facts = {"task": "embed", "rules": ("mean",), "outputs": WIDTH, **facts}
    known = PoolingFacts(
        width=WIDTH, **{name: tuple(one) if isinstance(one, list) else one for name, one in facts.items()}
    )
    core = PoolingCore(FakePooling(known), TextQueue(512, MOST_TEXTS))
    reader = TextReader(tokenizer, known, tokenizer.vocab_size if tokenizer else 128, MOST_TOKENS)
    parts = PoolingParts(
        calls=PoolingCalls(core, reader, TaskRules(known, has_dense=False)),
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size if tokenizer else 128,
        tokenizer_files=files,
    )
    return Engine.from_parts(parts)
