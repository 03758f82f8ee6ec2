"""The stand-in for the parts that generate, of an engine that pools: it says why there are no such parts."""

from __future__ import annotations

from typing import NoReturn

from mllm_compile.errors import RequestError
from mllm_compile.runtime.pooling.facts import PoolingTask


class NotGenerating:
    """Refuses every use by its reason."""

    def __init__(self, tasks: tuple[PoolingTask, ...]) -> None:
        self._tasks = tasks

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RequestError(
            f"the model generates no text; it has: {', '.join(self._tasks)}. Use embed, classify, score, reward or "
            "encode (docs/encoders.md)."
        )


def not_pooling() -> RequestError:
    """The error for a call for embeddings or scores of a model that generates."""
    return RequestError(
        "the model generates text, and embeds or classifies none. Set model.task: embed for its hidden states, or "
        "serve a model that has such a head (docs/encoders.md)."
    )
