"""Attention within segments by the program's kernels for Hopper, compiled as for a runtime, against float32."""

from __future__ import annotations

import itertools

import pytest
import torch

from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.ops.segments.family import Family
from mllm_compile.runtime.ops.segments.kernel import segments_kernels
from mllm_compile.runtime.ops.segments.ops import load_segments_kernels, loaded_kernel, segment_attention_by_kernel
from tests.gpu.test_segment_attention import LENGTHS, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

DEVICE = torch.device("cuda:0")
MARGIN = 1.05  # of the mean error of torch in bfloat16


def load(head_dim: int, folder) -> None:
    kernels = segments_kernels(head_dim)
    with KernelCompiler() as compiler:
        compiler.write(kernels, folder, NullReporter())
    load_segments_kernels(kernels, {path.stem: path.read_bytes() for path in folder.iterdir()}, DEVICE)


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("head_dim", [64, 72, 80, 88, 96, 128])
def test_every_kernel_is_as_near_to_float32_as_torch_in_bfloat16(head_dim, tmp_path):
    load(head_dim, tmp_path)
    torch.manual_seed(0)
    for lengths in (*LENGTHS, [129, 700, 64]):
        q, k, v = (torch.randn(sum(lengths), 4, head_dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
        q = 3 * q  # weights that differ
        exact = reference(q.float(), k.float(), v.float(), lengths)
        theirs = (reference(q, k, v, lengths).float() - exact).abs().mean()
        for kernel in segments_kernels(head_dim):
            out = torch.full_like(v, float("nan"))
            run = loaded_kernel(kernel, DEVICE)
            run(q, k, v, bounds_of(lengths), out, head_dim**-0.5, max(lengths))
            ours = (out.float() - exact).abs().mean()
            assert ours <= MARGIN * theirs, (kernel.name, lengths, ours, theirs)
    assert list(Family().faults(segments_kernels(head_dim), DEVICE)) == []


def test_parts_of_wider_rows_are_read_where_they_are_and_heads_of_keys_are_shared(tmp_path):
    load(72, tmp_path)
    torch.manual_seed(0)
    packed = torch.randn(640, 8, 72, dtype=torch.bfloat16, device=DEVICE)
    q, k, v = packed.split((4, 2, 2), 1)
    out = torch.empty(640, 4, 72, dtype=torch.bfloat16, device=DEVICE)
    segment_attention_by_kernel(q, k, v, bounds_of([400, 240]), out, 72**-0.5, "tower", 400)
    keys, values = (x.float().repeat_interleave(2, 1) for x in (k, v))
    exact = reference(q.float(), keys, values, [400, 240])
    assert (out.float() - exact).abs().mean() < 2e-3


def test_values_of_no_segment_are_never_summed(tmp_path):
    """A tile of keys may reach into the next image, or beyond the last row."""
    load(72, tmp_path)
    torch.manual_seed(0)
    q, k, v = (torch.randn(600, 4, 72, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    out, alone = torch.empty_like(q), torch.empty_like(q)
    segment_attention_by_kernel(q, k, v, bounds_of([300, 300]), out, 72**-0.5, "tower", 300)
    k[300:], v[300:] = 1e4, 1e4
    segment_attention_by_kernel(q, k, v, bounds_of([300, 300]), alone, 72**-0.5, "tower", 300)
    assert torch.equal(out[:300], alone[:300])
