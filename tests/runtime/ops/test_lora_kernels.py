"""The Triton kernels of adapters against the reference, through Triton's interpreter, on a CPU.

The interpreter knows no bfloat16. tests/gpu/test_adapters.py has compiled kernels.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import silu

from mllm_compile.runtime.ops.lora.reference import add_lora_reference

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INPUTS, HALF, SLOTS = 1100, 32, 3  # inputs that no block divides


@pytest.mark.skipif(IS_INTERPRETED, reason="this is that process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_compute_what_the_reference_does_through_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture
def kernels(monkeypatch):
    """The ops' functions, their kernels launched as they are: torch's wrapper takes compiled ones alone."""
    from mllm_compile.runtime.ops.lora import kernels

    monkeypatch.setattr(kernels, "wrap_triton", lambda kernel: kernel)
    monkeypatch.setattr(kernels, "starts_early", lambda: False)
    return kernels


@pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the process that has Triton's interpreter")
@pytest.mark.parametrize("is_few", [True, False])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("starts", "rows", "rank"),
    [([0, HALF], [HALF, HALF], 8), ([0], [HALF], 16), ([HALF], [HALF], 20), ([0, HALF], [HALF, HALF], 70)],
    ids=str,
)
def test_each_token_has_what_its_adapter_adds_and_the_activation_changes_no_bit(
    kernels, starts, rows, rank, dtype, tokens, is_few
):
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    y, x = random(tokens, 2 * HALF), random(tokens, INPUTS)
    a, b = random(SLOTS, rank * len(rows), INPUTS) / INPUTS**0.5, random(SLOTS, sum(rows), rank)
    slots = torch.randint(-1, SLOTS, (tokens,), generator=generator, dtype=torch.int32)
    shrunk = kernels.lora_shrink(x, a, slots, is_few)
    out = kernels.lora_expand(y, shrunk, b, slots, starts, rows)
    exact = add_lora_reference(y.float(), x.float(), a.float(), b.float(), slots, starts, rows)
    rounded = add_lora_reference(y, x, a, b, slots, starts, rows).float()
    assert (out.float() - exact).norm() <= 1.2 * (rounded - exact).norm() + 1e-5 * exact.norm()
    gate, up = out.chunk(2, -1)
    gated = kernels.lora_expand_gated(y, shrunk, b, slots, starts, rows)
    assert torch.allclose(gated, silu(gate.float()).to(dtype) * up, rtol=2e-3 if dtype == torch.float16 else 1e-5)
