"""Linears that take their adapters with them: what they take, and their source on the host, thread by thread."""

from __future__ import annotations

import ctypes
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
from mllm_compile.runtime.ops.stream_linear import rows as by_rows
from mllm_compile.runtime.ops.stream_linear.adapted import AdaptedKind, AdaptedTiling, choose, takes
from mllm_compile.runtime.ops.stream_linear.adapted_ops import AdaptedLinear
from tests.runtime.attention.test_clusters_source import on_the_host
from tests.sample import slow_but_a_sample

QKV, WHOLE = ((0, 4096), (4096, 1024), (5120, 1024)), ((0, 4096),)
GATE_UP = ((0, 12288), (12288, 12288))
OF_8B = [
    AdaptedKind(6144, 4096, 256, rank=16, parts=QKV),
    AdaptedKind(4096, 4096, residual=True, next_blocks=256, rank=16, parts=WHOLE),
    AdaptedKind(24576, 4096, 256, gated=True, rank=16, parts=GATE_UP),
    AdaptedKind(4096, 12288, residual=True, next_blocks=256, rank=32, parts=WHOLE),
]


@pytest.mark.parametrize("kind", OF_8B, ids=lambda kind: kind.name)
def test_8bs_linears_take_adapters_and_are_divided_as_without(kind):
    assert takes(kind.rows, kind.columns, kind.rank, kind.parts)
    adapted, plain = choose(kind), by_rows.choose(kind.plain)
    assert (adapted.num_blocks, adapted.stages, adapted.piece) == (plain.num_blocks, plain.stages, plain.piece)
    assert family("stream_linear_lora").from_json(json.loads(json.dumps(adapted.to_json()))) == adapted


@pytest.mark.parametrize(
    ("rows", "columns", "rank", "parts"),
    [
        (1024, 1024, 16, ((0, 1024),)),
        (4096, 4096, 12, WHOLE),
        (4096, 4096, 64, WHOLE),
        (6144, 4096, 16, ((0, 4096), (4104, 1016))),
        (4096, 24576, 16, WHOLE),
    ],
    ids=["held", "rank of 12", "rank of 64", "odd part", "inputs in all registers"],
)
def test_others_are_left_to_kernels_of_their_own(rows, columns, rank, parts):
    assert not takes(rows, columns, rank, parts)


def test_names_tell_kernels_apart():
    kinds = [*OF_8B, replace(OF_8B[0], rank=8), replace(OF_8B[0], parts=QKV[:2]), replace(OF_8B[0], parts=QKV[1:])]
    assert len({choose(kind).name for kind in kinds} | {by_rows.choose(kind.plain).name for kind in kinds}) == 11


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("kind", slow_but_a_sample(OF_8B, 1), ids=lambda kind: kind.name)
def test_the_source_compiles_without_spilling(tmp_path, kind):
    (tmp_path / "kernel.cu").write_text(kernel_source(choose(kind)))
    command = ["nvcc", "-cubin", "-arch=sm_90a", "-Xptxas", "-v", "kernel.cu", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) bytes spill stores", done.stderr) == ["0"]
    assert "warning" not in done.stderr


def test_two_engines_count_the_tasks_of_their_linears_apart(driver, monkeypatch):
    driver()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(AdaptedLinear, "_counts", {-1: torch.zeros(4, 4, dtype=torch.int32), 0: torch.zeros(0)})
    monkeypatch.setattr(AdaptedLinear, "_places", {})
    tiling = choose(OF_8B[1])
    loaded = AdaptedLinear(tiling, {tiling.name: b"binary"})
    launches = []
    monkeypatch.setattr(loaded._loaded, "launch", lambda blocks, threads, arguments: launches.append(arguments[2]))
    x, weight, slots = torch.zeros(2, 4096).bfloat16(), torch.zeros(64, 4096).bfloat16(), torch.zeros(2).int()
    adapters = [(torch.zeros(1, 16, 4096).bfloat16(), torch.zeros(1, 4096, 16).bfloat16()) for _ in range(2)]
    for a, b in (*adapters, adapters[0]):
        loaded(x, (weight, a, b, slots, [0], [4096]), [None] * 6, 0.0, 2)
    counts = AdaptedLinear._counts[-1].data_ptr()
    assert [one.counts - counts for one in launches] == [0, 16, 0]
    assert [one.a for one in launches] == [a.data_ptr() for a, _ in (*adapters, adapters[0])]


