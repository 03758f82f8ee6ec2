"""Steps with grammars: their tokens, when masks are made, and what happens around them.

The grammars are made up: a rule says which tokens may follow an output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mllm_compile.runtime.config_sections import SpeculativeSection
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from mllm_compile.runtime.step.results import StepHandle
from mllm_compile.runtime.step.runner import StepRunner
from tests.runtime.runner_cases import VOCAB, Loop, TinyModel, make_runner
from tests.runtime.step.decode_loop_cases import LoopedRunner
from tests.runtime.step.test_verify_steps import KINDS, ReplayingDrafter

EOS = 0
MOST_DRAFTED = 4
EVERYTHING = frozenset(range(VOCAB))
PROMPTS = [[3, 9, 27, 20, 60], [1, 2], [7] * 21, [5, 4, 3, 2, 1, 59, 58, 57, 33, 12]]

Rule = Callable[[list[int]], frozenset[int]]


class FakeMasks:
    """Makes masks by each grammar's rule, and notes what it was given."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[list[int], list[int]]]] = []
        self.events: list[str] = []

    def fill(self, work, masks):
        self.events.append("masks")
        self.calls.append([(list(part.matcher.output), list(part.token_ids)) for part in work])
        faults = {}
        for part in work:
            part.matcher.output += part.token_ids
            output, allowed = list(part.matcher.output), None
            masks[part.rows] = 0
            for row, drafted in enumerate([None, *part.drafted], start=part.row):
                if drafted is not None and drafted not in allowed:
                    break
                output += [] if drafted is None else [drafted]
                allowed = part.matcher.rule(output)
                if allowed is None:
                    faults[part.row] = "the rule says no"
                    break
                is_allowed = np.zeros(masks.shape[1] * 32, bool)
                is_allowed[sorted(allowed)] = True
                masks[row] = np.packbits(is_allowed, bitorder="little").view(np.int32)
        return faults


class FakeMatcher:
    def __init__(self, rule: Rule) -> None:
        self.rule, self.output = rule, []


class FakeGrammar:
    first_time = None

    def __init__(self, masks: FakeMasks, rule: Rule) -> None:
        self.masks, self.rule = masks, rule

    def matcher(self):
        return FakeMatcher(self.rule)


def add(loop: Loop, prompt, grammar=None, **params) -> Request:
    request = Request(
        request_id=str(prompt),
        prompt_token_ids=list(prompt),
        params=SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | params)),
        eos_token_ids=frozenset({EOS}),
        grammar=grammar,
    )
    loop.scheduler.add(request)
    return request


def run(prompts, rules, overlap=True, num_pages=100, masks=None, params=(), most_looped=0, drafter=None, **config):
    """Requests with a rule each (None: no grammar), and the loop; up to `most_looped` decodes are one launch."""
    masks = masks or FakeMasks()
    runner, speculation = make_runner(TinyModel(), num_pages=num_pages, **config), None
    if drafter is not None:
        section = SpeculativeSection(method="ngram", num_speculative_tokens=MOST_DRAFTED)
        runner.config = replace(runner.config, speculative=section)
        speculation = Speculation(drafter=TextDrafter(drafter), num_tokens=MOST_DRAFTED, vocab_size=VOCAB)
    loop = Loop(runner, speculation=speculation)
    if most_looped:
        loop.steps = StepRunner(LoopedRunner(runner, most_looped), Sampler())
    each = params or [{}] * len(prompts)
    requests = [
        add(loop, prompt, rule and FakeGrammar(masks, rule), **one)
        for prompt, rule, one in zip(prompts, rules, each, strict=True)
    ]
    loop.run(overlap)
    return requests, loop


def after(output: list[int]) -> frozenset[int]:
    """Tokens that depend on the last one and on how many there are, never end-of-sequence."""
    last = output[-1] if output else 17
    return frozenset({1 + (last * 7 + len(output)) % 60, 1 + (last + 30) % 60})


def outputs(requests):
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_token_is_one_that_the_rule_allows_after_those_before(overlap, deterministic):
    requests, _ = run(PROMPTS, [after] * 4, overlap, deterministic=deterministic)
    for request in requests:
        output = request.output_token_ids
        assert len(output) == 8
        assert all(token in after(output[:index]) for index, token in enumerate(output))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "seed": 3, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.5, "logit_bias": {5: 2.0}},
        {"temperature": 1.0, "seed": 1, "frequency_penalty": 0.5},
    ],
)
def test_a_mask_of_all_tokens_gives_the_same_tokens_as_none(params):
    each = [params] * 4
    plain, _ = run(PROMPTS, [None] * 4, params=each)
    masked, _ = run(PROMPTS, [lambda output: EVERYTHING] * 4, params=each)
    assert outputs(masked) == outputs(plain)


