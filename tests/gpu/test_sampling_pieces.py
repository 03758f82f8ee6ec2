"""The kernels that choose tokens, in packages as pieces are compiled: the tokens that torch's operations choose."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.inductor.job import PieceJob
from mllm_compile.inductor.workers import PieceWorkers
from mllm_compile.kernels.sampling import sampling_pieces
from mllm_compile.runtime.program.pieces import load_piece
from mllm_compile.runtime.sampling.counter_rng import draw_tokens, padded_vocab_size
from mllm_compile.runtime.sampling.params import NO_TOKEN, SamplingParams
from mllm_compile.runtime.sampling.sampler import Sampler, SamplingPieces
from tests.runtime.sampling.sampling_cases import assert_drawn_from, make_state, random_logits, scored_by_torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# A vocabulary that is no multiple of a block, one whose rows are not aligned either, one of less than a block.
KINDS = [("bfloat16", 151_936), ("float16", 50_257), ("float32", 200)]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request) -> tuple[str, int]:
    return request.param


@pytest.fixture(scope="module")
def vocab(kind) -> int:
    return kind[1]


@pytest.fixture(scope="module")
def pieces(kind, tmp_path_factory) -> SamplingPieces:
    folder = tmp_path_factory.mktemp("sampling")
    jobs = []
    for piece in sampling_pieces(*kind):
        (folder / f"{piece.name}.py").write_text(piece.source)
        source, package = (folder / f"{piece.name}{suffix}" for suffix in (".py", ".pt2"))
        jobs.append(PieceJob(piece.name, source, tuple(piece.inputs), package))
    sizes = {"T": 8192, "S": 8192, "P": 2**31 - 1}
    with PieceWorkers("cuda:0", sizes, folder / "cache", folder, count=len(jobs)) as workers:
        for compiled in [workers.submit(job) for job in jobs]:
            compiled.result()
    loaded = [load_piece(job.package_path.name, job.package_path.read_bytes()) for job in jobs]
    return SamplingPieces(getattr(torch, kind[0]), *loaded)


def rows_of(count: int, kind: tuple[str, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, temperatures, seeds and positions."""
    generator = torch.Generator().manual_seed(count)
    logits = random_logits(count, seed=count, spread=3.0, vocab_size=kind[1]).to(getattr(torch, kind[0]))
    temperatures = torch.rand(count, generator=generator) + 0.3
    seeds = torch.randint(0, 2**62, (count,), generator=generator)
    positions = torch.randint(0, 4096, (count,), generator=generator)
    return logits.cuda(), temperatures.cuda(), seeds.cuda(), positions.cuda()


