"""The op of a tower's attention by kernels of the program (attend.cu): schema, fake, and their launch.

Registered as in runtime/ops/attention/layer_op.py.

Shape legend: N rows, H heads, Hk heads of keys, D head dim.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping

import torch

from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.driver import TensorMap, address_of
from mllm_compile.runtime.cuda.loaded import LoadedKernel
from mllm_compile.runtime.ops.segments.kernel import PANEL, SegmentsKernel, choose

_LOG2_E = math.log2(math.e)
_ALIGNED = 8  # numbers in 16 bytes, as TMA reads them
_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define(
    "segment_attention_by_kernel(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor(a!) out, float sm_scale, "
    "str layer_name, int longest=0) -> ()"
)


class _Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "tiles", "row")),
        ("scale", ctypes.c_float),
    )


class _Loaded(LoadedKernel[SegmentsKernel]):
    """One kernel."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        out: torch.Tensor,
        sm_scale: float,
        longest: int,
    ) -> None:
        """Arguments as the op's."""
        kernel = self.kernel
        parts = ((q, kernel.rows), (k, kernel.keys), (v, kernel.keys))
        maps = [self._map(x, rows, columns) for columns in (PANEL, kernel.rest_columns or PANEL) for x, rows in parts]
        num_heads, tiles = q.shape[1], math.ceil(longest / kernel.rows)
        sizes = _Sizes(num_heads, k.shape[1], tiles, num_heads * kernel.head_dim, sm_scale * _LOG2_E)
        num_blocks = tiles * num_heads * (len(cu_seqlens) - 1)
        self._loaded.launch(num_blocks, kernel.num_threads, (*maps, address_of(out), address_of(cu_seqlens), sizes))

    def _map(self, x: torch.Tensor, rows: int, columns: int) -> TensorMap:
        row, head, _ = x.stride()
        return self._maps.get(x, tensor_maps.heads, rows, columns, x.shape[1], row, head)


_LOADED: dict[tuple[int, int], dict[SegmentsKernel, _Loaded]] = {}  # by device index and D


def load_segments_kernels(
    kernels: Iterable[SegmentsKernel], binaries: Mapping[str, bytes], device: torch.device
) -> None:
    """Makes these kernels those that the op launches on `device`.

    Args:
        binaries: binaries by the kernel's name; checked by the caller: they are executed.

    Raises:
        ArtifactError: one is missing.
        DeviceError: one cannot be loaded.
    """
    for kernel in kernels:
        with torch.cuda.device(device):
            of_heads = _LOADED.setdefault((torch.cuda.current_device(), kernel.head_dim), {})
            _Loaded.load_once(of_heads, kernel, kernel, binaries)


def loaded_kernel(kernel: SegmentsKernel, device: torch.device) -> Callable[..., None]:
    """One of those that were loaded, for checks; called as the op, less the layer's name."""
    with torch.cuda.device(device):
        return _LOADED[torch.cuda.current_device(), kernel.head_dim][kernel]


def segment_attention_by_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layer_name: str,
    longest: int = 0,
) -> None:
    """Attends within segments, in both directions.

    Args:
        q: [N, H, D]; k, v: [N, Hk, D], bfloat16, H a multiple of Hk; parts of wider rows are read as they are.
        cu_seqlens: [segments + 1] int32: where segments begin, and N.
        out: [N, H, D], contiguous, written.
        sm_scale: factor on q·k, above zero.
        layer_name: for people.
        longest: rows of the longest segment; 0: not known, and N is taken.
    """
    loaded = _LOADED.get((q.get_device(), q.shape[2]))
    if not loaded:
        raise RuntimeError(f"no kernel is loaded for heads of {q.shape[2]} on {q.device}: call load_segments_kernels")
    q, k, v = (x if _is_readable(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    kernel = choose(loaded, len(cu_seqlens) - 1, longest or len(q), q.shape[1])
    loaded[kernel](q, k, v, cu_seqlens, out, sm_scale, longest or len(q))


def _is_readable(x: torch.Tensor) -> bool:
    """True if TMA reads heads of x where they are."""
    row, head, column = x.stride()
    return column == 1 and not (row % _ALIGNED or head % _ALIGNED or x.data_ptr() % (2 * _ALIGNED))


_LIBRARY.impl("segment_attention_by_kernel", segment_attention_by_kernel, "CUDA")
torch.library.register_fake("mllm::segment_attention_by_kernel", lambda *args: None, lib=_LIBRARY)
