from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.metadata import StepPrompts
from mllm_compile.runtime.cuda_graph.prompts import LaunchedPrompts
from mllm_compile.runtime.errors import DeviceMemoryError
from mllm_compile.runtime.forward_batch import LogitsProcessorOutput
from mllm_compile.runtime.media.grids import GridTower
from mllm_compile.runtime.media.request import RequestMedia
from mllm_compile.runtime.sampling.sampler import Sampler
from mllm_compile.runtime.sampling.state import SamplingFlags
from mllm_compile.runtime.step.paths.decodes import DecodePath
from mllm_compile.runtime.step.paths.forward import ForwardPath
from mllm_compile.runtime.step.runner import StepRunner
from mllm_compile.runtime.step_fields import DTYPES, StepFields
from tests.runtime.runner_cases import VOCAB, Loop, TinyModel, make_runner
from tests.runtime.step.decode_loop_cases import GraphsOf, LoopedRunner

PROMPTS = [[3, 9, 27, 20, 60], [1, 2], [7] * 21, [5, 4, 3, 2, 1, 0, 59, 58, 57, 33, 12]]


def outputs(requests) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


def generate(prompts, overlap=True, enable_prefix_cache=False, num_tokens=8, **config):
    model = TinyModel()
    loop = Loop(make_runner(model, **config), enable_prefix_cache)
    requests = [loop.add(prompt, max_tokens=num_tokens) for prompt in prompts]
    loop.run(overlap)
    return outputs(requests), loop


@pytest.fixture(scope="module")
def expected():
    return [TinyModel().greedy(prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_batch_of_mixed_lengths_gives_each_prompt_what_it_gets_alone(expected, overlap):
    tokens, loop = generate(PROMPTS, overlap)
    assert tokens == expected
    assert len(loop.batches) < 12, "they ran together"


@pytest.mark.parametrize("budget", [8, 11])
def test_prompts_in_chunks_beside_decodes_give_the_same_tokens(expected, budget):
    tokens, loop = generate(PROMPTS, max_num_batched_tokens=budget)
    assert tokens == expected
    kinds = {(batch.num_decodes > 0, batch.num_decodes < batch.num_requests) for batch in loop.batches}
    assert kinds == {(False, True), (True, True), (True, False)}, "prompts, both, and decodes"
    assert any(not batch.sample_mask.all() for batch in loop.batches)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_page_size_makes_no_difference(expected, page_size):
    assert generate(PROMPTS, page_size=page_size)[0] == expected


def test_a_prefix_hit_gives_the_same_tokens_as_a_cold_prompt():
    model = TinyModel()
    loop = Loop(make_runner(model), enable_prefix_cache=True)
    shared = [11, 22, 33, 44, 55, 6, 7, 8, 9]
    first = loop.add([*shared, 1])
    loop.run()
    second = loop.add([*shared, 2, 3])
    loop.run()
    assert second.num_cached_tokens == 8
    assert outputs([first, second]) == [model.greedy([*shared, 1], 8), model.greedy([*shared, 2, 3], 8)]


def test_preempted_requests_are_recomputed_to_the_same_tokens():
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]]
    tokens, loop = generate(prompts, num_pages=9, num_tokens=14)
    assert loop.scheduler.stats().preemptions > 0
    assert tokens == [TinyModel().greedy(prompt, 14) for prompt in prompts]


def test_requests_join_and_leave_while_others_run(expected):
    model = TinyModel()
    loop = Loop(make_runner(model, max_running_requests=2))
    requests = [loop.add(prompt) for prompt in PROMPTS]
    loop.run()
    assert outputs(requests) == expected
    assert max(batch.num_requests for batch in loop.batches) == 2


