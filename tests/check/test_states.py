"""The self-check's comparison of kernels with the reference: of prompts, of one that goes on, and of decodes."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.check.states import StateCheck
from mllm_compile.errors import CompileError
from mllm_compile.runtime.state.base import StateInputs
from mllm_compile.runtime.state.layer import StateLayer
from mllm_compile.runtime.state.metadata import Segment, StateMetadata
from mllm_compile.runtime.state.piece_backend import StatePieces
from mllm_compile.runtime.state.reference import math_of
from tests.runtime.state.state_cases import KINDS, layer_of, operands_of, tokens_of

LENGTHS = (5, 3)


class Kernels:
    """Computes as kernels do, on the tensors that they are given; `fault` is what it does wrong."""

    def __init__(self, name: str, layer: StateLayer, fault: str = "") -> None:
        self.name, self.layer, self.fault = name, layer, fault
        self.calls: list[tuple[str, int]] = []

    def decodes(self, given: list[torch.Tensor]) -> None:
        *operands, states, rows, has_state, out = given
        self.calls.append(("decodes", len(rows)))
        starts = torch.arange(len(rows))
        self.run(operands, states, rows, has_state, starts, starts + 1, out, self.fault == "decodes")

    def prompts(self, given: list[torch.Tensor]) -> None:
        self.run_prompts("prompts", given)

    def few(self, given: list[torch.Tensor]) -> None:
        self.run_prompts("few", given)

    def run_prompts(self, what: str, given: list[torch.Tensor]) -> None:
        *operands, states, rows, has_state, _, starts, ends, out = given
        self.calls.append((what, len(rows)))
        if self.fault == "a prompt that goes on":
            has_state = torch.zeros_like(has_state)
        self.run(operands, states, rows, has_state, starts, ends, out, self.fault == what)

    def run(self, operands, states, rows, has_state, starts, ends, out, is_wrong: bool) -> None:
        by_name, kind = dict(zip(self.layer.operands, operands, strict=True)), self.layer.kind
        for row, kept, start, end in zip(rows, has_state, starts, ends, strict=True):
            before = states[row][None] if kept else torch.zeros_like(states[row][None])
            part = tokens_of(self.name, by_name, slice(int(start), int(end)))
            values, after = math_of(kind).scan(kind, part, before)
            out[start:end] = values * (1.1 if is_wrong else 1.0)
            states[row] = after[0]


def run(name: str, fault: str = "", times: int = 1, has_few: bool = False) -> Kernels:
    layer = layer_of(name)
    kernels = Kernels(name, layer, fault)
    pieces = StatePieces(kernels.decodes, kernels.prompts, kernels.few if has_few else None)
    check = StateCheck({layer.name: pieces}, "float32")
    for _ in range(times):
        segments = [Segment(0, 0, 5, False), Segment(1, 5, 8, False)]
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        batch = type("Batch", (), {"extend_seq_lens": lengths, "extend_prefix_lens": torch.zeros_like(lengths)})()
        metadata = StateMetadata(
            batch=batch, rows=torch.tensor([1, 2]), num_decodes=0, segments=segments, num_actual_tokens=8
        )
        out = torch.zeros(8, *layer.out_shape)
        inputs = StateInputs(operands_of(name, 8), out, layer, metadata)
        check.backend([layer], 2, "cpu").forward(inputs)
    return kernels


@pytest.mark.parametrize("name", KINDS)
def test_kernels_that_are_right_pass_and_each_is_compared_once(name):
    assert run(name, times=3).calls == [
        *(("prompts", 2), ("prompts", 2), ("prompts", 1), ("decodes", 8)),
        *(("prompts", 2), ("prompts", 2)),
    ]


@pytest.mark.parametrize("fault", ["prompts", "a prompt that goes on", "decodes"])
def test_a_kernel_that_is_wrong_is_named_with_what_it_does_not_compute(fault):
    with pytest.raises(CompileError, match=rf"the kernel of gated_delta .* does not compute {fault} right"):
        run("delta", fault)


def test_kernels_of_longer_steps_are_compared_where_all_batches_are_of_few_tokens():
    assert {what for what, _ in run("delta", has_few=True).calls} == {"few", "prompts", "decodes"}
    for fault, what in (("few", "prompts"), ("prompts", "a prompt that goes on, as one of a longer step")):
        with pytest.raises(CompileError, match=rf"does not compute {what} right"):
            run("delta", fault, has_few=True)


def test_a_layer_without_kernels_is_the_reference_s():
    layer, operands = layer_of("ssd"), operands_of("ssd", 8)
    backend = StateCheck({}, "float32").backend([layer], 1, "cpu")
    metadata = StateMetadata(
        batch=None,  # type: ignore[arg-type]
        rows=torch.tensor([1]),
        num_decodes=0,
        segments=[Segment(0, 0, 8, False)],
        num_actual_tokens=8,
    )
    out = torch.zeros(8, *layer.out_shape)
    backend.forward(StateInputs(operands, out, layer, metadata))
    expected, _ = math_of(layer.kind).scan(layer.kind, operands, torch.zeros(1, *layer.state_shape))
    torch.testing.assert_close(out, expected)
