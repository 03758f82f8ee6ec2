"""The kernels of attention within segments on Hopper, as far as they go without one: their sizes, choice and source."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch

from mllm_compile.errors import ArtifactError
from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.kernel import kernel_source
from mllm_compile.runtime.ops.segments import ops
from mllm_compile.runtime.ops.segments.kernel import SegmentsKernel, choose, is_taken, segments_kernels
from tests.runtime.compiled_source import check_compiles_without_spilling, needs_nvcc
from tests.sample import slow_but_a_sample

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


# Those of most rows, whose registers are the fewest for what they hold.
@needs_nvcc
@pytest.mark.parametrize(
    "kernel",
    slow_but_a_sample([segments_kernels(72)[-1], segments_kernels(96)[-1], segments_kernels(128)[-1]], 1),
    ids=lambda kernel: kernel.name,
)
def test_the_source_compiles_without_spilling(tmp_path, kernel):
    check_compiles_without_spilling(kernel_source(kernel), tmp_path)


def test_without_a_kernel_the_op_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(ops, "_LOADED", {})
    x = torch.zeros(4, 2, 72, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="no kernel is loaded for heads of 72"):
        ops.segment_attention_by_kernel(x, x, x, torch.tensor([0, 4], dtype=torch.int32), x, 1.0, "tower")


def test_windows_take_blocks_of_few_rows():
    kernels = segments_kernels(80)
    assert choose(kernels, 86, 64, 16).rows == 64
    assert choose(kernels, 1, 65, 16).rows > 64


@pytest.mark.parametrize(
    ("head_dim", "length", "rows"), [(72, 4096, 256), (80, 5476, 192), (64, 4096, 256), (128, 4096, 128)]
)
def test_what_was_measured_to_be_the_fastest_is_taken(head_dim, length, rows):
    assert choose(segments_kernels(head_dim), 1, length, 16).rows == rows


@pytest.fixture
def launches(driver, monkeypatch):
    """Launches of the kernels of heads of 72, which are loaded on device 0: kernel, blocks, arguments."""
    driver()
    monkeypatch.setattr(ops, "_LOADED", {})
    kernels = segments_kernels(72)
    ops.load_segments_kernels(kernels, {kernel.name: b"binary" for kernel in kernels}, torch.device("cuda:0"))
    seen: list[tuple[SegmentsKernel, int, Any]] = []
    for kernel, loaded in ops._LOADED[0, 72].items():
        monkeypatch.setattr(
            loaded._loaded, "launch", lambda blocks, threads, given, kernel=kernel: seen.append((kernel, blocks, given))
        )
    monkeypatch.setattr(ops, "_LOADED", {(-1, 72): ops._LOADED[0, 72]})  # where tensors of a CPU are
    return seen


def attend(lengths: list[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    ops.segment_attention_by_kernel(q, k, v, bounds, torch.empty_like(q), 0.5, "tower", max(lengths))


def test_there_is_a_block_for_each_tile_of_rows_of_each_head_of_each_segment(launches):
    q, k = torch.zeros(900, 4, 72, dtype=torch.bfloat16), torch.zeros(900, 2, 72, dtype=torch.bfloat16)
    attend([700, 200], q, k, k)
    attend([60] * 15, q, k, k)
    (images, blocks, arguments), (windows, of_windows, _) = launches
    assert images.rows > 64 and windows.rows == 64
    assert (blocks, of_windows) == (-(-700 // images.rows) * 4 * 2, 4 * 15)
    sizes = arguments[-1]
    assert (sizes.heads, sizes.kv_heads, sizes.tiles, sizes.row) == (4, 2, -(-700 // images.rows), 4 * 72)
    assert sizes.scale == pytest.approx(0.5 * math.log2(math.e))


def test_columns_of_a_product_are_read_where_they_are_and_others_are_copied(launches, monkeypatch):
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(tensor_maps.TensorMaps, "get", lambda self, x, boxes, *of: asked.append((x.data_ptr(), *of)))
    packed = torch.zeros(640, 8, 72, dtype=torch.bfloat16)
    q, k, v = packed.split((4, 2, 2), 1)
    attend([640], q, k, v)
    kernel = launches[0][0]
    panels, rests = asked[:3], asked[3:]
    counts = ((kernel.rows, 4), (kernel.keys, 2), (kernel.keys, 2))
    for found, columns in ((panels, 64), (rests, 16)):
        expected = [(rows, columns, heads, 8 * 72, 72) for rows, heads in counts]
        assert [of for _, *of in found] == [list(one) for one in expected]
    assert [place for place, *_ in panels] == [x.data_ptr() for x in (q, k, v)]
    asked.clear()
    crooked = torch.zeros(640, 4, 73, dtype=torch.bfloat16)[:, :, 1:]
    attend([640], crooked, k, v)
    assert asked[0][-2:] == (4 * 72, 72) and asked[0][0] != crooked.data_ptr()


def test_a_kernel_that_the_runtime_does_not_hold_is_named(driver):
    driver()
    with pytest.raises(ArtifactError, match="segments_72_rows64_keys64_stages2; compile"):
        ops.load_segments_kernels(segments_kernels(72), {}, torch.device("cuda:0"))
