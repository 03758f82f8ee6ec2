"""How shares.cu divides its work, by its own source on the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import mllm_compile.runtime.attention.hopper.shares as shares
from mllm_compile.runtime.attention.hopper.shares import ShareKernel

_AS_ON_THE_DEVICE = """
typedef unsigned int u32;
#define __device__
#define __forceinline__ inline
static struct { u32 x; } blockIdx, gridDim;
static int max(int a, int b) { return a > b ? a : b; }
static u32 max(int a, u32 b) { return (u32)a > b ? (u32)a : b; }
static int min(int a, int b) { return a < b ? a : b; }
static u32 min(u32 a, u32 b) { return a < b ? a : b; }
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(16, 128), (4, 128), (3, 128), (8, 256)])
def test_every_tile_is_some_blocks_and_what_blocks_leave_is_added_up_once(tmp_path, kv_heads, head_dim):
    kernel = ShareKernel(kv_heads, 4, 64, head_dim=head_dim)
    constants = "".join(f"#define {name} {value}\n" for name, value in kernel.constants().items())
    constants += f"#define NUM_BLOCKS {kernel.num_blocks}\n"
    plan = Path(shares.__file__).with_name("plan.cuh").read_text(encoding="utf-8")
    division = plan[: plan.index("// Counts keys and tiles of each request")]
    walk = Path(__file__).with_name("shares_plan.cpp").read_text(encoding="utf-8")
    source = tmp_path / "plan.cpp"
    source.write_text(constants + _AS_ON_THE_DEVICE + division + walk)
    subprocess.run(["g++", "-O1", "-w", str(source), "-o", str(tmp_path / "plan")], check=True)
    done = subprocess.run([str(tmp_path / "plan")], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)
