"""Binds a program to what was compiled for it: pieces and kernels on a device, then weights.

An engine (store/source.py) and the self-check (check/program.py) do it here, so that the checked program is the one
that serves. executor.py runs the steps. Parts that steps do not call (decode attention, the choice of tokens) go to
their users by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from mllm_compile.runtime.attention.hopper.clusters import ClusterKernel
from mllm_compile.runtime.attention.hopper.decoder import ClusterDecode, ShareDecode
from mllm_compile.runtime.attention.hopper.shares import ShareKernel
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.layer_kernels import DecodeVariant, LinkedKernels, StoredKernels
from mllm_compile.runtime.attention.paged.attend import PagedAttention
from mllm_compile.runtime.attention.split.split_decode import DecodePiece, LinkedDecode
from mllm_compile.runtime.cpu.library import CpuLibrary
from mllm_compile.runtime.cpu.load import load_library
from mllm_compile.runtime.lora.pool import LoraPool
from mllm_compile.runtime.ops import load_kernels
from mllm_compile.runtime.ops.panels.library import PANEL_LINEARS
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.linked_steps import PieceFunction
from mllm_compile.runtime.program.loaded import (
    DecodeLoopPieces,
    ImageExecutors,
    LoadedLora,
    MediaExecutors,
    PoolingExecutors,
    SourceExecutors,
    VerifyPieces,
)
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.sampling.sampler import SamplingPieces


@dataclass(frozen=True)
class LinkedProgram:
    """A program with its pieces and kernels on a device.

    Attributes:
        pieces: piece id → compiled function, of all that the program names.
        layer_kernels: layer → its own kernels, where it has some; layers that are alike share them.
        sampling: the kernels that choose tokens; None: torch chooses.
        decode_loop: the kernels around a captured decode, if the program has them.
        verify: those around a captured verify step, likewise.
    """

    program: Program
    pieces: Mapping[str, PieceFunction]
    layer_kernels: Mapping[str, LinkedKernels]
    sampling: SamplingPieces | None
    decode_loop: DecodeLoopPieces | None
    verify: VerifyPieces | None

    def bind_media(self, weights: Mapping[str, torch.Tensor]) -> MediaExecutors | None:
        """The programs for images over `weights`; None of a model without media.

        Raises:
            ArtifactError: as bind.
        """
        media = self.program.media
        if media is None:
            return None
        with_features, tower, *sound_tower = (ProgramExecutor(one, self.pieces, weights) for one in media.programs)
        return MediaExecutors(with_features, tower, media.facts, *sound_tower)

    def bind_pooling(self, weights: Mapping[str, torch.Tensor]) -> PoolingExecutors | None:
        """The head of a model that pools over `weights`; None of another model.

        Raises:
            ArtifactError: as bind.
        """
        pooling = self.program.pooling
        if pooling is None:
            return None
        head = None if pooling.head is None else ProgramExecutor(pooling.head, self.pieces, weights)
        return PoolingExecutors(pooling.facts, head)

    def bind_sources(self, weights: Mapping[str, torch.Tensor]) -> SourceExecutors | None:
        """The program of sources over `weights`; None of a model that is no encoder-decoder.

        Raises:
            ArtifactError: as bind.
        """
        source = self.program.source
        if source is None:
            return None
        layers = tuple(AttentionLayer.of(layer, weights) for layer in self.program.cross_layers)
        return SourceExecutors(source.facts, ProgramExecutor(source.program, self.pieces, weights), layers)

    def bind_images(self, weights: Mapping[str, torch.Tensor]) -> ImageExecutors | None:
        """The programs for images that layers attend to, over `weights`; None of another model.

        Raises:
            ArtifactError: as bind.
        """
        images = self.program.images
        if images is None:
            return None
        text, tower = (ProgramExecutor(one, self.pieces, weights) for one in images.programs)
        layers = tuple(AttentionLayer.of(layer, weights) for layer in images.text.cross_layers)
        return ImageExecutors(images.facts, text, tower, layers)

    def bind_lora(self, weights: Mapping[str, torch.Tensor], device: torch.device, rank: int = 0) -> LoadedLora | None:
        """The rank's programs for adapters over `weights`, with memory for them; None without them.

        Raises:
            ArtifactError: as bind.
        """
        lora = self.program.lora
        if lora is None:
            return None
        pool = LoraPool(lora.layout, device, rank)
        tensors = {**weights, **pool.buffers}
        executor, *others = (ProgramExecutor(one, self.pieces, tensors) for one in lora.programs)
        return LoadedLora(executor, pool, *others)

    def bind(
        self, weights: Mapping[str, torch.Tensor], rank: int = 0
    ) -> tuple[ProgramExecutor, tuple[AttentionLayer, ...]]:
        """The rank's program over `weights` (name → tensor, in its final place), and its layers by layer_id.

        Raises:
            ArtifactError: a weight, a layer or a value that the program names is not there.
        """
        executor = ProgramExecutor(self.program, self.pieces, weights)
        return executor, tuple(AttentionLayer.of(layer, executor.weights, rank) for layer in self.program.layers)


def link(
    program: Program, pieces: Mapping[str, PieceFunction], binaries: Mapping[str, bytes], device: torch.device
) -> LinkedProgram:
    """Loads the program's kernels onto `device`, and hands its pieces to their callers.

    Args:
        pieces: piece id → compiled function.
        binaries: of program.every_cuda_kernel() and every_library() by name; checked by the caller: they are executed.

    Raises:
        ArtifactError, DeviceError: a kernel or a library is missing or cannot be loaded.
    """
    with current_device(device):
        for one in program.every:
            load_kernels(one.kernels, binaries, device)
            if one.panels:
                load_library(PANEL_LINEARS, binaries)
        layer_kernels = _layer_kernels(program, pieces, binaries, device)
    sampling, loop, verify = program.sampling, program.decode_loop, program.verify
    return LinkedProgram(
        program,
        pieces,
        layer_kernels,
        None
        if sampling is None
        else SamplingPieces(getattr(torch, sampling.dtype), *(pieces[piece] for piece in sampling.piece_ids())),
        None if loop is None else DecodeLoopPieces(*(pieces[piece] for piece in loop.piece_ids())),
        None if verify is None else VerifyPieces(*(pieces[piece] for piece in verify.piece_ids())),
    )


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes the device this thread's current one: a package is loaded onto that."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _layer_kernels(
    program: Program, pieces: Mapping[str, PieceFunction], binaries: Mapping[str, bytes], device: torch.device
) -> dict[str, LinkedKernels]:
    """Each layer's own kernels; layers that are alike share them."""

    @cache
    def decoder_of(variant: DecodeVariant, sm_scale: float) -> LinkedDecode:
        piece: DecodePiece
        if variant.piece is not None:
            piece = pieces[variant.piece]
        elif isinstance(variant.kernels[0], ShareKernel):
            piece = ShareDecode(variant.kernels[0], binaries, sm_scale, device)
        else:
            clusters = [kernel for kernel in variant.kernels if isinstance(kernel, ClusterKernel)]
            piece = ClusterDecode(clusters, binaries, sm_scale, device)
        most, fuses_rope = variant.most_sequences, variant.fuses_rope
        return LinkedDecode(piece, most, variant.splits, fuses_rope, variant.tokens)

    @cache
    def paged(library: CpuLibrary) -> PagedAttention:
        return PagedAttention(load_library(library, binaries))

    @cache
    def linked(kernels: StoredKernels, sm_scale: float) -> LinkedKernels:
        return kernels.linked(lambda variant: decoder_of(variant, sm_scale), lambda piece: pieces[piece], paged)

    scales = {layer.name: layer.sm_scale for layer in (*program.layers, *program.cross_layers)}
    return {layer: linked(kernels, scales.get(layer, 0.0)) for layer, kernels in program.layer_kernels.items()}
