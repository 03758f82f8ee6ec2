"""The order of sums in the compiled kernels of adapters: products start from zero, whatever is added behind them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.runtime.interpreted import IS_INTERPRETED

SLOTS, TOKENS, WIDTH = 3, 300, 256
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Gets Triton's intermediate code of each launch, compiled for Hopper, in place of the launch."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mllm_compile.runtime.ops.lora import expand, stretches

    found = []

    class Compiled:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: object) -> Any:
            return self.compile

        def compile(self, *args: Any, **named: Any) -> None:
            names = self.kernel.arg_names
            constants = {name: named[name] for name in names if name in named}
            given = zip(names, args, strict=False)
            types = {name: POINTERS[one.dtype] if isinstance(one, torch.Tensor) else "i32" for name, one in given}
            source = ASTSource(self.kernel, types | dict.fromkeys(constants, "constexpr"), constants)
            options = {"num_warps": named["num_warps"]}
            found.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttir"])

    for module in (expand, stretches):
        monkeypatch.setattr(module, "wrap_triton", Compiled)
        monkeypatch.setattr(module, "starts_early", lambda: False)
    return found


def first_terms(code: str) -> list[str]:
    """The operations whose values chains of products start from."""
    made = dict(re.findall(r"(%\w+) = (\S+)", code))
    starts = re.findall(r"tt\.dot %\w+, %\w+, (%\w+)", code)
    return [made[one] for one in starts if made[one] != "tt.dot"]


@pytest.mark.skipif(IS_INTERPRETED, reason="kernels are compiled")
@pytest.mark.parametrize("rank", [16, 64, 128])
@pytest.mark.parametrize("is_few", [True, False])
def test_a_product_starts_from_zero_with_the_activation_and_without(compiled, is_few, rank):
    from mllm_compile.runtime.ops.lora import expand

    kind = torch.float32 if is_few else torch.bfloat16
    y, b = torch.empty(TOKENS, 2 * WIDTH, dtype=torch.bfloat16), torch.empty(SLOTS, 2 * WIDTH, rank).bfloat16()
    shrunk, slots = torch.empty(1, TOKENS, 2 * rank, dtype=kind), torch.zeros(TOKENS, dtype=torch.int32)
    for form in (expand.lora_expand, expand.lora_expand_gated):
        form(y, shrunk, b, slots, [0, WIDTH], [WIDTH, WIDTH], is_few, True)
    apart, gated = (first_terms(code) for code in compiled)
    assert apart == ["arith.constant"]
    assert gated == ["arith.constant"] * 2
