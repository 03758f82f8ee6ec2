"""Mixtures of experts: the kernels in packages as pieces are compiled, against float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from mllm_compile import Engine, EngineConfig, RequestOutput, SamplingParams
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.experts.linear import expert_linear_reference
from mllm_compile.runtime.ops.experts.shapes import (
    ELSEWHERE,
    NO_SOFTMAX,
    ONE_ROW,
    SOFTMAX_OF_ALL,
    SOFTMAX_OF_CHOSEN,
    VARIANT_TOKENS,
    rows_at_once,
    rows_of_block,
)
from tests.gpu.small_shape import ONE_RUNTIME
from tests.gpu.test_few_tokens import compiled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MARGIN = 1.2
EXPERTS, CHOSEN, INPUTS, OUTPUTS = 12, 3, 256, 96


def source(most: int | None, gated: bool, transposed: bool, bias: bool) -> str:
    block = rows_of_block(most, CHOSEN, EXPERTS)
    if block == ONE_ROW:
        order = "order, blocks = ids, None"
    else:
        most_rows = rows_at_once(most, CHOSEN)
        order = f"order, blocks = torch.ops.mllm.order_experts.default(ids, slots, {EXPERTS}, {block}, {most_rows})"
    call = "torch.ops.mllm.grouped_linear.default"
    biases = ("up_bias", "down_bias") if bias else (None, None)
    return f"""
import torch

class Piece(torch.nn.Module):
    def forward(self, x, ids, slots, up, down, up_bias, down_bias):
        {order}
        h = {call}(x, order, blocks, up, {biases[0]}, {CHOSEN}, {transposed}, True, {gated}, {block})
        return (h, {call}(h, order, blocks, down, {biases[1]}, {CHOSEN}, {transposed}, False, False, {block}))
