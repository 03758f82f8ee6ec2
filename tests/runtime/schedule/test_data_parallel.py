"""Requests of data-parallel ranks: each step is the ranks' steps, and results go back to the right one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mllm_compile.runtime.media.step_plan import MediaPlan
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.data_parallel import (
    DataParallelScheduler,
    batch_of_rank,
    copies_of_rank,
    pages_of_rank,
    ranks_of,
)
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, TokenRuns
from mllm_compile.runtime.speculation.drafter import Asked, Draft, DraftedRequest, Speculation
from mllm_compile.runtime.step.data_parallel_plan import DataParallelStep
from mllm_compile.runtime.step.host_page_table import HostPageTable
from mllm_compile.runtime.step.plan import token_positions

ROWS, PAGES, PAGE = 3, 9, 4


def scheduler(
    num_ranks: int = 2, num_snapshots: int = 0, speculation: Speculation | None = None
) -> DataParallelScheduler:
    limits = {"max_running_requests": ROWS, "max_num_batched_tokens": 8, "max_model_len": 32}
    config = SchedulerConfig(**limits, page_size=PAGE, num_pages=PAGES, num_snapshots=num_snapshots)
    return DataParallelScheduler(config, num_ranks, speculation)


def request(length: int, max_tokens: int = 4, **params: object) -> Request:
    how = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
    return Request(request_id=str(length), prompt_token_ids=list(range(1, length + 1)), params=how)


def run_to_the_end(dp: DataParallelScheduler) -> list[Request]:
    """Runs all steps, each with the tokens row * 100; returns requests in the order in which they ended."""
    finished = []
    while dp.has_work():
        batch = dp.schedule()
        assert batch is not None
        result = dp.update(batch, batch.rows.astype(np.int64) * 100)
        assert result.accepted == np.flatnonzero(batch.sample_mask).tolist()
        finished += result.finished
    return finished


def test_each_request_has_the_rows_of_one_rank_and_gets_its_own_tokens():
    dp = scheduler()
    requests = [request(length) for length in (5, 3, 11, 2)]
    for one in requests:
        dp.add(one)
    batch = dp.schedule()
    assert set(ranks_of(batch.rows, ROWS).tolist()) == {0, 1}
    assert len(set(batch.rows.tolist())) == batch.num_requests
    rows = {one.request_id: one.row for one in batch.requests}
    dp.update(batch, batch.rows.astype(np.int64) * 100)
    assert run_to_the_end(dp)
    for one in requests:
        assert len(one.output_token_ids) == 4
        if one.request_id in rows:
            assert set(one.output_token_ids) == {rows[one.request_id] * 100}
    assert len({one.sequence for one in requests}) == 4  # draws follow it
    assert dp.stats().pages_used == 0


def test_decodes_come_first_and_steady_steps_share_what_is_constant():
    dp = scheduler()
    for length in (2, 3):
        dp.add(request(length, 8))
    first = dp.schedule()
    dp.update(first, np.ones(2, dtype=np.int64))
    dp.add(request(6))
    mixed = dp.schedule()
    assert (mixed.num_decodes, mixed.num_requests) == (2, 3)
    assert mixed.num_new.tolist() == [1, 1, 6]
    dp.update(mixed, np.ones(3, dtype=np.int64))
    steady = [dp.schedule() for _ in range(2)]
    assert steady[0].requests is steady[1].requests
    assert (steady[1].prefix_lens - steady[0].prefix_lens).tolist() == [1, 1, 1]


def test_a_rank_takes_what_has_least_to_do():
    dp = scheduler()
    for length in (20, 2, 2, 2):
        dp.add(request(length))
    batch = dp.schedule()
    ranks = {one.request_id: int(rank) for one, rank in zip(batch.requests, ranks_of(batch.rows, ROWS), strict=True)}
    assert ranks == {"20": 0, "2": 1}
    assert np.bincount(ranks_of(batch.rows, ROWS)).tolist() == [1, 3]


def test_an_ended_request_is_forgotten_and_a_lost_step_ends_requests_of_all_ranks():
    dp = scheduler()
    requests = [request(length, 8) for length in (2, 3, 4)]
    for one in requests:
        dp.add(one)
    assert dp.abort(requests[2])
    assert not dp.abort(requests[2])
    assert set(dp.fail(dp.schedule())) == set(requests[:2])
    assert not dp.has_work()
    assert dp.stats().running == 0


def test_a_broken_row_ends_its_own_request():
    dp = scheduler()
    requests = [request(2, 8), request(3, 8)]
    for one in requests:
        dp.add(one)
    batch = dp.schedule()
    result = dp.update(batch, np.ones(2, dtype=np.int64), [1])
    assert result.broken == [batch.requests[1]]
    assert result.accepted == [0]
    dp.add(request(2, 2))
    cleared = dp.schedule().cleared_pages
    assert pages_of_rank(cleared, 0, PAGES).size == 0
    assert pages_of_rank(cleared, 1, PAGES).tolist() == [1]


def test_pages_that_a_lost_step_was_to_clear_are_cleared_by_the_next_one():
    dp = scheduler()
    dp.add(request(2, 8))
    dp.update(dp.schedule(), np.ones(1, dtype=np.int64), [0])
    dp.add(request(2, 2))
    lost = dp.schedule()
    assert lost.cleared_pages.size == 1
    dp.fail(lost)
    dp.add(request(2, 2))
    assert dp.schedule().cleared_pages.tolist() == lost.cleared_pages.tolist()


def test_states_of_prefixes_are_copied_by_the_rank_whose_they_are_in_its_own_rows():
    dp = scheduler(num_snapshots=2)
    for length in (6, 7):  # a page, and a part of one
        dp.add(request(length, 1))
    batch = dp.schedule()
    assert batch.state_saves.shape == (2, 2)
    for rank in (0, 1):
        ((source, target),) = copies_of_rank(batch.state_saves, 0, rank, ROWS)
        assert source == batch.rows[rank] - rank * ROWS in range(1, ROWS + 1)
        assert target in (ROWS + 1, ROWS + 2)  # behind requests' rows
    dp.update(batch, np.ones(2, dtype=np.int64))
    run_to_the_end(dp)
    dp.add(request(7, 1))
    restored = dp.schedule().state_restores
    (rank,) = ranks_of(restored[:, 1], ROWS)
    ((source, target),) = copies_of_rank(restored, 1, rank, ROWS)
    assert source in (ROWS + 1, ROWS + 2) and target in range(1, ROWS + 1)
    assert not copies_of_rank(restored, 1, 1 - rank, ROWS).size


def test_each_rank_has_the_positions_and_features_of_its_own_requests():
    dp = scheduler()
    for length in (5, 3, 2):
        dp.add(request(length))
    batch = dp.schedule()
    pages = HostPageTable(2 * ROWS + 1, 32, PAGE)
    pages.write(batch.page_rows, batch.page_positions, batch.page_ids)
    assert token_positions(batch).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    runs = (np.array([7, 8]),)
    blocks = np.array([[0, 1, 3, 3], [2, 8, 10, 2]])  # of the first request and of the third
    media = MediaPlan(
        np.arange(10), np.array([4, 5, 6], dtype=np.int32), np.arange(10), np.arange(30).reshape(3, 10), runs, blocks
    )
    first, second = (
        dp_step.with_media(dp_step.plan(batch, pages), batch, media)
        for dp_step in (DataParallelStep(rank, 2, ROWS, 2) for rank in (0, 1))
    )
    assert first.fields.positions.tolist() == first.media.rows.tolist() == [0, 1, 2, 3, 4]
    assert second.fields.positions.tolist() == second.media.rows.tolist() == [5, 6, 7, 8, 9]
    assert [first.media.deltas.tolist(), second.media.deltas.tolist()] == [[4], [5, 6]]
    assert second.media.axes.tolist() == media.axes[:, 5:].tolist()
    assert [first.media.blocks.tolist(), second.media.blocks.tolist()] == [[[0, 1, 3, 3]], [[1, 3, 5, 2]]]
    assert first.media.runs is second.media.runs is runs  # which all ranks have
    alone = scheduler()
    alone.add(request(5))
    batch = alone.schedule()
    dp_step = DataParallelStep(1, 2, ROWS, 2)
    nothing = dp_step.with_media(dp_step.plan(batch, pages), batch, media)
    assert nothing.fields.positions.tolist() == nothing.media.rows.tolist() == nothing.media.deltas.tolist() == [0]
    assert nothing.media.axes.shape == (3, 1) and not nothing.media.blocks.size


def test_captured_decodes_are_told_how_far_positions_are_from_places():
    dp = scheduler()
    for length in (2, 3, 4):
        dp.add(request(length))
    dp.update(dp.schedule(), np.ones(3, dtype=np.int64))
    batch = dp.schedule()
    pages = HostPageTable(2 * ROWS + 1, 32, PAGE)
    pages.write(batch.page_rows, batch.page_positions, batch.page_ids)
    dp_step = DataParallelStep(0, 2, ROWS, 2)
    media = MediaPlan(batch.seq_lens - 1 + batch.rows, batch.rows)
    plan = dp_step.with_media(dp_step.plan_decode(batch, pages, 4, 1), batch, media)
    assert plan.media.deltas.tolist() == plan.fields.req_pool_indices.tolist()


def test_scores_of_prompts_find_their_logits_among_all_ranks():
    dp = scheduler()
    for length in (6, 3, 4):
        dp.add(request(length, prompt_logprobs=None if length == 4 else 1))
    batch = dp.schedule()
    pages = HostPageTable(2 * ROWS + 1, 32, PAGE)
    at_once = 2  # positions of a rank whose logits are gathered at a time
    dp_steps = [DataParallelStep(rank, 2, ROWS, at_once) for rank in (0, 1)]
    plan = dp_steps[0].plan(batch, pages)
    assert plan.scored.reshape(2, -1).tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    others = dp_steps[1].with_scored(dp_steps[1].plan(batch, pages), plan.scored)
    blocks = [one.fields.scored_indices for one in (plan, others)]
    gathered = [
        (rank, int(index))
        for start in range(0, blocks[0].size, at_once)
        for rank, block in enumerate(blocks)
        for index in block[start : start + at_once]
    ]
    of_batch = [[rank, place] for place, rank in enumerate(ranks_of(batch.rows, ROWS).tolist())]
    found = [[*of_batch[row], gathered[place]] for row, place in zip(plan.prompt_rows, plan.score_indices, strict=True)]
    assert found == [[0, 0, (0, index)] for index in range(5)] + [[1, 1, (1, index)] for index in range(2)]
    targets = plan.fields.prompt_targets[plan.score_indices]
    assert targets.tolist() == [2, 3, 4, 5, 6, 2, 3]
    assert targets.size < plan.fields.prompt_targets.size == len(gathered)


def test_each_rank_plans_its_part_and_all_know_how_many_tokens_there_are():
    dp = scheduler()
    for length in (5, 3, 2):
        dp.add(request(length))
    batch = dp.schedule()
    pages = HostPageTable(2 * ROWS + 1, 32, PAGE)
    pages.write(batch.page_rows, batch.page_positions, batch.page_ids)
    plans = [DataParallelStep(rank, 2, ROWS, 2).plan(batch, pages) for rank in (0, 1)]
    assert [plan.rank_batch.num_tokens for plan in plans] == [5, 5]
    assert [plan.across.num_tokens_across_dp for plan in plans] == [(5, 5)] * 2
    assert [plan.fields.input_ids.tolist() for plan in plans] == [[1, 2, 3, 4, 5], [1, 2, 3, 1, 2]]
    # Two rows of logits a rank; the first rank's second one has no request.
    assert [plan.fields.logits_indices.tolist() for plan in plans] == [[4, 0], [2, 4]]
    assert plans[0].token_indices.tolist() == [0, 2, 3]
    assert plans[0].fields.sampled_rows.tolist() == [batch.rows[0], 0, batch.rows[1], batch.rows[2]]


def test_a_rank_without_requests_plans_the_dummy_row():
    dp = scheduler()
    dp.add(request(5))
    batch = dp.schedule()
    pages = HostPageTable(2 * ROWS + 1, 32, PAGE)
    plan = DataParallelStep(1, 2, ROWS, 2).plan(batch, pages)
    assert (plan.is_decode, plan.across.max_tokens_across_dp) == (True, 5)
    assert plan.fields.req_pool_indices.tolist() == plan.fields.out_cache_loc.tolist() == [0]
    assert batch_of_rank(batch, 1, ROWS).num_tokens == 1


def test_captured_decodes_have_a_block_of_rows_a_rank():
    dp = scheduler()
    for length in (2, 3, 4):
        dp.add(request(length))
    dp.update(dp.schedule(), np.ones(3, dtype=np.int64))
    batch = dp.schedule()
    pages = HostPageTable(2 * ROWS + 1, 32, PAGE)
    pages.write(batch.page_rows, batch.page_positions, batch.page_ids)
    dp_step = DataParallelStep(0, 2, ROWS, 2)
    plan = dp_step.plan_decode(batch, pages, 4, 1)
    of_ranks = [[row for row in batch.rows.tolist() if (row > ROWS) == rank] for rank in (False, True)]
    assert sorted(map(len, of_ranks)) == [1, 2]
    assert dp_step.most_requests(batch) == 2
    rows = plan.fields.req_pool_indices.tolist()
    assert rows == [row for own in of_ranks for row in own + [0] * (4 - len(own))]
    assert [rows[place] for place in plan.token_indices] == batch.rows.tolist()
    assert {length for row, length in zip(rows, plan.fields.seq_lens.tolist(), strict=True) if not row} == {1}


class CountingDrafter:
    """Answers count from their prompts' lengths on; it drafts that, and is wrong at every third number. A request whose
    prompt has 3 tokens gets no draft."""

    keeps_keys, keys_reach = False, 0

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        return [self.draft(one) for one in asked]

    def draft(self, one: Asked) -> Draft:
        if len(one.request.prompt_token_ids) == 3:
            return ()
        first = one.request.output_token_ids[-1] + 1
        return [number if number % 3 else 99 for number in range(first, first + one.most)]

    def leave(self, request: DraftedRequest) -> None:
        """Keeps nothing."""

    def end(self, request: DraftedRequest) -> None:
        """Keeps nothing."""


COUNTING = Speculation(drafter=CountingDrafter(), num_tokens=4, vocab_size=100)


def count_on(batch: ScheduledBatch) -> TokenRuns:
    """The tokens of a model that counts, in a step with drafts."""
    width = int(batch.num_new[: batch.num_decodes].max(initial=1))
    runs = TokenRuns(
        np.full((batch.num_requests, width), -1, dtype=np.int64),
        np.zeros(batch.num_requests, dtype=np.int64),
        np.zeros(batch.num_requests, dtype=bool),
        np.where(np.arange(batch.num_requests) < batch.num_decodes, batch.num_new - 1, 0),
    )
    first = 0
    for row, one in enumerate(batch.requests):
        if row >= batch.num_decodes:
            if batch.sample_mask[row]:
                runs.token_ids[row, 0], runs.counts[row] = len(one.prompt_token_ids), 1
            continue
        given = batch.verify_token_ids[first : first + batch.num_new[row]].tolist()
        first += len(given)
        assert given[0] == one.output_token_ids[-1] == batch.prefix_lens[row]
        wrong = [place for place in range(1, len(given)) if given[place] != given[0] + place]
        count = min(wrong, default=len(given))
        runs.token_ids[row, :count], runs.counts[row] = given[0] + 1 + np.arange(count), count
    assert first == batch.verify_token_ids.size
    return runs


def newest(runs: TokenRuns) -> np.ndarray:
    return np.take_along_axis(runs.token_ids, np.maximum(runs.counts - 1, 0)[:, None], axis=1)[:, 0]


def test_ranks_draft_for_their_requests_in_one_step():
    dp = scheduler(speculation=COUNTING)
    requests = [request(length, 14) for length in (5, 3, 2, 4)]
    for one in requests:
        dp.add(one)
    num_of_both, finished = 0, []
    while dp.has_work():
        batch = dp.schedule()
        is_drafted = any(one.output_token_ids for one in batch.requests)
        assert dp.schedule() is None or not is_drafted, "all tokens have to be known"
        ranks = ranks_of(batch.rows, ROWS)
        if batch.has_drafts:
            runs = count_on(batch)
            num_of_both += len(set(ranks.tolist())) == 2
            of_decodes = ranks[: batch.num_decodes].repeat(batch.num_new[: batch.num_decodes])
            for rank in set(ranks.tolist()):
                part = batch_of_rank(batch, rank, ROWS)
                assert part.verify_token_ids.tolist() == batch.verify_token_ids[of_decodes == rank].tolist()
            result = dp.update(batch, newest(runs), runs=runs)
            assert result.counts == runs.counts[result.accepted].tolist()
        else:
            tokens = [len(one.prompt_token_ids) + len(one.output_token_ids) for one in batch.requests]
            result = dp.update(batch, np.array(tokens))
        finished += result.finished
    assert num_of_both > 1 and set(finished) == set(requests)
    for one in requests:
        length = len(one.prompt_token_ids)
        assert one.output_token_ids == list(range(length, length + 14))
        assert (one.num_drafted_tokens > 0) is (length != 3)
    assert dp.stats().pages_used == 0


def test_a_stop_string_within_a_run_ends_a_rank_s_request():
    dp = scheduler(speculation=COUNTING)
    one = request(3, 14), request(4, 14)
    for each in one:
        dp.add(each)
    dp.update(dp.schedule(), np.array([3, 4]))
    batch = dp.schedule()
    runs = count_on(batch)
    dp.update(batch, newest(runs), runs=runs)
    assert one[1].output_token_ids == [4, 5, 6]
    dp.end_at(one[1], 2, "five")
    assert (one[1].output_token_ids, one[1].finish_reason, one[1].stop_reason) == ([4, 5], "stop", "five")
    dp.end_at(one[0], 2, "four")
    assert not dp.has_work() and dp.stats().running == 0


def test_logits_of_drafted_tokens_are_found_among_those_of_all_ranks():
    """Rank 0 has a decode with two drafted tokens and a prompt, rank 1 a decode without a draft."""
    dp = scheduler()
    for length in (5, 3, 2):
        dp.add(request(length))
    batch = replace(
        dp.schedule(),
        rows=np.array([1, 4, 2], dtype=np.int32),
        num_new=np.array([3, 1, 4], dtype=np.int32),
        prefix_lens=np.array([6, 9, 0], dtype=np.int32),
        num_decodes=2,
        num_tokens=8,
        verify_token_ids=np.array([10, 11, 12, 20]),
        prefill_token_ids=np.array([1, 2, 3, 4]),
    )
    for rank, ends in ((0, [0, 1, 2, 6]), (1, [0, 0, 0, 0])):
        plan = DataParallelStep(rank, 2, ROWS, 8).plan(batch, HostPageTable(2 * ROWS + 1, 32, PAGE))
        fields = plan.fields
        assert plan.sampled.tolist() == [0, 0, 0, 1, 2]
        assert plan.token_indices.tolist() == [0, 1, 2, 4, 3]
        assert fields.logits_indices.tolist() == ends
        assert fields.sampled_rows.tolist() == [1, 1, 1, 2, 4, 0, 0, 0]
        assert fields.sampled_positions.tolist() == [7, 8, 9, 4, 10, 0, 0, 0]
        assert fields.run_indices.reshape(3, 3).tolist() == [[0, 1, 2], [4, 4, 4], [3, 3, 3]]
        assert plan.runs.draft_ids.tolist() == [[11, 12], [-1, -1], [-1, -1]]
        assert fields.input_ids.tolist() == ([10, 11, 12, 1, 2, 3, 4] if rank == 0 else [20])
        assert plan.across.num_tokens_across_dp == (7, 1)
