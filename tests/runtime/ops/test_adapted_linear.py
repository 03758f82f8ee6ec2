"""Linears that take their adapters with them: what they take, and their source on the host, thread by thread."""

from __future__ import annotations

import ctypes
import itertools
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear, silu

from mllm_compile.runtime.cuda.kernel import kernel_source
from mllm_compile.runtime.ops import family
from mllm_compile.runtime.ops.stream_linear.adapted import (
    AdaptedKind,
    AdaptedRowTiling,
    AdaptedTileTiling,
    AdaptedTiling,
    choose,
    num_sums,
    takes,
)
from mllm_compile.runtime.ops.stream_linear.adapted_ops import STREAMED, AdaptedLinear
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling
from tests.runtime.attention.test_clusters_source import on_the_host
from tests.runtime.compiled_source import check_compiles_without_spilling, needs_nvcc
from tests.sample import slow_but_a_sample, slow_but_a_sample_of_each

QKV, WHOLE = ((0, 4096), (4096, 1024), (5120, 1024)), ((0, 4096),)
GATE_UP = ((0, 12288), (12288, 12288))
OF_8B = [
    AdaptedKind(6144, 4096, 256, rank=16, parts=QKV),
    AdaptedKind(4096, 4096, residual=True, next_blocks=256, rank=16, parts=WHOLE),
    AdaptedKind(24576, 4096, 256, gated=True, rank=16, parts=GATE_UP),
    AdaptedKind(4096, 12288, residual=True, next_blocks=256, rank=32, parts=WHOLE),
]


BUCKETS = (8, 16, 32, 64)
CASES = [(kind, tokens) for kind in OF_8B for tokens in BUCKETS]


@pytest.mark.parametrize("tokens", BUCKETS)
@pytest.mark.parametrize("kind", OF_8B, ids=lambda kind: kind.name)
def test_8bs_linears_take_adapters_and_are_divided_as_without(kind, tokens):
    assert takes(kind.rows, kind.columns, kind.rank, kind.parts)
    adapted, plain = choose(kind, tokens), choose_tiling(kind.plain, tokens)
    assert (adapted.source, adapted.num_blocks, adapted.stages) == (plain.source, plain.num_blocks, plain.stages)
    assert family("stream_linear_lora").from_json(json.loads(json.dumps(adapted.to_json()))) == adapted


def test_of_several_launches_none_takes_tasks_ahead_of_its_wait():
    """The one before counts its own in the same place yet."""
    slots = torch.arange(100)
    *_, its_slots, starts, rows, is_early = STREAMED._weight_of(
        (*torch.empty(3), slots, [0], [64], True), slice(64, 100)
    )
    assert its_slots.tolist() == list(range(64, 100)) and (starts, rows, is_early) == ([0], [64], False)


@pytest.mark.parametrize(
    ("rows", "columns", "rank", "parts"),
    [
        (1024, 1024, 16, ((0, 1024),)),
        (4096, 4096, 24, WHOLE),
        (4096, 4096, 64, WHOLE),
        (6144, 4096, 16, ((0, 4096), (4104, 1016))),
        (4104, 4096, 16, WHOLE),
        (4096, 24576, 16, WHOLE),
    ],
    ids=["held", "rank of 24", "rank of 64", "odd part", "odd rows", "inputs in all registers"],
)
def test_others_are_left_to_kernels_of_their_own(rows, columns, rank, parts):
    assert not takes(rows, columns, rank, parts)


def test_names_tell_kernels_apart():
    kinds = [*OF_8B, replace(OF_8B[0], rank=8), replace(OF_8B[0], parts=QKV[:2]), replace(OF_8B[0], parts=QKV[1:])]
    names = {choose(kind, tokens).name for kind in kinds for tokens in BUCKETS}
    plain = {choose_tiling(kind.plain, tokens).name for kind in kinds for tokens in BUCKETS}
    assert (len(names), len(plain), len(names & plain)) == (28, 16, 0)


@needs_nvcc
@pytest.mark.parametrize(("kind", "tokens"), slow_but_a_sample_of_each(lambda one: one[1] > 8, CASES, 1), ids=str)
def test_the_source_compiles_without_spilling(tmp_path, kind, tokens):
    check_compiles_without_spilling(kernel_source(choose(kind, tokens)), tmp_path)


class Places(dict):
    """Another thread finds the same number of them, as it looks at the same time."""

    def __len__(self) -> int:
        return 0


