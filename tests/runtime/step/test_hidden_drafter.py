"""A drafter that reads hidden states changes no token; one that is given the right ones is always right, whatever
happens to its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mllm_compile.runtime.config_sections import SpeculativeSection
from mllm_compile.runtime.memory_profile import run_largest_batch
from mllm_compile.runtime.ops.attention.layer_op import attention_with_output
from mllm_compile.runtime.program.loaded import LoadedModel
from tests.runtime.attention.attention_cases import make_layer
from tests.runtime.cuda_graph.played_cases import Model as PlayedModel
from tests.runtime.cuda_graph.played_cases import capture_on_cpu
from tests.runtime.runner_cases import HEAD_DIM, HEADS, KV_HEADS, VOCAB, Loop, TinyModel, make_runner
from tests.runtime.step.test_draft_model import counts
from tests.runtime.step.test_verify_steps import PARAMS, PROMPTS, seen


def next_token(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return (3 * tokens + 5 * positions + 1).long() % VOCAB


def logits_of(tokens: torch.Tensor) -> torch.Tensor:
    return 9.0 * torch.nn.functional.one_hot(tokens, VOCAB).float()


class Model(TinyModel):
    """The next token follows from a token and its position, which are its hidden state."""

    def body(self, inputs, all_rows=None):
        return torch.stack([inputs["input_ids"], inputs["positions"]], -1).float()

    def head(self, body, logits_indices):
        return logits_of(next_token(*body[logits_indices].unbind(-1)))

    def hidden_states(self, body, num_tokens):
        return body[:num_tokens]


class Head(PlayedModel):
    """Right if all its keys, and what it reads, were made of the hidden states that belong there; else wrong.

    At position t it reads (token t, t) and token t + 1. Values of keys are averaged, so it sees all of them: each says
    whether its hidden state was of its position, and the tokens that hidden states tell must be those read before.
    """

    def __init__(self, shift: int = 0, depth: int = 0) -> None:
        """
        Args:
            shift: 1 makes all it guesses wrong.
            depth: layers before this one; each reads a token further on.
        """
        super().__init__()
        self.layers, self.shift, self.depth = (make_layer(HEADS, KV_HEADS, HEAD_DIM),), shift, depth

    def load(self, device: torch.device) -> LoadedModel:
        return replace(super().load(device), layers=self.layers, hidden_size=2, reads_hidden_states=True)

    def body(self, inputs, all_rows=None):
        ids, positions, hidden = inputs["input_ids"], inputs["positions"], inputs["hidden_states"]
        before, place = hidden.unbind(-1)
        values = torch.zeros(len(ids), KV_HEADS, HEAD_DIM)
        said = [place == positions + self.depth, before, ids, before * (positions == 0)]
        values[:, :, : len(said)] = torch.stack([one.float() for one in said], -1)[:, None]
        q, k, out = (
            torch.zeros(len(ids), HEADS, HEAD_DIM),
            torch.zeros_like(values),
            torch.empty(len(ids), HEADS, HEAD_DIM),
        )
        attention_with_output(q, k, values, out, self.layers[0].name)
        count = (positions + 1).float()
        are_of_place, sum_before, sum_ids, first = (out[:, 0, : len(said)] * count[:, None]).unbind(-1)
        is_chain = (sum_before - (first + sum_ids - ids)).abs() < 0.1
        is_right = ((are_of_place - count).abs() < 0.1) & is_chain
        tokens = (next_token(ids, positions + 1 + self.depth) + torch.where(is_right, self.shift, 1)) % VOCAB
        return logits_of(tokens), torch.stack([ids, positions + 1 + self.depth], -1).float()

    def head(self, body, logits_indices):
        return body[0][logits_indices]

    def hidden_states(self, body, num_tokens):
        return body[1][:num_tokens]


def run(
    requests: Sequence[dict],
    shift: int | None,
    most: int = 3,
    prefix_cache: bool = False,
    num_layers: int = 1,
    **runtime,
) -> Loop:
    """The loop after these requests; None: nothing drafts."""
    head = None if shift is None else [Head(shift, depth) for depth in range(num_layers)]
    loop = Loop(make_runner(Model(), draft_model=head, **runtime), prefix_cache, num_drafted=most)
    loop.requests = [loop.add(**{"max_tokens": 12} | request) for request in requests]
    loop.run()
    return loop


def compare(requests: Sequence[dict], shift: int, most: int = 3, **options) -> Loop:
    """The loop with drafts, after a look that one without gives the same tokens."""
    drafted = run(requests, shift, most, **options)
    assert seen(drafted) == seen(run(requests, None, **options))
    assert any(batch.has_drafts for batch in drafted.batches)
    return drafted


@pytest.mark.parametrize("most", [1, 3, 7])
@pytest.mark.parametrize("chunk", [64, 8])
def test_right_hidden_states_give_right_drafts(most, chunk):
    loop = compare([{"prompt": prompt} for prompt in PROMPTS], 0, most, max_num_batched_tokens=chunk)
    drafted, accepted = counts(loop)
    assert drafted == accepted > 0
    section = SpeculativeSection(method="eagle3", num_speculative_tokens=most)
    most_kept = replace(loop.runner.config, speculative=section).num_kept_hidden_states(1)
    kept = loop.steps.drafter._kept.states
    assert kept.shape[:2].numel() <= most_kept
    assert run_largest_batch(loop.runner) == kept[0, 0].nbytes
    if chunk == 64:
        assert len(loop.batches) == 1 + -(-11 // (most + 1))


def test_drafts_that_are_rejected_leave_right_keys():
    """Draws go another way than the head guesses at times: what it guesses next is right all the same."""
    requests = [{"prompt": prompt, "temperature": 1.5, "seed": i, "max_tokens": 40} for i, prompt in enumerate(PROMPTS)]
    loop = compare(requests, 0)
    right, guessed = counts(loop)[1], counts(compare(requests, 1))[1]
    assert right > 3 * guessed


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_gives_the_same_tokens(name, shift):
    compare([{"prompt": prompt} | PARAMS[name] for prompt in PROMPTS], shift)


@pytest.mark.parametrize("params", [{}, {"temperature": 3.0}])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_preempted_requests_in_chunks_get_the_same_tokens(shift, prefix_cache, params):
    requests = [{"prompt": [*range(9), *prompt], "max_tokens": 20} | params for prompt in PROMPTS * 2]
    limits = {"num_pages": 26, "max_num_batched_tokens": 14}
    loop = compare(requests, shift, prefix_cache=prefix_cache, **limits)
    assert any(request.num_preemptions for request in loop.requests)
    assert any(request.num_cached_tokens for request in loop.requests) is prefix_cache
    drafted, accepted = counts(loop)
    if not params:
        assert accepted == (0 if shift else drafted)


@pytest.mark.parametrize("num_layers, most", [(2, 2), (3, 3), (3, 1), (3, 7), (6, 6)])
@pytest.mark.parametrize("chunk", [64, 9])
def test_layers_that_draft_a_token_each_are_right(num_layers, most, chunk):
    loop = compare(
        [{"prompt": prompt} for prompt in PROMPTS], 0, most, num_layers=num_layers, max_num_batched_tokens=chunk
    )
    drafted, accepted = counts(loop)
    assert drafted == accepted > 0
    section = SpeculativeSection(method="mtp", num_speculative_tokens=most)
    most_kept = replace(loop.runner.config, speculative=section).num_kept_hidden_states(num_layers)
    assert loop.steps.drafter._kept.states.shape[:2].numel() <= most_kept
    if chunk == 64:
        assert len(loop.batches) == 1 + -(-11 // (min(most, num_layers) + 1))


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_layers_are_right_behind_rejected_drafts_and_in_preempted_requests(prefix_cache):
    """Draws go another way than greedy guesses at times: then every layer reads other tokens at the same positions."""
    requests = [
        {"prompt": [*range(9), *prompt], "temperature": 1.5 * (place % 2), "seed": place, "max_tokens": 30}
        for place, prompt in enumerate(PROMPTS * 2)
    ]
    limits = {"num_pages": 30, "max_num_batched_tokens": 14, "num_layers": 3}
    loop = compare(requests, 0, prefix_cache=prefix_cache, **limits)
    assert any(request.num_preemptions for request in loop.requests)
    assert any(request.num_cached_tokens for request in loop.requests) is prefix_cache
    greedy = [request for request in loop.requests if request.params.temperature == 0]
    for request in greedy:
        assert request.num_drafted_tokens == request.num_accepted_tokens > 0
    guessed = counts(compare(requests, 1, prefix_cache=prefix_cache, **limits))[1]
    assert counts(loop)[1] > 2 * guessed + sum(request.num_accepted_tokens for request in greedy) / 2


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("kept", [5, 13, 16, 27])
def test_a_prefix_hit_brings_right_keys_wherever_the_answer_goes_on_otherwise(kept, num_layers):
    """The last keys of a page are made of tokens behind it. Drafts and what ends with a request leave no gaps."""
    heads = [Head(0, depth) for depth in range(num_layers)]
    loop = Loop(make_runner(Model(), draft_model=heads), True, num_drafted=3)
    first = loop.add(PROMPTS[0], max_tokens=28)
    loop.run()
    text = [*PROMPTS[0], *first.output_token_ids][:kept]
    for token in (7, 8):
        request = loop.add([*text, token, 3], max_tokens=12)
        loop.run()
        assert (request.num_cached_tokens > 0) is (kept >= 13)
        assert request.num_drafted_tokens == request.num_accepted_tokens > 0


@pytest.mark.parametrize("num_layers", [1, 3])
def test_keys_of_an_answer_that_had_no_drafts_are_there_when_it_is_a_prefix(num_layers, monkeypatch):
    heads = [Head(0, depth) for depth in range(num_layers)]
    loop = Loop(make_runner(Model(), draft_model=heads), True, num_drafted=3)
    with monkeypatch.context() as without_drafts:
        without_drafts.setattr(loop.scheduler.drafts, "may_draft", lambda request: False)
        firsts = [loop.add(prompt, max_tokens=30) for prompt in PROMPTS]
        loop.run()
    for first in firsts:
        request = loop.add([*first.prompt_token_ids, *first.output_token_ids, 7], max_tokens=12)
        loop.run()
        assert request.num_cached_tokens >= 24
        assert request.num_drafted_tokens == request.num_accepted_tokens > 0


@pytest.mark.parametrize("num_layers", [1, 3])
def test_of_a_prompt_that_is_broken_off_only_what_was_computed_is_read(num_layers, monkeypatch):
    heads = [Head(0, depth) for depth in range(num_layers)]
    loop = Loop(make_runner(Model(), draft_model=heads, max_num_batched_tokens=9), True, num_drafted=3)
    request = loop.add(range(2, 60))
    loop._turn(loop._turn(None, False), False)
    assert loop.scheduler.finish(request, "abort")
    monkeypatch.setattr(loop.steps.drafter, "_read", lambda *_: pytest.fail("nothing of it is kept"))
    loop.steps.drafter.settle()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_what_ends_costs_a_pass_only_where_others_may_share_its_pages(prefix_cache, monkeypatch):
    loop = Loop(make_runner(Model(), draft_model=Head()), prefix_cache, num_drafted=3)
    left: list[object] = []
    monkeypatch.setattr(loop.steps.drafter, "leave", left.append)
    request = loop.add(PROMPTS[0])
    loop.run()
    assert left == [request] * prefix_cache


def test_keys_that_pages_lack_are_written_before_drafts_take_these_pages(monkeypatch):
    loop = Loop(make_runner(Model(), draft_model=Head()), num_drafted=3)
    drafter, done = loop.steps.drafter, []
    for name in ("settle", "_enter_pages"):
        method = getattr(drafter, name)
        monkeypatch.setattr(drafter, name, lambda *args, name=name, do=method: (done.append(name), do(*args)))
    loop.add(PROMPTS[0])
    loop.run()
    where = [place for place, name in enumerate(done) if name == "_enter_pages"]
    assert where and all(done[place - 1] == "settle" for place in where)
    assert done.count("settle") == len(loop.batches) + len(where)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("num_alone", [4, 10, 20])
def test_requests_that_had_no_room_for_drafts_catch_up(num_alone, num_layers):
    """Four decodes fill a step; when two have ended, the head reads what is kept of the others."""
    requests = [{"prompt": prompt, "max_tokens": num_alone + 14 * (i % 2)} for i, prompt in enumerate(PROMPTS)]
    loop = compare(requests, 0, num_layers=num_layers, max_num_batched_tokens=4, max_running_requests=4)
    drafted, accepted = counts(loop)
    assert drafted == accepted > 0


def test_an_ended_request_leaves_nothing():
    drafter = run([{"prompt": prompt} for prompt in PROMPTS], 0).steps.drafter
    assert not drafter._computed and not drafter._kept._held


@pytest.mark.parametrize("most", [1, 3])
def test_passes_in_graphs_read_and_give_on_the_same_hidden_states(played, most):
    """Decodes and pieces of the head are replayed, in fewer rows from pass to pass."""
    runner = make_runner(Model(), draft_model=Head())
    capture_on_cpu(runner.drafter, decode_requests=(1, 2, 4), piecewise_tokens=(8, 16))
    loop = Loop(runner, num_drafted=most)
    loop.requests = [loop.add(prompt, max_tokens=6 + 3 * i) for i, prompt in enumerate(PROMPTS)]
    with torch.inference_mode():
        loop.run()
    plain = run([{"prompt": prompt, "max_tokens": 6 + 3 * i} for i, prompt in enumerate(PROMPTS)], None)
    assert seen(loop) == seen(plain)
    drafted, accepted = counts(loop)
    assert drafted == accepted > 0
    assert runner.drafter.attn_backend.prepared > 0, "decodes were replayed"
