"""Inputs of the decode pieces: pages, scratch and splits, for any batch. The kernel itself is tested on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.runtime.attention.capture import RopeInputs
from mllm_compile.runtime.attention.flashinfer import decode as flashinfer_decode
from mllm_compile.runtime.attention.flashinfer.decode import DecodeBatch, SplitGroup
from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup
from mllm_compile.runtime.attention.hopper.shapes import pays_together
from mllm_compile.runtime.attention.layer import PerLayerParameters
from mllm_compile.runtime.attention.split.split_decode import LinkedDecode, SplitDecodeSpace, choose_decoder
from mllm_compile.runtime.attention.split.splits import MOST_FEW_SEQUENCES, OF_FEW, OF_MANY

MAX_REQUESTS, PAGE_SIZE, CONTEXT = 40, 5, 60  # a page size that is not a power of two
GROUPS = [
    PlanGroup(8, 2, 16, PerLayerParameters(-1, 0.0, 0.25)),
    PlanGroup(3, 3, 32, PerLayerParameters(7, 0.0, 0.25)),
]


class Piece:
    """The op in plain torch, which splits nothing but looks at what it is given to split with."""

    def __init__(self, max_splits: int) -> None:
        self.max_splits = max_splits
        self.calls: list[tuple[int, int]] = []  # (requests, splits)

    def __call__(self, inputs: list[torch.Tensor]) -> None:
        q, keys, values, table, seq_lens, out, partial, tops, totals, done = inputs
        (count, heads, dim), kv_heads = q.shape, keys.shape[1]
        splits = partial.shape[1]
        self.calls.append((count, splits))
        assert 1 <= splits <= self.max_splits
        assert partial.shape == (count, splits, heads, dim)
        assert tops.shape == totals.shape == (count, splits, heads)
        assert done.shape == (count, kv_heads)
        assert not done.any()
        assert all(tensor.is_contiguous() for tensor in inputs)
        for row in range(count):
            positions = torch.arange(int(seq_lens[row]))
            slots = table[row][positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
            k, v = (x[slots].repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
            weights = torch.einsum("hd,lhd->hl", q[row], k).mul(0.25).softmax(-1)
            out[row] = torch.einsum("hl,lhd->hd", weights, v)


@pytest.fixture
def space_and_decoders():
    few, many = Piece(OF_FEW.most), Piece(OF_MANY.most)
    decoders = LinkedDecode(few, MOST_FEW_SEQUENCES, OF_FEW), LinkedDecode(many, None, OF_MANY)
    # Row r has the pages r, r + rows, r + 2 rows, …
    rows, width = MAX_REQUESTS + 1, CONTEXT // PAGE_SIZE
    pages = torch.arange(rows)[:, None] + rows * torch.arange(width)
    slots = pages.repeat_interleave(PAGE_SIZE, 1) * PAGE_SIZE + torch.arange(CONTEXT) % PAGE_SIZE
    groups = [(group, decoders) for group in GROUPS]
    space = SplitDecodeSpace(groups, slots.int(), MAX_REQUESTS, PAGE_SIZE, torch.float32)
    return space, decoders, slots


@pytest.mark.parametrize("count", [1, 2, 7, MAX_REQUESTS])
@pytest.mark.parametrize("group", GROUPS, ids=["grouped", "plain"])
def test_requests_attend_over_their_own_pages(space_and_decoders, group, count):
    space, decoders, slots = space_and_decoders
    torch.manual_seed(count)
    shape = (slots.numel() // PAGE_SIZE, PAGE_SIZE, group.num_kv_heads, group.head_dim)
    pages = torch.randn(shape), torch.randn(shape)
    rows = torch.randperm(MAX_REQUESTS)[:count] + 1
    seq_lens = torch.randint(1, CONTEXT + 1, (count,), dtype=torch.int32)
    q = torch.randn(group.num_heads, count, group.head_dim).transpose(0, 1)  # of any stride
    out = torch.empty(count, group.num_heads, group.head_dim)
    space.list_pages(rows)
    assert space.prepare(group, decoders, seq_lens).run(q, pages, out) is out
    for row, length, heads, got in zip(rows.tolist(), seq_lens.tolist(), q, out, strict=True):
        of_row = slots[row, :length]
        k, v = (x.flatten(0, 1)[of_row].repeat_interleave(group.num_heads // group.num_kv_heads, 1) for x in pages)
        weights = torch.einsum("hd,lhd->hl", heads, k).mul(0.25).softmax(-1)
        torch.testing.assert_close(got, torch.einsum("hl,lhd->hd", weights, v))


def test_all_pieces_are_loaded_before_a_request_needs_them(space_and_decoders):
    space, decoders, _ = space_and_decoders
    for group in GROUPS:
        space.load(group, decoders)
    assert [[count for count, _ in decoder.piece.calls] for decoder in decoders] == [[1, 1], [1, 1]]


def test_kernels_that_split_nothing_get_no_scratch(space_and_decoders):
    _, _, slots = space_and_decoders
    shapes = []
    kernels = LinkedDecode(lambda inputs: shapes.append([tuple(tensor.shape) for tensor in inputs[6:]]))
    space = SplitDecodeSpace([(GROUPS[0], [kernels])], slots.int(), MAX_REQUESTS, PAGE_SIZE, torch.float32)
    space.load(GROUPS[0], [kernels])
    assert shapes == [[]]


def test_kernels_that_rotate_are_given_what_q_is_made_of_and_pieces_never(space_and_decoders):
    _, (_, piece), slots = space_and_decoders
    given = []
    decoders = (
        LinkedDecode(lambda inputs, rope_inputs=None: given.append((inputs, rope_inputs)), 8, fuses_rope=True),
        piece,
    )
    group = GROUPS[0]
    space = SplitDecodeSpace([(group, decoders)], slots.int(), MAX_REQUESTS, PAGE_SIZE, torch.float32)
    space.list_pages(torch.arange(3) + 1)
    lengths = torch.tensor([5, 60, 1], dtype=torch.int32)
    decode = space.prepare(group, decoders, lengths)
    assert decode.fuses_rope
    pages = torch.zeros(7, PAGE_SIZE, 2, 16), torch.ones(7, PAGE_SIZE, 2, 16)
    angles, out = torch.zeros(1, 3, 16), torch.empty(3, 8, 16)
    rope_inputs = RopeInputs.of([torch.zeros(1, 3, 8, 16), torch.zeros(1, 3, 2, 16), angles, angles], out[:, :2], 1e-6)
    decode.run_with_rope(rope_inputs, pages, out)
    ((q, keys, values, table, seq_lens, to), told) = given[0]
    assert told is rope_inputs
    assert (seq_lens, to) == (lengths, out)
    assert (q.shape, q.data_ptr()) == ((3, 8, 16), rope_inputs.q.data_ptr())
    assert [x.data_ptr() for x in (keys, values)] == [x.data_ptr() for x in pages]
    assert keys.shape == values.shape == (7 * PAGE_SIZE, 2, 16)
    assert torch.equal(table, slots[1:4, ::PAGE_SIZE].int() // PAGE_SIZE)
    many = space.prepare(group, decoders, lengths.repeat(2))  # 6 requests of 2 heads: left to the piece
    assert not many.fuses_rope


def test_behind_writes_nothing_rotates_and_no_kernel_starts_early(space_and_decoders):
    _, (_, piece), slots = space_and_decoders
    given = []
    kernels = LinkedDecode(lambda inputs, rope_inputs=None, **how: given.append(how), 8, fuses_rope=True)
    decoders, group = (kernels, piece), GROUPS[0]
    space = SplitDecodeSpace([(group, decoders)], slots.int(), MAX_REQUESTS, PAGE_SIZE, torch.float32)
    pages = torch.zeros(7, PAGE_SIZE, 2, 16), torch.ones(7, PAGE_SIZE, 2, 16)
    for num_requests in (3, 6):
        lengths = torch.ones(num_requests, dtype=torch.int32)
        decode = space.prepare(group, decoders, lengths, behind_writes=True)
        assert not decode.fuses_rope
        version = space._fence._version
        decode.run(torch.zeros(num_requests, 8, 16), pages, torch.empty(num_requests, 8, 16))
        assert space._fence._version == version + (num_requests > 4), "a piece has a kernel ahead that waits"
        batch = DecodeBatch(lengths, lambda window, place: None, behind_writes=True)
        assert not SplitGroup(group, decoders, (), space).plan(batch).fuses_rope
    assert given == [{"starts_early": False}]


def test_rows_of_a_request_go_together_where_a_kernel_takes_as_many(space_and_decoders, monkeypatch):
    _, (_, piece), slots = space_and_decoders
    launches, group = [], GROUPS[0]

    def kernels(tokens: int) -> LinkedDecode:
        return LinkedDecode(
            lambda inputs, rope_inputs=None, **how: launches.append((tokens, how)), 8, fuses_rope=True, tokens=tokens
        )

    decoders = kernels(1), piece
    space = SplitDecodeSpace([(group, decoders)], slots.int(), MAX_REQUESTS, PAGE_SIZE, torch.float32)
    split_group = SplitGroup(group, decoders, [kernels(2)], space)
    pages = torch.zeros(7, PAGE_SIZE, 2, 16), torch.ones(7, PAGE_SIZE, 2, 16)
    monkeypatch.setattr(flashinfer_decode, "pays_together", lambda num_sequences, tokens: num_sequences <= 6)
    for num_rows, num_tokens, together in ((4, 2, True), (6, 2, True), (3, 3, False), (8, 2, False)):
        wrapper = split_group.plan_verify(num_tokens, torch.ones(num_rows, dtype=torch.int32))
        assert wrapper.fuses_rope is together
        wrapper.run(torch.zeros(num_rows, 8, 16), pages, torch.empty(num_rows, 8, 16))
    assert launches == [(2, {}), (2, {}), (1, {"starts_early": False})]


def test_tokens_go_together_where_the_measurement_says_so():
    shapes = [(count, tokens) for count in (1, 8, 16, 32, 64) for tokens in (2, 4, 8, 16) if count * tokens <= 256]
    folded = [(count, tokens) for count, tokens in shapes if not pays_together(8 * count, tokens)]
    assert folded == [(1, 16), (32, 2), (64, 2)]


def test_what_is_loaded_has_its_scratch_though_no_batch_takes_it():
    """With 10 KV heads a request alone has more splits than any batch of the piece for many."""
    group = PlanGroup(40, 10, 16, PerLayerParameters(-1, 0.0, 0.25))
    piece = Piece(OF_MANY.most)
    decoders = LinkedDecode(lambda inputs: None, 256), LinkedDecode(piece, None, OF_MANY)
    slots = torch.zeros(5, CONTEXT, dtype=torch.int32)
    space = SplitDecodeSpace([(group, decoders)], slots, 4, PAGE_SIZE, torch.float32)
    space.load(group, decoders)
    assert piece.calls == [(1, OF_MANY.most)]


@given(st.integers(1, 1 << 20))
def test_every_batch_has_a_piece_and_no_more_splits_than_that_piece_has(num_sequences):
    decoders = LinkedDecode(list, MOST_FEW_SEQUENCES, OF_FEW), LinkedDecode(list, None, OF_MANY)
    splits = choose_decoder(decoders, num_sequences).splits
    assert splits == (OF_FEW if num_sequences <= MOST_FEW_SEQUENCES else OF_MANY)
    assert 1 <= splits.of(num_sequences) <= splits.most
    if num_sequences >= 512:
        assert splits.of(num_sequences) == 1


def test_the_kernels_bound_of_splits_is_a_power_of_two():
    assert all(math.log2(splits.most).is_integer() for splits in (OF_FEW, OF_MANY))
