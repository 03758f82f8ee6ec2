"""The Triton kernels of adapters on a GPU, against float32. tests/gpu/test_adapters.py has them in packages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.lora.reference import add_lora_reference
from mllm_compile.runtime.ops.lora.shapes import SHORT_STEP

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MARGIN = 1.2  # ours may be this much further from float32 than torch in bfloat16 is
SLOTS = 8


def by_kernels(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, *parts: Any
) -> list[torch.Tensor]:
    """y with what adapters add, of each form."""
    found = []
    for is_few in (True, False):
        shrunk = op("lora_shrink")(x, a, slots, is_few, False)
        found.append(op("lora_expand")(y, shrunk, b, slots, *parts, is_few, False))
    return found


SHAPES = [  # inputs, outputs, first outputs and numbers of parts, rank
    (4096, 6144, [0, 4096, 5120], [4096, 1024, 1024], 16),
    (4096, 6144, [0, 5120], [4096, 1024], 64),
    (1100, 96, [32], [64], 8),
    (12288, 4096, [0], [4096], 16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_are_as_near_to_float32_as_torch_is(shape: Any) -> None:
    inputs, outputs, starts, rows, rank = shape
    factors = (SLOTS, rank * len(rows), inputs), (SLOTS, sum(rows), rank)
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(one, generator=generator, device="cuda") for one in factors)
    a, b = (a / inputs**0.5).bfloat16(), b.bfloat16()
    for tokens in (1, 2, 8, 17, 64, 65, 300, 2048, 4100):
        for most in (1, SLOTS):  # one adapter, and several
            y, x = (torch.randn(tokens, size, generator=generator, device="cuda") for size in (outputs, inputs))
            y, x = y.bfloat16(), x.bfloat16()
            slots = torch.randint(-1, most, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
            slots[0] = most - 1
            exact = add_lora_reference(y.float(), x.float(), a.float(), b.float(), slots, starts, rows)
            torchs = add_lora_reference(y, x, a, b, slots, starts, rows)
            theirs = (torchs.float() - exact).norm() / exact.norm()
            whole, first = (y, x, a, b, slots), (y[:1], x[:1], a, b, slots[:1])
            every = (by_kernels(*one, starts, rows) for one in (whole, whole, first))
            for form, (ours, again, alone) in zip(("few", "many"), zip(*every, strict=True), strict=True):
                assert torch.equal(ours, again), (form, tokens, most)
                assert torch.equal(ours[slots < 0], y[slots < 0])
                off = (ours.float() - exact).norm() / exact.norm()
                assert off <= MARGIN * theirs + 1e-6, (form, tokens, most, float(off), float(theirs))
                assert torch.equal(alone, ours[:1]), f"a token's numbers depend on the others: {form}, {tokens}, {most}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_that_adds_to_what_adapters_do_is_as_near_to_float32_as_torch_is(shape: Any) -> None:
    inputs, outputs, starts, rows, rank = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda").bfloat16()

    weight, a = random(outputs, inputs) / inputs**0.5, random(SLOTS, rank * len(rows), inputs) / inputs**0.5
    b = random(SLOTS, sum(rows), rank)
    for tokens in (65, 300, SHORT_STEP, SHORT_STEP + 1, 2048, 4100):
        x = random(tokens, inputs)
        slots = torch.randint(-1, SLOTS, (tokens,), generator=generator, device="cuda", dtype=torch.int32)

        def ours(given: torch.Tensor, x: torch.Tensor = x) -> torch.Tensor:
            made: torch.Tensor = op("lora_linear")(x, weight, a, b, given, starts, rows)
            return made

        y = torch.nn.functional.linear(x.float(), weight.float())
        exact = add_lora_reference(y, x.float(), a.float(), b.float(), slots, starts, rows)
        torchs = add_lora_reference(y.bfloat16(), x, a, b, slots, starts, rows)
        theirs = (torchs.float() - exact).norm() / exact.norm()
        out = ours(slots)
        off = (out.float() - exact).norm() / exact.norm()
        assert off <= MARGIN * theirs + 1e-6, (tokens, float(off), float(theirs))
        assert torch.equal(out, ours(slots))
        for slot in (-1, 1):
            of_others = ours(torch.where(slots == slot, slots, (slots + 3) % SLOTS))
            assert torch.equal(out[slots == slot], of_others[slots == slot]), "numbers depend on others' adapters"


def test_the_kernel_that_ends_with_the_activation_has_the_bits_of_both() -> None:
    generator, parts = torch.Generator("cuda").manual_seed(0), ([0, 12288], [12288, 12288])
    shapes = ("T", 24576), ("T", 4096), (SLOTS, 32, 4096), (SLOTS, 24576, 16)
    for tokens in (1, 8, 17, 64, 300, 2048):
        sizes = [(tokens if size == "T" else size, *rest) for size, *rest in shapes]
        y, x, a, b = (torch.randn(size, generator=generator, device="cuda").bfloat16() for size in sizes)
        slots = torch.randint(-1, SLOTS, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
        for is_few in (True, False):
            shrunk = op("lora_shrink")(x, a / 64, slots, is_few, False)
            apart = op("silu_mul")(op("lora_expand")(y, shrunk, b, slots, *parts, is_few, False))
            ours = op("lora_expand_gated")(y, shrunk, b, slots, *parts, is_few, False)
            assert torch.equal(apart, ours), (tokens, is_few)


def test_a_kernel_between_linears_has_the_numbers_of_those_that_it_stands_for() -> None:
    generator, parts, norm = torch.Generator("cuda").manual_seed(0), ([0, 12288], [12288, 12288]), (1e-6, 4096)
    of_adapters = (SLOTS, 16, 4096), (SLOTS, 4096, 16), (SLOTS, 32, 4096), (SLOTS, 24576, 16), (SLOTS, 16, 12288)
    shapes = (*[("T", 4096)] * 3, (4096,), ("T", 24576), *of_adapters)
    for tokens in (1, 8, 17, 64, 65, 256):
        sizes = [tuple(tokens if size == "T" else size for size in shape) for shape in shapes]
        tensors = [torch.randn(size, generator=generator, device="cuda") for size in sizes]
        tensors = [(one / 64 if len(one.shape) == 3 else one).bfloat16() for one in tensors]
        x, o, residual, weight, gate_up, a_o, b_o, a_gate_up, b_gate_up, a_down = tensors
        slots = torch.randint(-1, SLOTS, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
        torch.cuda.synchronize()  # slots are read early
        shrunk = op("lora_shrink")(x, a_o, slots, True, True)
        h = residual + op("lora_expand")(o, shrunk, b_o, slots, [0], [4096], True, True)
        out, scaled, squares, products = op("lora_expand_norm")(
            o, shrunk, b_o, slots, residual, weight, False, a_gate_up
        )
        gated = op("lora_expand_gated")(gate_up, products, b_gate_up, slots, *parts, True, True, squares, *norm)
        again, last = op("lora_expand_gated_chained")(
            gate_up, products, b_gate_up, slots, *parts, squares, *norm, a_down
        )
        assert torch.equal(h, out)
        assert torch.equal(gated, again)
        assert torch.equal(scaled, (h.float() * weight.float()).bfloat16())
        assert torch.allclose(squares.sum(-1), h.float().pow(2).sum(-1), rtol=1e-4)
        of_scaled, of_gated = (
            op("lora_shrink")(one, a, slots, True, True) for one, a in ((scaled, a_gate_up), (gated, a_down))
        )
        for ours, theirs in ((products, of_scaled), (last, of_gated)):
            found, expected = (one.sum(0)[slots >= 0] for one in (ours, theirs))
            assert (found - expected).norm() <= 1e-3 * expected.norm()
