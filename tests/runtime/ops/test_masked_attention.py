from __future__ import annotations

import pytest
import torch

from mllm_compile.runtime.ops import op

B, H, N, D, DV = 3, 2, 5, 4, 6


@pytest.mark.parametrize("is_masked", [True, False])
def test_each_row_attends_to_what_its_mask_shows(is_masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, H, N, D, generator=generator) for _ in range(2))
    v = torch.randn(B, H, N, DV, generator=generator)
    sees = torch.rand(B, 1, N, N, generator=generator) < 0.6
    sees |= torch.eye(N, dtype=torch.bool)
    scores = q @ k.mT * 0.3
    if is_masked:
        scores = scores.masked_fill(~sees, -torch.inf)
    want = (scores.softmax(-1) @ v).transpose(1, 2)
    given = q, k, v, sees if is_masked else None, 0.3
    torch.testing.assert_close(op("masked_attention")(*given), want)
    torch.library.opcheck(op("masked_attention"), given, test_utils=("test_schema", "test_faketensor"))