@pytest.mark.parametrize("rules", [[after] * 4, [after, None, after, None], [lambda output: EVERYTHING] * 4])
def test_steps_in_one_launch_give_the_tokens_that_others_give(rules):
    each = [{}, {"temperature": 1.0, "seed": 2}, {"temperature": 0.7, "seed": 5, "top_k": 20}, {"max_tokens": 3}]
    plain, _ = run(PROMPTS, rules, params=each)
    looped, loop = run(PROMPTS, rules, params=each, most_looped=8)
    assert loop.steps._runner.decodes > 4
    assert outputs(looped) == outputs(plain)


def test_a_neighbour_without_a_grammar_keeps_its_tokens():
    plain, _ = run(PROMPTS, [None] * 4, params=[{}, {"temperature": 1.0, "seed": 2}, {}, {}])
    mixed, _ = run(PROMPTS, [after, None, after, None], params=[{}, {"temperature": 1.0, "seed": 2}, {}, {}])
    assert outputs(mixed)[1::2] == outputs(plain)[1::2]
    assert outputs(mixed)[0::2] != outputs(plain)[0::2]


def test_chunked_prompts_and_prefix_hits_make_no_difference():
    whole, _ = run(PROMPTS, [after] * 4)
    chunked, loop = run(PROMPTS, [after] * 4, max_num_batched_tokens=8)
    assert outputs(chunked) == outputs(whole)
    assert any(not batch.sample_mask.all() for batch in loop.batches)


def test_a_preempted_request_goes_on_where_its_grammar_was():
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]]
    each = [{"max_tokens": 14}] * 3
    roomy, _ = run(prompts, [after] * 3, params=each)
    tight, loop = run(prompts, [after] * 3, params=each, num_pages=9)
    assert loop.scheduler.stats().preemptions > 0
    assert outputs(tight) == outputs(roomy)


def test_in_a_steady_batch_a_grammar_takes_one_token_a_step():
    masks = FakeMasks()
    run(PROMPTS[:2], [after] * 2, masks=masks)
    assert [len(call) for call in masks.calls] == [2] * 8, "one call a step, for all rows"
    assert {len(new) for call in masks.calls[1:] for _, new in call} == {1}


def test_the_forward_of_a_step_is_launched_before_the_tokens_before_it_are_waited_for(monkeypatch):
    masks = FakeMasks()
    events = masks.events

    def noted(owner, name, event):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (events.append(event), function(*args))[1])

    noted(ModelRunner, "forward", "forward")
    noted(StepHandle, "wait_for_tokens", "tokens")
    noted(Sampler, "__call__", "sampling")
    run(PROMPTS[:1], [after], masks=masks, params=[{"max_tokens": 3}])
    first, later = ["forward", "masks", "sampling"], ["forward", "tokens", "masks", "sampling"]
    assert events == first + later + later


def test_a_step_without_grammars_asks_for_no_masks_and_keeps_no_step(monkeypatch):
    monkeypatch.setattr("mllm_compile.runtime.step.grammar_rows.GrammarRows.mask", None)
    requests, loop = run(PROMPTS, [None] * 4)
    assert [len(output) for output in outputs(requests)] == [8] * 4
    assert loop.steps.sampling._previous is None
    assert loop.steps.sampling._grammars._masks is None, "no memory was taken for masks"


def test_when_grammars_are_gone_steps_are_plain_again():
    _, loop = run(PROMPTS, [after, None, None, None], params=[{"max_tokens": 2}, {}, {}, {}])
    assert not loop.steps.sampling._grammars
    assert loop.steps.sampling._previous is None


def test_end_of_sequence_ends_it_and_the_step_too_many_asks_for_nothing():
    masks = FakeMasks()

    def two_tokens(output):
        return frozenset({9}) if len(output) < 2 else frozenset({EOS})

    requests, _ = run(PROMPTS[:1], [two_tokens], masks=masks)
    assert requests[0].output_token_ids == [9, 9, EOS]
    assert requests[0].finish_reason == "stop"
    assert len(masks.calls) == 3
    assert all(EOS not in new for call in masks.calls for _, new in call)


