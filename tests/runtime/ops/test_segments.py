"""The kernels of attention within segments on Hopper, as far as they go without one: their sizes, choice and source."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import torch

from mllm_compile.runtime.cuda.source import kernel_source
from mllm_compile.runtime.ops.varlen import tiles
from mllm_compile.runtime.ops.varlen.kernel import SegmentsKernel, choose, segments_kernels
from mllm_compile.runtime.ops.varlen.shapes import is_taken

HEAD_DIMS = [head_dim for head_dim in range(8, 264, 8) if is_taken(head_dim, 1.0)]
KERNELS = [kernel for head_dim in HEAD_DIMS for kernel in segments_kernels(head_dim)]


def test_heads_of_towers_are_taken():
    assert HEAD_DIMS == [64, 72, 80, 88, 96, 128]
    assert not is_taken(76, 1.0), "rows of 16 bytes are read"
    assert not is_taken(72, -1.0), "the largest product would have the least weight"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_fits_and_is_stored_with_all_that_its_launch_takes(kernel):
    assert kernel.shared_bytes <= 227 << 10
    assert kernel.num_threads <= 1024
    data = json.loads(json.dumps(kernel.to_json()))
    assert SegmentsKernel.from_json(data) == kernel
    with pytest.raises(ValueError):
        SegmentsKernel.from_json(data | {"warps": 4})


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("kernel", [*segments_kernels(72), *segments_kernels(128)], ids=lambda kernel: kernel.name)
def test_the_source_compiles_without_spilling(tmp_path, kernel):
    (tmp_path / "kernel.cu").write_text(kernel_source(kernel))
    command = ["nvcc", "-cubin", "-arch=sm_90a", "-Xptxas", "-v", "kernel.cu", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) bytes spill stores", done.stderr) == ["0"]
    assert "warning" not in done.stderr
    assert "Performance Loss" not in done.stderr, "products of wgmma wait for each other"


def test_without_a_kernel_the_op_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(tiles, "_LOADED", {})
    x = torch.zeros(4, 2, 72, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="no kernel is loaded for heads of 72"):
        tiles.segment_attention_with_output(x, x, x, torch.tensor([0, 4], dtype=torch.int32), x, 1.0, "tower")


def test_windows_take_blocks_of_few_rows():
    kernels = segments_kernels(80)
    assert choose(kernels, 86, 64, 16).rows == 64
    assert choose(kernels, 1, 5476, 16).rows > 64