_EMULATED = {
    "load_shared": "return *(uint4*)emulated::place_of(address);",
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
  const Launch& l = *launched;
  stream_linear(l.weight, l.x, l.adapters, l.squares, l.residual, l.norm_weight, l.out, l.scaled, l.out_squares, 1e-6f,
                l.num_tokens);
}
extern "C" int launch(const Launch* all, u64 seed) {
  launched = all, named.clear();
  return emulated::run(body, CLUSTERS * SPLIT, SPLIT, 32 * ALL_WARPS, SHARED_BYTES, seed);
}
"""


def built(folder, tiling: AdaptedTiling) -> ctypes.CDLL:
    source = f"#define SHARED_BYTES {tiling.shared_bytes}\n" + kernel_source(tiling)
    source = on_the_host(source, _LAUNCH, _EMULATED)
    barrier = r'asm volatile\("bar.sync (\d), %0;" ::"n"\(32 \* WARPS\) : "memory"\);'
    source = re.sub(barrier, r"meet(\1, 32 * WARPS);", source)
    source = source.replace("struct __align__(64) TensorMap", _DEVICE_FUNCTIONS + "struct __align__(64) TensorMap", 1)
    (folder / "kernel.cpp").write_text("#include <utility>\n" + source)
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "kernel.so"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("kind", "slots"),
    slow_but_a_sample(
        [
            (AdaptedKind(128, 512, 32, rank=16, parts=((0, 64), (64, 32), (96, 32))), [1, 0, -1, 1, 2, 2, 0, 1]),
            (AdaptedKind(96, 512, rank=8, parts=((0, 32), (48, 16))), [2]),
            (AdaptedKind(192, 512, 32, gated=True, rank=24, parts=((0, 96), (96, 96))), [0, 1, 2]),
            (AdaptedKind(128, 512, gated=True, rank=8, parts=((64, 64),)), [2, 2, 2, 2]),
            (AdaptedKind(112, 512, residual=True, next_blocks=7, rank=32, parts=((0, 112),)), [0, -1, 1, 2, 1]),
            (AdaptedKind(64, 512, residual=True, rank=8, parts=((0, 64),)), [-1, -1]),
        ],
        2,
    ),
    ids=lambda value: value.name if isinstance(value, AdaptedKind) else str(value),
)
def test_each_token_gets_what_its_own_adapter_adds(tmp_path, kind, slots):
    tiling = AdaptedTiling(kind, 8, split=2, clusters=3, warps=2, resident=1, piece=128, stages=2)
    library, generator = built(tmp_path, tiling), torch.Generator().manual_seed(len(slots))

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    tokens, outputs = len(slots), kind.rows // (2 if kind.gated else 1)
    x, weight = random(tokens, kind.columns), random(kind.rows, kind.columns, scale=0.05)
    a = random(3, kind.a_rows, kind.columns, scale=0.05)
    b = random(3, sum(count for _, count in kind.parts), kind.rank, scale=0.3)
    residual, norm = random(tokens, kind.rows), random(kind.rows) + 1
    squares = x.float().pow(2).unflatten(-1, (32, -1)).sum(-1) if kind.norm_blocks else None
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
        shrunk = torch.full(tiling.num_sums, torch.nan)
        tensors = (weight, x, a, b, of_tokens, shrunk, counts, squares, residual, norm, out, scaled, sums)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        arguments = (ctypes.c_uint64 * (len(pointers) + 1))(*(pointer or 0 for pointer in pointers), tokens)
        assert not library.launch(arguments, ctypes.c_uint64(seed)), "threads wait for each other"
        assert counts.tolist() == [0, 0, 0], "as the next launch needs them"
        assert (out.float() - exact).norm() / exact.norm() < 4e-3
        if kind.next_blocks:
            assert torch.allclose(sums.sum(-1), out.float().pow(2).sum(-1), rtol=1e-4)
            assert (scaled.float() - out.float() * norm.float()).norm() / scaled.float().norm() < 4e-3
        out.fill_(7.0)