def test_min_tokens_forbids_the_end_while_the_grammar_allows_something_else():
    def open_ended(output):
        return frozenset({9, EOS})

    bias = {EOS: 100.0}
    requests, _ = run(PROMPTS[:1], [open_ended], params=[{"min_tokens": 5, "logit_bias": bias}])
    assert requests[0].output_token_ids == [9] * 5 + [EOS]


def test_a_grammar_that_is_complete_ends_the_answer_before_min_tokens():
    def three(output):
        return frozenset({9}) if len(output) < 3 else frozenset({EOS})

    requests, _ = run(PROMPTS[:1], [three], params=[{"min_tokens": 7}])
    assert requests[0].output_token_ids == [9, 9, 9, EOS]
    assert requests[0].finish_reason == "stop"


def test_stop_tokens_are_forbidden_before_min_tokens_too():
    def either(output):
        return frozenset({9, 11})

    each = [{"min_tokens": 3, "stop_token_ids": [11], "logit_bias": {11: 100.0}}]
    requests, _ = run(PROMPTS[:1], [either], params=each)
    assert requests[0].output_token_ids == [9, 9, 9, 11]
    assert (requests[0].finish_reason, requests[0].stop_reason) == ("stop", 11)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_fault_of_a_grammar_ends_its_request_alone(overlap, when):
    def faulty(output):
        return None if len(output) == when else after(output)

    requests, loop = run(PROMPTS, [after, faulty, None, after], overlap)
    alone, _ = run(PROMPTS, [after, after, None, after], overlap)
    assert requests[1].finish_reason == "abort"
    assert requests[1].grammar_fault == "the rule says no"
    assert len(requests[1].output_token_ids) == when
    for index in (0, 2, 3):
        assert requests[index].output_token_ids == alone[index].output_token_ids
    assert loop.scheduler.stats().pages_used == 0


def test_a_mask_of_nothing_ends_the_request_alone():
    requests, _ = run(PROMPTS[:2], [lambda output: frozenset(), after])
    assert requests[0].finish_reason == "abort"
    assert len(requests[1].output_token_ids) == 8


def test_log_probabilities_are_the_models_own_not_the_masks():
    plain, _ = run(PROMPTS[:1], [None], params=[{"logprobs": 5, "max_tokens": 1}])
    masked, _ = run(PROMPTS[:1], [after], params=[{"logprobs": 5, "max_tokens": 1}])
    (of_plain,), (of_masked,) = plain[0].output_logprobs, masked[0].output_logprobs
    assert of_masked.top == of_plain.top
    assert of_masked.token_id in after([])
    assert of_masked.rank > 1


def test_more_requests_with_grammars_than_run_at_once_wait_their_turn():
    prompts = [[number + 1, 2 * number + 1] for number in range(12)]
    requests, _ = run(prompts, [after] * 12, max_running_requests=3)
    alone = [run([prompt], [after])[0][0].output_token_ids for prompt in prompts]
    assert outputs(requests) == alone


def test_a_grammar_and_its_copy_do_not_share_their_state():
    masks = FakeMasks()
    grammar = FakeGrammar(masks, after)
    loop = Loop(make_runner(TinyModel()))
    first, second = (add(loop, prompt, grammar) for prompt in PROMPTS[:2])
    loop.run()
    for request in (first, second):
        output = request.output_token_ids
        assert all(token in after(output[:index]) for index, token in enumerate(output))


# Drafts ---------------------------------------------------------------------------------------------------------------


def compare(prompts, rules, kind, answers=None, **options):
    """The requests without and with drafts, and the loop of these, after a look that all are the same."""
    plain, _ = run(prompts, rules, **options)
    known = answers or {tuple(request.prompt_token_ids): request.output_token_ids for request in plain}
    drafted, loop = run(prompts, rules, drafter=ReplayingDrafter(known, kind), **options)
    for ours, theirs in zip(drafted, plain, strict=True):
        assert ours.output_token_ids == theirs.output_token_ids
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        assert ours.grammar_fault == theirs.grammar_fault
        assert [s.token_id for s in ours.output_logprobs] == [s.token_id for s in theirs.output_logprobs]
    assert loop.scheduler.stats().pages_used == 0
    return plain, drafted, loop


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token_of_a_grammar(kind, deterministic):
    each = [{}, {"temperature": 1.0, "seed": 2, "logprobs": 2}, {"temperature": 0.7, "seed": 5, "top_k": 20}, {}]
    rules = [after, after, None, after]
    _, drafted, loop = compare(PROMPTS, rules, kind, params=each, deterministic=deterministic)
    assert any(batch.has_drafts for batch in loop.batches)
    assert all(request.num_drafted_tokens > 0 for request in drafted)
    for request in (drafted[0], drafted[1], drafted[3]):
        output = request.output_token_ids
        assert all(token in after(output[:index]) for index, token in enumerate(output))
    if kind == "right":
        assert len(loop.batches) == 3, "a prompt, then all that a draft and the token behind it have"


