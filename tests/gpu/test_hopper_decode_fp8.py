"""The decode kernels for Hopper over a cache of e4m3, against float32 of the same keys and values."""

from __future__ import annotations

import json

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.check.decode_attention import _rotated
from tests.gpu.small_shape import SHAPE
from tests.gpu.test_hopper_decode import CLUSTERS, HEADS, SHARES, Decode, New, decode, decode_new, decoders, pytestmark
from tests.gpu.test_served_models import random_ids
from tests.gpu.test_split_decode import LENGTHS, Cache, in_float32

__all__ = ["decoders", "pytestmark"]

FP8 = torch.float8_e4m3fn
LIMIT = 8e-3  # of bfloat16 queries and outputs, as over a cache of bfloat16


def fp8_cache(lengths: list[int], kv_heads: int, page_size: int, head_dim: int = 128) -> Cache:
    cache = Cache(lengths, kv_heads, head_dim, page_size, torch.float32)
    cache.keys, cache.values = cache.keys.to(FP8), cache.values.to(FP8)
    is_key = torch.zeros(len(cache.keys), dtype=torch.bool, device="cuda")
    for row, length in enumerate(lengths):
        positions = torch.arange(length, device="cuda")
        is_key[cache.page_table[row].long()[positions // page_size] * page_size + positions % page_size] = True
    for tensor in (cache.keys, cache.values):
        tensor.view(torch.uint8)[~is_key] = 0x7F  # NaN, where no key is
    return cache


def off_by(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max().item()


@pytest.mark.parametrize("num_requests", [1, 3, 17])
@pytest.mark.parametrize(("heads", "kv_heads", "page_size"), HEADS)
@pytest.mark.parametrize("kind", [CLUSTERS, SHARES])
def test_numbers_match_float32(decoders, kind, heads, kv_heads, page_size, num_requests):
    lengths = (LENGTHS * 3)[:num_requests]
    decoder: Decode = decoders(kind, heads, kv_heads, page_size, fp8=True)
    for case in (lengths, lengths[::-1], [640] * num_requests):
        cache = fp8_cache(case, kv_heads, page_size)
        q = 2 * torch.randn(len(case), heads, 128, device="cuda").bfloat16()
        assert off_by(decode(decoder, cache, q), in_float32(cache, q)) < LIMIT


@pytest.mark.parametrize(("heads", "kv_heads", "page_size"), [(16, 4, 64), (16, 2, 16), (24, 3, 64)])
def test_numbers_of_heads_of_256_match_float32(decoders, heads, kv_heads, page_size):
    decoder: Decode = decoders(SHARES, heads, kv_heads, page_size, fp8=True, head_dim=256)
    for lengths in (LENGTHS, LENGTHS[::-1] * 2, [640] * 17):
        cache = fp8_cache(lengths, kv_heads, page_size, 256)
        q = 2 * torch.randn(len(lengths), heads, 256, device="cuda").bfloat16()
        assert off_by(decode(decoder, cache, q), in_float32(cache, q)) < LIMIT


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "page_size", "head_dim"),
    [
        *((kind, *heads, 128) for kind in (CLUSTERS, SHARES) for heads in ((32, 8, 64), (28, 4, 16), (50, 10, 64))),
        (SHARES, 16, 4, 64, 256),
    ],
)
def test_new_tokens_are_normed_rotated_and_written(decoders, kind, heads, kv_heads, page_size, head_dim, has_norms):
    wide = {} if head_dim == 128 else {"head_dim": head_dim}
    decoder: Decode = decoders(kind, heads, kv_heads, page_size, fp8=True, **wide)
    for lengths in ([1], [577], LENGTHS, [640, 641] * 9, [15, 16, 17] * 40):
        cache = fp8_cache(lengths, kv_heads, page_size, head_dim)
        new = _new(cache, heads, has_norms)
        others = torch.ones(len(cache.keys), dtype=torch.bool, device="cuda").index_fill_(0, new.slots, False)
        before = [tensor.view(torch.uint8)[others] for tensor in (cache.keys, cache.values)]
        got = decode_new(decoder, cache, new)
        written = cache.keys[new.slots].float(), cache.values[new.slots].float()
        for ours, exact in zip(written, (_rotated(new.rope_inputs)[1], new.rope_inputs.v.float()), strict=True):
            # Half of the distance of neighbours, of numbers that were rounded to bfloat16 before.
            assert ((ours - exact).abs() <= exact.abs() * (1 / 16 + 1 / 128) + 2**-9).all()
        for tensor, bytes_before in zip((cache.keys, cache.values), before, strict=True):
            assert torch.equal(tensor.view(torch.uint8)[others], bytes_before)
        assert off_by(got, in_float32(cache, _rotated(new.rope_inputs)[0])) < LIMIT


def _new(cache: Cache, heads: int, has_norms: bool) -> New:
    keys, values = cache.keys, cache.values
    cache.keys, cache.values = keys.float(), values.float()  # `New` fills rows in by an operation that fp8 lacks
    new = New(cache, heads, has_norms)
    cache.keys, cache.values = keys, values
    return new


@pytest.mark.parametrize("kind", [CLUSTERS, SHARES])
def test_numbers_beyond_the_range_are_the_largest(decoders, kind):
    cache = fp8_cache([577, 64], 8, 64)
    new = _new(cache, 32, False)
    new.rope_inputs.v.fill_(1e4)
    decode_new(decoders(kind, 32, 8, 64, fp8=True), cache, new)
    assert (cache.values[new.slots].float() == 448).all()


@pytest.mark.parametrize("kind", [CLUSTERS, SHARES])
def test_sinks_take_weight_from_all_keys(decoders, kind):
    sinks = torch.linspace(-4, 10, 32, device="cuda").bfloat16()
    cache = fp8_cache([577, 64, 1, 3000], 8, 64)
    q = 2 * torch.randn(4, 32, 128, device="cuda").bfloat16()
    got = decode(decoders(kind, 32, 8, 64, fp8=True, sinks=True), cache, q, None, sinks)
    assert off_by(got, in_float32(cache, q, sinks=sinks)) < 1.2e-2


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (16, 4), (8, 2), (32, 2)], ids=["8", "4", "2", "Triton"])
def test_an_engine_decodes_in_graphs_what_it_scores_in_prompts(heads, kv_heads, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shape = SHAPE | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    (folder / "config.json").write_text(json.dumps(shape))
    sections = {
        "model": {"path": str(folder), "load_format": "dummy"},
        "cache": {"dir": str(tmp_path / "cache")},
        "runtime": {"max_model_len": 1024, "mem_fraction_static": 0.3, "kv_cache_dtype": "fp8_e4m3"},
    }
    with Engine(EngineConfig.from_dict(sections)) as served:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
        prompts = [random_ids(16 + 30 * index, 4096, index) for index in range(9)]
        for prompt, output in zip(prompts, served.generate(prompts, params), strict=True):
            ids = [*prompt, *output.token_ids]
            scored = served.generate(ids, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))[0]
            for step, token in enumerate(output.token_ids):
                made = output.logprobs[step][token].logprob
                assert made == pytest.approx(scored.prompt_logprobs[len(prompt) + step][token].logprob, abs=0.1)
