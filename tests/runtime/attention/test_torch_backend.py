from dataclasses import replace

import pytest
import torch

from mllm_compile.runtime.attention import torch_backend
from mllm_compile.runtime.attention.base import AttentionInputs
from mllm_compile.runtime.attention.latent.choice import Widths, all_of_them
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from tests.runtime.attention.attention_cases import (
    AttentionCase,
    attend,
    latent_layer,
    make_batch,
    make_case,
    make_layer,
)

LAYERS = {
    "plain": make_layer(),
    "multi_head": make_layer(num_heads=2, num_kv_heads=2),
    "multi_query": make_layer(num_heads=6, num_kv_heads=1),
    "window": make_layer(window_left=5),
    "window_of_one": make_layer(window_left=0),
    "soft_cap": make_layer(soft_cap=2.0),
    "soft_cap_and_window": make_layer(soft_cap=2.0, window_left=3),
    "scale": make_layer(sm_scale=0.7),
    "sinks": make_layer(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "sinks_and_window": make_layer(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), window_left=4),
    "chunks": make_layer(chunk=5),
    "chunks_and_soft_cap": make_layer(chunk=3, soft_cap=2.0),
    "chunks_window_and_alibi": make_layer(chunk=6, window_left=3, alibi_slopes=(0.5, 0.25, 0.125, 1.0)),
    "alibi": make_layer(alibi_slopes=(0.5, 0.25, 0.125, 1.0)),
    "alibi_sinks_and_window": make_layer(
        alibi_slopes=(0.5, 0.25, 0.125, 1.0), sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), window_left=4
    ),
    "narrow_values": make_layer(v_head_dim=8),
    "latents": replace(make_layer(num_heads=6, num_kv_heads=1, head_dim=12, v_head_dim=8), is_latent=True),
    "latents_and_their_up_projection": latent_layer(num_heads=6, rotated=4, rank=8, key=6, value=5),
    "narrow_values_and_soft_cap": make_layer(v_head_dim=8, soft_cap=3.0),
}
BATCHES = {
    "decode": ([7, 0, 12, 3], [1, 1, 1, 1]),
    "decode_alone": ([9], [1]),
    "prefill": ([0, 0, 0], [5, 2, 9]),
    "prefill_after_prefix": ([4, 0, 7], [5, 3, 2]),
    "mixed": ([6, 11, 0, 3], [1, 1, 6, 5]),
    "short_end_of_a_prompt": ([2, 6], [4, 1]),
}


def run(case: AttentionCase, layer) -> torch.Tensor:
    backend = TorchAttnBackend()
    backend.init_forward_metadata(case.batch)
    return attend(backend, layer, case.batch, case.q, case.k, case.v)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", LAYERS)
def test_every_kind_of_layer_and_batch_equals_the_naive_reference(kind, batch):
    case = make_case(LAYERS[kind], *BATCHES[batch])
    torch.testing.assert_close(run(case, LAYERS[kind]), case.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("most_bytes", [1, 13 * 312, 1 << 20])
@pytest.mark.parametrize("batch", BATCHES)
def test_prompts_over_keys_and_values_made_of_latents_get_the_same_in_any_number_of_parts(batch, most_bytes):
    layer = LAYERS["latents_and_their_up_projection"]
    assert Widths.of(layer).numbers_of_a_token * 4 == 312
    case = make_case(layer, *BATCHES[batch])
    backend = TorchAttnBackend(choice=all_of_them, most_expanded_bytes=most_bytes)
    backend.init_forward_metadata(case.batch)
    got = attend(backend, layer, case.batch, case.q, case.k, case.v)
    torch.testing.assert_close(got, case.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "window", "soft_cap", "sinks_and_window", "alibi", "chunks"])
def test_blocks_of_queries_and_of_decodes_change_nothing(kind, monkeypatch):
    monkeypatch.setattr(torch_backend, "QUERY_BLOCK", 3)
    monkeypatch.setattr(torch_backend, "MAX_GATHERED_KEYS", 8)
    case = make_case(LAYERS[kind], [6, 11, 0, 3], [1, 1, 8, 5])
    torch.testing.assert_close(run(case, LAYERS[kind]), case.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "window", "soft_cap_and_window", "sinks"])
def test_tokens_of_blocks_see_each_other_in_both_directions(kind, monkeypatch):
    monkeypatch.setattr(torch_backend, "QUERY_BLOCK", 5)
    # Behind a decode: a block amid new tokens, one that ends with them, and one that began in the prefix.
    blocks = [(1, 2, 9), (1, 10, 14), (2, 3, 12)]
    case = make_case(LAYERS[kind], [6, 0, 7], [1, 14, 8], blocks=blocks)
    torch.testing.assert_close(run(case, LAYERS[kind]), case.expected, atol=1e-5, rtol=1e-5)


