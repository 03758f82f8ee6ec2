"""The sampler: distributions, seeds, penalties over steps, min_tokens, bias, flags, and what a greedy step costs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mllm_compile.runtime.sampling import sampler
from mllm_compile.runtime.sampling.counter_rng import draw_tokens, padded_scores, padded_vocab_size
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.penalties import PenaltyParams, TokenHistories
from mllm_compile.runtime.sampling.sampler import Sampler, SamplingPieces, sample_tokens
from mllm_compile.runtime.sampling.state import SamplingFlags, SamplingState
from tests.runtime.sampling.sampling_cases import (
    PROMPT,
    VOCAB,
    assert_drawn_from,
    draws,
    make_state,
    random_logits,
    sample,
    scored_by_torch,
)

GREEDY = SamplingParams(temperature=0)
RAW = ("raw_logprobs",)
NUM_DRAWS = 20_000
DISTRIBUTIONS = {
    "plain": (SamplingParams(), []),
    "cool": (SamplingParams(temperature=0.6), [TemperatureLogitsWarper(0.6)]),
    "warm": (SamplingParams(temperature=1.8), [TemperatureLogitsWarper(1.8)]),
    "top_k": (SamplingParams(top_k=12), [TopKLogitsWarper(12)]),
    "top_p": (SamplingParams(top_p=0.8), [TopPLogitsWarper(0.8)]),
    "min_p": (SamplingParams(min_p=0.1), [MinPLogitsWarper(0.1)]),
    "all": (
        SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.05),
        [TemperatureLogitsWarper(1.5), TopKLogitsWarper(40), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
    ),
}
CROWD = [
    GREEDY,
    SamplingParams(),
    SamplingParams(seed=7),
    SamplingParams(temperature=0.5, top_k=20),
    SamplingParams(top_p=0.7, seed=7),
    SamplingParams(min_p=0.1),
    SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(temperature=0, presence_penalty=1.0),
    SamplingParams(logit_bias={5: 4.0, 299: 4.0}),
    SamplingParams(min_tokens=3, stop_token_ids=[8], logprobs=2),
]


class CountOps(TorchDispatchMode):
    """Names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_distribution_of_transformers_warpers(name):
    params, warpers = DISTRIBUTIONS[name]
    logits = random_logits(1)
    expected = LogitsProcessorList(warpers)(None, logits).softmax(-1)[0]
    assert_drawn_from(draws(params, logits[0], NUM_DRAWS), expected)


def test_draws_of_many_seeds_at_one_position_follow_the_distribution():
    logits = random_logits(1)
    seeds = torch.arange(NUM_DRAWS)
    tokens = sample_tokens(logits.expand(NUM_DRAWS, -1), torch.ones(NUM_DRAWS), None, None, None, seeds=seeds)
    assert tokens.dtype == torch.int32
    assert_drawn_from(tokens, logits.softmax(-1)[0])


def test_a_token_is_the_same_alone_and_in_a_crowd_in_any_order_and_on_every_call():
    logits = random_logits(len(CROWD))
    rows = list(range(1, len(CROWD) + 1))
    positions = [len(PROMPT) + 1 + i for i in range(len(CROWD))]
    alone = []
    for i, params in enumerate(CROWD):
        state = SamplingState(len(CROWD) + 1, VOCAB, "cpu")
        state.set_request(i + 1, params, PROMPT, 1000 + i, stop_ids=params.stop_token_ids)
        alone.append(int(sample(state, logits[i : i + 1], [i + 1], positions[i : i + 1]).token_ids))
    for order in (rows, rows[::-1], rows[3:] + rows[:3]):
        state = make_state(*CROWD, stop_ids=(8,))
        index = [row - 1 for row in order]
        crowd = sample(state, logits[index], order, [positions[i] for i in index]).token_ids.tolist()
        assert crowd == [alone[i] for i in index]


