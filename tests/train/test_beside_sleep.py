"""A trainer and two engines on one device, which has no room for both: while one sleeps, the others work on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.errors import DeviceMemoryError, WeightsTornError
from tests.sleeping_arena import Machine
from tests.tiny_model import TINY, engine_of_pages, tiny_config
from tests.train.learner import InThread, Learner

PROMPTS = [[41, 30, 77, 102, 5, 90, 12, 5], [7, 7, 81, 7, 7], list(range(3, 34))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NUM_STEPS = 4


def answers(engine: Engine) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


def of_transformers(learner: Learner) -> list[list[int]]:
    learner.model.eval()
    found = []
    for prompt in PROMPTS:
        ids = learner.model.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
        )
        found.append(ids[0, len(prompt) :].tolist())
    return found


@pytest.fixture
def engines(eager_cache, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Engine]]:
    """The first one awake, the second one asleep."""
    machine = Machine()
    for module in ("store.source", "runtime.model_runner"):
        monkeypatch.setattr(f"mllm_compile.{module}.arena_on", lambda device: machine.arena())
    config = tiny_config(eager_cache, compile={"backend": "eager"}, runtime={"enable_sleep_mode": True})
    with ExitStack() as stack:
        second = stack.enter_context(engine_of_pages(config, 24))
        machine.size = int(1.5 * machine.taken)
        second.sleep(1)
        yield stack.enter_context(engine_of_pages(config, 24)), second


def test_a_trainer_learns_while_engines_beside_it_sleep_and_wake_in_turn(engines):
    awake, asleep = first, second = engines
    before = answers(awake)
    with pytest.raises(DeviceMemoryError, match="full"):
        asleep.wake_up()
    reference = Learner(TINY, torch.float32, "cpu")
    alone = [reference.step() for _ in range(2 * NUM_STEPS)]
    learner = Learner(TINY, torch.float32, "cpu")
    beside = InThread(learner, NUM_STEPS)
    rounds = 0
    while beside.is_running or rounds < 3:
        awake.sleep(1)
        asleep.wake_up()
        awake, asleep = asleep, awake
        assert answers(awake) == before
        rounds += 1
    losses = beside.losses()

    def change(woken: Engine, other: Engine) -> None:
        other.sleep(1)
        woken.wake_up()
        assert answers(woken) == before

    for _ in range(NUM_STEPS):  # with activations held, and with gradients
        losses.append(learner.step(lambda: change(asleep, awake), lambda: change(awake, asleep)))
    assert losses == alone, "no number of the trainer's was touched"

    told = of_transformers(learner)
    for engine, other in ((first, second), (second, first)):  # what it has learnt comes in the place of lost weights
        other.sleep(1)
        engine.wake_up()
        engine.sleep(2)
        engine.wake_up(["weights"])
        with pytest.raises(WeightsTornError):
            engine.resume()
        engine.update_weights(learner.model.state_dict().items())
        engine.wake_up()
        assert answers(engine) == told != before
