"""Captured verify steps, played on a CPU: the tokens that plain decodes give, with drafts of the host or the device.

On a GPU: tests/gpu/test_speculation.py.
"""

from __future__ import annotations

from random import Random

import pytest
import torch

from mllm_compile.runtime.config_sections import SpeculativeSection
from mllm_compile.runtime.cuda_graph.verifies import VerifyGraphs
from mllm_compile.runtime.ops.tokens.verify_fields import DRAFT_FIELD
from mllm_compile.runtime.program.loaded import VerifyPieces
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.factory import make_speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from mllm_compile.runtime.step.media_steps import MediaSteps
from tests.runtime.cuda_graph.played_cases import Model, played_runner
from tests.runtime.runner_cases import VOCAB, Loop
from tests.runtime.step import test_hidden_drafter as hidden
from tests.runtime.step.decode_loop_cases import OTHERS
from tests.runtime.step.test_grammar_rows import FakeGrammar, FakeMasks, add
from tests.runtime.step.test_verify_steps import KINDS, PROMPTS, ReplayingDrafter, seen

MOST = 3
FEW = {"allowed_token_ids": [5, 6]}  # answers that repeat themselves


class Repeats(Model):
    """Its answers repeat themselves: a token says much about the next one, and its position nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.positions.zero_()
        self.qkv = [weight * 0.2 for weight in self.qkv]


class TimedLoop(Loop):
    """Its steps take 1 ms, and `ms_of_token` for each token of a request beyond the first."""

    ms_of_token = 0.02

    def _finish(self, batch, handle):
        longest = int(batch.num_new.max()) if batch.has_drafts else 1
        self.scheduler.step_took(batch, (1 + self.ms_of_token * (longest - 1)) * 1e-3)
        super()._finish(batch, handle)


def serve(requests, section=None, drafter=None, prefix_cache=False, joining=0, model=Repeats, **options) -> Loop:
    """Serves requests; each further `joining` steps one more joins."""
    runner = played_runner(model(), section, **options)
    speculation = None
    if section is not None:
        verifies = runner.graph_runner.verifies
        assert verifies is not None
        speculation = make_speculation(section, VOCAB, captured=verifies.most_requests)
        if drafter is not None:
            captured = verifies.most_requests if section.by_cost else {}
            sizes = {"num_tokens": section.most_drafted, "by_cost": section.by_cost, "captured": captured}
            speculation = Speculation(drafter=drafter, vocab_size=VOCAB, **sizes)
    loop = TimedLoop(runner, prefix_cache, speculation)
    loop.requests, waiting, in_flight = [], list(requests), None
    with torch.inference_mode():
        while waiting or loop.scheduler.has_work():
            if waiting and (not joining or len(loop.batches) >= joining * len(loop.requests)):
                loop.requests.append(loop.add(**{"max_tokens": 24} | waiting.pop(0)))
            in_flight = loop._turn(in_flight, True)
        if in_flight is not None:
            loop._finish(*in_flight)
    return loop


def ahead_steps(loop: Loop) -> int:
    """Steps that were planned before the tokens of the last one were known."""
    lengths = (batch.device_lens for batch in loop.batches)
    return sum(of_step is not None and int(of_step.min()) < 0 for of_step in lengths)


def section_of(most: int | str = MOST, **more) -> SpeculativeSection:
    return SpeculativeSection(**{"method": "ngram", "num_speculative_tokens": most} | more)


def compare(requests, section=None, **options) -> Loop:
    plain = serve(requests, **options)
    drafted = serve(requests, section or section_of(), **options)
    assert seen(drafted) == seen(plain)
    for one, other in zip(drafted.requests, plain.requests, strict=True):
        ours, theirs = ([scores.logprob for scores in request.output_logprobs] for request in (one, other))
        assert ours == pytest.approx(theirs, abs=1e-4)
    return drafted


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_the_host_give_the_same_tokens_in_one_launch(played, kind):
    requests = [{"prompt": prompt, "temperature": 0.5 * (i % 2)} for i, prompt in enumerate(PROMPTS)]
    plain = serve(requests)
    answers = {tuple(request.prompt_token_ids): request.output_token_ids for request in plain.requests}
    drafted = serve(requests, section_of(method="suffix"), TextDrafter(ReplayingDrafter(answers, kind)))
    assert seen(drafted) == seen(plain)
    assert not ahead_steps(drafted)
    if kind == "right":
        assert len(drafted.batches) < len(plain.batches) / 2
        assert drafted.runner.forward_pass_id == len(drafted.batches)


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_drafts_by_cost_are_known_to_be_right_before_steps_check_them(played, monkeypatch, kind):
    monkeypatch.setattr(TimedLoop, "ms_of_token", 0.2)
    requests = [{"prompt": prompt, "max_tokens": 60} for prompt in PROMPTS]
    plain = serve(requests)
    answers = {tuple(request.prompt_token_ids): request.output_token_ids for request in plain.requests}
    drafted = serve(requests, section_of(method="suffix", **AUTO), TextDrafter(ReplayingDrafter(answers, kind)))
    assert seen(drafted) == seen(plain)
    assert drafted.scheduler.drafts._quiet._guesses == {}, "of requests that are over nothing is left"
    if kind == "right":
        assert len(drafted.batches) < 0.8 * len(plain.batches)
    else:
        assert sum(batch.has_drafts for batch in drafted.batches) <= 4, "which tell how long such steps take"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("most", [1, 7])
def test_drafts_of_the_device_give_the_same_tokens_while_a_step_is_in_flight(played, most, temperature):
    requests = [{"prompt": prompt * 2, "temperature": temperature} for prompt in PROMPTS]
    drafted = compare(requests, section_of(most))
    assert ahead_steps(drafted) > 5
    if not temperature:
        assert sum(request.num_accepted_tokens for request in drafted.requests) > 10


def depths_of(loop: Loop) -> list[int]:
    """The longest draft of each step whose drafts the device makes."""
    return [int(batch.num_new.max()) - 1 for batch in loop.batches if batch.device_lens is not None]


AUTO = {"most": "by_cost"}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_of_the_device_get_as_long_as_pays_and_give_the_same_tokens(played, temperature):
    requests = [{"prompt": [5, 6, 7, 8, 5, 6], "max_tokens": 56, "temperature": temperature} for _ in range(2)]
    drafted = compare(requests, section_of(**AUTO))
    plain = [batch for batch in drafted.batches if batch.device_lens is None]
    assert len(plain) > 5, "steps without drafts are timed first"
    assert ahead_steps(drafted) > 5
    if not temperature:
        assert len(set(depths_of(drafted))) > 2
        assert len(drafted.batches) < 40


def test_the_device_drafts_nothing_where_it_does_not_pay(played, monkeypatch):
    monkeypatch.setattr(TimedLoop, "ms_of_token", 10.0)
    drafted = compare([{"prompt": [5, 6, 7, 8, 5, 6], "max_tokens": 56}], section_of(**AUTO))
    depths = depths_of(drafted)
    assert 0 < len(depths) < 12
    assert set(depths) == {1}


def test_requests_of_several_depths_join_and_leave_with_the_same_tokens(played):
    random = Random(5)
    requests = [
        {
            "prompt": [random.randrange(9) for _ in range(random.randrange(1, 20))],
            "max_tokens": random.randrange(20, 40),
        }
        | random.choice([{}, {}, {"temperature": 0.8}, {"logprobs": 1}])
        for _ in range(24)
    ]
    drafted = compare(requests, section_of(**AUTO), joining=6, num_pages=60)
    assert ahead_steps(drafted) > 10


def test_steps_too_large_for_any_graph_have_no_drafts(played):
    requests = [{"prompt": [5, 6, 7, 8, 5, 6], "max_tokens": 40} for _ in range(8)]
    drafted = compare(requests, section_of(**AUTO), decode_requests=(1, 2, 4))
    batches = [batch for batch in drafted.batches if batch.num_decodes == 8]
    assert batches
    assert not any(batch.has_drafts for batch in batches)


def test_the_device_drafts_what_the_host_would(played):
    """Step by step, of one request."""
    requests = [{"prompt": [5, 6, 7, 8, 5, 6], "max_tokens": 30}]
    on_device = serve(requests, section_of())
    on_host = serve(requests, section_of(), make_speculation(section_of(), VOCAB).drafter)
    ours, theirs = (
        [loop.requests[0].num_drafted_tokens, loop.requests[0].num_accepted_tokens] for loop in (on_device, on_host)
    )
    assert ahead_steps(on_device) and not ahead_steps(on_host)
    assert seen(on_device) == seen(on_host)
    assert ours[1] > 5 and abs(ours[0] - theirs[0]) <= 2 * MOST


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_requests_that_join_and_leave_give_the_same_tokens(played, page_size):
    random = Random(3)
    requests = [
        {"prompt": [random.randrange(9) for _ in range(random.randrange(1, 20))], "max_tokens": random.randrange(1, 40)}
        | random.choice([{}, {}, {"temperature": 0.8}, {"stop_token_ids": [3, 5]}])
        for _ in range(24)
    ]
    drafted = compare(requests, joining=4, page_size=page_size, num_pages=400 // page_size)
    assert ahead_steps(drafted) > 10


def decodes_with_drafts(loop: Loop) -> int:
    """Steps of decodes alone that bring drafts."""
    return sum(batch.has_drafts and batch.num_decodes == batch.num_requests for batch in loop.batches)


@pytest.mark.parametrize("most", [MOST, "by_cost"])
@pytest.mark.parametrize("params", [*OTHERS, {"min_tokens": 20, "stop_token_ids": [5]}])
def test_all_parameters_are_served_in_one_launch_while_one_runs(played, launches, params, most):
    given = FEW | params if "allowed_token_ids" not in params else params
    requests = [{"prompt": prompt, "max_tokens": 30, "seed": 5} | given for prompt in PROMPTS]
    drafted = compare(requests, section_of(most), max_running_requests=4)
    assert ahead_steps(drafted) > 3
    assert len(launches) == decodes_with_drafts(drafted)
    assert sum(request.num_accepted_tokens for request in drafted.requests) > 3


def test_requests_with_all_kinds_of_parameters_share_steps(played, launches):
    others = [{}, *OTHERS, {"temperature": 0.8, "min_p": 0.1}]
    requests = [{"prompt": PROMPTS[i % 4], "max_tokens": 24} | other for i, other in enumerate(others)]
    drafted = compare(requests, joining=5)
    assert ahead_steps(drafted) > 3
    assert len(launches) == decodes_with_drafts(drafted)


def after(output: list[int]) -> frozenset[int]:
    """Tokens that depend on the last one and on how many there are."""
    last = output[-1] if output else 17
    return frozenset({1 + (last * 7 + len(output)) % 60, 1 + (last + 30) % 60})


@pytest.mark.parametrize(("kind", "fails"), [*((kind, False) for kind in KINDS), ("right", True)])
def test_drafts_of_requests_with_grammars_are_one_launch(played, launches, kind, fails):
    """A grammar may fail behind a drafted token."""

    def rule(output):
        if len(output) == 4 and failing:
            return failing.pop()
        return after(output)

    def served(section=None, drafter=None):
        runner = played_runner(Repeats(), section)
        speculation = drafter and Speculation(drafter=TextDrafter(drafter), num_tokens=MOST, vocab_size=VOCAB)
        loop, masks = Loop(runner, False, speculation), FakeMasks()
        loop.requests = [
            add(loop, prompt, FakeGrammar(masks, rule) if i % 2 else None, max_tokens=16, temperature=0.4 * (i // 2))
            for i, prompt in enumerate(PROMPTS)
        ]
        with torch.inference_mode():
            loop.run()
        return loop

    failing: list[None] = []
    plain = served()
    answers = {tuple(request.prompt_token_ids): request.output_token_ids for request in plain.requests}
    failing = [None] * fails
    drafted = served(section_of(method="suffix"), ReplayingDrafter(answers, kind))
    assert seen(drafted) == seen(plain)
    assert sum(request.had_broken_draft for request in drafted.requests) == fails
    assert 0 < len(launches) == decodes_with_drafts(drafted)


def test_tokens_behind_images_are_drafted_at_their_positions(played, launches, monkeypatch):
    requests = [{"prompt": prompt, "max_tokens": 20, **FEW} for prompt in PROMPTS]
    text = compare(requests, model=Model)
    launches.clear()

    def admit(media, admitted):
        for request in admitted:
            media._media, media._has_images[request.row], media._deltas[request.row] = media, True, 7

    monkeypatch.setattr(MediaSteps, "admit", admit)
    drafted = compare(requests, model=Model)
    assert ahead_steps(drafted) > 3
    assert len(launches) == decodes_with_drafts(drafted)
    assert seen(drafted) != seen(text)


def test_preempted_requests_give_the_same_tokens(played):
    requests = [{"prompt": [1, 2, 3, 4, 5, 6], "max_tokens": 20, "seed": i, "temperature": 0.6} for i in range(4)]
    drafted = compare(requests, num_pages=16)
    assert drafted.scheduler.stats().preemptions > 0
    assert ahead_steps(drafted) > 0


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_end_while_a_step_of_theirs_is_in_flight_give_all_back_and_hurt_no_other(played, seed):
    """By an abort, or by a stop text in the middle of a run; few pages, so that others are preempted meanwhile."""
    random, model = Random(seed), Repeats()
    runner = played_runner(Repeats(), section_of(), num_pages=26, page_size=2 + 2 * (seed % 2))
    speculation = make_speculation(section_of(), VOCAB, captured={MOST: 8})
    loop = Loop(runner, bool(seed % 2), speculation)
    scheduler = loop.scheduler
    requests, ended, in_flight, turns = [], set(), None, 0
    with torch.inference_mode():
        while len(requests) < 14 or scheduler.has_work():
            if len(requests) < 14 and turns % 3 == 0:
                prompt = [random.randrange(9) for _ in range(random.randrange(2, 9))] * 2
                requests.append(loop.add(prompt, max_tokens=random.randrange(4, 30)))
            live = [request for request in requests if not request.is_finished and request.output_token_ids]
            if live and random.random() < 0.15:
                request = random.choice(live)
                ended.add(request)
                if random.random() < 0.5:
                    scheduler.abort(request)
                else:
                    scheduler.end_at(request, random.randint(1, len(request.output_token_ids)), "text")
            in_flight = loop._turn(in_flight, True)
            turns += 1
        if in_flight is not None:
            loop._finish(*in_flight)
    assert ahead_steps(loop) > 2
    assert len(ended) > 2
    for request in requests:
        expected = model.greedy(request.prompt_token_ids, request.max_new_tokens)
        count = len(request.output_token_ids) if request in ended else request.max_new_tokens
        assert request.output_token_ids == expected[:count]
    scheduler.flush_prefix_cache()
    stats = scheduler.stats()
    assert (stats.pages_used, stats.pages_cached, stats.running, stats.waiting) == (0, 0, 0, 0)


def test_an_answer_ends_at_each_of_its_tokens(played):
    prompt = PROMPTS[0] * 2
    answer = serve([{"prompt": prompt}]).requests[0].output_token_ids
    ends = [{"max_tokens": length} for length in range(1, 9)] + [{"stop_token_ids": [token]} for token in set(answer)]
    compare([{"prompt": prompt} | end for end in ends], max_running_requests=16, num_pages=300)


def test_a_prefix_hit_on_an_answer_of_such_steps_gives_the_same_tokens(played):
    prompt = [3, 9, 27, 20, 60] * 2
    loop = serve([{"prompt": prompt, "max_tokens": 20}], section_of(), prefix_cache=True)
    again = [*prompt, *loop.requests[0].output_token_ids[:18], 8]
    request = loop.add(again, max_tokens=8)
    with torch.inference_mode():
        loop.run()
    assert request.num_cached_tokens >= 20
    assert request.output_token_ids == Repeats().greedy(again, 8)


@pytest.mark.parametrize("is_own", [False, True], ids=["the host's", "the device's"])
def test_a_draft_without_numbers_costs_no_token(played, is_own):
    """Token 7 has an embedding of NaN, and is all that is drafted; a later step of the request may be in flight."""

    class Broken(Repeats):
        def __init__(self) -> None:
            super().__init__()
            self.embedding[7] = torch.nan

    model, prompts = Broken(), [[1, 2, 1], [4, 5]]
    section = section_of(method="ngram" if is_own else "suffix")
    runner = played_runner(Broken(), section)
    loop = runner.graph_runner.verifies.loop
    begin = loop._pieces.begin

    def drafts_sevens(arguments):
        fields = arguments[0]
        fields[:, DRAFT_FIELD:] = 7
        fields[:, 3] = fields[:, 2]
        return begin(arguments)

    loop._pieces = VerifyPieces(drafts_sevens, loop._pieces.end)
    speculation = make_speculation(section, VOCAB, captured={MOST: 8})
    if not is_own:
        answers = {tuple(prompt): model.greedy(prompt, 1) + [7] * 20 for prompt in prompts}
        drafter = TextDrafter(ReplayingDrafter(answers, "right"))
        speculation = Speculation(drafter=drafter, num_tokens=MOST, vocab_size=VOCAB)
    loop = Loop(runner, True, speculation)
    requests = [loop.add(prompt, max_tokens=16) for prompt in prompts]
    with torch.inference_mode():
        loop.run()
    assert [request.output_token_ids for request in requests] == [model.greedy(prompt, 16) for prompt in prompts]
    assert [request.num_preemptions for request in requests] == [1, 1]
    assert (ahead_steps(loop) > 0) is is_own


def test_a_drafter_that_reads_hidden_states_gets_those_of_the_graph(played, monkeypatch):
    """Its head is always right where they are: of requests with drafts of several lengths."""

    class TellsItsTokens(Model, hidden.Model):
        body, head, hidden_states = hidden.Model.body, hidden.Model.head, hidden.Model.hidden_states

    requests = [{"prompt": prompt, "max_tokens": 9 + i} for i, prompt in enumerate(PROMPTS)]
    loops, launches, launch = [], [], VerifyGraphs.launch
    monkeypatch.setattr(VerifyGraphs, "launch", lambda *of: launches.append(of) or launch(*of))
    for head in (None, hidden.Head()):
        section = None if head is None else section_of(method="eagle3")
        runner = played_runner(TellsItsTokens(), section, draft_model=head)
        loop = Loop(runner, num_drafted=MOST)
        loop.requests = [loop.add(**request) for request in requests]
        with torch.inference_mode():
            loop.run()
        loops.append(loop)
    plain, drafted = loops
    assert seen(drafted) == seen(plain)
    steps = [batch for batch in drafted.batches if batch.has_drafts]
    assert 0 < len(steps) == len(launches)
    assert all(r.num_accepted_tokens == r.num_drafted_tokens > 4 for r in drafted.requests)


def nothing(arguments):
    """Steps of several depths."""


def drops_writes(arguments):
    arguments[8][:, 1:] = 0  # slots


def shifts_positions(arguments):
    arguments[7] -= 5


def forgets_drafts(arguments):
    arguments[6][:, 1:] = 3


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (None, None),
        (nothing, None),
        (drops_writes, "are no numbers, as keys were read before"),
        (shifts_positions, "differ by"),
        (forgets_drafts, "differ by"),
    ],
)
def test_steps_that_differ_from_decodes_are_left_out_at_the_start(played, spoil, said):
    runner = played_runner(section=section_of(**AUTO) if spoil is nothing else section_of())
    graphs, loop = runner.graph_runner, runner.graph_runner.verifies.loop
    begin = loop._pieces.begin
    runner.expert_counts = {"a layer of experts": torch.ones(3, dtype=torch.int64)}
    if spoil is not None:
        loop._pieces = VerifyPieces(lambda of: begin(of) or spoil(of), loop._pieces.end)
    fault = graphs.check_verifies()
    assert (graphs.verifies is None) is (said is not None)
    assert fault is None if said is None else said in fault
    assert not runner.req_to_token_pool.req_to_token.any()
    assert not any(counts.any() for counts in runner.expert_counts.values())
    buffers = [buffer for layer in range(2) for buffer in runner.token_to_kv_pool.get_pages(layer)]
    assert not any(buffer[1:].any() for buffer in buffers)


def test_a_synthetic_acceptance_gives_its_mean(played):
    section = section_of(synthetic_acceptance_length=2.5)
    loop = serve([{"prompt": [1, 2, 3], "max_tokens": 50} for _ in range(6)], section)
    steps = sum(batch.num_decodes for batch in loop.batches if batch.has_drafts and batch.num_new.max() > 1)
    assert 2.1 < (sum(request.num_accepted_tokens for request in loop.requests) + steps) / steps < 2.8
