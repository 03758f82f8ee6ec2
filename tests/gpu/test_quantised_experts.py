"""Experts whose weights are in few bits: the kernels against float32, and whole models as they are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from mllm_compile import SamplingParams
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.experts.linear import expert_linear_reference, order_of_step
from mllm_compile.runtime.ops.experts.shapes import ONE_ROW, rows_at_once, rows_of_block
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import MXFP4, WeightScheme
from tests.gpu.test_experts import GREEDY, scores_of, served_on
from tests.gpu.test_few_tokens import compiled
from tests.gpu.test_quantised import IN_FP8
from tests.gpu.test_served_models import random_ids, reference, reference_scores
from tests.quantised_experts import FORMATS, write_experts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MARGIN = 1.2
EXPERTS, CHOSEN, INPUTS, OUTPUTS = 12, 3, 320, 96
SCHEMES = {
    "fp8 rows": WeightScheme("fp8", INPUTS),
    "fp8 groups": WeightScheme("fp8", 128),
    "int4": WeightScheme("int4", 128, torch.bfloat16),
    "int4 with zero points": WeightScheme("int4", 64, torch.float16, has_zeros=True),
    "mxfp4": MXFP4,
}
SIZES = (1, 7, 64, 200, 999)  # every size of a block, and of the order's kernels
# Of whole models' 40 prompts, and of what is not cached of these; a start captures some 40 graphs by default.
FEW_GRAPHS: dict[str, Any] = {"decode_requests": [40], "piecewise_tokens": [512, 2048, 4096]}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", SCHEMES)
def test_rows_are_multiplied_by_their_experts_weights(name, gated, dtype):
    scheme = SCHEMES[name]
    tensors = quantised(random(EXPERTS, OUTPUTS, INPUTS) * INPUTS**-0.5, scheme)
    weight = dequantised(tensors, scheme.kind, scheme.group, INPUTS, torch.float32)
    bias = random(EXPERTS, OUTPUTS).to(dtype)
    for tokens in SIZES if dtype == torch.bfloat16 else SIZES[1:2]:
        x, ids = random(tokens, INPUTS).to(dtype), random(tokens, EXPERTS).topk(CHOSEN).indices
        order, blocks, block = order_of_step(ids, EXPERTS)
        how = (scheme.kind, scheme.group, CHOSEN, True, gated, block)
        ours = op("quantised_grouped_linear")(
            x, order, blocks, tensors["values"], tensors["scales"], tensors.get("zeros"), bias, *how
        )
        exact = expert_linear_reference(x.float(), ids, weight, bias.float(), False, True)
        rounded = expert_linear_reference(x, ids, weight.to(dtype), bias, False, True)
        if gated:
            exact, rounded = (silu(one.chunk(2, -1)[0]) * one.chunk(2, -1)[1] for one in (exact, rounded))
        error, limit = ((one.float() - exact).norm() for one in (ours, rounded))
        assert error <= MARGIN * limit + 1e-5 * exact.norm(), f"{tokens} tokens"


def source(most: int | None) -> str:
    block = rows_of_block(most, CHOSEN, EXPERTS)
    order = "order, blocks = ids, None"
    if block != ONE_ROW:
        rows = rows_at_once(most, CHOSEN)
        order = f"order, blocks = torch.ops.mllm.order_experts.default(ids, slots, {EXPERTS}, {block}, {rows})"
    call = "torch.ops.mllm.quantised_grouped_linear.default"
    return f"""
import torch

class Piece(torch.nn.Module):
    def forward(self, x, ids, slots, values, scales):
        {order}
        return ({call}(x, order, blocks, values, scales, None, None, "mxfp4", 32, {CHOSEN}, True, True, {block}),)
"""


@pytest.mark.parametrize("most", [1, 64])
def test_a_package_holds_the_kernel(tmp_path, most):
    tensors = quantised(random(EXPERTS, OUTPUTS, INPUTS) * INPUTS**-0.5, MXFP4)
    shapes = [("T", INPUTS), ("T", CHOSEN), ("T",), *(tuple(tensors[role].shape) for role in MXFP4.roles)]
    piece = compiled(tmp_path, source(most), shapes, ["bfloat16", "int64", "int64", "uint8", "uint8"])
    weight = dequantised(tensors, "mxfp4", 32, INPUTS, torch.float32)
    for tokens in {1: [1], 64: [2, 64]}[most]:
        x, ids = random(tokens, INPUTS).bfloat16(), random(tokens, EXPERTS).topk(CHOSEN).indices
        slots = torch.arange(1, tokens + 1, device="cuda")
        slots[1:2] = 0
        (ours,) = piece([x, ids, slots, tensors["values"], tensors["scales"]])
        gate, up = expert_linear_reference(x.float(), ids, weight, None, False, True).chunk(2, -1)
        exact = silu(gate) * up
        exact[CHOSEN : 2 * CHOSEN] = 0  # padding
        assert (ours - exact).norm() / exact.norm() < 0.01


def test_a_row_of_no_expert_is_nan_and_its_neighbours_are_not():
    tensors = quantised(random(EXPERTS, OUTPUTS, INPUTS), MXFP4)
    ids = random(9, EXPERTS).topk(CHOSEN).indices
    ids[4, 1] = EXPERTS
    args = (random(9, INPUTS).bfloat16(), ids, tensors["values"], tensors["scales"], None, None, "mxfp4", 32, True)
    out = op("quantised_expert_linear")(*args)
    assert out.isnan().all(1).nonzero().flatten().tolist() == [4 * CHOSEN + 1]
    assert out.isnan().any(1).sum() == 1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_as_near_to_float32_of_its_numbers_as_transformers_is(name, backend, tmp_path):
    packed, plain = write_experts(name, tmp_path, {"head_dim": 128, "hidden_size": 512})
    prompts = [random_ids(3 + 5 * number, 100, number) for number in range(40)]
    wanted, limit = _of_transformers(plain, prompts)
    texts = []
    for graphs in (FEW_GRAPHS, {"mode": "none"}):
        with served_on(packed, tmp_path / "cache", backend, "auto", without=IN_FP8, **graphs) as served:
            params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
            scored = served.generate(prompts, params)
            ours = torch.cat([scores_of(output, ids) for output, ids in zip(scored, prompts, strict=True)])
            error = (ours - wanted).abs().mean()
            print(f"{name} {backend} {graphs}: off by {error:.5f}, Transformers in bfloat16 by {limit:.5f}")
            assert error <= MARGIN * limit + 1e-4
            texts.append([output.token_ids for output in served.generate(prompts, GREEDY)])
    same = sum(one == other for one, other in zip(*texts, strict=True))
    assert same >= len(prompts) // 2, "batches are padded otherwise without graphs, so a few texts part"


def _of_transformers(folder: Path, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in float32, and how far those in bfloat16 are from them."""
    exact, rounded = (
        torch.cat([reference_scores(model, ids) for ids in prompts])
        for model in (reference(folder, dtype) for dtype in (torch.float32, torch.bfloat16))
    )
    return exact, (rounded - exact).abs().mean()
