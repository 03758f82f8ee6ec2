"""Planned tensors say of every value where it comes from: assembled, they are what torch makes of the real ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm_compile.checkpoint.planned_tensor import PlannedTensor
from mllm_compile.runtime.weights.views import viewed


def pair(name: str, *shape: int) -> tuple[torch.Tensor, PlannedTensor]:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator), PlannedTensor.of_file(name, "model.safetensors", shape)


def assemble(planned: PlannedTensor, sources: dict[str, torch.Tensor]) -> torch.Tensor:
    result = torch.full(tuple(planned.shape), float("nan"))
    for block in planned.blocks:
        place = result
        for dim, (start, size) in enumerate(zip(block.starts, block.shape, strict=True)):
            place = place.narrow(dim, start, size)
        place.copy_(viewed(sources[block.tensor], block.steps))
    return result


REARRANGEMENTS = {
    "stack and concatenate, as experts' gate and up": lambda a, b, c, d: torch.cat(
        [torch.stack([a, b], dim=0), torch.stack([c, d], dim=0)], dim=1
    ),
    "chunk": lambda a, b, c, d: torch.chunk(a, 2, dim=0)[1],
    "chunk that does not divide": lambda a, b, c, d: torch.chunk(a, 4, dim=1)[1],
    "split of a concatenation, across its seam": lambda a, b, c, d: torch.split(torch.cat([a, b]), [3, 4, 1])[1],
    "transpose of a stack": lambda a, b, c, d: torch.transpose(torch.stack([a, b]), 1, 2).contiguous(),
    "interleave": lambda a, b, c, d: a.reshape(2, 2, 6).transpose(0, 1).reshape(4, 6).contiguous(),
    "rotary permutation": lambda a, b, c, d: a.view(2, 1, 2, 6).transpose(1, 2).reshape(4, a.shape[-1]),
    "reshape to what it is": lambda a, b, c, d: torch.cat([a, b]).reshape(8, 6),
    "reshape with a size left open": lambda a, b, c, d: a.reshape(2, -1),
    "squeeze and unsqueeze": lambda a, b, c, d: a.unsqueeze(1).squeeze(1).unsqueeze(-1),
    "squeeze of a long dimension": lambda a, b, c, d: a.squeeze(0),
}


@pytest.mark.parametrize("name", REARRANGEMENTS)
def test_what_transformers_rearranges_is_planned(name):
    pairs = [pair(letter, 4, 6) for letter in "abcd"]
    real = REARRANGEMENTS[name](*(tensor for tensor, _ in pairs))
    planned = REARRANGEMENTS[name](*(plan for _, plan in pairs))
    sources = {letter: tensor for letter, (tensor, _) in zip("abcd", pairs, strict=True)}
    assert planned.shape == real.shape
    assert torch.equal(assemble(planned, sources), real)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["cat", "stack", "split", "transpose"]), st.integers(0, 5)), max_size=6))
def test_any_sequence_of_rearrangements_is_planned(operations):
    real, planned = pair("a", 4, 6)
    other_real, other_planned = pair("b", 4, 6)
    for name, number in operations:
        dim = number % real.dim()
        if name == "cat" and real.shape == other_real.shape:
            real, planned = torch.cat([real, other_real], dim), torch.cat([planned, other_planned], dim)
        elif name == "stack" and real.dim() < 4:
            real, planned = torch.stack([real, real], dim), torch.stack([planned, planned], dim)
        elif name == "split" and real.shape[dim] > 1:
            sizes = [1, real.shape[dim] - 1]
            real, planned = torch.split(real, sizes, dim)[number % 2], torch.split(planned, sizes, dim)[number % 2]
        elif name == "transpose":
            real, planned = torch.transpose(real, 0, dim), torch.transpose(planned, 0, dim)
    assert planned.shape == real.shape
    assert torch.equal(assemble(planned, {"a": pair("a", 4, 6)[0], "b": other_real}), real)


@pytest.mark.parametrize(
    "compute",
    [
        lambda a, b: torch.add(a, b),
        lambda a, b: a * 2,
        lambda a, b: torch.cat([a, b]).reshape(6, 8),
        lambda a, b: a[0],
    ],
    ids=["add", "scale", "reshape across parts", "index"],
)
def test_what_computes_cannot_be_planned(compute):
    with pytest.raises(TypeError):
        compute(pair("a", 4, 6)[1], pair("b", 4, 6)[1])


def test_parts_that_do_not_fit_together_are_an_error():
    with pytest.raises(ValueError, match=r"\[\[4, 6\], \[4, 5\]\] cannot be joined"):
        torch.cat([pair("a", 4, 6)[1], pair("b", 4, 5)[1]])