"""


def weights(gated: bool, transposed: bool) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    width = 2 * OUTPUTS if gated else OUTPUTS
    shapes = [(EXPERTS, width, INPUTS), (EXPERTS, INPUTS, OUTPUTS), (EXPERTS, width), (EXPERTS, INPUTS)]
    made = [torch.randn(shape, generator=generator, device="cuda") * shape[-1] ** -0.5 for shape in shapes]
    made = [weight.to(torch.bfloat16) for weight in made]
    return [weight.transpose(1, 2).contiguous() if transposed and weight.dim() == 3 else weight for weight in made]


def inputs(tokens: int, padding: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, INPUTS, generator=generator, device="cuda").to(torch.bfloat16)
    ids = torch.rand(tokens, EXPERTS, generator=generator, device="cuda").topk(CHOSEN).indices
    slots = torch.arange(1, tokens + 1, device="cuda")
    slots[tokens - padding :] = 0
    return x, ids, slots


def theirs(x, ids, up, down, up_bias, down_bias, gated, transposed, dtype):
    x, up, down = x.to(dtype), up.to(dtype), down.to(dtype)
    up_bias, down_bias = (None if one is None else one.to(dtype) for one in (up_bias, down_bias))
    h = expert_linear_reference(x, ids, up, up_bias, transposed, True)
    if gated:
        gate, right = h.chunk(2, -1)
        h = functional.silu(gate) * right
    return h, expert_linear_reference(h, ids, down, down_bias, transposed, False)


@pytest.mark.parametrize(
    ("gated", "transposed", "bias"), [(True, False, False), (False, True, True)], ids=["gated", "transposed"]
)
@pytest.mark.parametrize("most", [*VARIANT_TOKENS, None])
def test_rows_are_multiplied_by_their_experts_weights(tmp_path, most, gated, transposed, bias):
    shapes = [("T", INPUTS), ("T", CHOSEN), ("T",), *(tuple(one.shape) for one in weights(gated, transposed))]
    dtypes = ["bfloat16", "int64", "int64", *["bfloat16"] * 4]
    piece = compiled(tmp_path, source(most, gated, transposed, bias), shapes, dtypes)
    up, down, up_bias, down_bias = weights(gated, transposed)
    biases = (up_bias, down_bias) if bias else (None, None)
    counts = {1: [1], 64: [2, 7, 64], 256: [65, 256], None: [300, 1999]}[most]
    for tokens in counts:
        padding = 0 if tokens == 1 else tokens // 3
        x, ids, slots = inputs(tokens, padding)
        ours = piece([x, ids, slots, up, down, up_bias, down_bias])
        exact = theirs(x, ids, up, down, *biases, gated, transposed, torch.float32)
        rounded = theirs(x, ids, up, down, *biases, gated, transposed, torch.bfloat16)
        real = (tokens - padding) * CHOSEN
        for mine, true, other in zip(ours, exact, rounded, strict=True):
            error, limit = ((one[:real].float() - true[:real]).norm() for one in (mine, other))
            assert error <= MARGIN * limit, f"{tokens} tokens"
        assert not ours[0][real:].any(), "rows of padding are zeros"
        if tokens > 1:
            broken = ids.clone()
            broken[1, 0], broken[1, 1] = EXPERTS, -1
            h = piece([x, broken, slots, up, down, up_bias, down_bias])[0]
            assert h[CHOSEN : CHOSEN + 2].isnan().all()
            assert torch.equal(h[CHOSEN + 2 :], ours[0][CHOSEN + 2 :]), "neighbours are as they were"


@pytest.mark.parametrize("most_rows", [60, 2048, 0])
@pytest.mark.parametrize("block", [16, 128])
def test_each_row_is_in_its_experts_blocks_once(most_rows, block):
    from mllm_compile.runtime.ops import op

    _, ids, slots = inputs(20, 3)
    ids[1, 0], ids[2, 1] = -1, EXPERTS
    ids = ids.t().contiguous().t()
    order, blocks = op("order_experts")(ids, slots, EXPERTS, block, most_rows)
    found: dict[int, list[int]] = {}
    for (expert, count), rows in zip(blocks.tolist(), order.view(-1, block).tolist(), strict=True):
        assert count <= block
        found.setdefault(expert, []).extend(rows[:count])
    wanted: dict[int, list[int]] = {}
    for row, expert in enumerate(ids[:17].flatten().tolist()):
        is_expert = 0 <= expert < EXPERTS
        wanted.setdefault(expert if is_expert else -1, []).append(row if is_expert else -1 - row)
    wanted.setdefault(-1, []).extend(range(17 * CHOSEN, 20 * CHOSEN))
    assert {expert: sorted(rows) for expert, rows in found.items() if rows} == {
        expert: sorted(rows) for expert, rows in wanted.items()
    }


@pytest.mark.parametrize("tokens", [2, 20, 2000])
def test_rows_of_experts_that_are_elsewhere_are_zeros(tokens):
    up, _, bias, _ = weights(False, False)
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(tokens, INPUTS, generator=generator, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, EXPERTS, generator=generator, device="cuda").argsort(-1)[:, :CHOSEN]
    ids[ids >= EXPERTS // 2] = ELSEWHERE
    found = op("expert_linear")(x, ids, up, bias, False, True)
    exact = expert_linear_reference(x.float(), ids, up.float(), bias.float(), False, True)
    assert (found[ids.flatten() == ELSEWHERE] == 0).all()
    torch.testing.assert_close(found.float(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_experts", [4, 60, 128, 512])
@pytest.mark.parametrize(
    ("softmax", "renormalise"),
    [(NO_SOFTMAX, False), (SOFTMAX_OF_ALL, False), (SOFTMAX_OF_ALL, True), (SOFTMAX_OF_CHOSEN, False)],
)
def test_the_largest_scores_are_chosen(num_experts, softmax, renormalise):
    from mllm_compile.runtime.ops import op

    for tokens in (1, 5, 700):
        scores = torch.randn(tokens, num_experts, device="cuda")
        scores[-1, 2] = torch.nan
        weights, ids = op("choose_experts")(scores, 3, softmax, renormalise)
        expected = scores.softmax(-1) if softmax == SOFTMAX_OF_ALL else scores
        expected, chosen = expected.topk(3, -1)
        expected = expected / expected.sum(-1, keepdim=True) if renormalise else expected
        expected = expected.softmax(-1) if softmax == SOFTMAX_OF_CHOSEN else expected
        assert torch.equal(ids[:-1], chosen[:-1])
        torch.testing.assert_close(weights[:-1], expected[:-1])
        assert weights[-1].isnan().all() and ((ids[-1] >= 0) & (ids[-1] < num_experts)).all()


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def served_on(
    folder: Path, cache: Path, backend: str, attention: str, without: Sequence[str] = (), **graphs: str
) -> Engine:
    sections = {
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "compile": {"backend": backend, "disable_passes": list(without)},
        "cache": {"dir": str(cache)},
        "cudagraph": graphs,
        "runtime": {
            "device": "cuda",
            "max_model_len": 256,
            "mem_fraction_static": 0.3,
            "attention_backend": attention,
            **ONE_RUNTIME,
        },
    }
    return Engine(EngineConfig.from_dict(sections))


def scores_of(output: RequestOutput, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the prompt's own tokens after the first."""
    scores = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    return torch.tensor([of_token[token].logprob for of_token, token in scores])