def test_a_seeded_request_draws_the_same_tokens_alone_and_in_a_crowd():
    def draw(crowd: bool):
        loop = Loop(make_runner())
        others = [loop.add(prompt, temperature=1.5) for prompt in PROMPTS] if crowd else []
        request = loop.add([9, 9, 9], temperature=1.0, seed=7, top_p=0.9, max_tokens=12)
        loop.run()
        return request.output_token_ids, outputs(others)

    alone, _ = draw(crowd=False)
    in_crowd, others = draw(crowd=True)
    assert alone == in_crowd
    assert len(set(alone)) > 3
    assert others == draw(crowd=True)[1], "unseeded ones follow the engine's seed"


def test_a_slot_forgets_the_parameters_of_the_request_that_left():
    model = TinyModel()
    loop = Loop(make_runner(model, max_running_requests=1))
    biased = loop.add([1, 2], logit_bias={5: 100.0}, max_tokens=3)
    plain = loop.add([1, 2])
    loop.run()
    assert biased.output_token_ids == [5, 5, 5]
    assert plain.output_token_ids == model.greedy([1, 2], 8)
    assert not loop.steps.sampling.state.flags.needs_bias


def test_another_step_runner_finds_slots_without_parameters(expected):
    runner = make_runner()
    for limits in ({"logit_bias": {5: 100.0}, "min_tokens": 2}, {}):
        loop = Loop(runner)
        requests = [loop.add(prompt, max_tokens=8, **limits) for prompt in PROMPTS]
        loop.run()
    assert outputs(requests) == expected


def test_flags_of_requests_that_left_are_dropped_though_nobody_takes_their_slot():
    loop = Loop(make_runner())
    loop.add([1, 2], logprobs=3, max_tokens=2)
    long = loop.add([3, 4], max_tokens=12)
    loop.run()
    assert long.output_token_ids == TinyModel().greedy([3, 4], 12)
    assert loop.steps.sampling.state.flags.max_logprobs is None


def test_logprobs_match_the_model_and_as_many_as_each_request_asked_for():
    model = TinyModel()
    loop = Loop(make_runner(model))
    wants_2, wants_0, wants_none = (
        loop.add(p, logprobs=k, max_tokens=5) for p, k in zip(PROMPTS, (2, 0, None), strict=False)
    )
    loop.run()
    assert wants_none.output_logprobs == []
    for request, num_top in ((wants_2, 2), (wants_0, 0)):
        sequence = request.prompt_token_ids + request.output_token_ids
        logprobs = torch.log_softmax(model.logits(sequence), dim=-1)
        first = len(request.prompt_token_ids) - 1
        assert len(request.output_logprobs) == 5
        for i, scores in enumerate(request.output_logprobs):
            assert scores.token_id == request.output_token_ids[i]
            assert scores.logprob == pytest.approx(float(logprobs[first + i, scores.token_id]), abs=1e-4)
            assert scores.rank == 1
            assert len(scores.top) == num_top
        if num_top:
            assert wants_2.output_logprobs[0].top[0][0] == wants_2.output_token_ids[0]


@pytest.mark.parametrize("config", [{}, {"deterministic": True}, {"max_num_batched_tokens": 8}])
def test_log_probabilities_of_the_whole_vocabulary_are_those_rows_alone(config):
    model = TinyModel()
    loop = Loop(make_runner(model, **config))
    beside = [loop.add(PROMPTS[0]), loop.add(PROMPTS[1], logprobs=1)]
    requests = [loop.add(PROMPTS[2], logprobs=-1, max_tokens=5), loop.add(PROMPTS[3], logprobs=-1, temperature=0.7)]
    assert not loop.steps.sampling.state.flags.needs_all_logprobs
    loop.run()
    for request in requests:
        logprobs = torch.log_softmax(model.logits(request.prompt_token_ids + request.output_token_ids), dim=-1)
        for position, scores in enumerate(request.output_logprobs, start=len(request.prompt_token_ids) - 1):
            assert scores.of_all == pytest.approx(logprobs[position].numpy(), abs=1e-4)
            assert scores.logprob == pytest.approx(scores.of_all[scores.token_id], abs=1e-6)
            assert scores.top == ()
        assert len(request.output_logprobs) == len(request.output_token_ids)
    assert beside[0].output_logprobs == []
    assert all(scores.of_all is None and len(scores.top) == 1 for scores in beside[1].output_logprobs)


