"""Kernels of adapters whose clusters have whole rows, on the host: their sources thread by thread, against float32."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable

import pytest
import torch

from mllm_compile.runtime.cuda.kernel import kernel_source
from mllm_compile.runtime.ops.lora_clusters.family import Family
from mllm_compile.runtime.ops.lora_clusters.kernel import (
    SPLIT,
    ClusterKernel,
    NormKernel,
    ShrinkKernel,
    takes_norm,
    takes_shrink,
)
from mllm_compile.runtime.ops.lora_clusters.ops import NormOperands, ShrinkOperands
from tests.runtime.attention.test_clusters_source import on_the_host
from tests.runtime.compiled_source import check_compiles_without_spilling, needs_nvcc
from tests.sample import slow_but_a_sample

needs_host = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SLOTS, EPS = 5, 1e-6
_SEND = "memcpy(emulated::place_of(address_of_peer(shared_address(place), rank)), &v, sizeof(v));"
_EMULATED = {
    "copy": "memcpy(emulated::place_of(to), from, BYTES);",
    "wait_for_copies": "",
    "store_if": "if (is_there) *to = v;",
    "send_pair": _SEND,
    "send_one": _SEND,
    "meet_cluster": "emulated::arrive_at_cluster(); emulated::wait_for_cluster();",
}
_DEVICE_FUNCTIONS = """
struct uint2 {
  u32 x, y;
};
static int __ffs(u32 v) { return __builtin_ffs(v); }
static int __shfl_sync(u32, int v, int lane) { return emulated::exchange(v)[lane][0]; }
static u32 __ballot_sync(u32, bool v) {
  u32(&given)[32][6] = emulated::exchange(v), all = 0;
  for (int lane = 0; lane < 32; lane++) all |= given[lane][0] << lane;
  return all;
}
"""
_LAUNCH = """
static const Operands* launched;
static void body() { FUNCTION(*launched); }
extern "C" int launch(const Operands* operands, int num_blocks, u64 seed) {
  launched = operands;
  return emulated::run(body, num_blocks, SPLIT, THREADS, SHARED_BYTES, seed);
}
"""


def built(folder, kernel: ClusterKernel) -> ctypes.CDLL:
    launch = _LAUNCH.replace("FUNCTION", kernel.function)
    (folder / "kernel.cpp").write_text(on_the_host(_DEVICE_FUNCTIONS + kernel_source(kernel), launch, _EMULATED))
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "kernel.so"))


def run(library: ctypes.CDLL, kernel: ClusterKernel, operands: ctypes.Structure, seed: int) -> None:
    """As it is launched, by two clusters at most: these take tiles in turns."""
    num_blocks = min(kernel.num_blocks(operands.num_tokens), 2 * SPLIT)
    assert not library.launch(ctypes.byref(operands), num_blocks, ctypes.c_uint64(seed)), "threads wait for others"


def random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).bfloat16()


def of_own(x: torch.Tensor, factors: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[T, rows] float32: factors [L, rows, columns] of each token's slot times x; zeros without one."""
    return torch.einsum("trn,tn->tr", factors[slots.clamp(0).long()].float(), x.float()) * (slots >= 0)[:, None]


def off_by(made: torch.Tensor, exact: torch.Tensor) -> float:
    return ((made.float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(1e-3)).max().item()


SLOTS_OF_TOKENS = [  # one tile; tiles that clusters take in turns, the last one not whole; several in a tile; none
    [1] * 11,
    [0] * 20 + [3] * 9 + [-1] * 28,
    [-1, 2, 0, 4, 3, 2] * 14,
    [-1] * 17,
]


@needs_host
@pytest.mark.parametrize(
    ("columns", "rank", "rows", "plus_one", "slots"),
    slow_but_a_sample(
        [
            (512, 16, 48, False, SLOTS_OF_TOKENS[0]),
            (1024, 16, 32, True, SLOTS_OF_TOKENS[1]),
            (512, 32, 64, False, SLOTS_OF_TOKENS[2]),
            (512, 16, 16, True, SLOTS_OF_TOKENS[3]),
        ],
        1,
    ),
    ids=lambda value: str(value)[:20],
)
def test_a_norm_between_adapters_has_the_numbers_of_what_it_stands_for(tmp_path, columns, rank, rows, plus_one, slots):
    kernel, count = NormKernel(columns, rows, rank, plus_one), len(slots)
    library, generator = built(tmp_path, kernel), torch.Generator().manual_seed(count)
    y, residual, shrunk = (random(generator, count, size) for size in (columns, columns, rank))
    b, weight = random(generator, SLOTS, columns, rank) / 4, random(generator, columns)
    a, of_tokens = random(generator, SLOTS, rows, columns) / 20, torch.tensor(slots).int()

    def launched(tokens: slice, seed: int) -> list[torch.Tensor]:
        of_rows = [tensor[tokens].contiguous() for tensor in (y, residual, shrunk, of_tokens)]
        made = [torch.full((len(of_rows[0]), size), 7.0).bfloat16() for size in (columns, columns, rows)]
        given = *of_rows[:3], b, weight, a, of_rows[3], *made
        run(library, kernel, NormOperands(*(tensor.data_ptr() for tensor in given), len(of_rows[0]), EPS), seed)
        return made

    together = launched(slice(None), 0)
    out = residual.float() + y.float() + of_own(shrunk, b, of_tokens)
    normed = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + EPS) * (weight.float() + plus_one)
    exact = out, normed, of_own(normed, a, of_tokens)
    for made, its, most in zip(together, exact, (6e-3, 8e-3, 2e-2), strict=True):
        assert off_by(made, its) < most
    assert_alike_in_any_company(launched, together)


