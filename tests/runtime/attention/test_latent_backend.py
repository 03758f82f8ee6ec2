"""The backend over latents: pages, lengths, tiles and keys that its kernels are given, for any batch."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.base import AttentionInputs
from mllm_compile.runtime.attention.latent.backend import LatentAttnBackend, LatentPieces, _Space
from mllm_compile.runtime.attention.latent.choice import PromptSizes, Widths, all_of_them, none_of_them
from mllm_compile.runtime.attention.latent.expanded import attend_in_torch
from mllm_compile.runtime.attention.latent.tiles import PREFILL_TILE, decode_tile, expanded_tile, num_decode_tiles
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.split.splits import OF_LATENTS
from mllm_compile.runtime.errors import ConfigError, UnsupportedModelError
from mllm_compile.runtime.forward_batch import ForwardMode
from tests.runtime.attention.attention_cases import AttentionCase, latent_layer, make_case

PAGE, HEADS, WIDTH, VALUE_WIDTH = 4, 24, 12, 8
LAYER = AttentionLayer("layer0", 0, HEADS, 1, WIDTH, VALUE_WIDTH, WIDTH**-0.5, 0.0, -1, None, is_latent=True)
# A layer with its up-projection: keys of 6 + 4 columns, values of 5.
EXPANDING = replace(latent_layer(HEADS, WIDTH - VALUE_WIDTH, VALUE_WIDTH, key=6, value=5), sm_scale=LAYER.sm_scale)
OF_A_TOKEN = 4 * Widths.of(EXPANDING).numbers_of_a_token  # bytes


class Kernels:
    """The ops in plain torch, row by row, as the kernels read what they are given."""

    def __init__(self) -> None:
        self.decoded: list[int] = []  # requests of each call
        self.tiles: list[torch.Tensor] = []
        self.expanded_keys: list[int] = []  # of each call
        self.num_splits = 0  # of the last call

    def pieces(self) -> LatentPieces:
        return LatentPieces(self.decode, self.prefill, self.expanded)

    def expanded(self, inputs: list[torch.Tensor]) -> None:
        assert all(tensor.is_contiguous() for tensor in inputs)
        assert all(tensor.data_ptr() % 16 == 0 for tensor in inputs)
        self.expanded_keys.append(len(inputs[1]))
        self.num_splits = inputs[-1].shape[2]
        attend_in_torch(inputs, LAYER.sm_scale)

    def decode(self, inputs: list[torch.Tensor]) -> None:
        q, latents, table, seq_lens, out, partial, tops, totals = inputs
        assert all(tensor.is_contiguous() for tensor in inputs)
        assert tops.shape == totals.shape == (len(q), OF_LATENTS.of(len(q) * num_decode_tiles(HEADS)), HEADS)
        assert tops.shape[1] == 1 or len(partial) >= tops.numel() * VALUE_WIDTH
        self.decoded.append(len(q))
        for row, length in enumerate(seq_lens.tolist()):
            if length:
                out[row] = attended(q[row, None], latents, table[row], [length])

    def prefill(self, inputs: list[torch.Tensor]) -> None:
        q, latents, table, seq_lens, tiles, out = inputs
        self.tiles.append(tiles)
        flat, flat_out = q.flatten(0, 1), out.flatten(0, 1)
        for row, first, count, start in tiles.tolist():
            members = torch.arange(start, min(start + PREFILL_TILE.rows, count * HEADS))
            limits = int(seq_lens[row]) - count + members // HEADS + 1
            rows = first * HEADS + members
            flat_out[rows] = attended(flat[rows, None], latents, table[row], limits.tolist())[:, 0]


def attended(q: torch.Tensor, latents: torch.Tensor, pages: torch.Tensor, limits: list[int]) -> torch.Tensor:
    """[N, H, C] of q [N, H, D], each over the first so many latents of these pages."""
    results = []
    for query, limit in zip(q, limits, strict=True):
        places = torch.arange(limit)
        keys = latents[pages[places // PAGE] * PAGE + places % PAGE, 0]
        results.append((query @ keys.T * LAYER.sm_scale).softmax(-1) @ keys[:, :VALUE_WIDTH])
    return torch.stack(results)


def make(case: AttentionCase, kernels: Kernels, layer: AttentionLayer = LAYER, **options) -> LatentAttnBackend:
    return LatentAttnBackend(
        [layer],
        {layer.name: kernels.pieces()},
        req_to_token=case.batch.req_to_token_pool.req_to_token,
        max_requests=len(case.batch.seq_lens),
        page_size=PAGE,
        dtype=torch.float32,
        **options,
    )


def attend(backend: LatentAttnBackend, case: AttentionCase, layer: AttentionLayer = LAYER) -> torch.Tensor:
    case.batch.token_to_kv_pool.set_kv_buffer(0, case.batch.out_cache_loc, case.k, case.v)
    out = torch.full((*case.q.shape[:2], layer.out_dim), torch.nan)
    backend.forward(AttentionInputs(case.q, case.k, case.v, out, layer, case.batch))
    return out


EVERY_BATCH = pytest.mark.parametrize(
    ("prefix_lens", "new_lens"),
    [
        ([3, 0, 17, 30], [1, 1, 1, 1]),
        ([0, 0, 0], [1, 9, 30]),
        ([7, 20, 0, 5], [1, 1, 12, 3]),
        ([12], [25]),
    ],
    ids=["decodes", "prompts", "both", "a chunk"],
)


@EVERY_BATCH
def test_every_batch_gets_the_attention_over_its_latents(prefix_lens, new_lens):
    case, kernels = make_case(LAYER, prefix_lens, new_lens, PAGE), Kernels()
    backend = make(case, kernels)
    backend.init_forward_metadata(case.batch)
    torch.testing.assert_close(attend(backend, case), case.expected, rtol=1e-5, atol=1e-5)
    assert case.batch.token_to_kv_pool.get_pages(0)[1].numel() == 0  # values are not stored


def every_second(prompts: PromptSizes) -> np.ndarray:
    assert prompts.widths == Widths.of(EXPANDING)
    return np.arange(len(prompts.new)) % 2 == 0


@pytest.mark.parametrize(
    ("choice", "most_keys"),
    [(none_of_them, 1000), (all_of_them, 1), (all_of_them, 11), (all_of_them, 1000), (every_second, 1000)],
)
@EVERY_BATCH
def test_a_layer_with_its_up_projection_gets_the_attention_of_its_heads(prefix_lens, new_lens, most_keys, choice):
    case, kernels = make_case(EXPANDING, prefix_lens, new_lens, PAGE), Kernels()
    backend = make(case, kernels, EXPANDING, choice=choice, most_expanded_bytes=most_keys * OF_A_TOKEN)
    kernels.expanded_keys.clear()
    backend.init_forward_metadata(case.batch)
    torch.testing.assert_close(attend(backend, case, EXPANDING), case.expected, rtol=1e-5, atol=1e-5)
    num_decodes = len(new_lens) if max(new_lens) == 1 else int(np.argmax(np.array(new_lens) > 1))
    lengths = (np.array(prefix_lens) + new_lens)[num_decodes:]
    of_choice = {none_of_them: lengths[:0], all_of_them: lengths, every_second: lengths[::2]}[choice]
    assert sum(kernels.expanded_keys) == sum(of_choice)
    assert max(kernels.expanded_keys, default=0) <= backend._space.most_tokens(Widths.of(EXPANDING))


@pytest.mark.parametrize("most_keys", [2100, 4000])
def test_blocks_share_the_keys_of_few_tokens_behind_many(most_keys):
    case, kernels = make_case(EXPANDING, [5, 2500], [1, 3], PAGE), Kernels()
    backend = make(case, kernels, EXPANDING, choice=all_of_them, most_expanded_bytes=most_keys * OF_A_TOKEN)
    kernels.expanded_keys.clear()
    backend.init_forward_metadata(case.batch)
    torch.testing.assert_close(attend(backend, case, EXPANDING), case.expected, rtol=1e-5, atol=1e-5)
    assert kernels.num_splits == 4  # 24 heads
    assert len(kernels.expanded_keys) == (2 if most_keys == 2100 else 1)


def test_no_more_memory_is_taken_for_keys_and_values_than_all_requests_have_tokens():
    case = make_case(EXPANDING, [3, 0], [5, 9], PAGE)
    table = case.batch.req_to_token_pool.req_to_token
    slots = table.numel()
    space = _Space([LAYER, EXPANDING], table, 2, torch.float32, 1 << 30)
    assert space.most_tokens(Widths.of(EXPANDING)) == slots
    gathered, expanded = space.room(Widths.of(EXPANDING), slots)
    assert (gathered.shape, expanded.shape) == ((slots, WIDTH), (slots, HEADS, 6 + 5))
    gathered.fill_(1)
    expanded.fill_(2)
    assert gathered.eq(1).all()
    assert _Space([LAYER], table, 2, torch.float32, 1 << 30)._memory.numel() == 0
    smallest = _Space([EXPANDING], table, 2, torch.float32, 0)
    assert smallest.most_rows(Widths.of(EXPANDING)) == 2  # for decodes there is always room


def test_a_backends_memory_goes_with_it_at_once():
    """Not at some later collection: what is measured next would count it."""
    case = make_case(EXPANDING, [3, 0], [5, 9], PAGE)
    backend = make(case, Kernels(), EXPANDING, choice=all_of_them)
    backend.init_forward_metadata(case.batch)
    attend(backend, case, EXPANDING)
    memory = weakref.ref(backend._space)
    gc.disable()
    try:
        del backend
        assert memory() is None
    finally:
        gc.enable()


def test_where_there_is_no_room_for_what_attends_over_latents_every_prompt_is_expanded():
    case, kernels = make_case(EXPANDING, [7, 20, 0, 5], [1, 1, 12, 3], PAGE), Kernels()
    backend = make(case, kernels, EXPANDING, choice=none_of_them, most_expanded_bytes=0)
    kernels.expanded_keys.clear()
    backend.init_forward_metadata(case.batch)
    torch.testing.assert_close(attend(backend, case, EXPANDING), case.expected, rtol=1e-5, atol=1e-5)
    assert sum(kernels.expanded_keys) == 12 + 8


def test_each_head_of_each_prompts_token_is_in_one_tile_and_the_longest_come_first():
    case, kernels = make_case(LAYER, [5, 40, 0], [1, 11, 30], PAGE), Kernels()
    backend = make(case, kernels)
    backend.init_forward_metadata(case.batch)
    attend(backend, case)
    tiles = kernels.tiles[-1].numpy()
    assert tiles.dtype == np.int32
    of = [[(row, start) for row, _, count, start in tiles if row == wanted] for wanted in (1, 2)]
    for pairs, count in zip(of, (11, 30), strict=True):
        assert sorted(start for _, start in pairs) == list(range(0, count * HEADS, PREFILL_TILE.rows))
    assert [tiles[0, 0], tiles[-1, 0]] == [1, 2]  # 51 keys; one key
    assert {tuple(tile[:3]) for tile in tiles} == {(1, 1, 11), (2, 12, 30)}


def test_a_captured_decode_is_replayed_for_others_by_pages_and_lengths_alone():
    case, kernels = make_case(LAYER, [3, 0, 17], [1, 1, 1], PAGE), Kernels()
    backend = make(case, kernels)
    captured = torch.zeros(3, dtype=torch.int32)
    backend.init_cuda_graph_state(3, 3)
    rows = case.batch.req_pool_indices
    backend.init_forward_metadata_capture_cuda_graph(3, 3, torch.zeros_like(rows), captured, ForwardMode.DECODE)
    lengths = case.batch.seq_lens
    backend.init_forward_metadata_replay_cuda_graph(3, rows, lengths, ForwardMode.DECODE, lengths)
    assert captured.tolist() == lengths.tolist()  # what the captured kernel reads
    torch.testing.assert_close(attend(backend, case), case.expected, rtol=1e-5, atol=1e-5)
    assert backend.get_cuda_graph_seq_len_fill_value() == 0
    assert backend.page_table.shape[0] == 3
    with pytest.raises(RuntimeError, match=r"no batch of 2 was captured; captured: \[3\]"):
        backend.init_forward_metadata_replay_cuda_graph(2, rows, lengths, ForwardMode.DECODE, lengths)
    with pytest.raises(ConfigError, match="3 requests, 6 tokens"):
        backend.init_cuda_graph_state(3, 6)


def test_a_layer_without_kernels_is_refused_and_a_batch_has_to_be_planned():
    case = make_case(LAYER, [0], [1], PAGE)
    options = {"req_to_token": case.batch.req_to_token_pool.req_to_token, "max_requests": 1, "page_size": PAGE}
    with pytest.raises(UnsupportedModelError, match=r"layer0 is over latents.*disable_passes: \[absorb_latents\]"):
        LatentAttnBackend([LAYER], {}, dtype=torch.float32, **options)
    without = LatentPieces(Kernels().decode, Kernels().prefill)
    with pytest.raises(UnsupportedModelError, match=r"layer0 is over latents, and the runtime has no kernels"):
        LatentAttnBackend([EXPANDING], {EXPANDING.name: without}, dtype=torch.float32, **options)
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        attend(make(case, Kernels()), case)


@pytest.mark.parametrize("is_hopper", [True, False])
@pytest.mark.parametrize(("own", "rotated", "value"), [(128, 64, 128), (64, 32, 64), (256, 64, 256)])
def test_tiles_of_expanded_prompts_fit_the_shared_memory_of_a_gpu(own, rotated, value, is_hopper):
    tile = expanded_tile(own + rotated, value, is_hopper)
    numbers = tile.stages * tile.keys * (own + rotated + value)
    numbers += tile.rows * (own + rotated) if is_hopper else 0  # before Hopper products take queries from registers
    assert 2 * numbers <= (227 if is_hopper else 150) * 1024  # an A100 has 163, and Triton takes some


@pytest.mark.parametrize("heads", [1, 16, 17, 32, 40, 64, 128])
def test_tiles_have_room_for_all_heads(heads):
    assert decode_tile(heads).rows * num_decode_tiles(heads) >= heads
    assert decode_tile(heads).rows * (num_decode_tiles(heads) - 1) < heads
