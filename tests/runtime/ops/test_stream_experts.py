"""Experts' kernels for few tokens on Hopper, as far as they go without one: how they are laid out, and their source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.errors import ArtifactError
from mllm_compile.runtime.cuda.kernel import kernel_source
from mllm_compile.runtime.ops import family
from mllm_compile.runtime.ops.experts.shapes import NO_SOFTMAX, SOFTMAX_OF_ALL, SOFTMAX_OF_CHOSEN
from mllm_compile.runtime.ops.stream_experts import ops
from mllm_compile.runtime.ops.stream_experts.kernel import DownKernel, ExpertsKernel, GateUpKernel, Routing
from mllm_compile.runtime.ops.stream_experts.shapes import is_taken
from tests.passes.support import stand_ins
from tests.runtime.compiled_source import check_compiles_without_spilling, needs_nvcc
from tests.runtime.host_kernel import host_program, needs_compiler, run_program
from tests.sample import slow_but_a_sample_of_each

QWEN = Routing(128, 8, 2, SOFTMAX_OF_ALL, True, False)
GIVEN = Routing(512, 10, 0, NO_SOFTMAX, False, True)
KERNELS: list[ExpertsKernel] = [
    GateUpKernel(QWEN, 1536, 2048, 128),
    GateUpKernel(GIVEN, 1024, 4096, 0),
    GateUpKernel(Routing(60, 4, 4, SOFTMAX_OF_CHOSEN, False, True), 2816, 6144, 0),
    DownKernel(QWEN, 2048, 768, 128),
    DownKernel(GIVEN, 8192, 1024, 0),
    DownKernel(Routing(1024, 32, 2, SOFTMAX_OF_CHOSEN, False, False), 4096, 512, 256, plus_one=True),
]


@given(
    st.integers(1, 1024),
    st.integers(1, 32),
    st.integers(1, 32),
    st.integers(1, 128),
    st.integers(1, 512),
    st.booleans(),
)
def test_what_is_taken_fits_on_a_multiprocessor(experts, chosen, columns, hidden, outputs, is_given):
    sizes = (256 * columns, 8 * hidden, 16 * outputs)
    routing = Routing(experts, chosen, 0 if is_given else 2, SOFTMAX_OF_ALL, True, False)
    if not is_taken(experts, chosen, *sizes):
        return
    up, down = GateUpKernel(routing, 2 * sizes[1], sizes[0], 0), DownKernel(routing, sizes[2], sizes[1], 0)
    for kernel in (up, down):
        assert kernel.shared_bytes <= 227 << 10
        assert kernel.stages >= 4, "what is asked for is on its way while others are multiplied"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_is_the_same_from_json(kernel):
    data = json.loads(json.dumps(kernel.to_json()))
    assert family("stream_experts").from_json(data) == kernel
    with pytest.raises((KeyError, TypeError, ValueError)):
        family("stream_experts").from_json(data | {"warps": 4})


@needs_nvcc
@pytest.mark.parametrize("kernel", slow_but_a_sample_of_each(type, KERNELS, 1), ids=lambda kernel: kernel.name)
def test_the_source_compiles_without_spilling(tmp_path, kernel):
    check_compiles_without_spilling(kernel_source(kernel), tmp_path)


def test_a_launch_takes_the_kernel_of_its_shapes(driver, monkeypatch):
    driver()
    monkeypatch.setattr(ops, "_LOADED", {})
    binaries = {kernel.name: b"binary" for kernel in KERNELS}
    ops.load_expert_kernels(KERNELS, binaries, torch.device("cuda:0"))
    launches: list[tuple[object, ...]] = []
    for loaded in ops._LOADED.values():
        monkeypatch.setattr(loaded._loaded, "launch", lambda *how, of=loaded: launches.append((of.kernel, *how[:2])))
    monkeypatch.setattr(ops, "_LOADED", {(-1, kernel): loaded for (_, kernel), loaded in ops._LOADED.items()})
    x, h = torch.zeros(1, 3, 2048, dtype=torch.bfloat16), torch.zeros(3 * 8, 768, dtype=torch.bfloat16)
    up = torch.empty(128, 1536, 2048, dtype=torch.bfloat16)
    down = torch.empty(128, 2048, 768, dtype=torch.bfloat16)
    router = (torch.zeros(3, 128, dtype=torch.bfloat16), None, torch.ones(3, dtype=torch.int64), 8, 1, True, False)
    assert ops.stream_expert_up(x, up, torch.zeros(1, 3, 128), 1e-6, *router).shape == (24, 768)
    outs = ops.stream_expert_down_norm(h, down, x, x[0, 0], False, *router)
    assert [tuple(out.shape) for out in outs] == [(1, 3, 2048), (1, 3, 2048), (1, 3, 128)]
    assert launches == [(KERNELS[0], 132, 288), (KERNELS[3], 128, 288)]
    with pytest.raises(RuntimeError, match="expert_down_2048x768_next0_128x8_scores2_11 is loaded"):
        ops.stream_expert_down(h, down, x, *router)


def test_a_kernel_that_the_runtime_does_not_hold_is_named(driver):
    driver()
    with pytest.raises(ArtifactError, match="expert_gate_up_1536x2048_norm128_128x8_scores2_11; compile"):
        ops.load_expert_kernels(KERNELS, {}, torch.device("cuda:0"))


# Both kernels on a host: a few blocks, so that each takes several groups of several experts.
SMALL = Routing(6, 2, 2, SOFTMAX_OF_ALL, True, False)
SMALL_UP, SMALL_DOWN = GateUpKernel(SMALL, 128, 256, 16), DownKernel(SMALL, 256, 64, 16)
HOST_BLOCKS, EPS = 3, 1e-6
MAIN = """
int main(int count, char** paths) {
  char* given[7];
  const int tokens = std::atoi(paths[1]);
  for (int i = 0; i < GIVEN; i++) given[i] = bytes_of(paths[i + 2]);
  const Router router{given[0], nullptr, nullptr, (const long long*)given[1]};
  char* out = (char*)std::calloc(tokens, 1 << 16);
  CALL
}
"""
UP_CALL = """
  launch(BLOCKS, 32 * (WARPS + 1), SHARED_BYTES,
         [=] { expert_gate_up(given[2], given[3], (float*)given[4], router, (u32*)out, EPS, tokens); });
  write_bytes(paths[GIVEN + 2], out, tokens * CHOSEN * OUTPUTS * 2);
