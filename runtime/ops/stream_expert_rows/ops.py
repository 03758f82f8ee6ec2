"""The op that pieces for few tokens of a mixture of experts call on Hopper: schema, fake, and launches of the runtime's
own binaries.

Registered as in runtime/ops/attention/layer_op.py.

Shape legend: T tokens, k experts a token, R = T·k rows, E experts, N rows and K columns of an expert's weight, B rows
of a block of `order`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import torch

from mllm_compile.runtime.cuda.driver import Argument, address_of
from mllm_compile.runtime.cuda.loaded import LoadedKernel
from mllm_compile.runtime.cuda.tensor_maps import aligned
from mllm_compile.runtime.ops.stream_expert_rows.kernel import ExpertRowsKernel

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")


class _Loaded(LoadedKernel[ExpertRowsKernel]):
    """One kernel."""

    def __call__(self, *arguments: Argument) -> None:
        self._loaded.launch(self.kernel.num_blocks, self.kernel.num_threads, arguments)


_LOADED: dict[tuple[int, ExpertRowsKernel], _Loaded] = {}  # by device index


def load_expert_rows(kernels: Iterable[ExpertRowsKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
    """Makes these kernels those that the op launches on `device`.

    Args:
        binaries: binaries by the kernel's name; checked by the caller: they are executed.

    Raises:
        ArtifactError: one is missing.
        DeviceError: one cannot be loaded.
    """
    for kernel in kernels:
        with torch.cuda.device(device):
            _Loaded.load_once(_LOADED, (torch.cuda.current_device(), kernel), kernel, binaries)


def rows_kernel(
    values: torch.Tensor,
    bias: torch.Tensor | None,
    num_chosen: int,
    of_tokens: bool,
    swiglu: bool,
    is_early: bool,
    block: int,
) -> ExpertRowsKernel:
    """The kernel of a call of stream_expert_rows."""
    experts, rows, half = map(int, values.shape)
    return ExpertRowsKernel(experts, num_chosen, rows, 2 * half, block, of_tokens, swiglu, bias is not None, is_early)


_LIBRARY.define(
    "stream_expert_rows(Tensor x, Tensor order, Tensor? blocks, Tensor values, Tensor scales, Tensor? bias, "
    "int num_chosen, bool of_tokens, bool swiglu, float alpha, float limit, bool is_early, int block) -> Tensor"
)


def stream_expert_rows(
    x: torch.Tensor,
    order: torch.Tensor,
    blocks: torch.Tensor | None,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    num_chosen: int,
    of_tokens: bool,
    swiglu: bool,
    alpha: float,
    limit: float,
    is_early: bool,
    block: int,
) -> torch.Tensor:
    """x · weightᵀ + bias of each row's expert, whose weight is in MXFP4.

    Args:
        x: bfloat16, [T, K] if `of_tokens`, row t·k + j reads token t; else [R, K].
        order, blocks: what order_experts gave for `block`; with a block of ONE_ROW the ids [1, k] int64 of one token,
            and None.
        values, scales: [E, N, K / 2] and [E, N, K / 32] uint8.
        bias: [E, N] bfloat16, or None.
        swiglu: of each pair of outputs, g and u, give g · sigmoid(alpha · g) · (u + 1), with g at most `limit`, and u
            within ± `limit`; the outputs are rounded before, the result once.
        is_early: the launch reads `order` and `blocks` ahead of its wait: a kernel between theirs and this one has
            waited for them.

    Returns:
        [R, N] bfloat16, or [R, N / 2] with `swiglu`. Rows of padding are 0, those whose id is no expert's NaN.
    """
    kernel = rows_kernel(values, bias, num_chosen, of_tokens, swiglu, is_early, block)
    loaded = _LOADED.get((x.get_device(), kernel))
    if loaded is None:
        raise RuntimeError(f"no kernel {kernel.name} is loaded on {x.device}: call load_expert_rows")
    out = _new_output(x, values, num_chosen, of_tokens, swiglu)
    x, order = aligned(x), order.contiguous()
    num_blocks = num_chosen if blocks is None else len(blocks)
    loaded(
        *map(address_of, (values, scales, bias, x, order, blocks, out)),
        ctypes.c_float(alpha),
        ctypes.c_float(limit),
        ctypes.c_int(num_blocks),
    )
    return out


def _new_output(x: torch.Tensor, values: torch.Tensor, num_chosen: int, of_tokens: bool, swiglu: bool) -> torch.Tensor:
    num_rows = x.shape[0] * num_chosen if of_tokens else x.shape[0]
    return x.new_empty((num_rows, values.shape[1] // (2 if swiglu else 1)))


_LIBRARY.impl("stream_expert_rows", stream_expert_rows, "CUDA")
torch.library.register_fake(
    "mllm::stream_expert_rows",
    lambda x, order, blocks, values, scales, bias, num_chosen, of_tokens, swiglu, *how: _new_output(
        x, values, num_chosen, of_tokens, swiglu
    ),
    lib=_LIBRARY,
)
