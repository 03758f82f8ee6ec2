"""How kernels over ranks count their calls: buffers take turns for ever, also where the count begins anew."""

from __future__ import annotations

import subprocess
from pathlib import Path

from mllm_compile.runtime.collectives.sum_kernels import CALLS_AROUND, MOST_RANKS
from mllm_compile.runtime.cuda import kernel

# CUDA names that the host's compiler lacks, for a block of one thread.
CUDA = """
#include <cstdio>
#define __device__
#define __forceinline__ inline
#define __shared__ static
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint4 { u32 x, y, z, w; };
struct { u32 x = 0; } threadIdx, gridDim;
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline void __syncthreads() {}
inline u32 atomicAdd(u32* at, u32 more) { u32 before = *at; *at += more; return before; }
float first_of(u32), second_of(u32);
u32 pack(float, float);
"""
COUNT = """
int main() {
  gridDim.x = 1;
  u32 state[WORDS] = {CALLS_AROUND - 4};
  for (int i = 0; i < 8; i++) {
    printf("%u\\n", state[CALLS]);
    count_call(state, state[CALLS], 0);
  }
}
"""


def test_buffers_take_turns_where_the_count_begins_anew(tmp_path):
    defined = f"#define THREADS 1\n#define MOST_RANKS {MOST_RANKS}\n#define CALLS_AROUND {CALLS_AROUND}\n"
    peers = (Path(kernel.__file__).parent.parent / "collectives" / "peers.cuh").read_text()
    (tmp_path / "count.cpp").write_text(defined + CUDA + peers + COUNT)
    subprocess.run(["g++", "-std=c++17", "-o", tmp_path / "count", tmp_path / "count.cpp"], check=True)
    said = subprocess.run([tmp_path / "count"], check=True, capture_output=True, text=True).stdout
    calls = [int(line) for line in said.split()]
    assert calls == [*range(CALLS_AROUND - 4, CALLS_AROUND), 0, 1, 2, 3]
    for buffers in (2, 3):
        turns = [call % buffers for call in calls]
        assert turns == [(turns[0] + place) % buffers for place in range(len(turns))]
