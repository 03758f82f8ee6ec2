"""A tower's attention on a GPU is as near to float32 as torch in bfloat16 is, for heads of every width of towers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from mllm_compile.runtime.ops.segments.reference import segment_attention_with_output

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# One image, images of several sizes, windows, and segments of one row.
LENGTHS = ([1764], [256, 1024, 64], [64] * 40 + [16, 48], [1, 1, 7, 300, 1])


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    bounds = [0, *itertools.accumulate(lengths)]
    parts = []
    for start, end in itertools.pairwise(bounds):
        own = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        parts.append(functional.scaled_dot_product_attention(*own)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("lengths", LENGTHS, ids=["one", "several", "windows", "short"])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 88, 96, 128])
def test_it_is_as_near_to_float32_as_torch_in_bfloat16(head_dim: int, lengths: list[int]) -> None:
    torch.manual_seed(0)
    count = sum(lengths)
    q, k, v = (torch.randn(count, 4, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    out = torch.full_like(v, float("nan"))
    segment_attention_with_output(q, k, v, bounds, out, head_dim**-0.5, "tower", max(lengths))
    exact = reference(q.float(), k.float(), v.float(), lengths)
    ours = (out.float() - exact).abs().mean()
    theirs = (reference(q, k, v, lengths).float() - exact).abs().mean()
    assert ours <= 1.2 * theirs, (ours, theirs)


def test_parts_of_wider_rows_are_attended_over_without_a_copy() -> None:
    """q, k and v as columns of one product."""
    torch.manual_seed(0)
    packed = torch.randn(640, 3, 4, 72, dtype=torch.bfloat16, device="cuda")
    q, k, v = packed.unbind(1)
    bounds = torch.tensor([0, 400, 640], dtype=torch.int32, device="cuda")
    out = torch.empty(640, 4, 72, dtype=torch.bfloat16, device="cuda")
    segment_attention_with_output(q, k, v, bounds, out, 72**-0.5, "tower", 400)
    exact = reference(q.float(), k.float(), v.float(), [400, 240])
    assert (out.float() - exact).abs().mean() < 2e-3
