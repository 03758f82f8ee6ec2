"""A drafter of one pass changes no token; a head whose keys are all right is always right, whatever happens to its
requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from mllm_compile.runtime.ops.attention.layer_op import attention_with_output
from mllm_compile.runtime.program.loaded import LoadedModel
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.speculation.block import DraftBlock
from tests.runtime.runner_cases import HEAD_DIM, HEADS, KV_HEADS, VOCAB, Loop, make_runner
from tests.runtime.step.test_draft_model import counts
from tests.runtime.step.test_hidden_drafter import Head, Model, logits_of, next_token
from tests.runtime.step.test_verify_steps import PARAMS, PROMPTS, seen

MASK = 10_000  # no token of the model


class BlockHead(Head):
    """Right if each row sees the keys of all hidden states before its block and of all the block; else wrong.

    Values of keys are averaged, so a row sees how many of each kind there are.
    """

    def __init__(self, shift: int = 0, from_newest: bool = False, most: int = 7) -> None:
        super().__init__(shift)
        self.block = DraftBlock(MASK, most, sees_ahead=True, from_newest=from_newest)

    def load(self, device: torch.device) -> LoadedModel:
        return replace(super().load(device), block=self.block)

    def body(self, inputs, all_rows=None):
        ids, positions, hidden = inputs["input_ids"], inputs["positions"], inputs["hidden_states"]
        is_read, is_mask = ids == NO_TOKEN, ids == MASK
        values = torch.zeros(len(ids), KV_HEADS, HEAD_DIM)
        said = [is_read & (hidden[:, 1] == positions), is_mask, ~is_read * positions]
        values[:, :, : len(said)] = torch.stack([one.float() for one in said], -1)[:, None]
        q, out = torch.zeros(len(ids), HEADS, HEAD_DIM), torch.empty(len(ids), HEADS, HEAD_DIM)
        attention_with_output(q, torch.zeros_like(values), values, out, self.layers[0].name)
        tokens = torch.zeros_like(ids)
        for row in np.flatnonzero(~is_read & ~is_mask).tolist():
            num_masks = next((n for n, is_one in enumerate(is_mask[row + 1 :].tolist()) if not is_one), None)
            num_masks = len(ids) - row - 1 if num_masks is None else num_masks
            first, token = int(positions[row]), ids[row]
            count = first + 1 + num_masks
            expected = torch.tensor([first, num_masks, sum(range(first, count))])
            for place in range(num_masks + 1):
                is_right = bool(((out[row + place, 0, :3] * count - expected).abs() < 0.1).all())
                following = next_token(token, torch.tensor(first + place))
                chosen = following if self.block.from_newest else token
                tokens[row + place] = (chosen + (self.shift if is_right else 1)) % VOCAB
                token = following
        return logits_of(tokens), None

    def hidden_states(self, body, num_tokens):
        return None


class ChainHead(Head):
    """EAGLE's head, whose masks go on with the guess before."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__(shift)
        self.block = DraftBlock(MASK, 32, sees_ahead=False, from_newest=True)

    def load(self, device: torch.device) -> LoadedModel:
        return replace(super().load(device), block=self.block)

    def body(self, inputs, all_rows=None):
        ids, positions, hidden = (inputs[name].clone() for name in ("input_ids", "positions", "hidden_states"))
        for row in np.flatnonzero(ids == MASK).tolist():
            # In a graph rows that stand for nothing may be between.
            before = int(np.flatnonzero(positions[:row] == positions[row] - 1)[-1])
            hidden[row] = torch.stack([ids[before], positions[row]])
            ids[row] = next_token(ids[before], positions[row])
        return super().body({"input_ids": ids, "positions": positions, "hidden_states": hidden})


HEADS_OF = {"block": BlockHead, "block from the newest": partial(BlockHead, from_newest=True), "chain": ChainHead}


def run(requests: Sequence[dict], head: Head | None, most: int = 3, prefix_cache: bool = False, **runtime) -> Loop:
    """The loop after these requests; None: nothing drafts."""
    loop = Loop(make_runner(Model(), draft_model=head, **runtime), prefix_cache, num_drafted=most)
    loop.requests = [loop.add(**{"max_tokens": 12} | request) for request in requests]
    loop.run()
    return loop


def compare(requests: Sequence[dict], head: Head, most: int = 3, **options) -> Loop:
    """The loop with drafts, after a look that one without gives the same tokens."""
    drafted = run(requests, head, most, **options)
    assert seen(drafted) == seen(run(requests, None, **options))
    assert any(batch.has_drafts for batch in drafted.batches)
    return drafted


@pytest.mark.parametrize("kind", HEADS_OF)
@pytest.mark.parametrize("most", [1, 3, 7])
@pytest.mark.parametrize("chunk", [64, 12])
def test_right_keys_give_right_drafts(kind, most, chunk):
    loop = compare([{"prompt": prompt} for prompt in PROMPTS], HEADS_OF[kind](), most, max_num_batched_tokens=chunk)
    drafted, accepted = counts(loop)
    assert drafted == accepted > 0


@pytest.mark.parametrize("kind", HEADS_OF)
def test_drafts_that_are_rejected_leave_right_keys(kind):
    """Draws go another way than the head guesses at times: what it guesses next is right all the same."""
    requests = [{"prompt": prompt, "temperature": 1.5, "seed": i, "max_tokens": 40} for i, prompt in enumerate(PROMPTS)]
    right = counts(compare(requests, HEADS_OF[kind]()))[1]
    assert right > 3 * counts(compare(requests, HEADS_OF[kind](1)))[1]


@pytest.mark.parametrize("kind", HEADS_OF)
@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_gives_the_same_tokens(name, kind):
    compare([{"prompt": prompt} | PARAMS[name] for prompt in PROMPTS], HEADS_OF[kind]())


@pytest.mark.parametrize("kind", HEADS_OF)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_requests_in_chunks_get_the_same_tokens(kind, prefix_cache):
    requests = [{"prompt": [*range(9), *prompt], "max_tokens": 20} for prompt in PROMPTS * 2]
    limits = {"num_pages": 26, "max_num_batched_tokens": 24}
    loop = compare(requests, HEADS_OF[kind](), prefix_cache=prefix_cache, **limits)
    assert any(request.num_preemptions for request in loop.requests)
    drafted, accepted = counts(loop)
    if not prefix_cache:
        assert drafted == accepted


def test_a_draft_is_no_longer_than_a_block():
    loop = compare([{"prompt": prompt} for prompt in PROMPTS], BlockHead(most=2), most=5)
    assert max(int(batch.num_new[: batch.num_decodes].max(initial=0)) for batch in loop.batches) == 3


def test_a_pass_has_no_more_rows_than_attention_takes_requests(monkeypatch):
    runner = make_runner(Model(), draft_model=BlockHead())
    runner.drafter.config = replace(runner.drafter.config, most_chained=12)
    loop, sizes, forward = Loop(runner), [], runner.drafter.forward

    def noted(batch):
        sizes.append(batch.batch_size)
        assert batch.sees_ahead is bool((batch.input_ids == MASK).any())
        return forward(batch)

    monkeypatch.setattr(runner.drafter, "forward", noted)
    loop.requests = [loop.add(prompt, max_tokens=12) for prompt in PROMPTS]
    loop.run()
    assert seen(loop) == seen(run([{"prompt": prompt} for prompt in PROMPTS], None))
    assert len(PROMPTS) < max(sizes) <= 12
    assert counts(loop)[1] > 0
