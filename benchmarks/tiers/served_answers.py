"""Our own server behind agents' calls: its engine has a process of its own, as vLLM's has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.server.switch_speed import Served, served
from mllm_compile.config.schema import EngineConfig


class ServedAnswers:
    """Calls over HTTP, from many threads; each by a connection of its own.

    Attributes:
        server: the process that they are sent to.
    """

    def __init__(self, server: Served) -> None:
        self.server = server

    def answer(self, prompt: list[int], max_tokens: int) -> tuple[int, list[int]] | None:
        """See Replay."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, answer = self.server.ask("POST", "/v1/completions", body | {"return_token_ids": True})
        if status != 200:
            return None
        details: dict[str, int] = answer["usage"].get("prompt_tokens_details") or {}
        return details.get("cached_tokens", 0), answer["choices"][0]["token_ids"]


@contextmanager
def served_answers(config: EngineConfig) -> Iterator[ServedAnswers]:
    """A server of this config, until the block ends."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(config.model_dump(mode="json", exclude_defaults=True)))  # YAML too
        with served([str(path)], []) as server:
            server.wait()
            yield ServedAnswers(server)
