"""An engine as a benchmark uses it. Timing is the caller's: from outside, through the engine's public interface."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.measure.workloads import Call


class BenchEngine(Protocol):
    """A running engine.

    Attributes:
        version: the engine's.
        settings: the engine's settings, for the record.
        start_parts: seconds of each part of its start, in order; empty where the engine does not tell.
        kv_tokens: tokens that its KV cache holds; None where the engine does not tell.
    """

    version: str
    settings: Mapping[str, Any]
    start_parts: Mapping[str, float]
    kv_tokens: int | None

    def generate(self, call: Call) -> None:
        """Does a call's work and returns when the last token is on the host.

        The end-of-sequence token does not end a request, nothing is turned into text, nothing is shown.

        Raises:
            BenchmarkError: other numbers of tokens came than were asked for.
        """

    def close(self) -> None:
        """Ends the engine."""


class StreamEngine(Protocol):
    """A running engine whose answers are read token by token, in one event loop.

    Attributes:
        version, settings: as BenchEngine's.
    """

    version: str
    settings: Mapping[str, Any]

    def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        """The numbers of new tokens of each piece of a greedy answer, as they come.

        The end-of-sequence token does not end it. Leaving it early ends the request.
        """

    async def close(self) -> None:
        """Ends the engine."""


class ImageEngine(BenchEngine, Protocol):
    """A running engine that takes images: `generate` takes prompts of `prompt` beside token ids."""

    def image(self, side: int, seed: int) -> Any:
        """A random image of side × side pixels: what the model's processor would make of it, where the engine takes
        that."""

    def num_features(self, side: int) -> int:
        """Tokens of a prompt that stand for such an image."""

    def prompt(self, before: list[int], image: Any, after: list[int]) -> Any:
        """The prompt of an image between token ids."""


def check_output(call: Call, num_tokens: list[int]) -> None:
    """
    Raises:
        BenchmarkError: the engine made other numbers of tokens than the call asked for, so its time means nothing.
    """
    for index, (asked, got) in enumerate(zip(call.max_tokens, num_tokens, strict=True)):
        if asked != got:
            raise BenchmarkError(
                f"prompt {index} got {got} tokens where {asked} were asked for: the time means nothing"
            )
