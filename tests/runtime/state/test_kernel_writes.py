"""Tensors that torch assumes the kernels of layers with a state to write: a package copies them first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime.state.state_cases import OF_GATES, WITH_KERNELS, kernel_modules, kernels_of, layer_of, operands_of

pytest.importorskip("triton")


@pytest.fixture
def written(monkeypatch) -> list[list[str]]:
    """Gets the arguments that each launch is taken to write, in place of the launch."""
    from torch._higher_order_ops import triton_kernel_wrap
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from mllm_compile.inductor.patches.hidden_waits import hide_waits_from_analysis

    class Hopper:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    found = []

    class Analysed:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return self.analyse

        def analyse(self, *args: Any, **options: Any) -> None:
            names = self.kernel.arg_names
            given = dict(zip(names, args, strict=False)) | {key: options[key] for key in options if key in names}
            if hasattr(triton_kernel_wrap, "identify_accessed_tensors"):
                writes = triton_kernel_wrap.identify_accessed_tensors(self.kernel, given, {}).read_writes.writes
                found.append(sorted(write.name for write in writes))
            else:  # up to torch 2.11
                found.append(sorted(triton_kernel_wrap.identify_mutated_tensors(self.kernel, given, {})))

    for module in kernel_modules():
        monkeypatch.setattr(module, "wrap_triton", Analysed)
    hide_waits_from_analysis()
    if not torch.cuda.is_available():
        monkeypatch.setattr(driver, "_active", Hopper())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WITH_KERNELS | OF_GATES)
def test_states_and_outputs_are_all_that_a_kernel_writes(name, dtype, written):
    layer = layer_of(name)
    operands = [value.to(dtype) for value in operands_of(name, 9).values()]
    given = [*operands, torch.zeros(4, *layer.state_shape), torch.tensor([1, 2])]
    given.append(torch.tensor([True, False]))
    bounds = [torch.tensor([3, 2]), *(torch.tensor(ends, dtype=torch.int32) for ends in ([0, 4], [4, 9]))]
    out = torch.zeros(9, *layer.out_shape)
    pieces = kernels_of(layer)
    pieces.decodes([*given, out])
    for prompts in (pieces.prompts, pieces.prompts_of(9)):
        prompts([*given, *bounds, out])
    solved = [names for names in written if "inverses_ptr" in names]
    is_solved_ahead = name.startswith("delta") and dtype == torch.bfloat16  # few tokens of a gate a head are not
    assert len(solved) == is_solved_ahead * (2 if "a channel" in name else 1)
    assert all({"out_ptr", "states_ptr"}.isdisjoint(names) for names in solved)
    normed = [["out_ptr"]] if "norm" in name else []
    expected = [["out_ptr", "states_ptr"], *normed] * 3
    assert [names for names in written if names not in solved] == expected
