"""The counter-based random values: known answers, uniformity, independence, finiteness."""

import math

import torch

from mllm_compile.runtime.sampling import counter_rng
from mllm_compile.runtime.sampling.counter_rng import derive_seed, draw_tokens, negative_gumbel, row_keys, uniform


def test_the_mixer_is_splitmix64():
    # The first outputs of the generator with state 0, as in its authors' reference (prng.di.unimi.it/splitmix64.c).
    states = torch.arange(1, 4) * counter_rng._signed(counter_rng._GAMMA)
    outputs = [value % 2**64 for value in counter_rng._mix64(states).tolist()]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [derive_seed(0, i) for i in range(3)] == [value >> 1 for value in outputs]


def test_derived_seeds_are_seeds_and_differ():
    seeds = {derive_seed(seed, index) for seed in (0, 1, 2**63 - 1) for index in range(1000)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_values_are_uniform_and_unrelated_for_neighbouring_seeds_positions_and_tokens():
    def values(seeds, positions):
        return uniform(row_keys(seeds, positions), 2000)

    steps = torch.arange(100)
    by_seed, by_position = values(steps, torch.zeros_like(steps)), values(torch.zeros_like(steps), steps)
    for matrix in (by_seed, by_position):
        assert ((matrix > 0) & (matrix < 1)).all()
        histogram = torch.histc(matrix, bins=100, min=0, max=1)
        expected = matrix.numel() / 100
        assert ((histogram - expected) ** 2 / expected).sum() < 99 + 4 * math.sqrt(198)
        for shifted in (matrix[1:, :-1] - 0.5, matrix[1:, 1:] - 0.5, matrix[:-1, 1:] - 0.5):
            correlation = ((matrix[:-1, :-1] - 0.5) * shifted).mean() * 12
            assert abs(correlation) < 4 / math.sqrt(shifted.numel())


def test_the_smallest_and_largest_bits_give_finite_values(monkeypatch):
    extremes = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    monkeypatch.setattr(counter_rng, "_mix64", lambda bits: extremes[None])
    assert negative_gumbel(torch.zeros(1, dtype=torch.int64), 5).isfinite().all()


def test_a_rare_token_among_many_is_drawn_as_often_as_it_should_be():
    # A coarse uniform is wrong at the far end. One token of 1e-3 among 1,024, in 20,000 draws.
    scores = torch.zeros(1, 1024)
    scores[0, 700] = math.log(1e-3 / (1 - 1e-3) * 1023)
    positions = torch.arange(20_000)
    tokens = draw_tokens(scores.expand(20_000, -1), torch.zeros_like(positions), positions)
    assert abs((tokens == 700).sum() - 20) < 4 * math.sqrt(20)