@needs_host
@pytest.mark.parametrize(
    ("columns", "rows", "slots"),
    slow_but_a_sample(
        [
            (1536, 16, SLOTS_OF_TOKENS[0]),
            (1024, 48, SLOTS_OF_TOKENS[1]),
            (512, 64, SLOTS_OF_TOKENS[2]),
            (2048, 8, SLOTS_OF_TOKENS[3]),
        ],
        1,
    ),
    ids=lambda value: str(value)[:20],
)
def test_products_with_a_are_those_of_each_tokens_own_adapter(tmp_path, columns, rows, slots):
    kernel, count = ShrinkKernel(columns, rows), len(slots)
    library, generator = built(tmp_path, kernel), torch.Generator().manual_seed(count)
    x, a = random(generator, count, columns), random(generator, SLOTS, rows, columns) / 20
    of_tokens = torch.tensor(slots).int()

    def launched(tokens: slice, seed: int) -> list[torch.Tensor]:
        its, its_slots = x[tokens].contiguous(), of_tokens[tokens].contiguous()
        made = torch.full((len(its), rows), 7.0).bfloat16()
        addresses = (tensor.data_ptr() for tensor in (its, a, its_slots, made))
        run(library, kernel, ShrinkOperands(*addresses, len(its), seed % 2), seed)
        return [made]

    together = launched(slice(None), 0)
    assert off_by(together[0], of_own(x, a, of_tokens)) < 1e-2
    assert_alike_in_any_company(launched, together)


def assert_alike_in_any_company(launched: Callable[[slice, int], list[torch.Tensor]], together: list[torch.Tensor]):
    """A token's bits are the same alone and in company, in any order of threads."""
    count = len(together[0])
    for seed, tokens in enumerate((slice(0, 1), slice(count - 1, count), slice(None)), 1):
        for alone, all_ in zip(launched(tokens, seed), together, strict=True):
            assert torch.equal(alone, all_[tokens])


@needs_nvcc
@pytest.mark.parametrize(
    "kernel",
    slow_but_a_sample(
        [
            *(NormKernel(4096, 48, 16), NormKernel(8192, 32, 16), NormKernel(1024, 64, 32, plus_one=True)),
            *(ShrinkKernel(4096, 16), ShrinkKernel(12288, 16), ShrinkKernel(14336, 32)),
        ],
        1,
    ),
    ids=lambda kernel: kernel.name,
)
def test_the_sources_compile_without_spilling(tmp_path, kernel):
    check_compiles_without_spilling(kernel_source(kernel), tmp_path)


def test_rows_are_taken_that_divide_among_a_clusters_warps():
    assert takes_norm(4096, 16, 48) and takes_norm(5120, 32, 48) and takes_norm(512, 16, 16)
    for sizes in (
        (4000, 16, 48),
        (16384, 16, 48),
        (4096, 8, 24),
        (4096, 16, 20),
        (4096, 32, 96),
        (256, 16, 16),
        (8192, 16, 64),
    ):
        assert not takes_norm(*sizes), sizes
    assert takes_shrink(12288, 16) and takes_shrink(14336, 32) and takes_shrink(768, 8)
    assert not any(takes_shrink(*sizes) for sizes in ((11008, 16), (4096, 12), (4096, 72), (0, 16), (14336, 64)))
    for kernel in (NormKernel(4096, 48, 16, plus_one=True), ShrinkKernel(4096, 48)):
        assert Family().from_json(kernel.to_json()) == kernel
        assert kernel.shared_bytes < 227 << 10
    kernel = NormKernel(4096, 48, 16)
    assert (kernel.num_blocks(1), kernel.num_blocks(256)) == (SPLIT, 16 * SPLIT)
    assert kernel.num_blocks(8192) == kernel.tokens_at_once // 16 * SPLIT == 32 * SPLIT
    sizes = [(columns, rows) for columns in range(256, 32769, 256) for rows in range(8, 65, 8)]
    taken: list[ClusterKernel] = [ShrinkKernel(*one) for one in sizes if takes_shrink(*one)]
    taken += [NormKernel(*one, rank) for rank in (16, 32) for one in sizes if takes_norm(one[0], rank, one[1])]
    assert len(taken) > 200
    assert all(one.shared_bytes <= 227 << 10 and one.num_threads <= 512 for one in taken)
