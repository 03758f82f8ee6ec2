"""`runtime.deterministic` on Hopper with steps of any number of rows, in compiled pieces: the same bits in any batch.

The embedded model has every way that a request may go; tiny ones have experts, fp8, states and ranks. Run four side by
side by `-n 4`. test_deterministic.py has the mode where all steps are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, RequestOutput, SamplingParams
from mllm_compile.kernels.cuda import can_compile_kernels
from mllm_compile.runtime.device.open import sum_in_one_order
from tests.gpu.small_shape import WIDE
from tests.gpu.test_deterministic import CROWD, NOISE, PARAMS, PRODUCTS, PROMPT, numbers
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config
from tests.tiny_model import TINY, engine_of_pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, max_tokens=48, ignore_eos=True, logprobs=5, seed=7)
EngineMaker = Callable[..., Engine]
OF_EXPERTS = WIDE | {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}
# Architecture, sizes, and what its config says of model and runtime.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "experts": ("qwen3_moe", OF_EXPERTS, {}, {}),
    "experts in fp8": ("qwen3_moe", OF_EXPERTS, {"quantization": "fp8"}, {}),
    "fp8": ("qwen3", WIDE | {"intermediate_size": 1024}, {"quantization": "fp8"}, {}),
    "delta nets": ("qwen3_5_text", WIDE, {}, {}),
    "mamba": ("falcon_h1", WIDE, {}, {}),
    "two ranks": ("qwen3", WIDE | {"intermediate_size": 1024}, {}, {"tensor_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineMaker]:
    cache, made = tmp_path_factory.mktemp("cache"), []

    def make(num_pages: int | None = 4000, **runtime: Any) -> Engine:
        sections = {
            "model": {"path": str(TINY), "dtype": "bfloat16"},
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
    return make_engine()


@pytest.fixture(scope="module")
def alone(engine: Engine) -> tuple[RequestOutput, RequestOutput]:
    """A greedy answer with scores of its prompt, and one that is drawn."""
    return engine.generate(PROMPT, PARAMS)[0], engine.generate(PROMPT, DRAWN)[0]


@pytest.mark.parametrize("copies", [0, 1, 4, 40])
def test_in_a_crowd_every_log_probability_is_bitwise_the_same(engine, alone, copies):
    crowd = CROWD * copies
    params = [NOISE] * len(crowd) + [PARAMS, DRAWN] + [NOISE] * len(crowd)
    outputs = engine.generate([*crowd, PROMPT, PROMPT, *crowd], params)
    assert [numbers(one) for one in outputs[len(crowd) :][:2]] == [numbers(one) for one in alone]


def test_a_prompt_that_comes_while_others_decode_and_prefix_hits_give_the_same(make_engine, engine, alone):
    busy = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
    streams = [engine.stream(text, busy) for text in CROWD * 9]
    for stream in streams:
        next(stream)
    try:
        assert numbers(engine.generate(PROMPT, PARAMS)[0]) == numbers(alone[0])
    finally:
        for stream in streams:
            stream.close()
    cached = make_engine(enable_prefix_cache=True)
    without_prompt = replace(PARAMS, prompt_logprobs=None)
    cold, warm = (cached.generate(PROMPT, without_prompt)[0] for _ in range(2))
    assert warm.num_cached_tokens > 100 and cold.num_cached_tokens == 0
    assert cold.logprobs == warm.logprobs == alone[0].logprobs


def test_preempted_requests_and_smaller_steps_give_the_same(make_engine, alone):
    prompt = alone[0].prompt_token_ids
    limits = {"max_model_len": len(prompt) + 48, "page_size": 16, "max_num_batched_tokens": 256}
    small = make_engine(**limits)
    first = small.generate(PROMPT, PARAMS)[0]
    tight = make_engine(num_pages=1 + 7 + 3 + len(prompt) // 16, **limits)
    short = [list(range(100 * i, 100 * i + 10)) for i in range(1, 8)]
    grow = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = tight.generate([*short, prompt], [grow] * 7 + [PARAMS])
    assert tight.stats().preemptions > 0
    assert numbers(outputs[7]) == numbers(first) == numbers(alone[0])


@pytest.mark.parametrize("kind", MODELS)
def test_other_models_give_the_same_in_crowds_and_behind_prefix_hits(kind, tmp_path):
    architecture, sizes, model, runtime = MODELS[kind]
    if torch.cuda.device_count() < runtime.get("tensor_parallel_size", 1):
        pytest.skip("takes two GPUs")
    save_tiny_model(tiny_config(architecture, **sizes, max_position_embeddings=1024), tmp_path / "model")
    limits = {"max_model_len": 1024, "mem_fraction_static": 0.1, "page_size": 16}
    sections = {
        "model": {"path": str(tmp_path / "model"), "dtype": "bfloat16"} | model,
        "cudagraph": {"decode_requests": [1, 8, 32, 48, 64, 128], "piecewise_tokens": [64, 256]},
        "runtime": {"device": "cuda", "deterministic": True} | limits | runtime,
        "cache": {"dir": str(tmp_path / "cache")},
    }
    rng = Random(3)
    prompt, *crowd = ([rng.randrange(FIRST_SPECIAL_TOKEN) for _ in range(n)] for n in (300, 3, 70, 500, 20, 130))
    with Engine(EngineConfig.from_dict(sections)) as engine:
        assert engine.config.runtime.any_rows
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=2)
        noise = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=3)
        alone = numbers(engine.generate(prompt, greedy)[0])
        for copies in (1, 4, 12):
            others = crowd * copies
            params = [noise] * len(others) + [greedy] + [noise] * len(others)
            outputs = engine.generate([*others, prompt, *others], params)
            assert numbers(outputs[len(others)]) == alone
        (warm,) = engine.generate(prompt, replace(greedy, prompt_logprobs=None))
        assert warm.num_cached_tokens > 100 and (warm.token_ids, warm.logprobs) == alone[:2]


@pytest.mark.parametrize("model", PRODUCTS)
def test_a_row_of_a_product_is_bitwise_the_same_among_any_number(model):
    torch.manual_seed(0)
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    sum_in_one_order()
    try:
        for out_width, in_width in PRODUCTS[model]:
            weight = torch.randn(out_width, in_width, dtype=torch.bfloat16, device="cuda") * in_width**-0.5
            x = torch.randn(2048, in_width, dtype=torch.bfloat16, device="cuda")
            whole = torch.nn.functional.linear(x, weight)
            for count in (64, 65, 80, 100, 128, 200, 256, 300, 511, 1000, 2000):
                part = torch.nn.functional.linear(x[5 : 5 + count].contiguous(), weight)
                assert torch.equal(part, whole[5 : 5 + count]), f"{out_width} x {in_width} with {count} rows"
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (before, True)
