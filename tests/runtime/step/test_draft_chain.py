"""A head's pass behind a captured verify step, played on a CPU: tokens are as of plain decodes. A head with the
right keys is always right, while the host has not seen the last step's tokens.

On a GPU: tests/gpu/test_parallel_heads.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch

from mllm_compile.runtime.config_sections import SpeculativeSection
from mllm_compile.runtime.cuda_graph import verify_check
from mllm_compile.runtime.cuda_graph.draft_chain import DraftChain, chain_obstacle, chain_of
from mllm_compile.runtime.graph_mode import GraphKind
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.schedule.rope_lengths import RopeLengths
from mllm_compile.runtime.speculation.factory import make_speculation
from tests.runtime.cuda_graph.played_cases import Model as PlayedModel
from tests.runtime.cuda_graph.played_cases import capture_on_cpu, played_runner
from tests.runtime.runner_cases import VOCAB, Loop, make_runner
from tests.runtime.step import test_hidden_drafter as hidden
from tests.runtime.step.test_captured_verify import TimedLoop, ahead_steps
from tests.runtime.step.test_grammar_rows import EVERYTHING, FakeGrammar, FakeMasks, add
from tests.runtime.step.test_hidden_drafter import Head
from tests.runtime.step.test_parallel_drafter import HEADS_OF as BLOCK_HEADS
from tests.runtime.step.test_parallel_drafter import MASK, BlockHead
from tests.runtime.step.test_verify_steps import PROMPTS, seen

MOST = 3
SIZES = (1, 2, 4, 8)
HEADS_OF = {**BLOCK_HEADS, "token by token": Head}


class TellsItsTokens(PlayedModel, hidden.Model):
    body, head, hidden_states = hidden.Model.body, hidden.Model.head, hidden.Model.hidden_states


def chained_runner(head: BlockHead, section: SpeculativeSection, model: type[PlayedModel] = TellsItsTokens, **options):
    runner = make_runner(model(), draft_model=head, **options)
    runner.config = replace(runner.config, speculative=section)
    runner.drafter.config = replace(runner.drafter.config, most_chained=64)
    capture_on_cpu(runner.drafter, SIZES)
    runner.draft_chain = chain_of(runner.drafter)
    capture_on_cpu(runner, SIZES)
    return runner


def look_up_bounds(runner: ModelRunner, seen: list[int]) -> None:
    """Has each run of a program, and of the kernels behind it, compare all that it is given as an index with the memory
    behind it, as kernels on a GPU do not; notes the tokens of each."""
    run, page_size = runner.program.run, runner.config.runtime.page_size
    table, pool = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool
    least_id = NO_TOKEN if runner.model.reads_hidden_states else 0

    def checked(batch, tokens, logits_indices, *how, **others):
        num_rows, num_columns = table.shape
        ids, positions, slots = tokens.input_ids, tokens.positions, tokens.out_cache_loc
        count = len(ids)
        assert ((least_id <= ids) & ((ids < VOCAB) | (ids == MASK))).all()
        assert ((positions >= 0) & (positions < num_columns)).all()
        assert ((slots >= 0) & (slots < pool.num_pages * page_size)).all()
        assert ((logits_indices >= 0) & (logits_indices < count)).all()
        rows, lengths = batch.req_pool_indices, batch.seq_lens
        assert ((rows >= 0) & (rows < num_rows)).all()
        assert ((lengths >= 0) & (lengths <= num_columns)).all()
        assert {len(one) for one in (positions, slots)} == {count}
        assert tokens.hidden_states is None or len(tokens.hidden_states) == count
        is_behind = len(how) > 1 and how[1].kind is GraphKind.VERIFY
        if batch.forward_mode.is_decode() and (is_behind or not runner.model.reads_hidden_states):
            pages = runner.attn_backend.page_table
            assert len(pages) >= len(rows) == count
            for place in torch.nonzero((rows > 0) & (lengths > 0)).flatten().tolist():
                of_row = table[rows[place], : lengths[place] : page_size] // page_size
                assert torch.equal(pages[place, : len(of_row)], of_row)
                assert (of_row > 0).all(), "a page that the request does not have"
                assert slots[place] == table[rows[place], positions[place]]
        seen.append(count)
        return run(batch, tokens, logits_indices, *how, **others)

    runner.program.run = checked
    loop, num_parameters = runner.model.decode_loop, len(runner.row_state.sampling.tables[0])
    if loop is None:
        return

    def end(arguments):
        assert all(one.is_contiguous() for one in arguments), "kernels read a row behind another"
        logits, floats, _, rows, places, _, last_tokens, chosen = arguments
        assert len(logits) == len(rows) == len(places) <= chosen.shape[1]
        assert len(floats) == num_parameters
        assert ((rows >= 0) & (rows < min(floats.shape[1], len(last_tokens)))).all()
        return loop.end(arguments)

    runner.model = replace(runner.model, decode_loop=replace(loop, end=end))


def serve(requests: Sequence[dict], head: BlockHead | None = None, joining: int = 0, **options) -> Loop:
    """Serves requests; each further `joining` steps one more joins. Without a head nothing is drafted."""
    section = options.pop("section", SpeculativeSection(method="dflash", num_speculative_tokens=MOST))
    prefix_cache, speculation = options.pop("prefix_cache", False), None
    model = options.pop("model", TellsItsTokens)
    if head is None:
        runner = played_runner(model(), **options)
    else:
        runner = chained_runner(head, section, model, **options)
        verifies = runner.graph_runner.verifies
        speculation = make_speculation(section, VOCAB, None, verifies.most_requests, verifies.chain.keys_ahead)
    loop = TimedLoop(runner, prefix_cache, speculation)
    loop.requests, waiting, in_flight = [], list(requests), None
    with torch.inference_mode():
        while waiting or loop.scheduler.has_work():
            is_due = not joining or len(loop.batches) >= joining * len(loop.requests)
            if waiting and (is_due or not loop.scheduler.has_work()):
                loop.requests.append(loop.add(**{"max_tokens": 24} | waiting.pop(0)))
            in_flight = loop._turn(in_flight, True)
        if in_flight is not None:
            loop._finish(*in_flight)
    return loop


def compare(requests: Sequence[dict], head: BlockHead, **options) -> Loop:
    plain = serve(requests, **{name: value for name, value in options.items() if name != "section"})
    drafted = serve(requests, head, **options)
    assert seen(drafted) == seen(plain)
    return drafted


def counts(loop: Loop) -> tuple[int, int]:
    of_requests = [(request.num_drafted_tokens, request.num_accepted_tokens) for request in loop.requests]
    drafted, accepted = (sum(column) for column in zip(*of_requests, strict=True))
    return drafted, accepted


@pytest.mark.parametrize("kind", HEADS_OF)
@pytest.mark.parametrize("page_size", [1, 4])
def test_drafts_are_right_while_a_step_is_in_flight(played, kind, page_size):
    requests = [{"prompt": prompt, "max_tokens": 20 + i} for i, prompt in enumerate(PROMPTS)]
    loop = compare(requests, HEADS_OF[kind](), page_size=page_size, num_pages=400)
    drafted, accepted = counts(loop)
    assert ahead_steps(loop) > 3
    assert accepted > 50
    assert drafted - accepted <= MOST * len(requests), "drafts are cut where a request may end"


@pytest.mark.parametrize("kind", ["block", "chain", "token by token"])
@pytest.mark.parametrize("num_alone", [0, 1, 2])
def test_a_request_without_drafts_beside_one_with_a_grammar_leaves_no_hole(played, kind, num_alone, monkeypatch):
    """The host drafts for the grammar. The other request has none at first: its keys are made ahead of the pass."""
    section = SpeculativeSection(method="dflash", num_speculative_tokens=MOST)
    runner = chained_runner(HEADS_OF[kind](), section)
    verifies = runner.graph_runner.verifies
    speculation = make_speculation(section, VOCAB, None, verifies.most_requests, verifies.chain.keys_ahead)
    loop = TimedLoop(runner, False, speculation)
    drafter, asked_before = loop.steps.drafter, []
    propose = drafter.propose

    def without_the_second(asked):
        asked_before.append(asked)
        if len(asked_before) > num_alone:
            return propose(asked)
        found = dict(zip([one.request for one in asked[:1]], propose(asked[:1]), strict=True))
        return [found.get(one.request, ()) for one in asked]

    monkeypatch.setattr(drafter, "propose", without_the_second)
    with torch.inference_mode():
        of_grammar = add(loop, PROMPTS[0], FakeGrammar(FakeMasks(), lambda output: EVERYTHING), max_tokens=10)
        other = add(loop, PROMPTS[1], None, max_tokens=34)
        loop.run()
    for request in (of_grammar, other):
        assert request.num_drafted_tokens - request.num_accepted_tokens <= MOST, "drafts are cut where it may end"
    assert other.num_accepted_tokens > 12
    assert of_grammar.num_accepted_tokens > 4, "the host reads what passes behind steps have drafted"


@pytest.mark.parametrize("kind", HEADS_OF)
@pytest.mark.parametrize("shift", [0, 1])
def test_drafts_that_are_rejected_leave_right_keys(played, kind, shift):
    requests = [{"prompt": prompt, "temperature": 1.5, "seed": i, "max_tokens": 40} for i, prompt in enumerate(PROMPTS)]
    loop = compare(requests, HEADS_OF[kind](shift))
    assert (counts(loop)[1] > 60) is not shift


@pytest.mark.parametrize("kind", ["block", "chain", "token by token"])
def test_requests_that_join_and_leave_give_the_same_tokens(played, kind):
    """Of some the graph's choice is not used: what is drafted follows the tokens that hold."""
    random = Random(3)
    others = [
        {},
        {},
        {"temperature": 0.8},
        {"stop_token_ids": [3, 5]},
        {"logprobs": 1},
        {"top_k": 3, "temperature": 0.8},
    ]
    others += [{"presence_penalty": 1.0}, {"allowed_token_ids": [5, 6]}]
    requests = [
        {"prompt": [random.randrange(9) for _ in range(random.randrange(1, 20))], "max_tokens": random.randrange(1, 40)}
        | random.choice(others)
        for _ in range(24)
    ]
    loop = compare(requests, HEADS_OF[kind](), joining=4, prefix_cache=True)
    drafted, accepted = counts(loop)
    assert ahead_steps(loop) > 10
    assert accepted > drafted / 3


