"""A policy gradient on a model's own answers (GRPO): the engine makes rollouts, and trains on its own numbers.

    python examples/grpo.py [MODEL] [STEPS]

Answers are rewarded for the share of letters in them. Each step samples a group of answers to each prompt, and raises
those above their group's mean. The trainer's log-probabilities are bitwise the engine's (docs/rollouts.md), so a first
update needs no ratio, and the example checks that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mllm_compile.model
from mllm_compile import Engine, MllmError, RequestOutput, SamplingParams, Trainable, trainable

TINY = Path(mllm_compile.model.__file__).parent / "tiny"  # the embedded model
PROMPTS = ["Return a new", "The for statement is", "def copy(x, memo):", "If the file cannot be"]
GROUP = 8  # answers to each prompt
SAMPLED = SamplingParams(temperature=1.0, max_tokens=16, logprobs=0, ignore_eos=True, n=GROUP)


def main(model: str = str(TINY), num_steps: int = 20) -> None:
    train({"model": {"path": model}, "runtime": {"deterministic": True, "max_model_len": 256}}, num_steps)


def train(config: dict[str, Any], num_steps: int) -> list[float]:
    """The mean reward of each step."""
    policy, rewards = trainable(config), []
    optimiser = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0)
    with Engine(config) as engine:
        for step in range(num_steps):
            outputs = engine.generate(PROMPTS, SAMPLED)
            rewards.append(learn(policy, outputs))
            optimiser.step()
            optimiser.zero_grad()
            engine.update_weights(policy.state_dict().items())
            print(f"step {step}: reward {rewards[-1]:.3f}")
    policy.close()
    return rewards


def learn(policy: Trainable, outputs: Sequence[RequestOutput]) -> float:
    """Adds the gradients of a step's answers; returns their mean reward."""
    token_ids, lengths, weights, told = [], [], [], []
    rewards = torch.tensor([[reward(answer.text) for answer in output.outputs] for output in outputs])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    for output, of_group in zip(outputs, advantages.tolist(), strict=True):
        for answer, advantage in zip(output.outputs, of_group, strict=True):
            ids = output.prompt_token_ids + answer.token_ids
            token_ids += ids
            lengths.append(len(ids))
            weights += [0.0] * len(output.prompt_token_ids) + [advantage] * len(answer.token_ids)
            told += [0.0] * len(output.prompt_token_ids)
            told += [entry[token].logprob for entry, token in zip(answer.logprobs or [], answer.token_ids, strict=True)]
    logprobs, weight, rollout = policy(token_ids, lengths), torch.tensor(weights), torch.tensor(told)
    is_answer = rollout != 0
    if not torch.equal(logprobs[is_answer], rollout[is_answer]):
        raise RuntimeError("the trainer's log-probabilities are not the engine's")
    (-(logprobs * weight).sum() / is_answer.sum()).backward()
    return float(rewards.mean())


def reward(text: str) -> float:
    return sum(letter.isalpha() for letter in text) / max(1, len(text))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
    except MllmError as error:
        sys.exit(str(error))