@pytest.mark.parametrize("budget", [64, 8])
def test_prompt_logprobs_cover_every_prompt_token_but_the_first(budget):
    model = TinyModel()
    loop = Loop(make_runner(model, max_num_batched_tokens=budget))
    beside = loop.add(PROMPTS[0])
    request = loop.add(PROMPTS[3], prompt_logprobs=1, max_tokens=3)
    loop.run()
    logprobs = torch.log_softmax(model.logits(PROMPTS[3]), dim=-1)
    assert [scores.token_id for scores in request.prompt_logprobs] == PROMPTS[3][1:]
    for position, scores in enumerate(request.prompt_logprobs):
        assert scores.logprob == pytest.approx(float(logprobs[position, scores.token_id]), abs=1e-4)
        assert scores.top[0][0] == int(logprobs[position].argmax())
        assert scores.rank == 1 + int((logprobs[position] > logprobs[position, scores.token_id]).sum())
    assert request.output_token_ids == model.greedy(PROMPTS[3], 3)
    assert beside.output_token_ids == model.greedy(PROMPTS[0], 8)


def test_prompt_logprobs_run_the_head_on_a_part_of_the_positions_at_a_time(monkeypatch):
    def score():
        model = TinyModel()
        loop = Loop(make_runner(model))
        request = loop.add(PROMPTS[2], prompt_logprobs=2, max_tokens=2)
        loop.run()
        return [(s.token_id, s.rank, s.top, s.logprob) for s in request.prompt_logprobs], model.calls

    expected, calls = score()
    assert calls == [(21, 1), (21, 20), (1, 1)]
    monkeypatch.setattr("mllm_compile.runtime.step.sampling._SCORED_LOGITS", 8 * VOCAB)
    in_parts, calls = score()
    assert calls == [(21, 1), (21, 8), (21, 8), (21, 4), (1, 1)]
    assert in_parts == expected


def test_only_rows_that_end_their_prompt_get_logits():
    model = TinyModel()
    loop = Loop(make_runner(model, max_num_batched_tokens=8))
    loop.add(PROMPTS[2], max_tokens=2)
    loop.run()
    assert model.calls == [(8, 1), (8, 1), (5, 1), (1, 1)]
    assert [batch.sample_mask.tolist() for batch in loop.batches] == [[False], [False], [True], [True]]


def test_tokens_of_unsampled_rows_are_marked():
    loop = Loop(make_runner(max_num_batched_tokens=8))
    loop.add(PROMPTS[2], max_tokens=2)
    batch = loop.scheduler.schedule()
    output = loop.steps.submit(batch).wait()
    assert output.token_ids.dtype == np.int64
    assert output.token_ids.tolist() == [-1]


def test_running_out_of_memory_names_the_keys_to_change(monkeypatch):
    loop = Loop(make_runner())
    loop.add([1, 2, 3])

    def fail(batch):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(loop.steps._runner, "forward", fail)
    with pytest.raises(DeviceMemoryError, match=r"step of 3 tokens of 1 requests .*max_num_batched_tokens"):
        loop.steps.submit(loop.scheduler.schedule())


def image_of(token_ids: list[int]) -> RequestMedia:
    """One image, of all tokens that are the last one."""
    tower = GridTower(
        merge=1,
        patch_width=1,
        feature_width=8,
        window=0,
        table_side=0,
        align_corners=False,
        image_token_id=token_ids[-1],
    )
    is_image = np.array(token_ids) == token_ids[-1]
    count = int(is_image.sum())
    tensors = {"pixel_values": np.zeros((count, 1)), "image_grid_thw": np.array([(1, 1, count)])}
    return RequestMedia.of(tower, token_ids, is_image, [(len(token_ids) - count, count, bytes(32), tensors)])