def test_a_seed_decides_the_draws_whatever_the_slot_and_different_seeds_differ():
    logits = random_logits(1).expand(200, -1)
    state = make_state(SamplingParams(seed=5), SamplingParams(seed=5), SamplingParams(seed=6), SamplingParams())
    tokens = [sample(state, logits, [row] * 200, list(range(200))).token_ids for row in (1, 2, 3, 4)]
    assert torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[0], tokens[2])
    assert not torch.equal(tokens[0], tokens[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_take_the_first_of_the_largest_logits_alone_and_beside_random_rows(dtype):
    logits = random_logits(3).to(dtype)
    logits[0, [17, 280]] = 50.0
    expected = logits.float().argmax(-1).tolist()
    assert expected[0] == 17
    assert sample(make_state(GREEDY, GREEDY, GREEDY), logits, [1, 2, 3], [9] * 3).token_ids.tolist() == expected
    mixed = make_state(GREEDY, SamplingParams(top_k=3), GREEDY)
    assert sample(mixed, logits, [1, 2, 3], [9] * 3).token_ids.tolist()[::2] == expected[::2]


def test_a_greedy_step_reads_the_logits_once_by_numpy_and_looks_at_what_it_found():
    state = make_state(GREEDY, GREEDY)
    logits, rows, positions = random_logits(2), torch.tensor([1, 2]), torch.tensor([5, 5])
    with CountOps() as ops:
        Sampler()(logits, state, rows, state.flags, positions)
    of_rows = ["unsqueeze.default", "gather.default", "squeeze.dim", "abs.default", "lt.Scalar"]
    first = ops.names.index("aten.unsqueeze.default")
    assert set(ops.names[:first]) <= {"aten.detach.default", "aten.lift_fresh.default"}
    assert ops.names[first : first + 5] == [f"aten.{name}" for name in of_rows]
    assert set(ops.names[first + 5 :]) <= {"aten.scalar_tensor.default", "aten.where.self", "aten.where.ScalarOther"}


class CountedPieces:
    """The program's kernels, by torch's operations; `calls` says which were called, with how many rows."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        choice = self.greedy, self.from_logits, self.from_scores
        self.pieces = SamplingPieces(torch.bfloat16, *choice, scored_by_torch, scored_by_torch)

    def greedy(self, inputs):
        (logits,) = inputs
        self.calls.append(("greedy", logits.shape[0]))
        assert logits.dtype == torch.bfloat16
        assert logits.is_contiguous()
        return [logits.argmax(-1)]

    def from_logits(self, inputs):
        logits, temperatures, seeds, positions = inputs
        self.calls.append(("from_logits", logits.shape[0]))
        assert logits.dtype == torch.bfloat16
        assert all(one.is_contiguous() for one in inputs)
        return [draw_tokens(padded_scores(logits, temperatures), seeds, positions)]

    def from_scores(self, inputs):
        self.calls.append(("from_scores", inputs[0].shape[0]))
        assert inputs[0].shape[1] == padded_vocab_size(VOCAB)
        assert all(one.is_contiguous() for one in inputs)
        return [draw_tokens(*inputs)]


@pytest.mark.parametrize(
    ("crowd", "calls"),
    [
        ([SamplingParams(temperature=0.6), SamplingParams(seed=3)], [("from_logits", 2)]),
        ([SamplingParams(temperature=0.6), GREEDY], [("from_logits", 2), ("greedy", 2)]),
        ([SamplingParams(), SamplingParams(top_k=5)], [("from_scores", 2)]),
        ([SamplingParams(), SamplingParams(presence_penalty=1.0)], [("from_scores", 2)]),
        ([GREEDY, GREEDY], [("greedy", 2)]),
        ([GREEDY, SamplingParams(temperature=0, presence_penalty=1.0)], []),
    ],
)
def test_the_programs_kernels_choose_where_there_are_some(crowd, calls):
    logits = random_logits(len(crowd)).bfloat16()
    rows, positions = torch.arange(len(crowd)) + 1, torch.tensor([9, 9])
    counted = CountedPieces()
    tokens = []
    for pieces in (None, counted.pieces):
        state = make_state(*crowd)
        tokens.append(Sampler(pieces)(logits, state, rows, state.flags, positions).token_ids)
    assert torch.equal(*tokens)
    assert counted.calls == calls


@pytest.mark.parametrize("num_rows", [1, 3, 7])
def test_what_kernels_read_of_the_parameters_is_contiguous_and_aligned(num_rows):
    params = make_state(*[SamplingParams(temperature=0.6)] * num_rows).gather(torch.arange(num_rows) + 1)
    for column in (params.temperature, params.seed):
        assert column.is_contiguous()
        assert column.data_ptr() % 16 == 0, "a package copies what is not"


def test_a_very_small_temperature_is_greedy():
    logits = random_logits(20)
    state = make_state(*[SamplingParams(temperature=1e-3)] * 20)
    assert torch.equal(sample(state, logits, list(range(1, 21)), [9] * 20).token_ids, logits.argmax(-1))


def test_the_logits_that_are_handed_in_stay_as_they_are():
    logits = random_logits(len(CROWD))
    before = logits.clone()
    sample(make_state(*CROWD), logits, list(range(1, len(CROWD) + 1)), [5] * len(CROWD))
    assert torch.equal(logits, before)


def test_penalties_count_what_was_drawn_step_by_step():
    logits = torch.zeros(1, VOCAB)
    logits[0, [20, 21, 22]] = torch.tensor([1.0, 0.9, 0.5])
    state = make_state(SamplingParams(temperature=0, frequency_penalty=0.3))
    tokens = [int(sample(state, logits, [1], [len(PROMPT) + i]).token_ids) for i in range(6)]
    # 20: 1.0, 0.7, 0.4, …; 21: 0.9, 0.6, …; 22: 0.5, 0.2, …
    assert tokens == [20, 21, 20, 21, 22, 20]


def test_a_resumed_request_is_penalised_for_the_output_it_had():
    params = SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    logits = random_logits(12, spread=0.5)

    def step(state, row, i):
        return int(sample(state, logits[i : i + 1], [row], [len(PROMPT) + i]).token_ids)

    whole = make_state(params)
    tokens = [step(whole, 1, i) for i in range(12)]
    resumed = SamplingState(4, VOCAB, "cpu")
    resumed.set_request(1, params, PROMPT, 0)
    assert [step(resumed, 1, i) for i in range(5)] == tokens[:5]
    resumed.clear(1)
    resumed.set_request(3, params, PROMPT, 0, output_token_ids=tokens[:5])
    assert [step(resumed, 3, i) for i in range(5, 12)] == tokens[5:]


def test_rows_penalised_a_few_at_a_time_are_penalised_alike(monkeypatch):
    logits = random_logits(10, spread=0.1)
    rows = list(range(1, 11))
    params = [SamplingParams(temperature=0, repetition_penalty=1 + i / 10, presence_penalty=i / 10) for i in range(10)]

    def tokens():
        state = make_state(*params)
        return [sample(state, logits, rows, [9] * 10).token_ids.tolist() for _ in range(4)]

    at_once = tokens()
    monkeypatch.setattr(sampler, "_PENALTY_ELEMENTS", 3 * VOCAB)
    assert tokens() == at_once


def test_a_step_that_still_runs_for_a_cleared_slot_harms_no_one():
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    state = make_state(params, params)
    logits = torch.zeros(1, VOCAB)
    logits[0, 30] = 1.0
    sample(state, logits, [1], [4])
    state.clear(1)
    sample(state, logits, [1], [5])
    assert sample(state, logits, [2], [4]).token_ids.tolist() == [30]


def test_bias_moves_the_choice_and_is_gone_with_its_request():
    logits = torch.zeros(2, VOCAB)
    logits[:, 10] = 1.0
    state = make_state(SamplingParams(temperature=0, logit_bias={0: 3.0, 299: 5.0}), GREEDY)
    assert sample(state, logits, [1, 2], [4, 4]).token_ids.tolist() == [299, 10]
    state.set_request(1, GREEDY, PROMPT, 0)
    state.set_request(2, SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(100, 200), 2.0)), PROMPT, 0)
    assert sample(state, logits, [1, 2], [4, 4]).token_ids.tolist() == [10, 100]


def test_a_banned_token_is_not_drawn():
    logits = torch.zeros(VOCAB)
    assert 7 not in draws(SamplingParams(logit_bias={7: -100}), logits, 20_000)


def test_stop_ids_cannot_be_drawn_before_min_tokens_as_in_transformers():
    params = SamplingParams(temperature=0, min_tokens=3)
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 9, 50]] = torch.tensor([5.0, 4.0, 3.0])
    state = make_state(params, stop_ids=(2, 9))
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [2, 9])
    ids = torch.tensor([PROMPT])
    tokens = []
    for i in range(5):
        tokens.append(int(sample(state, logits, [1], [len(PROMPT) + i]).token_ids))
        assert tokens[-1] == int(processor(ids, logits).argmax())
        ids = torch.cat([ids, torch.tensor([tokens[-1:]])], dim=1)
    assert tokens == [50, 50, 50, 2, 2]


def test_logprobs_are_of_the_models_own_distribution():
    logits = random_logits(2)
    state = make_state(SamplingParams(temperature=0.3, top_k=5, logit_bias={4: 9.0}, logprobs=3), GREEDY)
    output = sample(state, logits, [1, 2], [4, 4])
    raw = logits.log_softmax(-1)
    torch.testing.assert_close(output.logprobs.logprobs, raw.gather(1, output.token_ids[:, None]).squeeze(1))
    torch.testing.assert_close(output.logprobs.top_logprobs, raw.topk(3).values)
    assert sample(make_state(GREEDY), logits[:1], [1], [4]).logprobs is None


def test_flags_say_what_the_active_slots_use_and_no_more():
    state = SamplingState(9, VOCAB, "cpu")
    assert state.flags == SamplingFlags()
    state.set_request(1, GREEDY, PROMPT, 0)
    assert state.flags == SamplingFlags(all_greedy=True, any_greedy=True)
    state.set_request(2, SamplingParams(top_k=5, logprobs=0), PROMPT, 0)
    assert state.flags == SamplingFlags(all_greedy=False, needs_top_k=True, max_logprobs=0, modes=RAW)
    state.set_request(3, SamplingParams(top_p=0.5, min_p=0.1, min_tokens=1, logprobs=7), PROMPT, 0)
    state.set_request(4, SamplingParams(presence_penalty=1, logit_bias={1: 1}), PROMPT, 0)
    assert state.flags == SamplingFlags(
        all_greedy=False,
        needs_bias=True,
        needs_penalties=True,
        needs_min_tokens=True,
        needs_top_k=True,
        needs_top_p=True,
        needs_min_p=True,
        max_logprobs=7,
        modes=RAW,
    )
    for row in (1, 3, 4):
        state.clear(row)
    assert state.flags == SamplingFlags(all_greedy=False, any_greedy=False, needs_top_k=True, max_logprobs=0, modes=RAW)
    state.set_request(2, GREEDY, PROMPT, 0)
    assert state.flags == SamplingFlags()


def test_filters_of_a_greedy_request_cost_nothing():
    assert make_state(SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.2)).flags == SamplingFlags()


@pytest.mark.parametrize("params", [GREEDY, CROWD[3], CROWD[6], CROWD[9]])
def test_a_step_without_rows_to_sample_gives_no_tokens(params):
    output = sample(make_state(params, stop_ids=(8,)), torch.empty(0, VOCAB), [], [])
    assert output.token_ids.shape == (0,)


def test_sample_tokens_takes_parameters_as_tensors():
    logits = random_logits(4)
    counts = torch.zeros(4, VOCAB, dtype=torch.int32)
    best = logits.argmax(-1)
    counts[0, best[0]] = 1
    penalties = PenaltyParams(
        repetition_penalties=torch.ones(4),
        frequency_penalties=torch.full((4,), 2.0),
        presence_penalties=torch.full((4,), 30.0),
        token_histories=TokenHistories(prompt_mask=counts > 0, output_counts=counts),
    )
    temperatures = torch.tensor([0.0, 0.0, 1.0, 1.0])
    top_ks, top_ps = torch.tensor([0, 0, 1, 0]), torch.tensor([1.0, 1.0, 1.0, 1e-6])
    tokens = sample_tokens(logits, temperatures, top_ps, top_ks, penalties)
    assert tokens[0] == logits[0].topk(2).indices[1]
    assert tokens[1:].tolist() == best[1:].tolist()


def test_sample_tokens_without_seeds_follows_torchs_generator():
    logits, temperatures = random_logits(50), torch.ones(50)
    torch.manual_seed(3)
    first, second = (sample_tokens(logits, temperatures, None, None, None) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(sample_tokens(logits, temperatures, None, None, None), first)
    assert not torch.equal(first, second)