@pytest.mark.parametrize("kind", ["block", "chain", "token by token"])
def test_preempted_requests_give_the_same_tokens(played, kind):
    requests = [{"prompt": [1, 2, 3, 4, 5, 6], "max_tokens": 20, "seed": i, "temperature": 0.6} for i in range(4)]
    loop = compare(requests, HEADS_OF[kind](), num_pages=16)
    assert loop.scheduler.stats().preemptions > 0
    assert ahead_steps(loop) > 0


def test_depths_by_cost_and_short_blocks_give_the_same_tokens(played):
    section = SpeculativeSection(method="dflash", num_speculative_tokens="by_cost")
    requests = [{"prompt": prompt, "max_tokens": 40} for prompt in PROMPTS[:2]]
    loop = compare(requests, BlockHead(most=2), section=section)
    assert counts(loop)[1] > 0


def test_a_head_whose_rope_follows_lengths_is_told_those_of_decodes(played):
    class Follows(BlockHead):
        def load(self, device):
            return replace(super().load(device), rope=RopeLengths(8, of_each_length=True, recomputes=False))

        def body(self, inputs, all_rows=None):
            assert not inputs["rope_lens"].any()
            return super().body(inputs, all_rows)

    loop = compare([{"prompt": prompt} for prompt in PROMPTS], Follows())
    assert ahead_steps(loop) > 3
    assert counts(loop)[1] > 0