def test_the_pages_are_read_as_they_are():
    case = make_case(LAYERS["plain"], [3, 2], [1, 1])
    before = [pages.clone() for pages in case.batch.token_to_kv_pool.get_pages(0)]
    backend = TorchAttnBackend()
    backend.init_forward_metadata(case.batch)
    backend.forward(AttentionInputs(case.q, case.k, case.v, torch.empty_like(case.q), LAYERS["plain"], case.batch))
    after = case.batch.token_to_kv_pool.get_pages(0)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_new_batch_replaces_the_plan_of_the_last_one():
    layer = LAYERS["window"]
    backend = TorchAttnBackend()
    for seed, (prefix, new) in enumerate(BATCHES.values()):
        case = make_case(layer, prefix, new, seed=seed)
        backend.init_forward_metadata(case.batch)
        out = attend(backend, layer, case.batch, case.q, case.k, case.v)
        torch.testing.assert_close(out, case.expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_as_close_as_its_rounding():
    layer = make_layer(head_dim=32)
    case = make_case(layer, [6, 30, 0], [1, 1, 9], dtype=torch.bfloat16)
    torch.testing.assert_close(run(case, layer).float(), case.expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ["plain", "window", "soft_cap", "sinks"])
def test_an_fp8_cache_gives_the_attention_over_rounded_keys_and_values(kind, batch):
    case = make_case(LAYERS[kind], *BATCHES[batch], kv_dtype=torch.float8_e4m3fn)
    torch.testing.assert_close(run(case, LAYERS[kind]), case.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_deterministic_request_s_output_is_bitwise_the_same_in_any_batch(kind):
    layer = LAYERS[kind]
    case = make_case(layer, [6, 11, 0, 30], [1, 1, 1, 1])
    together = TorchAttnBackend(deterministic=True)
    together.init_forward_metadata(case.batch)
    out = attend(together, layer, case.batch, case.q, case.k, case.v)
    torch.testing.assert_close(out, case.expected, atol=1e-5, rtol=1e-5)
    table, pool = case.batch.req_to_token_pool, case.batch.token_to_kv_pool
    for i, prefix in enumerate([6, 11, 0, 30]):
        one = slice(i, i + 1)
        rows = case.batch.req_pool_indices[one].tolist()
        alone = make_batch(rows, [prefix], [1], case.batch.out_cache_loc[one], table, pool, "cpu")
        backend = TorchAttnBackend(deterministic=True)
        backend.init_forward_metadata(alone)
        assert torch.equal(attend(backend, layer, alone, case.q[one], case.k[one], case.v[one]), out[one])


@pytest.mark.parametrize("new_lens", [[1, 1, 1, 1], [1, 1, 1, 6]], ids=["decode", "mixed"])
@pytest.mark.parametrize("kind", LAYERS)
def test_decodes_that_begin_with_the_same_pages_get_what_they_get_without_saying_so(kind, new_lens):
    layer, prefix_lens, shared = LAYERS[kind], [9, 8, 30, 12], 8
    case = make_case(layer, prefix_lens, new_lens)
    case.batch.req_to_token_pool.req_to_token[2:, :shared] = case.batch.req_to_token_pool.req_to_token[1, :shared]
    apart = run(case, layer)
    case.batch.common_prefix_len = shared
    torch.testing.assert_close(run(case, layer), apart, atol=1e-5, rtol=1e-5)


def test_shared_keys_are_gathered_once_for_all_decodes(monkeypatch):
    layer, shared = LAYERS["plain"], 8
    case = make_case(layer, [9, 8, 30, 12], [1, 1, 1, 1])
    gathered = []
    take = torch_backend._take
    monkeypatch.setattr(torch_backend, "_take", lambda buffer, rows: gathered.append(len(rows)) or take(buffer, rows))
    run(case, layer)
    apart, longest, heads = sum(gathered), 31, layer.num_kv_heads
    assert apart == 2 * 4 * longest * heads
    gathered.clear()
    case.batch.common_prefix_len = shared
    run(case, layer)
    assert sum(gathered) == 2 * (4 * (longest - shared) * heads + shared)


def test_sharing_pays_from_so_many_keys_that_decodes_are_spared():
    backend = TorchAttnBackend()
    assert not backend.cascade_pays(1, 4096)
    assert [backend.cascade_pays(count, 64) for count in (4, 5)] == [False, True]


def test_forward_before_planning_says_what_is_missing():
    case = make_case(LAYERS["plain"], [1], [1])
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        attend(TorchAttnBackend(), LAYERS["plain"], case.batch, case.q, case.k, case.v)
