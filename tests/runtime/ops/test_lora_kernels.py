"""The Triton kernels of adapters against the reference, through Triton's interpreter, on a CPU.

The interpreter knows no bfloat16. tests/gpu/test_adapter_kernels.py has compiled kernels.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import silu

from mllm_compile.runtime.ops.lora import shapes
from mllm_compile.runtime.ops.lora.reference import add_lora_reference
from tests.runtime.interpreted import interpreted, run_interpreted, starts_the_interpreter

INPUTS, HALF, SLOTS = 2100, 32, 3  # inputs that no block divides


@starts_the_interpreter
def test_the_kernels_compute_what_the_reference_does_through_the_interpreter():
    run_interpreted(__file__)


@pytest.fixture
def kernels(monkeypatch):
    """The modules of the ops, their kernels launched as they are: torch's wrapper takes compiled ones alone."""
    from mllm_compile.runtime.ops.lora import chained, expand, shrink, stretches

    for module in (shrink, expand, chained, stretches):
        monkeypatch.setattr(module, "wrap_triton", lambda kernel: kernel)
        monkeypatch.setattr(module, "starts_early", lambda: False)
    for name, tokens in (("APART_TOKENS", 128), ("LONG_TOKENS", 256)):  # blocks that only end take the interpreter long
        monkeypatch.setattr(shrink, name, tokens)
    return shrink, expand, chained


@pytest.fixture(params=["slots", "loops", "many"])
def is_few(kernels, monkeypatch, request) -> bool:
    """Of each form of the kernels: blocks of few tokens with a slot each, those that go through slots, and of many."""
    for module in kernels[:2]:
        monkeypatch.setattr(module, "MOST_SLOTS", 0 if request.param == "loops" else SLOTS)
    return request.param != "many"


@interpreted
def test_blocks_of_many_tokens_give_the_same_bits_however_they_go_through_slots_and_inputs(kernels, monkeypatch):
    shrink, expand, _ = kernels
    from mllm_compile.runtime.ops.lora import stretches

    starts, rows, tokens = [0, HALF], [HALF, HALF], 71
    y, x, a, b = operands(tokens, starts, rows, 16, torch.float16)
    slots = torch.arange(tokens, dtype=torch.int32) % (SLOTS + 1) - 1
    found = []
    forms = (SLOTS, 128, 256, 256), (SLOTS, 0, 256, 0), (SLOTS, 0, 20, 256), (0, 0, 20, 0)
    for most_slots, apart_tokens, long_tokens, short_tokens in forms:
        monkeypatch.setattr(shrink, "MOST_SLOTS", most_slots)
        monkeypatch.setattr(shrink, "APART_TOKENS", apart_tokens)
        monkeypatch.setattr(shrink, "LONG_TOKENS", long_tokens)
        monkeypatch.setattr(stretches, "SHORT_TOKENS", short_tokens)
        shrunk = shrink.lora_shrink(x, a, slots, False, True)
        out = expand.lora_expand(y, shrunk, b, slots, starts, rows, False, True)
        found.append((shrunk[0, slots >= 0], out))
    (shrunk, out), *others = found
    assert all(torch.equal(shrunk, one) and torch.equal(out, other) for one, other in others)
    exact = add_lora_reference(y.float(), x.float(), a.float(), b.float(), slots, starts, rows)
    assert torch.allclose(out.float(), exact, rtol=2e-3, atol=1e-2)