@pytest.mark.parametrize("kind", [BlockHead, Head])
def test_a_head_without_numbers_costs_no_token(played, kind):
    class Broken(kind):
        def head(self, body, logits_indices):
            return torch.full_like(super().head(body, logits_indices), torch.nan)

    loop = compare([{"prompt": prompt} for prompt in PROMPTS], Broken())
    assert counts(loop) == (0, 0)


@pytest.mark.parametrize("kind", ["block", "chain", "token by token"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_no_index_of_a_pass_is_outside_of_memory(played, kind, page_size, monkeypatch):
    """At the start's check, and in answers up to the last position, whose blocks would go beyond it."""
    seen, init = [], ModelRunner.init_attention_backend

    def looking(runner):
        init(runner)
        look_up_bounds(runner, seen)

    monkeypatch.setattr(ModelRunner, "init_attention_backend", looking)
    monkeypatch.setattr(verify_check, "_LENGTH", 20)
    section = SpeculativeSection(method="dflash", num_speculative_tokens=MOST)
    runner = chained_runner(HEADS_OF[kind](), section, page_size=page_size)
    runner.graph_runner.check_verifies()
    assert runner.graph_runner.verifies is not None
    at_start = len(seen)
    requests = [{"prompt": prompt, "max_tokens": 60} for prompt in PROMPTS]
    loop = serve(requests, HEADS_OF[kind](), page_size=page_size, num_pages=100)
    assert counts(loop)[1] > 50
    assert len(seen) > at_start + 40


@pytest.mark.parametrize(
    ("chooses", "most_chained", "obstacle"), [(True, 64, None), (False, 64, "choose"), (True, 0, "reads")]
)
def test_what_keeps_a_draft_model_from_drafting_behind_steps_is_named(played, chooses, most_chained, obstacle):
    head = chained_runner(BlockHead(), SpeculativeSection(method="dflash", num_speculative_tokens=MOST)).drafter
    head.model = replace(head.model, decode_loop=head.model.decode_loop if chooses else None)
    head.config = replace(head.config, most_chained=most_chained)
    found = chain_obstacle(head)
    assert found is None if obstacle is None else obstacle in found
    assert (chain_of(head) is None) is (obstacle is not None)


def fails(self, batch):
    raise ValueError("no such batch")


@pytest.mark.parametrize("kind", ["block", "chain", "token by token"])
@pytest.mark.parametrize("fault", ["none", "other drafts", "no comparison"])
def test_a_pass_that_drafts_something_else_is_left_out_at_the_start(played, kind, fault, monkeypatch):
    if fault == "other drafts":
        choose = DraftChain._choose
        monkeypatch.setattr(DraftChain, "_choose", lambda *of: torch.full_like(choose(*of), VOCAB - 2))
    monkeypatch.setattr(verify_check, "_LENGTH", 20)  # the block has room behind
    section = SpeculativeSection(method="dflash", num_speculative_tokens=MOST)
    graphs = chained_runner(HEADS_OF[kind](), section).graph_runner
    if fault == "no comparison":
        monkeypatch.setattr(ModelRunner, "run_eager", fails)
    graphs.check_verifies()
    assert (graphs.verifies is None) is (fault != "none")


def test_a_start_whose_passes_are_wrong_keeps_its_verify_steps(played, monkeypatch, caplog):
    monkeypatch.setattr(DraftChain, "fault", lambda self, step, width: "drafts are not the head's")
    monkeypatch.setattr(ModelRunner, "captures_graphs", True)
    monkeypatch.setattr(verify_check, "_LENGTH", 20)
    section = SpeculativeSection(method="dflash", num_speculative_tokens=MOST)
    runner = chained_runner(BlockHead(), section)
    runner.init_cuda_graphs()
    assert runner.draft_chain is None
    assert runner.graph_runner.verifies.chain is None
    assert "drafts are made beside verify steps: drafts are not the head's" in caplog.text
