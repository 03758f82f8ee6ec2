"""Attention by the C++ library: against one query and one head at a time in float64, and beside torch's backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm_compile.runtime.attention.base import AttentionInputs
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from tests.runtime.attention.attention_cases import AttentionCase, make_batch, make_case, make_layer
from tests.runtime.attention.cpu_library import paged_attention

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SLOPES = (0.5, 0.25, 0.125, 1.0)
LAYERS = {
    "plain": make_layer(),
    "multi_head": make_layer(num_heads=2, num_kv_heads=2, head_dim=64),
    "multi_query": make_layer(num_heads=14, num_kv_heads=1),
    "heads_of_80": make_layer(num_heads=3, num_kv_heads=1, head_dim=80),
    "window": make_layer(window_left=5),
    "window_of_one": make_layer(window_left=0),
    "wide_window": make_layer(window_left=70),
    "soft_cap": make_layer(soft_cap=2.0),
    "soft_cap_and_window": make_layer(soft_cap=2.0, window_left=3),
    "scale": make_layer(sm_scale=0.7),
    "sinks": make_layer(sinks=SINKS),
    "sinks_and_window": make_layer(sinks=SINKS, window_left=4),
    "chunks": make_layer(chunk=5),
    "wide_chunks_and_soft_cap": make_layer(chunk=66, soft_cap=2.0),
    "chunks_window_and_alibi": make_layer(chunk=6, window_left=3, alibi_slopes=SLOPES),
    "alibi": make_layer(alibi_slopes=SLOPES),
    "alibi_sinks_and_window": make_layer(alibi_slopes=SLOPES, sinks=SINKS, window_left=4),
    "narrow_values": make_layer(head_dim=48, v_head_dim=16),
    "latents": replace(make_layer(num_heads=6, num_kv_heads=1, head_dim=48, v_head_dim=32), is_latent=True),
}
# Tokens in the cache and new ones of each request: page ends on both sides, and more keys than a block and a part have.
BATCHES = {
    "decode": ([7, 0, 12, 3, 8, 63, 64, 65], [1] * 8),
    "long_decodes": ([511, 512, 1100], [1] * 3),
    "decode_alone": ([9], [1]),
    "prefill": ([0, 0, 0], [5, 2, 9]),
    "long_prefill": ([0, 30], [150, 60]),
    "prefill_after_prefix": ([4, 0, 7, 100], [5, 3, 2, 33]),
    "mixed": ([6, 600, 0, 3], [1, 1, 6, 5]),
    "short_end_of_a_prompt": ([2, 6], [4, 1]),
}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def backend_of(layer, dtype=torch.float32, deterministic=False) -> TorchAttnBackend:
    return TorchAttnBackend(deterministic, paged={layer.name: paged_attention().of(layer, dtype)})


def run(case: AttentionCase, layer, backend: TorchAttnBackend | None = None) -> torch.Tensor:
    """Attends, and leaves the writing of new keys and values to the library."""
    backend = backend or backend_of(layer, case.q.dtype)
    backend.init_forward_metadata(case.batch)
    assert backend.writes_kv(layer)
    out = case.q.new_empty(*case.q.shape[:2], layer.out_dim)
    backend.forward(AttentionInputs(case.q, case.k, case.v, out, layer, case.batch, case.batch.out_cache_loc))
    return out


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", LAYERS)
def test_every_kind_of_layer_and_batch_equals_the_naive_reference(kind, batch):
    case = make_case(LAYERS[kind], *BATCHES[batch])
    torch.testing.assert_close(run(case, LAYERS[kind]), case.expected, **CLOSE)


@pytest.mark.parametrize("kind", ["plain", "heads_of_80", "latents", "sinks_and_window"])
def test_new_keys_and_values_are_in_the_cache_as_the_pool_writes_them(kind):
    layer = LAYERS[kind]
    ours, theirs = (make_case(layer, *BATCHES["mixed"]) for _ in range(2))
    run(ours, layer)
    theirs.batch.token_to_kv_pool.set_kv_buffer(0, theirs.batch.out_cache_loc, theirs.k, theirs.v)
    pools = zip(ours.batch.token_to_kv_pool.get_pages(0), theirs.batch.token_to_kv_pool.get_pages(0), strict=True)
    assert all(torch.equal(a, b) for a, b in pools)


def test_without_slots_the_pages_are_read_as_they_are():
    layer = LAYERS["plain"]
    case = make_case(layer, [3, 2], [1, 1])
    before = [pages.clone() for pages in case.batch.token_to_kv_pool.get_pages(0)]
    backend = backend_of(layer)
    backend.init_forward_metadata(case.batch)
    backend.forward(AttentionInputs(case.q, case.k, case.v, torch.empty_like(case.q), layer, case.batch))
    after = case.batch.token_to_kv_pool.get_pages(0)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ["plain", "heads_of_80", "soft_cap_and_window", "sinks", "alibi", "latents"])
def test_bfloat16_is_as_close_as_its_rounding(kind, batch):
    layer = LAYERS[kind]
    case = make_case(layer, *BATCHES[batch], dtype=torch.bfloat16)
    torch.testing.assert_close(run(case, layer).float(), case.expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", ["plain", "window", "soft_cap_and_window", "sinks"])
def test_tokens_of_blocks_see_each_other_in_both_directions(kind):
    blocks = [(1, 2, 9), (1, 10, 14), (2, 3, 12)]
    case = make_case(LAYERS[kind], [6, 0, 7], [1, 14, 8], blocks=blocks)
    torch.testing.assert_close(run(case, LAYERS[kind]), case.expected, **CLOSE)


@pytest.mark.parametrize("new_lens", [[1, 1, 1, 1], [1, 1, 1, 6]], ids=["decode", "mixed"])
@pytest.mark.parametrize("shared", [8, 64, 1040])
@pytest.mark.parametrize("kind", ["plain", "multi_query", "heads_of_80", "soft_cap", "sinks", "window", "latents"])
def test_decodes_that_begin_with_the_same_pages_get_what_they_get_without_saying_so(kind, shared, new_lens):
    layer = LAYERS[kind]
    case = make_case(layer, [shared + 1, shared, shared + 700, shared + 4], new_lens)
    table = case.batch.req_to_token_pool.req_to_token
    table[2:, :shared] = table[1, :shared]
    apart = run(case, layer)
    case.batch.common_prefix_len = shared
    torch.testing.assert_close(run(case, layer), apart, **CLOSE)


@pytest.mark.parametrize("kind", ["plain", "window", "sinks", "chunks"])
def test_a_deterministic_request_s_output_is_bitwise_the_same_in_any_batch_and_on_any_number_of_threads(kind):
    layer, prefixes = LAYERS[kind], [6, 1100, 0, 530]
    case = make_case(layer, prefixes, [1] * 4)
    out = run(case, layer, backend_of(layer, deterministic=True))
    table, pool = case.batch.req_to_token_pool, case.batch.token_to_kv_pool
    before = torch.get_num_threads()
    for i, prefix in enumerate(prefixes):
        one = slice(i, i + 1)
        rows = case.batch.req_pool_indices[one].tolist()
        alone = make_batch(rows, [prefix], [1], case.batch.out_cache_loc[one], table, pool, "cpu")
        torch.set_num_threads(1 + i % 3)
        got = run(AttentionCase(alone, case.q[one], case.k[one], case.v[one], out), layer)
        torch.set_num_threads(before)
        assert torch.equal(got, out[one])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_compute_the_same_numbers_as_one(dtype):
    layer = make_layer(num_heads=6, num_kv_heads=2, head_dim=64)
    case = make_case(layer, [2000, 30, 700], [1, 1, 300], dtype=dtype)
    before, outs = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        outs.append(run(case, layer))
    torch.set_num_threads(before)
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_tensors_are_taken_as_they_lie_and_in_any_type():
    layer = LAYERS["plain"]
    case = make_case(layer, *BATCHES["mixed"])
    right = run(case, layer)
    packed = torch.cat((case.q, case.k, case.v), dim=1)
    case.q, case.k, case.v = packed.split([4, 2, 2], dim=1)
    assert torch.equal(run(case, layer), right)
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    case.k, case.v = case.k.double(), case.v.double()
    assert torch.equal(run(case, layer, backend_of(layer)), right)
    case.q = case.q.double()
    assert torch.equal(run(case, layer, backend_of(layer)), right.double())


def test_a_key_that_is_no_number_makes_the_answer_none():
    layer = LAYERS["plain"]
    case = make_case(layer, [70, 20], [1, 1])
    case.k[0, 1, 3] = torch.nan
    out = run(case, layer)
    assert out[0, 2:].isnan().all()
    assert not out[0, :2].isnan().any()
    assert not out[1].isnan().any()


def test_large_scores_neither_overflow_nor_lose_the_rest():
    layer = make_layer(sm_scale=20.0)
    case = make_case(layer, [200, 5], [1, 90])
    torch.testing.assert_close(run(case, layer), case.expected, atol=1e-3, rtol=1e-3)


REQUESTS = st.lists(st.tuples(st.integers(0, 140), st.sampled_from((1, 1, 2, 7, 40, 70))), min_size=1, max_size=5)


@settings(max_examples=25)
@given(
    requests=REQUESTS,
    heads=st.sampled_from(((1, 1), (4, 2), (6, 1), (8, 8))),
    dims=st.sampled_from(((16, 16), (32, 16), (64, 64), (112, 112))),
    window=st.sampled_from((-1, 0, 3, 66)),
    cap=st.sampled_from((0.0, 3.0)),
    page_size=st.sampled_from((1, 4, 16)),
    seed=st.integers(0, 1000),
)
def test_any_batch_equals_the_naive_reference(requests, heads, dims, window, cap, page_size, seed):
    requests = sorted(requests, key=lambda one: one[1] > 1)  # decodes come first
    layer = make_layer(*heads, *dims, window_left=window, soft_cap=cap)
    case = make_case(layer, *zip(*requests, strict=True), page_size=page_size, seed=seed)
    torch.testing.assert_close(run(case, layer), case.expected, **CLOSE)
