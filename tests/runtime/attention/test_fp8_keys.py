"""How the decode kernels for Hopper attend to keys and values of e4m3, by their own source on the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import mllm_compile.runtime.attention.hopper.kernel as kernel


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("num_keys", [(1, 15, 17, 32, 33), pytest.param((8, 16, 31, 47, 64), marks=pytest.mark.slow)])
def test_a_warp_attends_to_the_keys_that_are_there_whatever_is_behind_them(tmp_path, num_keys):
    header = Path(kernel.__file__).with_name("fp8_keys.cuh").read_text(encoding="utf-8")
    functions = header[header.index("// Adds the products of sixteen keys") :]  # those before are instructions
    walk = Path(__file__).with_name("fp8_keys.cpp").read_text(encoding="utf-8")
    source = tmp_path / "keys.cpp"
    source.write_text(walk.replace("// fp8_keys.cuh\n", functions, 1))
    program = str(tmp_path / "keys")
    subprocess.run(["g++", "-std=c++17", "-O1", "-w", "-pthread", str(source), "-o", program], check=True)
    done = subprocess.run([program, *map(str, num_keys)], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)