def test_two_engines_count_the_tasks_of_their_linears_apart(driver, monkeypatch):
    driver()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(AdaptedLinear, "_counts", {-1: torch.zeros(4, 4, dtype=torch.int32), 0: torch.zeros(0)})
    monkeypatch.setattr(AdaptedLinear, "_places", Places())
    monkeypatch.setattr(AdaptedLinear, "_numbers", itertools.count())
    tiling = choose(OF_8B[1], 8)
    loaded = AdaptedLinear(tiling, {tiling.name: b"binary"})
    launches = []
    monkeypatch.setattr(loaded._loaded, "launch", lambda blocks, threads, arguments: launches.append(arguments[2]))
    x, weight, slots = torch.zeros(2, 4096).bfloat16(), torch.zeros(64, 4096).bfloat16(), torch.zeros(2).int()
    adapters = [(torch.zeros(1, 16, 4096).bfloat16(), torch.zeros(1, 4096, 16).bfloat16()) for _ in range(2)]
    for a, b in (*adapters, adapters[0]):
        loaded(x, (weight, a, b, slots, [0], [4096], True), [None] * 6, 0.0, 2)
    counts = AdaptedLinear._counts[-1].data_ptr()
    assert [one.counts - counts for one in launches] == [0, 16, 0]
    assert [one.a for one in launches] == [a.data_ptr() for a, _ in (*adapters, adapters[0])]


_EMULATED = {
    "load_weight": """
  const char* from = *(const char* const*)map;
  for (int p = 0; p < PANELS; p++)
    for (int i = 0; i < ROWS; i++) {
      const int its = GATED ? (row / 16 + i / 16) * 8 + i % 8 + i % 16 / 8 * (N / 2) : row + i;
      const char* there = row + i < N ? from + ((u64)its * K + (panel + p) * 64) * 2 : nullptr;
      put_row(to + (p * ROWS + i) * 128, there);
    }
  auto& its = emulated::block().barriers.at(barrier);
  its.bytes -= PANELS * ROWS * 128, its.look();""",
    "load_x": """
  for (int i = 0; i < tokens_of_step; i++)
    put_row(to + i * 128, *(const char* const*)map + ((u64)(token + i) * K + panel * 64) * 2);
  auto& its = emulated::block().barriers.at(barrier);
  its.bytes -= tokens_of_step * 128, its.look();""",
    "multiply_add_all": """
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  for (int i = 0; i < ROWS / 2; i++) {
    const int token = warp * 16 + lane / 4 + i / 2 % 2 * 8, row = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) d[i] += value_at(a, token, k) * value_at(b, row, k);
  }
  __syncwarp();""",
    "fetch_map": "",
    "load_shared": "return *(uint4*)emulated::place_of(address);",
    "shared_pair": "return *(uint2*)emulated::place_of(address);",
    "load_bytes": """
  memcpy(emulated::place_of(to), from, bytes);
  auto& its = emulated::block().barriers.at(barrier);
  its.bytes -= bytes, its.look();""",
    "load_row": """
  memcpy(emulated::place_of(to), from, bytes);
  auto& its = emulated::block().barriers.at(barrier);
  its.bytes -= bytes, its.look();""",
    "send": """
  *(float4*)emulated::place_of(to) = v;
  const int first = emulated::now->block / emulated::cluster_blocks * emulated::cluster_blocks;
  auto& its = emulated::blocks[first + (barrier >> 24) - 1].barriers.at(barrier & 0xffffff);
  its.bytes -= 16, its.look();""",
    "read_once": "return 0;",
    "times": "return pack(first_of(a) * first_of(b), second_of(a) * second_of(b));",
    "times_norm_weight": """
  return pack(first_of(v) * (first_of(weight) + plus_one), second_of(v) * (second_of(weight) + plus_one));""",
    "power_of": "return expf(-v);",
    "reciprocal": "return 1.f / v;",
    "store_if": "if (is_there) *to = v;",
    "fetch": "",
    "seen": "emulated::yield(); return *(volatile const u32*)count;",
}
_DEVICE_FUNCTIONS = """
static int tokens_of_step;
static u32 swizzled_place(u32 address) { return address ^ (address >> 7 & 7) << 4; }
static void put_row(u32 to, const char* from) {  // zeros of a row that is not there
  for (int i = 0; i < 128; i += 16) {
    char* place = emulated::place_of(swizzled_place(to + i));
    from ? (void)memcpy(place, from + i, 16) : (void)memset(place, 0, 16);
  }
}
static float value_at(u64 matrix, int row, int k) {
  const u32 place = swizzled_place(((u32)(matrix & 0x3fff) << 4) + row * 128 + k * 2);
  return __uint_as_float((u32) * (unsigned short*)emulated::place_of(place) << 16);
}
static int __reduce_min_sync(u32, int v) { return -__reduce_max_sync(~0u, -v); }
static int __popcll(u64 v) { return __builtin_popcountll(v); }
static int __ffsll(u64 v) { return __builtin_ffsll(v); }
struct uint2 {
  u32 x, y;
};
static u32 __match_any_sync(u32, int v) {
  auto& given = emulated::exchange(v);
  u32 same = 0;
  for (int i = 0; i < 32; i++) same |= (u32)((int)given[i][0] == v) << i;
  return same;
}
static u32 __ballot_sync(u32, bool v) {
  auto& given = emulated::exchange(v);
  u32 all = 0;
  for (int i = 0; i < 32; i++) all |= given[i][0] << i;
  return all;
}
static int __shfl_sync(u32, int v, int from) { return (int)emulated::exchange(v)[from % 32][0]; }
static int __reduce_add_sync(u32, int v) {
  auto& given = emulated::exchange(v);
  int sum = 0;
  for (int i = 0; i < 32; i++) sum += (int)given[i][0];
  return sum;
}
static int __popc(u32 v) { return __builtin_popcount(v); }
static int __ffs(int v) { return __builtin_ffs(v); }
static void __threadfence() {}
static float4 __ldcg(const float4* from) { return *from; }
static u32 atomicAdd(u32* to, u32 v) { return (*to += v) - v; }
static u32 atomicExch(u32* to, u32 v) { const u32 old = *to; *to = v; return old; }
static std::map<std::pair<int, int>, emulated::Meeting> named;
static void meet(int barrier, int threads) {
  emulated::Meeting& meeting = named[{emulated::now->block, barrier}];
  const u64 generation = meeting.generation;
  if (!meeting.arrive(threads))
    while (meeting.generation == generation) emulated::yield();
}
"""
_STATEMENTS = {
    "barrier.cluster.arrive": "emulated::arrive_at_cluster();",
    "barrier.cluster.wait": "emulated::wait_for_cluster();",
    "wgmma.": "",
}
_LAUNCH = """
struct Launch {
  const char *weight, *x;
  Adapters adapters;
  const float* squares;
  const u32 *residual, *norm_weight;
  u32 *out, *scaled;
  float* out_squares;
  int num_tokens;
};
static const Launch* launched;
static void body() {
  Launch l = *launched;
  l.adapters.early_slots = l.num_tokens % 2;
#ifdef TOKENS  // of tiles.cu
  TensorMap maps[2];
  memcpy(&maps[0], &l.weight, sizeof(char*)), memcpy(&maps[1], &l.x, sizeof(char*));
  stream_linear(maps[0], maps[1], l.x, l.adapters, l.squares, l.residual, l.norm_weight, l.out, l.scaled,
                l.out_squares, 1e-6f, l.num_tokens);
#else
  stream_linear(l.weight, l.x, l.adapters, l.squares, l.residual, l.norm_weight, l.out, l.scaled, l.out_squares, 1e-6f,
                l.num_tokens);
#endif
}
extern "C" int launch(const Launch* all, int num_blocks, int num_threads, u64 seed) {
  launched = all, named.clear(), tokens_of_step = all->num_tokens;
  return emulated::run(body, num_blocks, SPLIT, num_threads, SHARED_BYTES, seed);
}
"""