def scores_of(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    scores = logits.new_full((logits.shape[0], padded_vocab_size(logits.shape[1])), -torch.inf, dtype=torch.float32)
    scores[:, : logits.shape[1]] = logits * temperatures.reciprocal()[:, None]
    return scores


@pytest.mark.parametrize("count", [1, 3, 256, 600])
def test_tokens_match_torchs_operations_from_logits_and_from_scores(pieces, kind, count):
    logits, temperatures, seeds, positions = rows_of(count, kind)
    scores = scores_of(logits, temperatures)
    expected = draw_tokens(scores, seeds, positions)
    from_logits = pieces.from_logits([logits, temperatures, seeds, positions])[0]
    assert from_logits.dtype == torch.int64
    assert torch.equal(from_logits, pieces.from_scores([scores, seeds, positions])[0])
    # Sums of a block's 256 exponentials differ by up to 3e-5, which may decide between two near blocks.
    assert (from_logits != expected).sum() <= count // 500


@pytest.mark.parametrize("count", [1, 3, 64, 256, 600])
def test_greedy_tokens_match_torchs_argmax(pieces, kind, count):
    logits = rows_of(count, kind)[0]
    tokens = pieces.greedy([logits])[0]
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("count", [1, 3, 64, 300])
def test_log_probabilities_match_torchs_and_are_the_same_alone_and_in_float32(pieces, kind, vocab, count):
    logits, temperatures, seeds, _ = rows_of(count, kind)
    factors, tokens = temperatures.reciprocal(), seeds % vocab
    found, wanted = pieces.score([logits, factors, tokens])[0], scored_by_torch([logits, factors, tokens])[0]
    torch.testing.assert_close(found[:3], wanted[:3], rtol=1e-6, atol=5e-6)
    products = logits.float() * factors[:, None]
    assert torch.equal(found[3].long() - 1, (products > products.gather(1, tokens[:, None])).sum(-1))
    assert torch.equal(found, pieces.score_floats([logits.float(), factors, tokens])[0])
    assert torch.equal(found, pieces.score_floats([products, torch.ones_like(factors), tokens])[0])
    row = slice(count // 2, count // 2 + 1)
    alone = pieces.score([logits[row].contiguous(), factors[row].clone(), tokens[row].clone()])[0]
    assert torch.equal(found[:, row], alone)


def test_of_equal_logits_the_lowest_id_is_taken(pieces, kind, vocab):
    logits = rows_of(3, kind)[0]
    logits[0, [vocab - 1, 17, vocab // 2]] = 50.0  # in one block and in several
    logits[1] = 0.0
    assert pieces.greedy([logits])[0].tolist() == [17, 0, int(logits[2].argmax())]


def test_rows_with_a_logit_that_is_no_number_have_no_token_and_the_others_keep_theirs(pieces, kind, vocab):
    logits, temperatures, seeds, positions = rows_of(11, kind)

    def choose():
        scores = scores_of(logits, temperatures)
        return [
            pieces.greedy([logits])[0],
            pieces.from_logits([logits, temperatures, seeds, positions])[0],
            pieces.from_scores([scores, seeds, positions])[0],
        ]

    before = choose()
    broken = {1: torch.nan, 3: torch.inf, 8: -torch.nan}
    for row, value in broken.items():
        logits[row, (0, vocab // 2, vocab - 1)[row % 3]] = value
    logits[5], logits[10] = -torch.inf, torch.nan
    for tokens, expected in zip(choose(), before, strict=True):
        assert tokens[[1, 3, 5, 8, 10]].tolist() == [NO_TOKEN] * 5
        fine = [0, 2, 4, 6, 7, 9]
        assert torch.equal(tokens[fine], expected[fine])


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9, "min_p": 0.1}])
def test_filters_of_rows_without_numbers_end_and_leave_the_others_alone(pieces, kind, vocab, limits):
    logits = rows_of(6, kind)[0]
    crowd = [SamplingParams(seed=5, logprobs=1, **limits)] * 6
    state = make_state(*crowd, device="cuda", vocab_size=vocab)
    rows, positions = torch.arange(1, 7, device="cuda"), torch.full((6,), 9, device="cuda")
    expected = Sampler(pieces)(logits, state, rows, state.flags, positions).token_ids
    logits[0], logits[2, vocab // 2], logits[4, 3], logits[5] = torch.nan, torch.nan, torch.inf, -torch.inf
    output = Sampler(pieces)(logits, state, rows, state.flags, positions)
    assert output.token_ids.tolist() == [NO_TOKEN, expected[1], NO_TOKEN, expected[3], NO_TOKEN, NO_TOKEN]
    assert output.logprobs.logprobs.isnan().tolist() == [True, False, True, False, True, True]


def test_a_row_is_the_same_alone(pieces, kind):
    logits, temperatures, seeds, positions = rows_of(64, kind)
    together = pieces.from_logits([logits, temperatures, seeds, positions])[0]
    one = slice(17, 18)
    alone = pieces.from_logits([x[one].clone() for x in (logits, temperatures, seeds, positions)])[0]
    assert together[one].equal(alone)


def test_tokens_that_are_ruled_out_are_never_drawn_and_the_others_by_their_probability(pieces, kind, vocab):
    count = 8192
    probs = torch.zeros(vocab)
    probs[[3, vocab // 2, vocab // 2 + 1, vocab - 1]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    logits = probs.log().to(getattr(torch, kind[0])).cuda().expand(count, -1).contiguous()
    seeds = torch.full((count,), 11, device="cuda")
    ones = torch.ones(count, device="cuda")
    tokens = pieces.from_logits([logits, ones, seeds, torch.arange(count, device="cuda")])[0]
    assert_drawn_from(tokens, logits[0].float().softmax(-1))


def test_the_sampler_chooses_the_same_with_them_and_without(pieces, kind, vocab):
    crowds = [
        [SamplingParams(temperature=0.6), SamplingParams(seed=5), SamplingParams(temperature=0)],
        [SamplingParams(temperature=0.6), SamplingParams(top_k=5), SamplingParams(presence_penalty=1.0)],
        [SamplingParams(temperature=0), SamplingParams(temperature=0)],
    ]
    for crowd in crowds:
        logits = rows_of(len(crowd), kind)[0]
        rows = torch.arange(len(crowd), device="cuda") + 1
        tokens = []
        for kernels in (None, pieces):
            state = make_state(*crowd, device="cuda", vocab_size=vocab)
            tokens.append(Sampler(kernels)(logits, state, rows, state.flags, rows + 8).token_ids)
        assert torch.equal(*tokens)
