"""The gated linear with adapters within, on the host: its source thread by thread, over the maps that TMA is told."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence

import pytest
import torch
from torch.nn.functional import linear, silu

from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.kernel import kernel_source
from mllm_compile.runtime.ops.gated_linear.kernel import RANKS, GatedKernel, divided, gated_kernels, takes_adapters
from tests.runtime.attention.test_clusters_source import on_the_host
from tests.runtime.compiled_source import check_compiles_without_spilling, needs_nvcc
from tests.sample import slow_but_a_sample

SLOTS = 41  # that are found 32 at a time
_EMULATED = {
    "load_weight": """
  for (int copy = 0; copy < COPIES; copy++)
    copy_boxes(to + copy * COPY_ROWS * ROW_BYTES, map, {step * COLUMNS, 0, (tile * COPIES + copy) * COPY_OUTPUTS / 8},
               barrier, false);""",
    "load_x": "copy_boxes(to, map, {step * COLUMNS, row}, barrier, SHARE > 1);",
    "load_b": "copy_boxes(to, map, {column, 0, first_eight, half}, barrier, false);",
    "slot_again": "return *from;",
    "multiply_add_all": """
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  for (int i = 0; i < ROWS / 2; i++)
    for (int k = 0; k < 16; k++)
      d[i] += value_at(a, warp * 16 + lane / 4 + i / 2 % 2 * 8, k) * value_at(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k);
  __syncwarp();""",
    "multiply_registers": """
  auto& given = emulated::exchange(a[0], a[1], a[2], a[3]);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < ROWS / 2; i++)
    for (int k = 0; k < 16; k++)
      d[i] += emulated::of_half(given[lane / 4 * 4 + k % 8 / 2][i / 2 % 2 + k / 8 * 2], k % 2) *
              value_at(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k);
  __syncwarp();""",
    "arrive_in_cluster": "barrier_of(barrier).arrive(0);",
    "fetch_map": "",
    "times": "return pack(first_of(a) * first_of(b), second_of(a) * second_of(b));",
    "power_of": "return expf(-v);",
    "reciprocal": "return 1.f / v;",
}
_DEVICE_FUNCTIONS = """
struct AxisOfMap {
  long long size, stride, box;
};
struct Boxes {  // a TensorMap
  const char* from;
  AxisOfMap axes[5];
};
static int __ffs(u32 v) { return __builtin_ffs(v); }
static u32 __reduce_or_sync(u32, u32 v) {
  u32 all = 0;
  for (int bit = 0; bit < 32; bit++) all |= (u32)__reduce_max_sync(~0u, v >> bit & 1) << bit;
  return all;
}
static emulated::Barrier& barrier_of(u32 barrier) {
  const int first = emulated::now->block / emulated::cluster_blocks * emulated::cluster_blocks;
  return emulated::blocks[first + (barrier >> 24) - 1].barriers.at(barrier & 0xffffff);
}
static u32 swizzled_place(u32 address, int row_bytes) {
  return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4;
}
static float value_at(u64 matrix, int row, int k) {
  const int row_bytes = matrix >> 62 == 3 ? 32 : 128;
  const u32 place = swizzled_place(((u32)(matrix & 0x3fff) << 4) + row * row_bytes + k * 2, row_bytes);
  return __uint_as_float((u32) * (unsigned short*)emulated::place_of(place) << 16);
}
// What TMA does: boxes of bfloat16 at a place of each axis, zeros outside; to all blocks of a cluster, or to one.
static void copy_boxes(u32 to, const void* map, std::array<int, 5> at, u32 barrier, bool is_to_all) {
  const Boxes boxes = *(const Boxes*)map;
  const int share = emulated::cluster_blocks;
  const int first_peer = is_to_all ? 0 : blockIdx.x % share, peers = is_to_all ? share : 1;
  int count = 1;
  for (const AxisOfMap& axis : boxes.axes) count *= axis.box;
  for (int i = 0; i < count; i++) {
    const char* from = boxes.from;
    bool is_there = true;
    int rest = i;
    for (int axis = 0; axis < 5; axis++) {
      const AxisOfMap& its = boxes.axes[axis];
      const int step = at[axis] + rest % its.box;
      rest /= its.box, is_there &= 0 <= step && step < its.size, from += step * its.stride;
    }
    const u32 place = swizzled_place(to + i * 2, boxes.axes[0].box * 2);
    for (int peer = first_peer; peer < first_peer + peers; peer++)
      *(unsigned short*)emulated::place_of(place | (peer + 1) << 24) = is_there ? *(const unsigned short*)from : 0;
  }
  for (int peer = first_peer; peer < first_peer + peers; peer++) {
    auto& its = barrier_of(barrier | (peer + 1) << 24);
    its.bytes -= count * 2, its.look();
  }
}
"""
_STATEMENTS = {
    r'"barrier.cluster.arrive[^"]*" ::: "memory"': "emulated::arrive_at_cluster();",
    r'"barrier.cluster.wait[^"]*" ::: "memory"': "emulated::wait_for_cluster();",
    r'"wgmma.(?:fence|commit|wait)[^"]*" ::: "memory"': "",
    r'"setmaxnreg[^"]*"': "",
}
_LAUNCH = """
struct Launch {
  TensorMap weight, x, gates, ups;
  Adapters adapters;
  uint4* out;
  Tokens tokens;
};
static const Launch* launched;
static void body() {
  const Launch& l = *launched;
  gated_linear(l.weight, l.x, l.gates, l.ups, l.adapters, l.out, l.tokens);
}
extern "C" int launch(const Launch* all, int num_blocks, int num_threads, u64 seed) {
  launched = all;
  return emulated::run(body, num_blocks, SHARE, num_threads, SHARED_BYTES, seed);
}
"""


class Map(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("axes", ctypes.c_int64 * 15))
    _align_ = 64


class Launch(ctypes.Structure):
    _fields_ = (
        *((name, Map) for name in ("weight", "x", "gates", "ups")),
        *((name, ctypes.c_void_p) for name in ("shrunk", "slots", "out")),
        ("tokens", ctypes.c_int * 5),
    )


def map_of(tensor: torch.Tensor, axes: tensor_maps.Axes) -> Map:
    numbers = [number for axis in axes for number in axis] + [1, 0, 1] * (5 - len(axes))
    numbers[1] = tensor.element_size()
    return Map(tensor.data_ptr(), (ctypes.c_int64 * 15)(*numbers))


def built(folder, kernel: GatedKernel) -> ctypes.CDLL:
    source = kernel_source(kernel)
    for statement, emulated in _STATEMENTS.items():
        source = re.sub(rf"asm volatile\({statement}\);", emulated, source)
    (folder / "kernel.cpp").write_text(
        "#include <array>\n" + on_the_host(_DEVICE_FUNCTIONS + source, _LAUNCH, _EMULATED)
    )
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "kernel.so"))


def exact_of(x: torch.Tensor, weight: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, slots: Sequence[int]):
    """[T, N / 2] float32."""
    product, rank = linear(x.float(), weight.float()), b.shape[2]
    for token, slot in enumerate(slots):
        for part, half in enumerate(b[slot].float().chunk(2) if slot >= 0 else ()):
            u = shrunk[token, part * rank : (part + 1) * rank].float()
            product[token].chunk(2)[part].add_(half @ u)
    gate, up = product.chunk(2, -1)
    return silu(gate) * up


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("rows", "columns", "tile_rows", "rank", "slots"),
    slow_but_a_sample(
        [  # a tile's stages are fewer than the ring's with 128 columns, and more with others
            (192, 448, 64, 16, [1] * 70),
            (256, 128, 128, 32, [-1, 2, 0, 40, 33] * 30),
            (448, 128, 192, 16, [0] * 100 + [-1] * 60 + [2] * 140),
            (448, 576, 192, 16, [0] * 100 + [-1] * 60 + [2] * 140),
            (128, 128, 64, 32, [-1] * 66),
        ],
        1,
    ),
    ids=lambda value: str(value)[:20],
)
def test_each_token_gets_what_its_own_adapter_adds(tmp_path, rows, columns, tile_rows, rank, slots):
    kernel, count = GatedKernel(rows, columns, tile_rows, rank), len(slots)
    library, generator = built(tmp_path, kernel), torch.Generator().manual_seed(count)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    x, weight, b = random(count, columns), random(rows, columns, scale=0.1), random(SLOTS, rows, rank, scale=0.3)
    shrunk, of_tokens = random(count, 2 * rank), torch.tensor(slots).int()
    out, division = torch.full((count, rows // 2), 7.0).bfloat16(), divided(count)
    box = kernel.box_tokens(count)
    halves = [map_of(half, tensor_maps.spread_slots(half)) for half in b.chunk(2, 1)]
    launch = Launch(
        map_of(weight, tensor_maps.spread_halves(weight)),
        map_of(x, tensor_maps.rows(x, box)),
        *halves,
        *(tensor.data_ptr() for tensor in (shrunk, of_tokens, out)),
        (ctypes.c_int * 5)(count, division.tiles, division.units, division.larger, box),
    )
    blocks = 2 * kernel.share if rows > 300 else kernel.num_blocks(count)  # that take tiles in turns
    exact = exact_of(x, weight, shrunk, b, slots)
    for seed in range(2):
        stuck = library.launch(ctypes.byref(launch), blocks, kernel.num_threads, ctypes.c_uint64(seed))
        assert not stuck, "threads wait for each other"
        off = (out.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert off.max() < 1e-2
        out.fill_(7.0)


@needs_nvcc
@pytest.mark.parametrize(("rank", "tile_rows"), slow_but_a_sample([(16, 192), (32, 192), (16, 64), (32, 128)], 1))
def test_the_source_compiles_without_spilling(tmp_path, rank, tile_rows):
    check_compiles_without_spilling(kernel_source(GatedKernel(24576, 4096, tile_rows, rank)), tmp_path)


def test_adapters_of_both_halves_are_taken_and_kernels_of_ranks_told_apart():
    assert takes_adapters(256, 16, [0, 128], [128, 128])
    for rank, starts, counts in ((64, [0, 128], [128, 128]), (16, [0], [128]), (16, [128], [128]), (16, [0], [256])):
        assert not takes_adapters(256, rank, starts, counts)
    names = {kernel.name for rank in (0, *RANKS) for kernel in gated_kernels(6144, 1024, rank)}
    assert len(names) == 3 * len(gated_kernels(6144, 1024))