@interpreted
@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.float32), (35, torch.float16), (300, torch.float16)])
@pytest.mark.parametrize(
    ("starts", "rows", "rank"),
    [([0, HALF], [HALF, HALF], 8), ([0], [HALF], 16), ([HALF], [HALF], 20), ([0, HALF], [HALF, HALF], 70)],
    ids=str,
)
def test_each_token_has_what_its_adapter_adds_and_the_activation_changes_no_bit(
    kernels, is_few, starts, rows, rank, tokens, dtype
):
    y, x, a, b = operands(tokens, starts, rows, rank, dtype)
    slots = torch.randint(-1, SLOTS, (tokens,), dtype=torch.int32, generator=torch.Generator().manual_seed(tokens))
    shrink, expand, _ = kernels
    shrunk = shrink.lora_shrink(x, a, slots, is_few, True)
    out = expand.lora_expand(y, shrunk, b, slots, starts, rows, is_few, True)
    exact = add_lora_reference(y.float(), x.float(), a.float(), b.float(), slots, starts, rows)
    rounded = add_lora_reference(y, x, a, b, slots, starts, rows).float()
    assert (out.float() - exact).norm() <= 1.2 * (rounded - exact).norm() + 1e-5 * exact.norm()
    gate, up = out.chunk(2, -1)
    gated = expand.lora_expand_gated(y, shrunk, b, slots, starts, rows, is_few, True)
    assert torch.allclose(gated, silu(gate.float()).to(dtype) * up, rtol=2e-3 if dtype == torch.float16 else 1e-5)