def test_a_request_that_a_failed_step_admitted_and_had_no_token_of_is_answered_by_its_own_wishes(monkeypatch):
    loop = Loop(make_runner(max_num_batched_tokens=16), enable_prefix_cache=True)
    prefix = [3, 1, 4, 1]
    loop.add([*prefix, 5], max_tokens=1)
    loop.run()
    lost = loop.add([60] * 12)
    waiting = loop.add([*prefix, *[60] * 8], logit_bias={7: 100.0}, max_tokens=3)  # its image is too much for the step
    for request in (lost, waiting):
        request.media = image_of(request.prompt_token_ids)
    batch = loop.scheduler.schedule()
    assert batch.requests == [lost] and batch.admitted == [lost, waiting]
    with monkeypatch.context() as patch:
        patch.setattr(loop.steps._runner, "forward", Mock(side_effect=torch.OutOfMemoryError("no room")))
        with pytest.raises(DeviceMemoryError):
            loop.steps.submit(batch)
    assert loop.scheduler.fail(batch) == [lost]
    loop.run()
    assert waiting.output_token_ids == [7, 7, 7]


@pytest.mark.parametrize("part", ["counts.allocate", "biases.set"])
def test_after_sampling_ran_out_of_memory_the_slot_serves_another_request(expected, monkeypatch, part):
    def refuse(*args):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    loop = Loop(make_runner(TinyModel(), max_running_requests=1))
    owner, name = part.split(".")
    loop.add([1, 2, 3], frequency_penalty=0.5, logit_bias={4: 100.0})
    batch = loop.scheduler.schedule()
    with monkeypatch.context() as patch:
        patch.setattr(getattr(loop.steps.sampling.state, owner), name, refuse)
        with pytest.raises(DeviceMemoryError, match="ran out of memory"):
            loop.steps.submit(batch)
    loop.scheduler.fail(batch)
    request = loop.add(PROMPTS[0])
    loop.run()
    assert request.output_token_ids == expected[0]
    assert loop.steps.sampling.state.flags == SamplingFlags()


def test_decodes_are_one_launch_where_new_pages_are_their_own():
    runner = make_runner()
    loop = Loop(runner)
    loop.add([1, 2, 3])
    loop.run()
    decode = loop.batches[2]
    assert decode.num_decodes == 1
    paths = StepRunner(LoopedRunner(runner, 100), Sampler())._paths
    for row, is_own in ((int(decode.rows[0]), True), (7, False)):
        pages = {"page_rows": row, "page_positions": 1, "page_ids": 60}
        batch = replace(decode, **{name: np.array([value], dtype=np.int32) for name, value in pages.items()})
        assert isinstance(paths.of(batch), DecodePath if is_own else ForwardPath)


def test_every_token_is_one_of_the_vocabulary():
    loop = Loop(make_runner())
    requests = [loop.add([i, i + 1], temperature=2.0, max_tokens=20) for i in range(8)]
    loop.run()
    assert all(0 <= token < VOCAB for tokens in outputs(requests) for token in tokens)


def test_a_chunk_says_where_its_prompt_is_if_its_pages_follow_each_other(monkeypatch):
    runner = make_runner(max_num_batched_tokens=16)
    loop, seen = Loop(runner), []
    forward = runner.forward

    def noted(batch):
        if batch.first_slot is not None:
            row, count = int(batch.req_pool_indices[-1]), int(batch.seq_lens_cpu[-1])
            slots = runner.req_to_token_pool.req_to_token[row, :count]
            assert torch.equal(slots, torch.arange(batch.first_slot, batch.first_slot + count, dtype=torch.int32))
        seen.append((batch.batch_size, batch.extend_num_tokens, batch.first_slot is not None))
        return forward(batch)

    monkeypatch.setattr(runner, "forward", noted)
    loop.add(range(40), max_tokens=1)
    loop.run()
    assert seen == [(1, 16, False), (1, 16, True), (1, 8, True)], "the first chunk has no prefix"
    seen.clear()
    loop.add(range(40), max_tokens=1)  # in pages that came back in another order
    loop.run()
    assert seen == [(1, 16, False)] * 2 + [(1, 8, False)]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("reads_pages", [True, False])