@pytest.mark.parametrize("kind", KINDS)
def test_drafted_grammars_go_with_penalties_preemption_and_chunks(kind):
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]]
    each = [{"max_tokens": 14, "frequency_penalty": 0.7}] * 3
    _, _, loop = compare(prompts, [after] * 3, kind, params=each, num_pages=9)
    assert loop.scheduler.stats().preemptions > 0
    compare(prompts, [after, None, after], kind, params=each, max_num_batched_tokens=8)


def test_in_a_verify_step_a_grammar_takes_what_was_accepted():
    masks = FakeMasks()
    plain, _ = run(PROMPTS[:1], [after], params=[{"max_tokens": 11}])
    answer = plain[0].output_token_ids
    drafter = ReplayingDrafter({tuple(PROMPTS[0]): answer}, "right")
    run(PROMPTS[:1], [after], masks=masks, params=[{"max_tokens": 11}], drafter=drafter)
    taken = [new for call in masks.calls for _, new in call]
    assert taken == [[], answer[:1], answer[1:6]]


def ending(length: int) -> Rule:
    return lambda output: frozenset({9}) if len(output) < length else frozenset({EOS})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 4, 5, 8])
def test_an_end_anywhere_in_a_draft_ends_the_answer(length, kind):
    answers = {tuple(PROMPTS[0]): [9] * length + [EOS, 9, 9, EOS]}
    _, drafted, _ = compare(PROMPTS[:1], [ending(length)], kind, answers, params=[{"max_tokens": 20, "min_tokens": 9}])
    assert drafted[0].output_token_ids == [9] * length + [EOS]


@pytest.mark.parametrize("kind", KINDS)
def test_min_tokens_hold_behind_each_drafted_token(kind):
    def either(output):
        return frozenset({9, 11, EOS})

    bias = {11: 50.0, EOS: 100.0}
    for stop in ([], [11]):
        each = [{"min_tokens": 6, "max_tokens": 12, "stop_token_ids": stop, "logit_bias": bias}]
        compare(PROMPTS[:1], [either], kind, {tuple(PROMPTS[0]): [11, 9, EOS] * 4}, params=each)
        compare(PROMPTS[:1], [either], kind, params=each)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", [0, 1, 3, 6])
def test_a_fault_of_a_grammar_ends_a_drafted_request_alone(when, kind):
    def faulty(output):
        return None if len(output) == when else after(output)

    healthy, _ = run(PROMPTS, [after] * 4)
    answers = {tuple(request.prompt_token_ids): request.output_token_ids for request in healthy}
    _, drafted, _ = compare(PROMPTS, [after, faulty, None, after], kind, answers)
    assert len(drafted[1].output_token_ids) == when


def test_a_grammar_that_fails_at_a_draft_alone_goes_on_without_drafts():
    """Both tokens are allowed at each place, and the grammar fails behind the unlikelier one."""
    plain, _ = run(PROMPTS[:2], [after] * 2)
    right = plain[0].output_token_ids

    def trap(output):
        return after(output) if output == right[: len(output)] else None

    other = [next(iter(after(right[:place]) - {token})) for place, token in enumerate(right)]
    answers = {tuple(PROMPTS[0]): other, tuple(PROMPTS[1]): plain[1].output_token_ids}
    _, drafted, _ = compare(PROMPTS[:2], [trap, after], "right", answers)
    assert [request.had_broken_draft for request in drafted] == [True, False]
    assert drafted[0].num_drafted_tokens == MOST_DRAFTED, "of the first draft"


@pytest.mark.parametrize("kind", KINDS)
def test_a_grammar_that_allows_nothing_behind_a_token_ends_the_request_there(kind):
    def stuck(output):
        return after(output) if len(output) < 3 else frozenset()

    healthy, _ = run(PROMPTS[:2], [after] * 2)
    answers = {tuple(request.prompt_token_ids): request.output_token_ids for request in healthy}
    _, drafted, _ = compare(PROMPTS[:2], [stuck, after], kind, answers)
    assert (len(drafted[0].output_token_ids), drafted[0].finish_reason) == (3, "abort")
