"""Ranks take new weights together: each keeps its part, all swap behind one step, what one refuses none has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.errors import WeightsTornError, WeightUpdateError
from tests.e2e.test_weight_updates import tensors_of, write_changed
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as shape_of
from tests.tiny_model import tiny_config

PROMPTS = [[41, 30, 77, 102, 5, 90, 12, 5] * 2, [7, 7, 81, 7, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answers(engine: Engine) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


class Lost(RuntimeError):
    """A sender that is gone."""


def broken_off(tensors: dict[str, torch.Tensor], count: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(tensors.items())[:count]
    raise Lost("the sender is gone")


@pytest.mark.parametrize(
    "runtime", [{"tensor_parallel_size": 2}, pytest.param({"expert_parallel_size": 2}, marks=pytest.mark.slow)]
)
def test_all_ranks_have_the_old_weights_or_the_new_ones(runtime, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    save_tiny_model(shape_of("mixtral", num_hidden_layers=2), first)
    write_changed(first, second)
    configs = [
        tiny_config(
            tmp_path / "cache",
            model={"path": str(folder)},
            compile={"backend": "eager"},
            runtime={"max_model_len": 64, **runtime},
        )
        for folder in (first, second)
    ]
    with Engine(configs[1]) as fresh:
        expected = answers(fresh)
    check(configs[0], first, second, expected)


def check(config: object, first: Path, second: Path, expected: list[list[int]]) -> None:
    old, new = tensors_of(first), tensors_of(second)
    with Engine(config) as engine:  # type: ignore[arg-type]
        before = answers(engine)
        assert before != expected
        last_expert = next(name for name in reversed(new) if "experts.3" in name)
        faults = {
            "holds NaN or inf": new | {last_expert: torch.full_like(new[last_expert], float("nan"))},
            "the update lacks": {name: tensor for name, tensor in new.items() if name != last_expert},
            "expected shape": new | {last_expert: new[last_expert][:1]},
        }
        for message, tensors in faults.items():
            with pytest.raises(WeightUpdateError, match=message):
                engine.update_weights(tensors.items())
        for count in (0, 1, len(new) - 1):
            with pytest.raises(Lost):
                engine.update_weights(broken_off(new, count))
        assert answers(engine) == before
        engine.update_weights(new.items())
        assert answers(engine) == expected
        with pytest.raises(Lost):
            engine.update_weights(broken_off(old, 3), direct=True)
        with pytest.raises(WeightsTornError):
            answers(engine)
        engine.update_weights(old.items(), direct=True)
        assert answers(engine) == before
        engine.weights.start(partial=True)
        name = next(name for name in new if name.endswith("q_proj.weight"))
        places = torch.arange(new[name].numel())
        engine.weights.receive_delta(name, places, new[name].flatten())
        engine.weights.receive((one, tensor) for one, tensor in new.items() if one != name)
        engine.weights.finish()
        assert answers(engine) == expected