def test_new_pages_are_listed_ahead_of_a_step_that_reads_them_else_behind_its_launch_even_if_that_fails(
    monkeypatch, reads_pages, fails
):
    runner, told = make_runner(TinyModel()), []
    loop = Loop(runner)
    forward, write = runner.forward, runner.req_to_token_pool.write_page_slots

    def forward_or_fail(batch):
        told.append("forward")
        if fails:
            raise torch.OutOfMemoryError("no room")
        return forward(batch)

    monkeypatch.setattr(runner, "reads_pages", lambda batch: reads_pages)
    monkeypatch.setattr(runner, "forward", forward_or_fail)
    monkeypatch.setattr(runner.req_to_token_pool, "write_page_slots", lambda *new: (told.append("pages"), write(*new)))
    loop.add([1, 2, 3], max_tokens=1)
    with pytest.raises(DeviceMemoryError) if fails else nullcontext():
        loop.run()
    assert told == (["pages", "forward"] if reads_pages else ["forward", "pages"])
    assert runner.req_to_token_pool.req_to_token.any()


def launched_at_once(runner, most: int, launches: list[int]):
    """As captured prompts run of up to `most` tokens; notes how many each launch has."""

    def launch(descriptor, fields, prompts: StepPrompts) -> LaunchedPrompts | None:
        assert descriptor == most >= fields.positions.size
        launches.append(fields.positions.size)
        placed = StepFields(
            **{
                name: torch.from_numpy(array.astype(DTYPES[name]))
                for name, array in (fields.inputs() | fields.others()).items()
            }
        )
        # A captured step reads these pages and no table.
        table, size, ids = runner.req_to_token_pool.req_to_token, runner.config.runtime.page_size, prompts.list_pages()
        for row, num_keys in zip(prompts.rows.tolist(), prompts.num_keys.tolist(), strict=True):
            count = -(-num_keys // size)
            slots, ids = (ids[:count, None] * size + np.arange(size)).ravel(), ids[count:]
            table[row, : slots.size] = torch.from_numpy(slots.astype(np.int32))
        assert not ids.size
        new, cached = torch.from_numpy(prompts.query_lens), torch.from_numpy(prompts.prefix_lens)
        batch = runner.prepare_forward_batch_extend(
            placed.input_ids, placed.req_pool_indices, placed.seq_lens, new, cached, placed.out_cache_loc
        )

        def head(indices: torch.Tensor) -> LogitsProcessorOutput:
            batch.logits_indices = indices
            return runner.forward(batch)

        return LaunchedPrompts(placed, head)

    return launch


def capture_prompts(runner, most: int, launch) -> None:
    """Gives the runner captured prompts of up to `most` tokens, which `launch` plays."""

    def find(num_tokens: int, prefix_lens: np.ndarray, has_lora: bool) -> int | None:
        return most if num_tokens <= most else None

    runner.graph_runner = GraphsOf(prompts=SimpleNamespace(find=find, launch=launch))


@pytest.mark.parametrize("overlap", [True, False])
def test_prompts_in_one_launch_and_others_get_the_same_tokens(expected, overlap):
    runner, launches = make_runner(TinyModel(), max_num_batched_tokens=24), []
    capture_prompts(runner, 21, launched_at_once(runner, 21, launches))
    loop = Loop(runner)
    requests = [loop.add(prompt) for prompt in PROMPTS[:1]]
    loop.run(overlap)
    requests += [loop.add(prompt) for prompt in PROMPTS[1:]]
    loop.run(overlap)
    assert outputs(requests) == expected
    assert launches == [5], "a step of 24 tokens is too long, later ones have decodes"
    scored = loop.add([5, 4, 3], prompt_logprobs=1)
    loop.run(overlap)
    assert len(launches) == 1 and len(scored.output_token_ids) == 8, "prompts that are scored need more than the head"


def test_prompts_that_hit_the_cache_are_launched_so_too_and_get_the_same_tokens():
    runner, launches = make_runner(TinyModel(), page_size=4), []
    capture_prompts(runner, 21, launched_at_once(runner, 21, launches))
    loop, prompt = Loop(runner, enable_prefix_cache=True), PROMPTS[3]
    for length in (len(prompt), 10, 9, len(prompt)):
        request = loop.add(prompt[:length])
        loop.run()
        assert outputs([request]) == [TinyModel().greedy(prompt[:length], 8)]
    assert launches == [len(prompt), 2, 1, 3], "4 tokens are a page"


@pytest.mark.parametrize(("most", "is_served"), [(21, True), (21, False), (4, True)])
def test_captured_prompts_read_states_of_prefixes_where_they_are_and_others_have_them_copied(
    most, is_served, monkeypatch
):
    runner, told = make_runner(TinyModel()), []
    launch = launched_at_once(runner, most, [])

    def launch_and_tell(descriptor, fields, prompts: StepPrompts) -> LaunchedPrompts | None:
        if not is_served:
            return None
        told.extend([prompts.rows.tolist(), prompts.state_rows.tolist()])
        return launch(descriptor, fields, prompts)

    pool = SimpleNamespace(copy_rows=lambda copies: told.append(copies.tolist()))
    capture_prompts(runner, most, launch_and_tell)
    loop = Loop(runner)
    monkeypatch.setattr(runner, "state_pool", pool)
    for prompt in PROMPTS[:2]:
        loop.add(prompt[:3])
    batch = loop.scheduler.schedule()
    first, second = batch.rows.tolist()
    waits = 7  # admitted, without tokens in the step
    loop.steps.submit(replace(batch, state_restores=np.array([[9, second], [8, waits]])))
    if is_served and most == 21:
        assert told == [[first, second], [first, 9], [[8, waits]]]
    else:
        assert told == [[[9, second], [8, waits]]]


@pytest.mark.parametrize("fails", [False, True])
def test_new_pages_of_captured_prompts_are_listed_behind_what_their_tokens_wait_for_even_if_that_fails(
    monkeypatch, fails
):
    runner, told, launches = make_runner(TinyModel(), page_size=4), [], []
    launch = launched_at_once(runner, 21, launches)
    write, table = runner.req_to_token_pool.write_page_slots, runner.req_to_token_pool.req_to_token

    def launch_alone(descriptor, fields, prompts: StepPrompts) -> LaunchedPrompts | None:
        assert fields.page_places is None and fields.page_slots is None, "what no token waits for comes later"
        launched = launch(descriptor, fields, prompts)

        def head(indices: torch.Tensor) -> LogitsProcessorOutput:
            told.append("head")
            if fails:
                raise torch.OutOfMemoryError("no room")
            output = launched.head(indices)
            table.zero_()
            return output

        return LaunchedPrompts(launched.fields, head)

    capture_prompts(runner, 21, launch_alone)
    loop = Loop(runner, enable_prefix_cache=True)
    sampling, sample = loop.steps.sampling, loop.steps.sampling.sample
    monkeypatch.setattr(sampling, "sample", lambda *step, **rest: (told.append("sample"), sample(*step, **rest))[1])
    monkeypatch.setattr(runner.req_to_token_pool, "write_page_slots", lambda *new: (told.append("pages"), write(*new)))
    request = loop.add(PROMPTS[3])
    batch = loop.scheduler.schedule()
    with pytest.raises(DeviceMemoryError) if fails else nullcontext():
        loop.steps.submit(batch)
    assert told == (["head", "pages"] if fails else ["head", "sample", "pages"])
    slots = loop.steps._pools._pages.slots(np.full(11, request.row), np.arange(11))
    assert table[request.row, :11].tolist() == slots.tolist()
