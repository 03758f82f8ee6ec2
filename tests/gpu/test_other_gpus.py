"""The portable kernels as an A100, L40S, RTX or Blackwell gets them: the same numbers, compiled for each, and they fit.

Each op runs here as told that the GPU is another one, with that one's shared memory. Triton's source is then compiled
for that architecture; a block must fit into its shared memory (CUDA C++ Programming Guide, "Technical Specifications
per Compute Capability").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu.test_split_decode import Cache, decode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
BF16 = torch.bfloat16
MODELS = {"0.6B": (1024, 3072, 16), "8B": (4096, 12288, 32)}  # hidden, feed-forward, query heads; 8 KV heads of 128
VOCAB = 151_936


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, device="cuda") * 0.1).to(dtype)


def one_token(hidden: int, ffn: int, _: int) -> list[torch.Tensor]:
    x, norm = random(1, 1, hidden), random(hidden)
    y = torch.ops.mllm.norm_gated_linear(x, norm, random(2 * ffn, hidden), 1e-6)
    z = torch.ops.mllm.linear_residual(y, random(hidden, ffn), x)
    return [y, z, torch.ops.mllm.norm_linear(z, norm, random(hidden, hidden), 1e-6)]


def few_tokens(hidden: int, ffn: int, _: int) -> list[torch.Tensor]:
    x, norm = random(1, 8, hidden), random(hidden)
    h, scaled, squares = torch.ops.mllm.few_linear_residual_norm(x, random(hidden, hidden), x, norm)
    y = torch.ops.mllm.few_linear(scaled, random(2 * ffn, hidden), squares, 1e-6, True)
    return [h, y, torch.ops.mllm.few_linear_residual(y, random(hidden, ffn), h)]


def activation(_: int, ffn: int, __: int) -> list[torch.Tensor]:
    return [torch.ops.mllm.silu_mul(random(1, 300, 2 * ffn))]


def rotation(_: int, __: int, heads: int) -> list[torch.Tensor]:
    tokens = 40
    keys, values = torch.zeros(2, 64, 8, 128, dtype=BF16, device="cuda").unbind()
    slots = torch.arange(tokens, device="cuda")
    q, k, v = random(1, tokens, heads, 128), random(1, tokens, 8, 128), random(tokens, 8, 128)
    angles, norm = random(1, tokens, 128), random(128)
    out = torch.ops.mllm.rope_and_cache(q, k, v, angles, angles, norm, norm, 1e-6, slots, keys, values)
    return [*out, keys, values]


def decodes(_: int, __: int, heads: int) -> list[torch.Tensor]:
    made = []
    for head_dim in (64, 128, 256):
        cache = Cache([1, 65, 577], 8, head_dim, 64, BF16)
        made += [decode(cache, random(3, heads, head_dim), 4, fetch_first=few) for few in (True, False)]
    return made


def choices(_: int, __: int, ___: int) -> list[torch.Tensor]:
    logits, numbers = random(8, VOCAB), torch.arange(8, device="cuda")
    heat = torch.full((8,), 0.7, device="cuda")
    return [torch.ops.mllm.greedy_tokens(logits), torch.ops.mllm.draw_tokens(logits, numbers, numbers, heat)]


def experts(hidden: int, ffn: int, _: int) -> list[torch.Tensor]:
    from mllm_compile.runtime.ops.experts.shapes import ONE_ROW, VARIANT_TOKENS, rows_at_once, rows_of_block

    made = []
    up, down = random(8, 2 * ffn // 4, hidden), random(8, hidden, ffn // 4)
    for most in (*VARIANT_TOKENS, None):
        tokens = most or 300
        weights, ids = torch.ops.mllm.choose_experts(random(tokens, 8), 2, 1, True)
        block = rows_of_block(most, 2, 8)
        order, blocks = ids, None
        if block != ONE_ROW:
            slots = torch.ones(tokens, dtype=torch.int64, device="cuda")
            order, blocks = torch.ops.mllm.order_experts(ids, slots, 8, block, rows_at_once(most, 2))
        how = (2, False)
        h = torch.ops.mllm.grouped_linear(random(tokens, hidden), order, blocks, up, None, *how, True, True, block)
        rows = torch.ops.mllm.grouped_linear(h, order, blocks, down, None, *how, False, False, block)
        made += [weights, ids, rows, torch.ops.mllm.sum_experts(rows, weights)]
    return made


@pytest.fixture
def launches(monkeypatch) -> list[Any]:
    """The Triton kernels that are launched, as compiled."""
    from triton.runtime.jit import JITFunction

    launched: list[Any] = []
    plain = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        launched.append(plain(self, *args, **options))
        return launched[-1]

    monkeypatch.setattr(JITFunction, "run", run)
    return launched


@pytest.fixture
def as_another_gpu(monkeypatch):
    from mllm_compile.runtime.ops import few_tokens
    from mllm_compile.runtime.ops.dependent_launch import starts_early
    from mllm_compile.runtime.ops.experts import grouped

    def pretend(architecture: int) -> None:
        if architecture < 90:  # the others are as this one: its kernels start early
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: divmod(architecture, 10))
        shared = SHARED_KB[architecture] * 1024
        for module in (few_tokens, grouped):
            monkeypatch.setattr(module, "most_shared_bytes", lambda: shared)
        starts_early.cache_clear()

    yield pretend
    monkeypatch.undo()
    starts_early.cache_clear()


@pytest.mark.parametrize("architecture", SHARED_KB)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("work", [one_token, few_tokens, activation, rotation, decodes, choices, experts])
def test_a_kernel_fits_every_gpu_and_gives_the_same_numbers(
    work: Callable[..., list[torch.Tensor]],
    model: str,
    architecture: int,
    launches: list[Any],
    as_another_gpu: Callable[[int], None],
):
    import triton
    from triton.backends.compiler import GPUTarget

    import mllm_compile.runtime.ops.attention.rope_cache
    import mllm_compile.runtime.ops.experts.choose
    import mllm_compile.runtime.ops.experts.grouped
    import mllm_compile.runtime.ops.experts.order
    import mllm_compile.runtime.ops.experts.sum
    import mllm_compile.runtime.ops.few_tokens
    import mllm_compile.runtime.ops.silu_mul
    import mllm_compile.runtime.ops.single_token
    import mllm_compile.runtime.ops.tokens.draw
    import mllm_compile.runtime.ops.tokens.greedy  # noqa: F401

    here = work(*MODELS[model])
    launches.clear()
    as_another_gpu(architecture)
    there = work(*MODELS[model])
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    assert launches
    for kernel in {launch.hash: launch for launch in launches}.values():
        assert architecture >= 90 or "griddepcontrol" not in kernel.asm["ptx"]
        options = {"num_warps": kernel.metadata.num_warps, "num_stages": kernel.metadata.num_stages}
        built = triton.compile(kernel.src, target=GPUTarget("cuda", architecture, 32), options=options)
        assert built.metadata.shared <= SHARED_KB[architecture] * 1024, kernel.metadata.name