def built(folder, tiling: AdaptedTiling) -> ctypes.CDLL:
    source = kernel_source(tiling)
    if "#define SHARED_BYTES" not in source:
        source = f"#define SHARED_BYTES {tiling.shared_bytes}\n{source}"
    for statement, emulated in _STATEMENTS.items():  # within functions that are not emulated
        source = re.sub(rf'asm volatile\("{re.escape(statement)}[^"]*" ::: "memory"\);', emulated, source)
    source = on_the_host(_DEVICE_FUNCTIONS + source, _LAUNCH, _EMULATED)
    barrier = r'asm volatile\("bar.sync (\d), %0;" ::"n"\(32 \* WARPS\) : "memory"\);'
    source = re.sub(barrier, r"meet(\1, 32 * WARPS);", source)
    (folder / "kernel.cpp").write_text("#include <utility>\n" + source)
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "kernel.so"))


class InTurns(AdaptedTileTiling):
    """Blocks that take tiles one after another: the ring has pages between those of one tile and of the next."""

    num_blocks = 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("kind", "slots"),
    slow_but_a_sample(
        [
            (AdaptedKind(128, 256, 16, rank=16, parts=((0, 64), (64, 32), (96, 32))), [1, 0, -1, 1, 2, 2, 0, 1] * 2),
            (AdaptedKind(128, 256, 16, gated=True, rank=32, parts=((0, 64), (64, 64))), [0, 1, 2] * 13),
            (
                AdaptedKind(80, 256, residual=True, next_blocks=5, rank=16, parts=((0, 32), (48, 32))),
                [1] * 30 + [0] * 31,
            ),
            (AdaptedKind(64, 256, residual=True, rank=32, parts=((0, 64),)), [-1] * 20),
            (AdaptedKind(128, 256, 16, rank=32, parts=((0, 64), (96, 32))), [8, 7, 6, 5, 4, 3, 2, 1, 0, -1, 8]),
            (AdaptedKind(128, 512, 32, rank=16, parts=((0, 64), (64, 32), (96, 32))), [1, 0, -1, 1, 2, 2, 0, 1]),
            (AdaptedKind(96, 512, rank=16, parts=((0, 32), (48, 16))), [2]),
            (AdaptedKind(192, 512, 32, gated=True, rank=32, parts=((0, 96), (96, 96))), [0, 1, 2]),
            (AdaptedKind(128, 512, gated=True, rank=16, parts=((64, 64),)), [2, 2, 2, 2]),
            (AdaptedKind(112, 512, residual=True, next_blocks=7, rank=32, parts=((0, 112),)), [0, -1, 1, 2, 1]),
            (AdaptedKind(64, 512, residual=True, rank=16, parts=((0, 64),)), [-1, -1]),
        ],
        2,
    ),
    ids=lambda value: value.name if isinstance(value, AdaptedKind) else str(value),
)
def test_each_token_gets_what_its_own_adapter_adds(tmp_path, kind, slots):
    tiling: AdaptedTiling = AdaptedRowTiling(kind, 8, split=2, clusters=3, warps=2, resident=1, piece=128, stages=2)
    if len(slots) > 8:
        bucket = next(bucket for bucket in BUCKETS if len(slots) <= bucket)
        form, split = (InTurns, 1) if kind.gated else (AdaptedTileTiling, 2)
        tiling = form(kind, bucket, rows=48 if kind.rows % 32 else 32, split=split, panels=1, stages=2)
    library, generator = built(tmp_path, tiling), torch.Generator().manual_seed(len(slots))

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    tokens, outputs = len(slots), kind.rows // (2 if kind.gated else 1)
    x, weight = random(tokens, kind.columns), random(kind.rows, kind.columns, scale=0.05)
    num_slots = max(3, *slots) + 1
    a = random(num_slots, kind.a_rows, kind.columns, scale=0.05)
    b = random(num_slots, sum(count for _, count in kind.parts), kind.rank, scale=0.3)
    residual, norm = random(tokens, kind.rows), random(kind.rows) + 1
    squares = x.float().pow(2).unflatten(-1, (kind.norm_blocks, -1)).sum(-1) if kind.norm_blocks else None
    of_tokens, counts = torch.tensor(slots).int(), torch.zeros(3).int()
    out, scaled = torch.empty(tokens, outputs).bfloat16(), torch.empty(tokens, outputs).bfloat16()
    sums = torch.empty(tokens, max(kind.next_blocks, 1))

    exact = linear(x.float(), weight.float())
    for token, slot in enumerate(slots):
        first = 0
        for part, (start, count) in enumerate(kind.parts if slot >= 0 else ()):
            shrunk = a[slot, part * kind.rank :][: kind.rank].float() @ x[token].float()
            exact[token, start : start + count] += b[slot, first : first + count].float() @ shrunk
            first += count
    if squares is not None:
        exact = exact * torch.rsqrt(squares.sum(-1, keepdim=True) / kind.columns + 1e-6)
    if kind.gated:
        exact = silu(exact[:, :outputs]) * exact[:, outputs:]
    exact = exact + residual.float() if kind.residual else exact

    for seed in range(2):
        shrunk = torch.full(num_sums(tiling), torch.nan)
        tensors = (weight, x, a, b, of_tokens, shrunk, counts, squares, residual, norm, out, scaled, sums)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        pointers.insert(7, None)  # early_slots
        arguments = (ctypes.c_uint64 * (len(pointers) + 1))(*(pointer or 0 for pointer in pointers), tokens)
        stuck = library.launch(arguments, tiling.num_blocks, tiling.num_threads, ctypes.c_uint64(seed))
        assert not stuck, "threads wait for each other"
        assert counts.tolist() == [0, 0, 0], "as the next launch needs them"
        assert (out.float() - exact).norm() / exact.norm() < 4e-3
        if kind.next_blocks:
            assert torch.allclose(sums.sum(-1), out.float().pow(2).sum(-1), rtol=1e-4)
            assert (scaled.float() - out.float() * norm.float()).norm() / scaled.float().norm() < 4e-3
        out.fill_(7.0)
