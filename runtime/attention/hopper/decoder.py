"""Runs the kernels in the place of a piece of the program (attention/split/split_decode.py, DecodePiece).

Both are called with the inputs of a piece, the sinks last, and ignore its scratch. Given `rope_inputs` they norm and
rotate q and the new keys, and write these and the new values into the cache; q is then `rope_inputs`' q, of any stride.
Where they start early they fetch all keys but each row's own before the kernel ahead has ended.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping

import torch

from mllm_compile.runtime.attention.capture import RopeInputs
from mllm_compile.runtime.attention.hopper.clusters import ClusterKernel, choose_split, left_words, parts_per_head
from mllm_compile.runtime.attention.hopper.kernel import MISSING, DecodeKernel
from mllm_compile.runtime.attention.hopper.rotation import Rotation
from mllm_compile.runtime.attention.hopper.shares import MOST_REQUESTS, TILE, ShareKernel
from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.driver import address_of, load_kernel
from mllm_compile.runtime.cuda.tensor_maps import TensorMaps

_LOG2_E = math.log2(math.e)


class ClusterDecode:
    """Decodes of few requests, of layers that are alike; or verify steps, whose requests have several tokens.

    Rows of a request follow each other, as many as the kernels are made for. Each sees its length's keys. Rows behind
    its last token have length 0, and their outputs stay as they are.
    """

    def __init__(
        self,
        kernels: Iterable[ClusterKernel],
        binaries: Mapping[str, bytes],
        sm_scale: float,
        device: torch.device,
    ) -> None:
        """
        Args:
            kernels: one for each split that batches need, of as many tokens.
            binaries: binaries by name; checked by the caller: they are executed.
            sm_scale: factor of the products.

        Raises:
            ArtifactError: one is missing.
            DeviceError: one cannot be loaded.
        """
        kernels = tuple(kernels)
        self._scale = ctypes.c_float(sm_scale * _LOG2_E)  # to base 2
        self._maps = TensorMaps()
        with torch.cuda.device(device):
            self._kernels = {kernel.split: (kernel, load_kernel(kernel, binaries)) for kernel in kernels}
        # Data that clusters leave to each other within a launch; at its end all of it is MISSING again.
        self._tokens, self._together = kernels[0].tokens, kernels[0].together
        num_words = left_words(kernels[0].rows, self._kernels)
        self._left = torch.full((num_words,), MISSING, dtype=torch.int32, device=device)

    def __call__(
        self, inputs: list[torch.Tensor], rope_inputs: RopeInputs | None = None, starts_early: bool = True
    ) -> None:
        q, keys, values, page_table, seq_lens, out, *rest = inputs
        rotation = Rotation(q, keys, values, rope_inputs)
        num_sequences = out.shape[0] // self._tokens * (keys.shape[1] // self._together)
        split = choose_split(num_sequences, self._kernels)
        kernel, loaded = self._kernels[split]
        parts = parts_per_head(num_sequences, split)
        maps = [self._maps.get(cache.flatten(1), tensor_maps.rows, kernel.box_rows) for cache in (keys, values)]
        loaded.launch(
            num_sequences * parts * split,
            kernel.num_threads,
            (
                *maps,
                *map(address_of, (rotation.q, page_table, seq_lens, out, self._left)),
                ctypes.c_int(parts),
                ctypes.c_int(page_table.shape[1]),
                self._scale,
                rotation.argument,
                _sinks_of(kernel, rest),
            ),
            starts_early,
        )


class ShareDecode:
    """Decodes of any number of requests, of layers that are alike, one after another."""

    def __init__(
        self, kernel: ShareKernel, binaries: Mapping[str, bytes], sm_scale: float, device: torch.device
    ) -> None:
        """Arguments and errors: as ClusterDecode, of one kernel."""
        self._scale = ctypes.c_float(sm_scale * _LOG2_E)  # to base 2
        self._kernel = kernel
        self._maps = TensorMaps()
        with torch.cuda.device(device):
            self._loaded = load_kernel(kernel, binaries)
        # Parts that blocks leave to each other within a launch, at whose end all of them are MISSING again.
        num_words = kernel.num_blocks * kernel.warps * kernel.part_floats
        self._parts = torch.full((num_words,), MISSING, dtype=torch.int32, device=device)

    def __call__(
        self, inputs: list[torch.Tensor], rope_inputs: RopeInputs | None = None, starts_early: bool = True
    ) -> None:
        """Raises ValueError for more requests than the kernel counts."""
        q, keys, values, page_table, seq_lens, out, *rest = inputs
        rotation = Rotation(q, keys, values, rope_inputs)
        num_requests = out.shape[0]
        if num_requests > MOST_REQUESTS:
            raise ValueError(f"{num_requests} requests decode; the kernel counts up to {MOST_REQUESTS}")
        boxes = (tensor_maps.panels, TILE, self._kernel.box_panels)
        maps = [self._maps.get(cache.flatten(1), *boxes) for cache in (keys, values)]
        self._loaded.launch(
            self._kernel.num_blocks,
            self._kernel.num_threads,
            (
                *maps,
                *map(address_of, (rotation.q, page_table, seq_lens, out, self._parts)),
                ctypes.c_int(num_requests),
                ctypes.c_int(page_table.shape[1]),
                self._scale,
                rotation.argument,
                _sinks_of(self._kernel, rest),
            ),
            starts_early,
        )


def _sinks_of(kernel: DecodeKernel, rest: list[torch.Tensor]) -> ctypes.c_void_p:
    """The launch's argument: behind a piece's other inputs, for a kernel that takes sinks."""
    return address_of(rest[-1]) if kernel.sinks else ctypes.c_void_p(None)
