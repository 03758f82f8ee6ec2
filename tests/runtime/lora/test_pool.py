"""The memory of adapters: what a write leaves in a slot, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.lora.pool import LoraPool
from mllm_compile.runtime.lora.target import LoraBuffers, LoraLayout, LoraTarget, a_name, b_name, scales_name
from mllm_compile.runtime.lora.wire import pack, unpack

CPU = torch.device("cpu")
QKV = "attn.q+v.weight"
RANGES = (((0, 2),), ((2, 2),))


def pool(rank: int = 0, is_cut: bool = False) -> LoraPool:
    rows = 2 if is_cut else 4
    cut = RANGES if is_cut else ()
    targets = (
        LoraTarget("attn.q.weight", 4, 6, QKV, 0, 0, rows, cut),
        LoraTarget("attn.v.weight", 4, 6, QKV, 1, rows, rows, cut),
    )
    return LoraPool(LoraLayout(2, 3, "float32", targets, (LoraBuffers(QKV, 6, 6, 2 * rows),)), CPU, rank)


def factors(rank: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(1.0, 6 * rank + 1).view(rank, 6), torch.arange(1.0, 4 * rank + 1).view(4, rank)


def slot_of(pool: LoraPool, slot: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return pool.buffers[a_name(QKV)][slot], pool.buffers[b_name(QKV)][slot]


def test_a_write_leaves_nothing_of_the_adapter_before():
    written = pool()
    for buffer in written.buffers.values():
        buffer.fill_(torch.nan)
    a, b = factors()
    written.write(1, {"attn.v.weight": (a, b)})
    a_slot, b_slot = slot_of(written)
    assert torch.equal(a_slot, torch.cat([torch.zeros(3, 6), a, torch.zeros(1, 6)]))
    assert torch.equal(b_slot, torch.cat([torch.zeros(4, 3), torch.cat([b, torch.zeros(4, 1)], 1)]))
    assert slot_of(written, 0)[0].isnan().all(), "another slot is left alone"


def test_a_rank_takes_its_part():
    a, b = factors()
    for rank in range(2):
        part = pool(rank, is_cut=True)
        part.write(1, {"attn.q.weight": (a, b), "attn.v.weight": (a, b)})
        rows = b[2 * rank : 2 * rank + 2]
        assert torch.equal(slot_of(part)[1][:, :2], torch.cat([rows, rows]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ranks_that_follow_read_the_slot_and_factors_that_were_packed(dtype):
    sent = {"attn.q.weight": factors(), "attn.v.weight": factors(3)}
    sent = {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in sent.items()}
    slot, found = unpack(bytearray(b"".join(pack(7, sent))), dtype)
    assert slot == 7 and found.keys() == sent.keys()
    assert all(torch.equal(one, other) for name in sent for one, other in zip(found[name], sent[name], strict=True))


def test_bytes_are_those_of_the_buffers():
    assert pool().nbytes == 2 * (6 * 6 + 8 * 3) * 4


@pytest.mark.parametrize(
    ("name", "a", "b", "message"),
    [
        ("attn.k.weight", (2, 6), (4, 2), "'attn.k.weight' is no weight that adapters may change; these are: 'attn.q"),
        ("attn.q.weight", (2, 5), (4, 2), r"shapes \[2, 6\] and \[4, 2\], got \[2, 5\] and \[4, 2\]"),
        ("attn.q.weight", (2, 6), (4, 3), "expected A"),
        ("attn.q.weight", (2, 6), (2, 4), "expected A"),
        ("attn.q.weight", (4, 6), (4, 4), r"a rank of at most 3 \(lora.max_rank\), got 4"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(name, a, b, message):
    written = pool()
    good = torch.ones(1, 6), torch.ones(4, 1)
    with pytest.raises(ValueError, match=message):
        written.write(0, {"attn.v.weight": good, name: (torch.ones(a), torch.ones(b))})
    assert not any(buffer.any() for buffer in written.buffers.values())


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_is_not_there_is_refused(slot):
    with pytest.raises(ValueError, match=f"a slot of 0 to 1, got {slot}"):
        pool().write(slot, {})


def test_an_embedding_s_first_factor_is_turned_and_experts_have_factors_of_their_own():
    table = LoraTarget("table.weight", 2, 7, "table.weight", 0, 0, 2, kind="embedding")
    experts = LoraTarget("experts.up", 4, 6, "experts.up", 0, 0, 4, kind="experts", num_experts=5)
    buffers = LoraBuffers("table.weight", 7, 3, 2), LoraBuffers("experts.up", 15, 6, 20)
    written = LoraPool(LoraLayout(2, 3, "float32", (table, experts), buffers), CPU)
    for buffer in written.buffers.values():
        buffer.fill_(torch.nan)
    of_table, of_experts = (tuple(map(torch.randn, target.shapes(2))) for target in (table, experts))
    written.write(1, {"table.weight": of_table, "experts.up": of_experts})
    a, b = (written.buffers[name][1] for name in (a_name("table.weight"), b_name("table.weight")))
    assert torch.equal(a, torch.cat([of_table[0].T, torch.zeros(7, 1)], 1))
    assert torch.equal(b, torch.cat([of_table[1], torch.zeros(2, 1)], 1))
    a, b = (written.buffers[name][1].unflatten(0, (5, -1)) for name in (a_name("experts.up"), b_name("experts.up")))
    assert torch.equal(b @ a, of_experts[1] @ of_experts[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_experts_its_parts_of_them_and_its_scales(rank):
    dealt = LoraTarget("up", 4, 6, "up", 0, 0, 4, kind="experts", num_experts=4, expert_ranges=RANGES)
    cut = LoraTarget("down", 4, 6, "down", 0, 0, 2, RANGES, kind="experts", num_experts=2)
    plain = LoraTarget("v", 4, 6, "v", 0, 0, 2, RANGES)
    buffers = LoraBuffers("up", 6, 6, 8), LoraBuffers("down", 6, 6, 4), LoraBuffers("v", 3, 6, 2, 2)
    written = LoraPool(LoraLayout(1, 3, "float32", (dealt, cut, plain), buffers), CPU, rank)
    given = {target.weight: tuple(map(torch.randn, target.shapes(2))) for target in (dealt, cut)}
    scales, own = torch.arange(4.0), slice(2 * rank, 2 * rank + 2)
    written.write(0, given | {"v": (*factors(), scales)})
    found = {
        name: written.buffers[b_name(name)][0].unflatten(0, (2, -1)) @ written.buffers[a_name(name)][0].view(2, 3, 6)
        for name in given
    }
    assert torch.allclose(found["up"], given["up"][1][own] @ given["up"][0][own])
    assert torch.allclose(found["down"], given["down"][1][:, own] @ given["down"][0])
    assert torch.equal(written.buffers[scales_name("v")][0], scales[own])


def test_scales_are_one_but_for_those_of_an_adapter():
    target = LoraTarget("v.weight", 4, 6, "q+v", 0, 0, 4, stored_in="q+v", stored_start=2)
    layout = LoraLayout(2, 3, "float32", (target,), (LoraBuffers("q+v", 3, 6, 4, 8),))
    written, scales = LoraPool(layout, CPU), torch.arange(4.0)
    written.write(1, {"v.weight": (*factors(), scales)})
    found = written.buffers[scales_name("q+v")]
    assert torch.equal(found, torch.stack([torch.ones(8), torch.cat([torch.ones(2), scales, torch.ones(2)])]))
    written.write(1, {"v.weight": factors()})
    assert bool((found == 1).all())
    with pytest.raises(ValueError, match=r"expected no scales, or \[4\] with lora.dora: true"):
        pool().write(1, {"attn.q.weight": (*factors(), scales)})
