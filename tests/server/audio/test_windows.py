"""The texts of windows are made by threads: thousands of them would keep the event loop from other requests."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mllm_compile.engine.speech.doubt import Written
from mllm_compile.server.audio.windows import Windows
from mllm_compile.server.flow.threads import Threads


def test_answers_are_doubted_and_cut_into_segments_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[str] = []
    asked: list[int] = []

    def decode(ids: list[int], skip_special_tokens: bool = True) -> str:
        readers.append(threading.current_thread().name)
        return "".join(map(str, ids))

    async def written(windows: Windows, asked_for: list[bytes], *_: Any, **__: Any) -> tuple[str, list[Written]]:
        asked.append(len(asked_for))
        return "name", [Written([number], -2.0) for number in range(len(asked_for))]

    monkeypatch.setattr(Windows, "_written", written)
    tokens = SimpleNamespace(no_speech=None, seconds=lambda _: None)
    cut = SimpleNamespace(windows=[b"a", b"b"], beginning=[1], places=[(0.0, 1.0), (1.0, 2.0)])
    sound: Any = SimpleNamespace(
        fields=SimpleNamespace(temperatures=(0.0, 0.5, 1.0), sequential=False),
        speech=SimpleNamespace(tokens=tokens, tokenizer=SimpleNamespace(decode=decode)),
        cut=lambda language: cut,
        duration=2.0,
        task="transcribe",
    )

    async def run() -> Any:
        admission = SimpleNamespace(place=nullcontext)
        front: Any = SimpleNamespace(sounds=Threads(1, "reads"), admission=admission, going_on=nullcontext)
        share: Any = None
        return await Windows(front, sound, share, "client", None, None).transcript("en")

    name, transcript = asyncio.run(run())
    assert (name, transcript.text, asked) == ("name", "01", [2, 2, 2])
    assert len(readers) == 2 * 3 + 2 and {one.rpartition("_")[0] for one in readers} == {"reads"}
