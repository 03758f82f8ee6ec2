"""Random histories of requests, pauses and updates: each token is of the weights that its span says."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.errors import EnginePausedError
from tests.engine.rollouts.test_weight_updates import Lost, broken_off, following, live_weights, tensors_of
from tests.fakes import FakeStepRunner, all_pages_are_back, fake_engine, hashed_token

NUM_EVENTS = 40
PAUSES = ("abort", "keep", "retract")


class History:
    """Things that happen to one engine; `key_of` has the weights of each version."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._chance = engine, random.Random(seed)
        self.key_of = {"default": 0}
        self.streams: list[Any] = []
        self._shared = [97 + self._chance.randrange(20) for _ in range(24)]

    def run(self) -> None:
        for _ in range(NUM_EVENTS):
            self._chance.choice(self.events())()
        self.end()

    def events(self) -> tuple[Callable[[], None], ...]:
        return (self._ask, self._ask, self._ask, self._update, self._break_off, self._pause, self._resume, self._read)

    def end(self) -> None:
        """Lets all go on."""
        self._engine.resume()

    def _ask(self) -> None:
        own = [97 + self._chance.randrange(20) for _ in range(self._chance.randrange(1, 12))]
        prompt = self._shared[: self._chance.randrange(25)] + own
        stop = ["ab", "c"] if self._chance.random() < 0.3 else None
        params = SamplingParams(
            max_tokens=self._chance.randrange(1, 60), ignore_eos=True, stop=stop, n=self._chance.choice((1, 1, 3))
        )
        try:
            self.streams.append((prompt, self._engine.stream(prompt, params), []))
        except EnginePausedError:
            assert self._engine.is_paused

    def _update(self) -> None:
        version, key = f"v{len(self.key_of)}", self._chance.randrange(1000)
        self.key_of[version] = key
        self._engine.update_weights(
            tensors_of(key).items(), version=version, direct=self._chance.random() < 0.5, keep_prefix_cache=False
        )

    def _break_off(self) -> None:
        with pytest.raises(Lost):
            self._engine.update_weights(broken_off(tensors_of(1), self._chance.randrange(3)))

    def _pause(self) -> None:
        self._engine.pause(self._chance.choice(PAUSES))

    def _resume(self) -> None:
        self._engine.resume()

    def _read(self) -> None:
        """Lets one go on for a while, if steps run."""
        if self.streams and not self._engine.is_paused:
            _, stream, outputs = self._chance.choice(self.streams)
            output = next(stream, None)
            if output is not None:
                outputs.append(output)


@pytest.mark.parametrize("seed", range(12))
def test_each_token_is_of_the_weights_that_its_span_says(seed):
    live = live_weights()
    with fake_engine(FakeStepRunner(following(live)), live=live, num_pages=65) as engine:
        history = History(engine, seed)
        history.run()
        for prompt, stream, outputs in history.streams:
            outputs += stream
            check(prompt, outputs, history.key_of)
        assert all_pages_are_back(engine)


def check(prompt: list[int], outputs: list[Any], key_of: dict[str, int]) -> None:
    tokens: dict[int, list[int]] = {}
    spans: dict[int, Any] = {}
    for output in outputs:
        for one in output.outputs:
            tokens.setdefault(one.index, []).extend(one.token_ids)
            if one.finish_reason is not None:
                spans[one.index] = one.weight_versions
    assert spans.keys() >= tokens.keys()
    for index, found in tokens.items():
        versions = spans[index]
        if versions is None:  # it ended before there was an update
            versions = []
            keys = [0] * len(found)
        else:
            keys = [key_of[span.version] for span in versions for _ in range(span.start, span.end)]
            starts = [span.start for span in versions]
            assert starts == [0, *(span.end for span in versions[:-1])][: len(starts)], "without gaps"
        assert len(keys) == len(found)
        text = list(prompt)
        for key in keys:
            text.append(hashed_token([key, *text]))
        assert found == text[len(prompt) :]


def test_two_hundred_updates_leave_nothing_behind():
    """Of every update's own objects not one stays: neither tensors, nor versions, nor what its requests held."""
    live = live_weights()

    def update(number: int) -> None:
        direct = number % 3 == 1
        engine.update_weights(tensors_of(number).items(), version=f"v{number}", direct=direct)
        if number % 3 == 2:
            engine.weights.start(partial=True)
            engine.weights.receive_delta("key", torch.tensor([1]), torch.tensor([float(number)]))
            engine.weights.finish(version=f"v{number} and a value")
        if number % 7 == 0:
            with pytest.raises(Lost):
                engine.update_weights(broken_off(tensors_of(number), 1))
        engine.generate([97, 98, 99], SamplingParams(max_tokens=2, ignore_eos=True))

    def counted() -> tuple[int, int]:
        """Live objects, and tensors among them."""
        assert all_pages_are_back(engine)
        runner.batches.clear()
        gc.collect()
        objects = gc.get_objects()
        return len(objects), sum(isinstance(one, torch.Tensor) for one in objects)

    runner = FakeStepRunner(following(live))
    with fake_engine(runner, live=live) as engine:
        for number in range(60):
            update(number)
        objects, tensors = counted()
        for number in range(60, 260):
            update(number)
        grown_objects, grown_tensors = counted()
        assert grown_tensors <= tensors
        assert grown_objects - objects < 100
