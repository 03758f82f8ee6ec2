"""The clusters' source on the host, thread by thread, against float32: its indices, its barriers, its order.

Functions of PTX are replaced by what PTX says they do (warps.h has warps, barriers and copies); all else is the source.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from mllm_compile.runtime.attention.capture import RopeInputs
from mllm_compile.runtime.attention.hopper.clusters import ClusterKernel
from mllm_compile.runtime.attention.hopper.kernel import MISSING
from mllm_compile.runtime.attention.hopper.rotation import Rotation
from mllm_compile.runtime.cuda.kernel import kernel_source
from tests.sample import slow_but_a_sample

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

_PAGE, _KV_HEADS, _DIM = 16, 2, 128
_EMULATED = {
    "address_of_peer": "return address | (rank + 1) << 24;",
    "make_barrier": "emulated::block().barriers[barrier] = {(int)arrivals, (int)arrivals, 0, 0};",
    "publish_barriers": "",
    "arrive": "emulated::block().barriers.at(barrier).arrive(0);",
    "expect_bytes": "emulated::block().barriers.at(barrier).arrive(bytes);",
    "wait_for": "while (emulated::block().barriers.at(barrier).phase == parity) emulated::yield();",
    "load_box": """
  struct { const char* from; u64 stride; } its;
  memcpy(&its, map, sizeof(its));
  emulated::copies.push_back(
      {emulated::now->block, to, barrier, its.from + (u64)row * its.stride + column * (FP8 ? 1 : 2),
       its.stride, BOX_ROWS});""",
    "load_matrices": """
  auto& given = emulated::exchange(address);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) to[i] = *(u32*)(emulated::place_of(given[8 * i + lane / 4][0]) + lane % 4 * 4);""",
    "load_transposed": """
  auto& given = emulated::exchange(address);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    unsigned short both[2];
    for (int j = 0; j < 2; j++)
      both[j] = ((unsigned short*)emulated::place_of(given[8 * i + lane % 4 * 2 + j][0]))[lane / 4];
    to[i] = both[0] | (u32)both[1] << 16;
  }""",
    "multiply_add": """
  auto& given = emulated::exchange(a0, a1, a2, a3, b0, b1);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; k++)
      sum += emulated::of_half(given[row * 4 + k % 8 / 2][i / 2 + k / 8 * 2], k % 2) *
             emulated::of_half(given[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    d[i] += sum;
  }""",
    "pack": """
  auto rounded = [](float v) -> u32 {
    const u32 bits = __float_as_uint(v);
    return v != v ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  };
  return rounded(first) | rounded(second) << 16;""",
    "wait_for_prerequisites": "",
    "start_dependents": "",
    "send_to_peer": "memcpy(emulated::place_of(address_of_peer(shared_address(place), rank)), &v, sizeof(v));",
    "put": "*place = {__uint_as_float(first), __uint_as_float(second)};",
    "look_at": "emulated::yield(); return *(volatile float*)&place->x, *place;",
    "put_into_tile": """
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < A_LANE; i++)
    if constexpr (FP8)
      *(unsigned short*)emulated::place_of(chunk_of(i * 4 + lane / 8) + lane % 8 * 2) = fp8_pair(head.pairs[i], factor);
    else *(u32*)emulated::place_of(chunk_of(i * 8 + lane / 4) + lane % 4 * 4) = head.pairs[i];""",
    "head_in_tile": """
  const int lane = threadIdx.x % 32;
  Head its;
  for (int i = 0; i < A_LANE; i++)
    if constexpr (FP8)
      its.pairs[i] = *(unsigned short*)emulated::place_of(chunk_of(i * 4 + lane / 8) + lane % 8 * 2);
    else its.pairs[i] = *(u32*)emulated::place_of(chunk_of(i * 8 + lane / 4) + lane % 4 * 4);
  return its;""",
    "half_pair": "return emulated::float16_pair(first, second);",
    "fp8_pair": """
  return emulated::to_e4m3(first_of(pair) * factor) | emulated::to_e4m3(second_of(pair) * factor) << 8;""",
    "halves_of": """
  auto number = [](u32 v) { return emulated::of_e4m3(v & 0xff); };
  auto pair = [&](u32 v) { return emulated::float16_pair(number(v), number(v >> 8)); };
  return {pair(four), pair(four >> 16)};""",
    "add_halves": """
  auto& given = emulated::exchange(a0, a1, a2, a3, b0, b1);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; k++)
      sum += emulated::of_float16(given[row * 4 + k % 8 / 2][i / 2 + k / 8 * 2], k % 2) *
             emulated::of_float16(given[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    d[i] += sum;
  }""",
    "transposed": """
  auto& given = emulated::exchange(matrix);
  const int lane = threadIdx.x % 32;
  unsigned short both[2];
  for (int j = 0; j < 2; j++) both[j] = given[(lane % 4 * 2 + j) * 4 + lane / 8][0] >> 16 * (lane / 4 % 2);
  return both[0] | (u32)both[1] << 16;""",
    "in_order": """
  u32 its = 0;
  for (int i = 0; i < 4; i++)
    if ((order >> 4 * i & 15) < 4) its |= (pairs >> 8 * (order >> 4 * i & 15) & 0xff) << 8 * i;
  return its;""",
    "power_of_two": "return exp2f(v);",
}
_STATEMENTS = {
    "barrier.cluster.arrive": "emulated::arrive_at_cluster();",
    "barrier.cluster.wait": "emulated::wait_for_cluster();",
    "fence.proxy": "",
}
_LAUNCH = """
struct Launch {
  TensorMap keys, values;
  const u32* q;
  const int *page_table, *seq_lens;
  unsigned short* out;
  float2* left;
  int parts, width;
  float scale;
  Rotation rotation;
  const unsigned short* sinks;
};
static const Launch* launched;
static void body() {
  const Launch& l = *launched;
  cluster_decode(l.keys, l.values, l.q, l.page_table, l.seq_lens, l.out, l.left, l.parts, l.width, l.scale, l.rotation,
                 l.sinks);
}
extern "C" int launch(const char* keys, const char* values, u64 stride, const u32* q, const int* page_table,
                      const int* seq_lens, unsigned short* out, float2* left, int parts, int width, float scale,
                      const Rotation* rotation, const unsigned short* sinks, int num_blocks, u64 seed) {
  Launch l = {{}, {}, q, page_table, seq_lens, out, left, parts, width, scale, *rotation, sinks};
  struct { const char* from; u64 stride; } maps[] = {{keys, stride}, {values, stride}};
  memcpy(&l.keys, &maps[0], 16), memcpy(&l.values, &maps[1], 16), launched = &l;
  return emulated::run(body, num_blocks, SPLIT, 32 * WARPS, SHARED_BYTES, seed);
}
"""


def on_the_host(source: str, launch: str = _LAUNCH, others: Mapping[str, str] | None = None) -> str:
    """The source with each function of PTX replaced, and `launch` behind it.

    Args:
        others: bodies of further functions, by name.
    """
    emulated_bodies = _EMULATED | dict(others or {})
    parts, at = [], 0
    for found in re.finditer(r"__device__ __forceinline__ [^;{]*?(\w+)\([^;{]*\) \{", source):
        if found.start() < at:
            continue
        end, depth = found.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(source[end], 0)
            end += 1
        if "asm" in source[found.end() : end]:
            body = emulated_bodies.get(found[1], "abort();")
            parts += [source[at : found.end()], body, "}"]
            at = end
    whole = "".join([*parts, source[at:]])
    for statement, emulated in _STATEMENTS.items():
        whole = re.sub(rf'asm volatile\("{re.escape(statement)}[^"]*" ::: "memory"\);', emulated, whole)
    whole = re.sub(r"extern __shared__ .* memory\[\];", "char* const memory = emulated::block().memory;", whole)
    header = Path(__file__).with_name("warps.h").read_text(encoding="utf-8")
    return header + whole + launch


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Callable[[ClusterKernel], ctypes.CDLL]:
    def build(kernel: ClusterKernel) -> ctypes.CDLL:
        folder = tmp_path_factory.mktemp("clusters")
        (folder / "kernel.cpp").write_text(on_the_host(kernel_source(kernel)))
        command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        return ctypes.CDLL(str(folder / "kernel.so"))

    return build


def rotated(x: torch.Tensor, weight: torch.Tensor, told: RopeInputs) -> torch.Tensor:
    x = x.float()
    if told.cos is None:
        return x
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + told.eps) * weight.float()
    first, second = x.chunk(2, -1)
    return x * told.cos[0, :, None].float() + torch.cat((-second, first), -1) * told.sin[0, :, None].float()


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize(
    ("tokens", "group", "split", "parts", "before", "sinks"),
    slow_but_a_sample(
        [
            (1, 4, 2, 1, [0, 62, 129], False),
            (1, 8, 4, 1, [300], True),
            (2, 4, 2, 1, [0, 62, 129], False),
            (4, 4, 2, 1, [0, 61, 62, 130], True),
            (4, 4, 8, 1, [509], False),
            (4, 4, 2, 3, [1600, 40], False),
            (3, 5, 2, 1, [62, 127], False),
            (8, 4, 2, 1, [0, 60, 121], False),
            (8, 4, 2, 2, [1600], True),
            (16, 4, 4, 1, [50, 240], False),
            (9, 7, 2, 1, [58, 3], False),
        ],
        1,
    ),
    ids=str,
)
def test_each_token_sees_the_keys_up_to_its_own(built, tokens, group, split, parts, before, sinks, rotates):
    compare(built, tokens, group, split, parts, before, sinks, rotates, torch.bfloat16)


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize(
    ("tokens", "group", "split", "parts", "before", "sinks"),
    slow_but_a_sample(
        [
            (1, 8, 2, 1, [0, 62, 129, 300], True),
            (2, 4, 2, 1, [0, 62, 129], False),
            (4, 4, 2, 1, [0, 61, 62, 130], True),
            (4, 2, 8, 1, [509], False),
            (4, 4, 2, 3, [1600, 40], False),
            (8, 4, 2, 1, [0, 60, 121], False),
            (3, 5, 4, 1, [62, 127], False),
        ],
        1,
    ),
    ids=str,
)
def test_each_token_sees_the_keys_of_e4m3_up_to_its_own(built, tokens, group, split, parts, before, sinks, rotates):
    compare(built, tokens, group, split, parts, before, sinks, rotates, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("group", "split", "parts", "before", "sinks"),
    slow_but_a_sample([(2, 2, 1, [0, 62, 129], False), (8, 4, 1, [300], True), (4, 2, 3, [1600, 40], False)], 1),
    ids=str,
)
def test_two_heads_of_64_are_taken_as_one_of_128(built, group, split, parts, before, sinks, dtype):
    compare(built, 1, group, split, parts, before, sinks, False, dtype, together=2, of_source=not sinks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("tokens", "group", "split", "parts", "before", "sinks", "together"),
    slow_but_a_sample(
        [
            (1, 2, 2, 1, [0, 62, 129], False, 2),
            (1, 4, 4, 1, [300], True, 1),
            (4, 4, 2, 1, [0, 61, 62, 130], False, 1),
            (1, 4, 2, 3, [1600, 40], False, 2),
        ],
        1,
    ),
    ids=str,
)
def test_keys_and_values_of_heads_that_do_not_rotate_are_written(
    built, tokens, group, split, parts, before, sinks, together, dtype
):
    compare(built, tokens, group, split, parts, before, sinks, True, dtype, together=together, turns=False)


def compare(built, tokens, group, split, parts, before, sinks, rotates, dtype, together=1, turns=True, of_source=False):
    """Compares the kernel over a cache of `dtype` with float32. `rotates`: it writes new tokens too, whose heads it
    norms and rotates if `turns`."""
    fp8 = dtype == torch.float8_e4m3fn
    bits, nothing = (torch.uint8, torch.nan) if fp8 else (torch.int16, torch.inf)
    features = {"sinks": sinks, "fp8": fp8, "of_source": of_source}
    kernel = ClusterKernel(_KV_HEADS, group, _PAGE, split, together=together, tokens=tokens, **features)
    kv_heads, dim = _KV_HEADS * together, _DIM // together
    library = built(kernel)
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    num_requests, heads = len(before), group * _KV_HEADS
    counts = [max(1, tokens - 2 * row) for row in range(num_requests)] + [0]
    before = [*before, 5]
    width = -(-(max(before) + tokens) // _PAGE)
    pages = torch.randperm(len(before) * width, generator=generator).int().view(len(before), width)
    keys, values = (random(pages.numel() * _PAGE, kv_heads, dim).to(dtype) for _ in range(2))

    def fill(cache: torch.Tensor, rows: torch.Tensor, given: torch.Tensor | float) -> None:
        cache.view(bits)[rows] = torch.as_tensor(given).to(dtype).view(bits)

    lengths = torch.tensor(
        [first + i + 1 if i < count else 0 for first, count in zip(before, counts, strict=True) for i in range(tokens)]
    ).int()
    is_token = lengths > 0
    positions = torch.arange(width * _PAGE)
    slots = pages[:, positions // _PAGE].long() * _PAGE + positions % _PAGE
    is_key = positions < lengths.view(-1, tokens).max(1).values[:, None]
    for cache in (keys, values):
        fill(cache, slots[~is_key], nothing)
    num_rows = len(lengths)
    packed = random(1, num_rows, (heads + 2 * kv_heads) * dim)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in packed.split([heads * dim, kv_heads * dim, kv_heads * dim], -1))
    angles = 6 * torch.rand(1, num_rows, dim, generator=generator)
    weights = [1 + random(dim) / 4 for _ in range(2)]
    how = [angles.cos().bfloat16(), angles.sin().bfloat16(), *weights] if turns else []
    told = RopeInputs.of([q, k, *how], v[0], 1e-6)
    new = slots.repeat_interleave(tokens, 0)[is_token].gather(1, lengths[is_token, None].long() - 1).squeeze(1)
    queries, new_keys = rotated(q[0], weights[0], told), rotated(k[0], weights[1], told)
    if rotates:
        fill(keys, new, nothing), fill(values, new, nothing)
        rotation = Rotation(q[0], keys, values, told)
    else:
        fill(keys, new, new_keys[is_token].bfloat16()), fill(values, new, v[0, is_token])
        queries = queries.bfloat16()
        rotation = Rotation(queries, keys, values, None)
    out = torch.full((num_rows, heads, dim), 7.0).bfloat16()
    sink_logits = torch.linspace(-4, 4, heads).bfloat16()
    sequences = len(before) * _KV_HEADS
    left = torch.full((2 * sequences * max(1, parts - 1) * kernel.rows * _DIM,), MISSING, dtype=torch.int32)
    table = pages.repeat_interleave(tokens, 0)

    def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(tensor.data_ptr())

    for seed in range(2):
        stuck = library.launch(
            *map(pointer, (keys, values)),
            ctypes.c_uint64(kv_heads * dim * keys.itemsize),
            *map(pointer, (rotation.q, table, lengths, out, left)),
            ctypes.c_int(parts),
            ctypes.c_int(width),
            ctypes.c_float(dim**-0.5 * 1.4426950408889634),
            ctypes.byref(rotation.argument),
            pointer(sink_logits),
            ctypes.c_int(sequences * parts * split),
            ctypes.c_uint64(seed),
        )
        assert not stuck, "threads wait for each other"
        assert (left == MISSING).all()
        assert (out[~is_token] == 7.0).all()
        if rotates:
            assert torch.equal(values.view(bits)[new], v[0, is_token].to(dtype).view(bits))
            got, want = keys.view(bits)[new].view(dtype).float(), new_keys[is_token]
            assert ((got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < (4e-2 if fp8 else 5e-3)
        for row in is_token.nonzero().flatten().tolist():
            own = slots[row // tokens, : lengths[row]]
            its_keys, its_values = (
                x.view(bits)[own].view(dtype).float().repeat_interleave(group // together, 1) for x in (keys, values)
            )
            logits = torch.einsum("hd,lhd->hl", queries[row].float(), its_keys) * dim**-0.5
            if sinks:
                logits = torch.cat((logits, sink_logits.float()[:, None]), -1)
            want = torch.einsum("hl,lhd->hd", logits.softmax(-1)[:, : len(own)], its_values)
            assert (out[row].float() - want).norm() / want.norm() < 8e-3
        out.fill_(7.0)
        if rotates:
            fill(keys, new, nothing), fill(values, new, nothing)
