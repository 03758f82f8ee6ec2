"""Runs the kernel for few requests in the place of a piece of the program (attention/split_decode.py, DecodePiece)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping

import torch

from mllm_compile.runtime.attention.split_decode import DecodePiece
from mllm_compile.runtime.cluster_decode.shapes import ClusterKernel, choose_split, has_few_blocks
from mllm_compile.runtime.cuda.driver import TensorMaps, address_of, load_kernel

_LOG2_E = math.log2(math.e)


class ClusterDecode:
    """Decodes of layers that are alike; called with a piece's inputs, of which it needs no scratch."""

    def __init__(
        self,
        kernels: Iterable[ClusterKernel],
        binaries: Mapping[str, bytes],
        sm_scale: float,
        device: torch.device,
        of_few_blocks: DecodePiece | None = None,
    ) -> None:
        """
        Args:
            kernels: one for each split.
            binaries: by name; checked by the caller: they are executed.
            sm_scale: of the products.
            of_few_blocks: what decodes in their place where there would be too few blocks for long requests
                (shapes.has_few_blocks), if requests may be long.

        Raises:
            ArtifactError: one is missing.
            DeviceError: one cannot be loaded.
        """
        self._scale = ctypes.c_float(sm_scale * _LOG2_E)
        self._maps = TensorMaps()
        self._of_few_blocks = of_few_blocks
        with torch.cuda.device(device):
            self._kernels = {kernel.split: (kernel, load_kernel(kernel, binaries)) for kernel in kernels}

    def __call__(self, inputs: list[torch.Tensor]) -> None:
        q, keys, values, page_table, seq_lens, out, *_ = inputs
        num_sequences = q.shape[0] * keys.shape[1]
        if self._of_few_blocks is not None and has_few_blocks(num_sequences):
            self._of_few_blocks(inputs)
            return
        split = choose_split(num_sequences)
        kernel, loaded = self._kernels[split]
        maps = [self._maps.get(cache.flatten(1), kernel.box_rows) for cache in (keys, values)]
        loaded.launch(
            num_sequences * split,
            kernel.num_threads,
            (
                *maps,
                *map(address_of, (q, page_table, seq_lens, out)),
                ctypes.c_int(page_table.shape[1]),
                self._scale,
            ),
        )
