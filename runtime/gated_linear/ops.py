"""The op that pieces for many tokens call on Hopper: schema, fake, and the launch of the runtime's own binaries.

Registered as runtime/ops.py has it.

Shape legend: N rows (gates, then ups) and K columns of the weight.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping

import torch

from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.driver import address_of, load_kernel
from mllm_compile.runtime.cuda.tensor_maps import TensorMaps, aligned
from mllm_compile.runtime.gated_linear.kernel import GatedKernel, choose, launches

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")


class _Loaded:
    """One kernel."""

    def __init__(self, kernel: GatedKernel, binaries: Mapping[str, bytes]) -> None:
        self._kernel = kernel
        self._loaded = load_kernel(kernel, binaries)
        self.binary = binaries[kernel.name]
        self._maps = TensorMaps()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """x [T, K], weight [N, K] → out [T, N / 2]."""
        num_tokens = len(x)
        box = self._kernel.box_tokens(num_tokens)
        arguments = (
            self._maps.get(weight, tensor_maps.spread_halves),
            self._maps.get(x, tensor_maps.rows, box),
            address_of(out),
            ctypes.c_int(num_tokens),
            ctypes.c_int(box),
        )
        self._loaded.launch(self._kernel.num_blocks(num_tokens), self._kernel.num_threads, arguments)


# By device index and the weight's shape; those of one differ in their tiles.
_LOADED: dict[tuple[int, int, int], dict[GatedKernel, _Loaded]] = {}


def load_gated_kernels(kernels: Iterable[GatedKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
    """Makes these kernels those that the op launches on `device`.

    Args:
        binaries: by the kernel's name; checked by the caller: they are executed.

    Raises:
        ArtifactError: one is missing.
        DeviceError: one cannot be loaded.
    """
    for kernel in kernels:
        with torch.cuda.device(device):
            of_weight = _LOADED.setdefault((torch.cuda.current_device(), kernel.rows, kernel.columns), {})
            loaded, binary = of_weight.get(kernel), binaries.get(kernel.name)
            if loaded is None or loaded.binary != binary:  # once for a process's engines
                of_weight[kernel] = _Loaded(kernel, binaries)


_LIBRARY.define("gated_linear(Tensor x, Tensor weight) -> Tensor")


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x · gateᵀ) * (x · upᵀ), rounded where the three operations round.

    Args:
        x: […, K] bfloat16, of any number of tokens.
        weight: [N, K] bfloat16: gate rows, then up rows.

    Returns:
        […, N / 2] bfloat16.
    """
    num_tokens = math.prod(x.shape[:-1])
    parts = launches(num_tokens)
    if not parts:
        gate, up = torch.nn.functional.linear(x, weight).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    x = aligned(x)
    out = _new_output(x, weight)
    rows, columns = map(int, weight.shape)
    of_weight = _LOADED.get((x.get_device(), rows, columns))
    if of_weight is None:
        raise RuntimeError(
            f"no kernel is loaded for a weight {rows} x {columns} on {x.device}: call load_gated_kernels"
        )
    all_x, all_out, start = x.view(num_tokens, -1), out.view(num_tokens, -1), 0
    for count in parts:
        kernel = of_weight[choose(of_weight, count)]
        kernel(all_x[start : start + count], weight, all_out[start : start + count])
        start += count
    return out


def _new_output(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


_LIBRARY.impl("gated_linear", gated_linear, "CUDA")
torch.library.register_fake("mllm::gated_linear", _new_output, lib=_LIBRARY)
