"""Copies of keys and values in a row, on a CPU; tests/gpu/test_flashinfer_backend.py has their attention."""

from __future__ import annotations

import torch

from mllm_compile.runtime.attention.flashinfer.copied import CopiedPrefill, CopySpace, RowPrefill


class Wrapper:
    """Notes what it is given."""

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, **options: object) -> None:
        self.k, self.v, self.options = k.clone(), v.clone(), options
        out.copy_(q)


def test_rows_of_any_slots_are_copied_in_their_order() -> None:
    keys, values = torch.randn(2, 5, 4, 2, 8).bfloat16()  # 5 pages of 4 tokens
    slots = torch.tensor([19, 0, 7, 8, 9], dtype=torch.int32)
    space, wrapper = CopySpace(torch.zeros(2 * 20 * 2 * 8 * 2, dtype=torch.uint8)), Wrapper()
    assert space.most_tokens(2, 8, torch.bfloat16) == 20
    q = torch.randn(3, 4, 8).bfloat16()
    out = torch.empty_like(q)
    CopiedPrefill(wrapper, space, slots).run(q, (keys, values), out=out, return_lse=True)
    assert torch.equal(wrapper.k, keys.flatten(0, 1)[slots.long()])
    assert torch.equal(wrapper.v, values.flatten(0, 1)[slots.long()])
    assert torch.equal(out, q)
    assert wrapper.options == {"return_lse": True}


def test_layers_of_other_heads_use_the_same_memory() -> None:
    space = CopySpace(torch.zeros(4096, dtype=torch.uint8))
    for heads, width, dtype in ((1, 64, torch.float16), (4, 128, torch.bfloat16)):
        pages = torch.randn(2, 3, 1, heads, width).to(dtype)
        keys, values = space.copy((pages[0], pages[1]), torch.tensor([2, 1], dtype=torch.int32))
        assert torch.equal(keys, pages[0, [2, 1], 0])
        assert torch.equal(values, pages[1, [2, 1], 0])


def test_pages_that_follow_each_other_are_read_where_they_are() -> None:
    keys, values = torch.randn(2, 5, 4, 2, 8).bfloat16()
    wrapper, q = Wrapper(), torch.randn(3, 4, 8).bfloat16()
    out = torch.empty_like(q)
    RowPrefill(wrapper, first_slot=8, num_keys=9).run(q, (keys, values), out=out, return_lse=True)
    assert torch.equal(wrapper.k, keys.flatten(0, 1)[8:17])
    assert torch.equal(wrapper.v, values.flatten(0, 1)[8:17])
    assert torch.equal(out, q) and wrapper.options == {"return_lse": True}