@interpreted
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-5), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
def test_a_product_adds_to_what_b_has_written(kernels, monkeypatch, is_long, dtype, off):
    from mllm_compile.runtime.ops.lora import fill, linear, stretches

    launched = []

    class Launched:
        """A kernel, which the interpreter would take through a grid of no blocks."""

        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launched.append((self.kernel.fn.__name__, math.prod(grid) > 0))
            return self.kernel[grid] if math.prod(grid) else lambda *args, **named: None

    for module in (*kernels[:1], fill, stretches):
        monkeypatch.setattr(module, "wrap_triton", Launched)
        monkeypatch.setattr(module, "starts_early", lambda: False)
    monkeypatch.setattr(linear, "SHORT_STEP", 70 if is_long else 71)
    starts, rows, tokens = [HALF], [HALF], 71  # outputs ahead have no adapters
    _, x, a, b = operands(tokens, starts, rows, 16, dtype)
    weight = torch.randn(2 * HALF, INPUTS, generator=torch.Generator().manual_seed(3)).to(dtype) / INPUTS**0.5
    y = torch.nn.functional.linear(x, weight)
    slots = torch.arange(tokens, dtype=torch.int32) // 5 % (SLOTS + 1) - 1

    def run(given: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = linear.lora_linear(x.view(1, tokens, -1), weight, a, b, given, starts, rows)
        return made.view(tokens, -1)

    out, of_others = run(slots), run(torch.where(slots == 1, slots, -1))
    forms = [(name, is_there) for name, is_there in launched if is_there]
    assert [name for name, _ in forms[: len(forms) // 2]] == (
        ["loop_kernel", "sum_kernel", "stretch_kernel"] if is_long else ["loop_kernel", "fill_kernel"]
    )
    exact = add_lora_reference(y.float(), x.float(), a.float(), b.float(), slots, starts, rows)
    assert torch.allclose(out.float(), exact, rtol=off, atol=5 * off)
    assert torch.equal(out[slots < 0], run(torch.full_like(slots, -1))[slots < 0])
    assert torch.equal(out[slots == 1], of_others[slots == 1])


@interpreted
def test_outputs_ahead_of_all_parts_read_nothing_ahead_of_b(kernels, is_few):
    shrink, expand, _ = kernels
    rank = 70  # more than a product takes at once
    y, x, a, given = operands(35, [HALF], [HALF], rank, torch.float32)
    ahead = HALF * rank
    whole = torch.full((ahead + given.numel(),), torch.nan)
    b = whole[ahead:].view_as(given).copy_(given)
    slots = torch.arange(35, dtype=torch.int32) % (SLOTS + 1) - 1
    shrunk = shrink.lora_shrink(x, a, slots, is_few, True)
    out = expand.lora_expand(y, shrunk, b, slots, [HALF], [HALF], is_few, True)
    assert torch.equal(out[:, :HALF], y[:, :HALF])


@interpreted
def test_a_token_has_the_same_bits_alone_and_among_others(kernels, is_few):
    shrink, expand, _ = kernels
    starts, rows, tokens = [0, HALF], [HALF, HALF], 71
    y, x, a, b = operands(tokens, starts, rows, 16, torch.float16)
    # Their sums are exact in any order: that of NumPy's depends on where a row is. GPUs' are in tests/gpu.
    x, a, b = x.round(), (a * INPUTS**0.5).round(), b.round()
    slots = torch.arange(tokens, dtype=torch.int32) // 5 % (SLOTS + 1) - 1

    def run(chosen: torch.Tensor) -> torch.Tensor:
        shrunk = shrink.lora_shrink(x[chosen], a, slots[chosen], is_few, True)
        return expand.lora_expand(y[chosen], shrunk, b, slots[chosen], starts, rows, is_few, True)

    together = run(torch.arange(tokens))
    assert torch.equal(together[slots < 0], y[slots < 0])
    for chosen in (torch.arange(1), torch.arange(20, 45), torch.arange(0, tokens, 7)):
        assert torch.equal(run(chosen), together[chosen])


@interpreted
@pytest.mark.parametrize("plus_one", [False, True])
def test_a_kernel_between_linears_has_the_bits_of_those_that_it_stands_for(kernels, plus_one, monkeypatch):
    shrink, expand, chained = kernels
    monkeypatch.setattr(shapes, "_CHAINED_COLUMNS", 32)
    tokens, rank, width, wide = 19, 20, 64, 96
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).half()

    slots = torch.randint(-1, SLOTS, (tokens,), dtype=torch.int32, generator=generator)
    has_adapter = slots >= 0
    x, y, residual, weight, b = (
        random(tokens, 256),
        *(random(tokens, width) for _ in range(2)),
        random(width),
        random(SLOTS, width, rank),
    )
    shrunk = shrink.lora_shrink(x, random(SLOTS, rank, 256) / 16, slots, True, True)
    next_a = random(SLOTS, 2 * rank, width) / 8
    out, scaled, squares, products = chained.lora_expand_norm(y, shrunk, b, slots, residual, weight, plus_one, next_a)
    assert torch.equal(out, residual + expand.lora_expand(y, shrunk, b, slots, [0], [width], True, True))
    assert torch.equal(scaled, (out.float() * (weight.float() + plus_one)).half())
    assert torch.allclose(squares.sum(-1), out.float().pow(2).sum(-1))
    alone = shrink.lora_shrink(scaled, next_a, slots, True, True)
    assert torch.allclose(products.sum(0)[has_adapter], alone.sum(0)[has_adapter], atol=1e-4)

    gate_up, b = random(tokens, 2 * wide), random(SLOTS, 2 * wide, rank)
    last_a = random(SLOTS, rank, wide)
    norm = squares, 1e-6, width
    gated, products_of_gated = chained.lora_expand_gated_chained(
        gate_up, products, b, slots, [0, wide], [wide, wide], *norm, last_a
    )
    assert torch.equal(
        gated, expand.lora_expand_gated(gate_up, products, b, slots, [0, wide], [wide, wide], True, True, *norm)
    )
    factors = torch.rsqrt(squares.sum(-1) / width + 1e-6)[:, None]
    normed = torch.where(has_adapter[:, None], products.sum(0) * factors, 0)
    both = (
        expand.lora_expand(gate_up, one, b, slots, [0, wide], [wide, wide], True, True, *more)
        for one, more in ((products, norm), (normed[None], ()))
    )
    ours, theirs = both
    assert torch.allclose(ours, theirs, rtol=2e-3, atol=1e-2)
    alone = shrink.lora_shrink(gated, last_a, slots, True, True)
    assert torch.allclose(products_of_gated.sum(0)[has_adapter], alone.sum(0)[has_adapter], rtol=1e-3, atol=1e-3)


def operands(
    tokens: int, starts: list[int], rows: list[int], rank: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, x, A and B."""
    generator = torch.Generator().manual_seed(tokens)
    factors = (SLOTS, rank * len(rows), INPUTS), (SLOTS, sum(rows), rank)
    y, x, a, b = (torch.randn(shape, generator=generator) for shape in ((tokens, 2 * HALF), (tokens, INPUTS), *factors))
    return y.to(dtype), x.to(dtype), (a / INPUTS**0.5).to(dtype), b.to(dtype)
