"""`runtime.deterministic` on a GPU: fixed shapes make a token's numbers bitwise its request's own, in every graph mode.

Runs the embedded model in bfloat16 (2 KV heads of 128: FlashInfer's fa2 kernel), and the products of two larger ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, RequestOutput, SamplingParams
from tests.tiny_model import TINY, engine_of_pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=5, prompt_logprobs=5)
PROMPT = "If the file cannot be opened, an OSError is raised.\n" * 20
CROWD = ["A", "The for statement is used to iterate over", "Return a new list containing " * 40, "x = 1\n" * 150]
NOISE = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=30, seed=3)
# Output and input width of the products of Qwen3-0.6B and Qwen3-8B, packed as the passes pack them.
PRODUCTS = {
    "0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    "8b": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
}

EngineMaker = Callable[..., Engine]


@pytest.fixture(scope="module", params=["full_decode_only", "piecewise", "none"])
def make_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineMaker]:
    cache, made = tmp_path_factory.mktemp("cache"), []

    def make(num_pages: int | None = None, mode: str | None = None, **runtime: Any) -> Engine:
        sections = {
            "model": {"path": str(TINY), "dtype": "bfloat16"},
            "compile": {"backend": "eager"},
            "cudagraph": {"mode": mode or request.param},
            "runtime": {"device": "cuda", "deterministic": True, "enable_prefix_cache": False} | runtime,
            "cache": {"dir": str(cache)},
        }
        made.append(engine_of_pages(EngineConfig.from_dict(sections), num_pages))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def engine(make_engine: EngineMaker) -> Engine:
    return make_engine(num_pages=4000)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> RequestOutput:
    return engine.generate(PROMPT, PARAMS)[0]


def numbers(output: RequestOutput) -> tuple[Any, ...]:
    """Every log-probability to its last bit."""
    return output.token_ids, output.logprobs, output.prompt_logprobs


@pytest.mark.parametrize("copies", [1, 4, 30])
def test_in_a_crowd_every_log_probability_is_bitwise_the_same(engine, alone, copies):
    crowd = CROWD * copies
    outputs = engine.generate([*crowd, PROMPT, *crowd], [NOISE] * len(crowd) + [PARAMS] + [NOISE] * len(crowd))
    assert numbers(outputs[len(crowd)]) == numbers(alone)


def test_a_prompt_cut_where_the_others_leave_room_gives_the_same(engine, alone):
    busy = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    streams = [engine.stream(text, busy) for text in CROWD * 9]
    for stream in streams:
        next(stream)
    try:
        assert numbers(engine.generate(PROMPT, PARAMS)[0]) == numbers(alone)
    finally:
        for stream in streams:
            stream.close()


def test_a_prefix_hit_gives_the_same(make_engine, alone):
    engine = make_engine(num_pages=4000, enable_prefix_cache=True)
    without_prompt = replace(PARAMS, prompt_logprobs=None)
    cold, warm = (engine.generate(PROMPT, without_prompt)[0] for _ in range(2))
    assert warm.num_cached_tokens > 100 and cold.num_cached_tokens == 0
    assert cold.logprobs == warm.logprobs == alone.logprobs


def test_preempted_requests_give_the_same(make_engine, alone):
    # Pages of 16: a request is let in only with a page to spare for each that runs, which 48 tokens would never use up.
    roomy = make_engine(num_pages=4000, page_size=16)
    alone, prompt = roomy.generate(PROMPT, PARAMS)[0], alone.prompt_token_ids
    limits = {"max_model_len": len(prompt) + 48, "page_size": 16}
    engine = make_engine(num_pages=1 + 7 + 3 + len(prompt) // 16, **limits)
    short = [list(range(100 * i, 100 * i + 10)) for i in range(1, 8)]
    grow = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = engine.generate([*short, prompt], [grow] * 7 + [PARAMS])
    assert engine.stats().preemptions > 0
    assert numbers(outputs[7]) == numbers(alone)


def test_it_says_what_the_model_says_without_it(make_engine, alone):
    engine = make_engine(num_pages=4000, mode="none", deterministic=False)
    (plain,) = engine.generate(PROMPT, PARAMS)
    scored = zip(alone.prompt_logprobs[1:], plain.prompt_logprobs[1:], alone.prompt_token_ids[1:], strict=True)
    differences = [abs(ours[token].logprob - theirs[token].logprob) for ours, theirs, token in scored]
    assert sum(differences) / len(differences) < 0.03  # two roundings to bfloat16
    assert max(differences) < 0.5


@pytest.mark.parametrize("num_rows", [128, 256])
@pytest.mark.parametrize("model", PRODUCTS)
def test_a_row_of_a_product_of_fixed_size_is_bitwise_the_same_wherever_it_stands(model, num_rows):
    torch.manual_seed(0)
    for out_width, in_width in PRODUCTS[model]:
        weight = torch.randn(out_width, in_width, dtype=torch.bfloat16, device="cuda") * in_width**-0.5
        row = torch.randn(in_width, dtype=torch.bfloat16, device="cuda")
        first = None
        for position in range(0, num_rows, 7):
            rows = torch.randn(num_rows, in_width, dtype=torch.bfloat16, device="cuda")
            rows[position] = row
            product = torch.nn.functional.linear(rows, weight)[position]
            first = product if first is None else first
            assert torch.equal(product, first), f"{out_width} x {in_width}: row {position} differs from row 0"
