"""Linears of experts in MXFP4 with few rows on Hopper, as far as they go without one: what fits, what is stored, the
source."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.errors import ArtifactError
from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, kernel_source
from mllm_compile.runtime.ops import family
from mllm_compile.runtime.ops.experts.shapes import ELSEWHERE, ONE_ROW, most_blocks, rows_of_block
from mllm_compile.runtime.ops.stream_expert_rows import ops
from mllm_compile.runtime.ops.stream_expert_rows.kernel import ExpertRowsKernel, is_taken
from mllm_compile.runtime.quantised.numbers import quantised
from mllm_compile.runtime.quantised.scheme import MXFP4, SCALES, VALUES
from tests.passes.support.stand_ins import order_experts, stream_expert_rows
from tests.runtime.compiled_source import check_compiles_without_spilling, needs_nvcc
from tests.runtime.host_kernel import host_program, needs_compiler, run_program
from tests.sample import slow_but_a_sample

GATE_UP = ExpertRowsKernel(32, 4, 5760, 2880, 16, True, True, True, False)
DOWN = ExpertRowsKernel(32, 4, 2880, 2880, 16, False, False, True, True)
KERNELS = [
    GATE_UP,
    DOWN,
    ExpertRowsKernel(32, 4, 5760, 2880, ONE_ROW, True, True, True, False),
    ExpertRowsKernel(128, 4, 2880, 2880, ONE_ROW, False, False, True, True),
    ExpertRowsKernel(128, 8, 2048, 3072, 16, True, False, False, False),
]


@given(
    st.integers(1, 355), st.integers(1, 32), st.integers(1, 400), st.integers(1, 96), st.sampled_from((1, 64, 256, 512))
)
def test_what_is_taken_fits_a_multiprocessor(experts, chosen, groups, scales, tokens):
    block = rows_of_block(tokens, chosen, experts)
    sizes = (experts, chosen, 16 * groups, 32 * scales, block)
    assert is_taken(*sizes) is (block in (ONE_ROW, 16))
    if is_taken(*sizes):
        kernel = ExpertRowsKernel(*sizes, True, True, True, False)
        blocks = 2 if block == ONE_ROW else 1
        assert blocks * (kernel.shared_bytes + 1024) <= 228 << 10
        assert kernel.stages >= 3, "what is asked for is on its way while others are multiplied"
        assert kernel.num_blocks == blocks * MULTIPROCESSORS
        num_blocks = most_blocks(tokens * chosen, experts, block)
        assert num_blocks <= kernel.constants()["MOST_BLOCKS"]


@pytest.mark.parametrize(
    "sizes",
    [
        (500, 4, 2048, 768, 16),
        (32, 4, 2040, 768, 16),
        (32, 4, 2048, 784, 16),
        (32, 4, 2048, 3104, 16),
        (32, 4, 2048, 768, 32),
    ],
)
def test_what_no_kernel_takes_is_left_alone(sizes):
    assert not is_taken(*sizes)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_is_the_same_from_json(kernel):
    data = json.loads(json.dumps(kernel.to_json()))
    assert family("stream_expert_rows").from_json(data) == kernel
    with pytest.raises((KeyError, TypeError, ValueError)):
        family("stream_expert_rows").from_json(data | {"warps": 4})


@needs_nvcc
@pytest.mark.parametrize("kernel", slow_but_a_sample(KERNELS, 1), ids=lambda kernel: kernel.name)
def test_the_source_compiles_without_spilling(tmp_path, kernel):
    check_compiles_without_spilling(kernel_source(kernel), tmp_path)


def test_a_launch_takes_the_kernel_of_its_shapes(driver, monkeypatch):
    driver()
    monkeypatch.setattr(ops, "_LOADED", {})
    ops.load_expert_rows(KERNELS, {kernel.name: b"binary" for kernel in KERNELS}, torch.device("cuda:0"))
    launches: list[tuple[object, ...]] = []
    for loaded in ops._LOADED.values():
        monkeypatch.setattr(loaded._loaded, "launch", lambda *how, of=loaded: launches.append((of.kernel, *how[:2])))
    monkeypatch.setattr(ops, "_LOADED", {(-1, kernel): loaded for (_, kernel), loaded in ops._LOADED.items()})
    x = torch.zeros(6, 2880, dtype=torch.bfloat16)
    order, blocks = torch.zeros(24 * 16, dtype=torch.int32), torch.zeros(24, 2, dtype=torch.int32)

    def weight(rows: int) -> tuple[torch.Tensor, ...]:
        sizes = {1440: torch.uint8, 90: torch.uint8}
        values, scales = (torch.empty(32, rows, size, dtype=dtype) for size, dtype in sizes.items())
        return values, scales, torch.empty(32, rows, dtype=torch.bfloat16)

    a = ops.stream_expert_rows(x, order, blocks, *weight(5760), 4, True, True, 1.702, 7.0, False, 16)
    assert a.shape == (24, 2880)
    assert ops.stream_expert_rows(a, order, blocks, *weight(2880), 4, False, False, 0.0, 0.0, True, 16).shape == a.shape
    assert launches == [(GATE_UP, 132, 448), (DOWN, 132, 448)]
    with pytest.raises(RuntimeError, match="no kernel expert_rows_32x4_2880x2880_of_16_bias is loaded on cpu"):
        ops.stream_expert_rows(a, order, blocks, *weight(2880), 4, False, False, 0.0, 0.0, False, 16)


def test_a_kernel_that_the_runtime_does_not_hold_is_named(driver):
    driver()
    with pytest.raises(ArtifactError, match="expert_rows_32x4_5760x2880_of_16_of_tokens_swiglu_bias; compile"):
        ops.load_expert_rows([GATE_UP], {}, torch.device("cuda:0"))


ALPHA, LIMIT = 1.702, 0.75  # a limit that some of a test's numbers reach
MAIN = """
int main(int count, char** paths) {
  char* given[7];
  for (int i = 0; i < 7; i++) given[i] = bytes_of(paths[i + 1]);
  const int rows = std::atoi(paths[8]), blocks = std::atoi(paths[9]);
  launch(std::atoi(paths[10]), 32 * (ASKER + 1), SHARED_BYTES, [=] {
    expert_rows(given[0], given[1], given[2], given[3], (int*)given[4], (int*)given[5], (u32*)given[6], ALPHA, LIMIT,
                blocks);
  });
  write_bytes(paths[7], given[6], rows * OUTPUTS * 2);
}
"""
# Scales of a row that four divides and does not, more than a warp's step; rows in both orders of banks.
HOSTED = {
    "of tokens, swiglu, bias": ExpertRowsKernel(6, 2, 64, 192, 16, True, True, True, False),
    "of rows, early": ExpertRowsKernel(6, 2, 48, 1120, 16, False, False, False, True),
    "one token": ExpertRowsKernel(6, 2, 64, 192, ONE_ROW, True, True, True, False),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    main = MAIN.replace("ALPHA", str(ALPHA)).replace("LIMIT", str(LIMIT))
    return {name: host_program(one, main, tmp_path_factory.mktemp("expert_rows")) for name, one in HOSTED.items()}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@needs_compiler
@pytest.mark.parametrize(
    ("name", "num_tokens", "skewed", "num_blocks"),
    [
        ("of tokens, swiglu, bias", 3, 0.0, 3),
        ("of tokens, swiglu, bias", 40, 0.9, 7),
        ("of rows, early", 9, 0.0, 5),
        ("of rows, early", 40, 1.0, 4),
        ("one token", 1, 0.0, 3),
        ("one token", 1, 1.0, 9),
    ],
)
def test_the_kernel_computes_each_row_by_its_expert(programs, tmp_path, name, num_tokens, skewed, num_blocks):
    kernel, generator = HOSTED[name], torch.Generator().manual_seed(num_tokens)
    tensors = quantised(
        torch.randn(kernel.experts, kernel.rows, kernel.columns, generator=generator) * kernel.columns**-0.5, MXFP4
    )
    bias = torch.randn(kernel.experts, kernel.rows, generator=generator).bfloat16() if kernel.bias else None
    x_rows = num_tokens if kernel.of_tokens else 2 * num_tokens
    x = torch.randn(x_rows, kernel.columns, generator=generator).bfloat16()
    ids = torch.rand(num_tokens, kernel.experts, generator=generator).topk(2).indices
    ids[: round(skewed * num_tokens)] = torch.tensor([4, 1])
    slots, has_broken = torch.arange(1, num_tokens + 1), num_tokens > 8 or skewed == 1.0
    if num_tokens > 8:
        ids[2, 1], ids[3, 0], ids[4, 0], slots[-3:] = kernel.experts, -1, ELSEWHERE, 0
    elif has_broken:
        ids[0, 1] = 1 << 40
    if kernel.block == ONE_ROW:
        order, blocks, count = ids, None, 2
    else:
        order, blocks = (one.int() for one in order_experts(ids, slots, kernel.experts, kernel.block, 0))
        count = len(blocks)
    outputs = kernel.rows // 2 if kernel.swiglu else kernel.rows
    out = torch.full((2 * num_tokens, outputs), 7.0).bfloat16()
    given = (tensors[VALUES], tensors[SCALES], bias, x, order, blocks, out)
    paths = [tmp_path / str(index) for index in range(len(given))]
    for path, tensor in zip(paths, given, strict=True):
        path.write_bytes(b"" if tensor is None else bytes_of(tensor))
    run_program(programs[name], *paths, 2 * num_tokens, count, num_blocks)
    ours = torch.frombuffer(bytearray(paths[-1].read_bytes()), dtype=torch.bfloat16).view(-1, outputs)
    how = (2, kernel.of_tokens, kernel.swiglu, ALPHA, LIMIT, kernel.early, kernel.block)
    true = stream_expert_rows(x, order, blocks, *given[:3], *how)
    torch.testing.assert_close(ours, true, rtol=2e-2, atol=2e-2, equal_nan=True)
    if num_tokens > 8:
        assert not ours[-6:].any() and not ours[8].any()
        assert ours[[5, 6]].isnan().all()
    elif has_broken:
        assert ours[1].isnan().all() and not ours[0].isnan().any()
