"""The front's knowledge of a model that pools: what may be asked of it, and how its texts are read."""

from __future__ import annotations

from dataclasses import dataclass

from mllm_compile.engine.pooling.calls import TaskRules
from mllm_compile.engine.pooling.texts import TextReader
from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.pooling.facts import PoolingFacts
from mllm_compile.server.api.errors import UNSUPPORTED, ApiError
from mllm_compile.server.wire.messages import Hello
from mllm_compile.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PoolingFront:
    """
    Attributes:
        rules: says what may be asked.
        reader: reads texts.
    """

    rules: TaskRules
    reader: TextReader

    @classmethod
    def of(cls, hello: Hello, tokenizer: Tokenizer | None) -> PoolingFront:
        """The knowledge that an engine's first event gives."""
        told = hello.pooling or {}
        facts = from_json(PoolingFacts, told["facts"])
        rules = TaskRules(facts, bool(told["has_dense"]))
        return cls(rules, TextReader(tokenizer, facts, hello.vocab_size, hello.max_model_len))

    def not_generating(self) -> ApiError:
        """The error for a request that wants generated text."""
        has = ", ".join(self.rules.names)
        return ApiError(
            404,
            f"the model generates no text; it has: {has}. Use /v1/embeddings, /score and the like",
            code=UNSUPPORTED,
        )