"""
DOWN_CALL = """
  u32* scaled = (u32*)std::calloc(tokens, N * 2);
  float* squares = (float*)std::calloc(tokens, NEXT_BLOCKS * 4);
  launch(BLOCKS, 32 * (WARPS + 1), SHARED_BYTES, [=] {
    expert_down(given[2], given[3], router, (u32*)given[4], (u32*)given[5], (u32*)out, scaled, squares, tokens);
  });
  write_bytes(paths[GIVEN + 2], out, tokens * N * 2), write_bytes(paths[GIVEN + 3], (char*)scaled, tokens * N * 2);
  write_bytes(paths[GIVEN + 4], (char*)squares, tokens * NEXT_BLOCKS * 4);
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """gate_up and down, compiled for the host."""
    made = []
    for kernel, call, count in ((SMALL_UP, UP_CALL, 5), (SMALL_DOWN, DOWN_CALL, 6)):
        main = MAIN.replace("CALL", call).replace("GIVEN", str(count)).replace("BLOCKS,", f"{HOST_BLOCKS},")
        main = main.replace("EPS", str(EPS))
        made.append(host_program(kernel, main, tmp_path_factory.mktemp(kernel.function)))
    return made


def run_on_host(
    program: Path, tokens: int, operands: list[torch.Tensor], outs: list[torch.Tensor], folder: Path
) -> None:
    """Runs a program on tensors in files; fills `outs`."""
    paths = [folder / f"{program.parent.name}_{index}" for index in range(len(operands) + len(outs))]
    for path, tensor in zip(paths, operands, strict=False):
        path.write_bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    run_program(program, tokens, *paths)
    for path, out in zip(paths[len(operands) :], outs, strict=True):
        out.copy_(torch.frombuffer(bytearray(path.read_bytes()), dtype=out.dtype).view(out.shape))


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_the_kernels_compute_what_their_ops_say(programs, tmp_path, tokens):
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    up, down, norm = random(6, 128, 256), random(6, 256, 64), 1 + random(256)
    h, residual = 4 * random(tokens, 256), random(tokens, 256)
    x, squares = h * norm, h.float().pow(2).unflatten(-1, (16, 16)).sum(-1)
    scores = torch.stack([torch.randperm(6, generator=generator) for _ in range(tokens)]).bfloat16() / 4
    slots = torch.arange(1, tokens + 1)
    if tokens == 8:
        slots[5] = 0  # padding
    router = (scores, None, slots, 2, SOFTMAX_OF_ALL, True, False)
    real = slots > 0
    rows = torch.empty(2 * tokens, 64, dtype=torch.bfloat16)
    run_on_host(programs[0], tokens, [scores, slots, up, x, squares], [rows], tmp_path)
    true = stand_ins.stream_expert_up(x, up, squares, EPS, *router)
    torch.testing.assert_close(rows.view(tokens, -1)[real], true.view(tokens, -1)[real], rtol=3e-2, atol=3e-2)
    out, scaled = (torch.empty(tokens, 256, dtype=torch.bfloat16) for _ in range(2))
    sums = torch.empty(tokens, 16)
    run_on_host(programs[1], tokens, [scores, slots, down, rows, residual, norm], [out, scaled, sums], tmp_path)
    outs = stand_ins.stream_expert_down_norm(rows, down, residual, norm, False, *router)
    for mine, one in zip((out, scaled, sums), outs, strict=True):
        torch.testing.assert_close(mine[real], one[real], rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(out[~real], residual[~real])
