"""A trainer and two engines on one GPU: while an engine sleeps, the others have its memory, and touch none of its."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from mllm_compile import Engine
from tests.e2e.test_weight_updates import answers, tensors_of
from tests.gpu.small_shape import WIDE
from tests.gpu.test_sleep import MIB, free_bytes
from tests.gpu.test_weight_updates import PROMPTS, config_of
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as shape_of
from tests.train.learner import InThread, Learner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

NUM_STEPS, ROUNDS = 8, 4


def test_a_trainer_learns_while_engines_beside_it_sleep_and_wake_in_turn(tmp_path):
    folder = tmp_path / "model"
    save_tiny_model(shape_of("qwen3", **WIDE), folder)
    config = config_of(folder, tmp_path / "cache", "auto") | {"compile": {"backend": "eager"}}
    config["runtime"] |= {"enable_sleep_mode": True, "max_total_tokens": 4096}
    reference = Learner(folder, torch.bfloat16, "cuda")
    alone = [reference.step() for _ in range(2 * NUM_STEPS)]
    with ExitStack() as stack:
        asleep = first = stack.enter_context(Engine(config))
        before = answers(first, PROMPTS)
        asleep.sleep(1)
        free = free_bytes()
        asleep.wake_up()
        assert free - free_bytes() >= asleep.sleep_bytes - MIB > 0
        asleep.sleep(1)
        awake = second = stack.enter_context(Engine(config))
        assert answers(awake, PROMPTS) == before

        def change(woken: Engine, other: Engine) -> None:
            other.sleep(1)
            woken.wake_up()
            assert answers(woken, PROMPTS) == before

        learner = Learner(folder, torch.bfloat16, "cuda")
        beside = InThread(learner, NUM_STEPS)
        for _ in range(ROUNDS):
            change(asleep, awake)
            asleep, awake = awake, asleep
        losses = beside.losses()
        for _ in range(NUM_STEPS):  # with activations held, and with gradients
            losses.append(learner.step(lambda: change(asleep, awake), lambda: change(awake, asleep)))
        torch.testing.assert_close(losses, alone, rtol=2e-2, atol=0)  # 16 bits; another's numbers are far off

        learnt = {name: one.detach().clone() for name, one in learner.model.state_dict().items()}
        for engine, other in ((first, second), (second, first)):
            other.sleep(1)
            engine.wake_up()
            engine.sleep(2)
            engine.wake_up(["weights"])
            engine.update_weights(learnt.items())
            engine.wake_up()
        told = answers(second, PROMPTS)
        second.sleep(1)
        first.wake_up()
        assert answers(first, PROMPTS) == told != before
        first.update_weights(tensors_of(folder).items())
        assert answers(first, PROMPTS) == before
