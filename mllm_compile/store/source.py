"""Loads a cached runtime onto a device for ModelRunner: constants, weights, pieces, kernels, executor.

Imports neither transformers, Dynamo nor Inductor. Pieces and kernels are loaded while weights stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

import torch

from mllm_compile.errors import ArtifactError
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.attention.hopper.clusters import ClusterKernel
from mllm_compile.runtime.attention.hopper.decoder import ClusterDecode, ShareDecode
from mllm_compile.runtime.attention.hopper.shares import ShareKernel
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.split.split_decode import DecodePiece, Decoder, Decoders
from mllm_compile.runtime.ops import load_kernels
from mllm_compile.runtime.program.executor import PieceFunction, ProgramExecutor
from mllm_compile.runtime.program.loaded import DecodeLoopPieces, LoadedModel
from mllm_compile.runtime.program.pieces import PackagedPiece, SourcePiece, load_piece
from mllm_compile.runtime.program.spec import DecodeForm, DecodeLoopForms, Program, SamplingForms
from mllm_compile.runtime.sampling.sampler import SamplingPieces
from mllm_compile.runtime.weights.loader import allocate_weights, fill_random, load_weights
from mllm_compile.store.artifact import CONSTANTS, Artifact

if TYPE_CHECKING:
    from mllm_compile.store.opened import CompiledRuntime


class ArtifactSource:
    """A ModelSource over a compiled runtime and the folder that its weights are in."""

    def __init__(self, runtime: CompiledRuntime, reporter: Reporter) -> None:
        self._artifact = runtime.artifact
        self._config = runtime.config
        self._weights_root = runtime.weights_root
        self._reporter = reporter
        beside = ThreadPoolExecutor(1, thread_name_prefix="kernels")
        self._kernels = beside.submit(self._find_kernels)
        beside.shutdown(wait=False)

    @property
    def weight_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self._artifact.weights)

    def load(self, device: torch.device) -> LoadedModel:
        """Brings program and weights to `device`.

        Raises:
            ArtifactError: a piece cannot be loaded on this machine.
            DamagedWeightsError: packed weights are not those that were packed.
            CheckpointError: a weight file is missing, truncated, or not the one that was compiled for.
        """
        artifact = self._artifact
        with self._reporter.stage("load model"), ThreadPoolExecutor(1, thread_name_prefix="pieces") as beside:
            pieces = beside.submit(self._load_pieces, device)
            weights = self._load_weights(device)
            self._kernels.result()
            loaded = pieces.result()
            executor = ProgramExecutor(artifact.program, loaded, weights)
        sizes = artifact.sizes
        return LoadedModel(
            executor=executor,
            layers=tuple(AttentionLayer.of(layer, executor.weights) for layer in artifact.program.layers),
            decoders=load_decoders(artifact.program, loaded, artifact.cubins, device),
            sampling=_sampling_pieces(artifact.program.sampling, loaded),
            decode_loop=_decode_loop_pieces(artifact.program.decode_loop, loaded),
            num_attention_heads=sizes.num_attention_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            hidden_size=sizes.hidden_size,
            vocab_size=sizes.vocab_size,
            num_hidden_layers=sizes.num_hidden_layers,
            context_len=sizes.context_len,
        )

    def _load_pieces(self, device: torch.device) -> dict[str, PackagedPiece | SourcePiece]:
        suffix = self._artifact.manifest.piece_suffix
        with self._reporter.stage("load pieces"), current_device(device):
            load_kernels(self._artifact.program.kernels, self._artifact.cubins, device)
            return {piece: load_piece(piece + suffix, data) for piece, data in self._artifact.pieces.items()}

    def _find_kernels(self) -> None:
        """Imports FlashInfer, which takes seconds and so begins first, and finds the runtime's kernels."""
        folder = self._artifact.kernels_folder
        if folder is None:
            return
        from mllm_compile.runtime.attention.flashinfer.kernel_folder import use_kernels_from

        with self._reporter.stage("load FlashInfer"):
            use_kernels_from(folder)

    def _load_weights(self, device: torch.device) -> dict[str, torch.Tensor]:
        specs = self._artifact.weights
        with current_device(device):
            weights = allocate_weights(specs, str(device))
            with self._reporter.stage("load weights", total=self.weight_bytes) as stage:
                if self._artifact.manifest.weights.are_random:
                    fill_random(specs, weights, self._config.runtime.seed)
                else:
                    with self._artifact.trusted.naming_itself():
                        load_weights(specs, weights, self._weights_root, stage.advance)
        return weights | _load_constants(self._artifact, device)


def load_decoders(
    program: Program, pieces: Mapping[str, PieceFunction], cubins: Mapping[str, bytes], device: torch.device
) -> dict[str, Decoders]:
    """Layer → its decoders; layers that are alike share them.

    Raises:
        ArtifactError, DeviceError: a kernel is missing or cannot be loaded.
    """

    @cache
    def of(form: DecodeForm, sm_scale: float) -> Decoder:
        piece: DecodePiece
        if form.piece is not None:
            piece = pieces[form.piece]
        elif isinstance(form.kernels[0], ShareKernel):
            piece = ShareDecode(form.kernels[0], cubins, sm_scale, device)
        else:
            clusters = [kernel for kernel in form.kernels if isinstance(kernel, ClusterKernel)]
            piece = ClusterDecode(clusters, cubins, sm_scale, device)
        return Decoder(piece, form.most_sequences, form.splits, rotates=bool(form.kernels))

    scales = {layer.name: layer.sm_scale for layer in program.layers}
    return {
        layer: tuple(of(form, scales[layer]) for form in forms) for layer, forms in program.decode_attention.items()
    }


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes the device this thread's current one: a package is loaded onto that."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _sampling_pieces(
    forms: SamplingForms | None, loaded: Mapping[str, PackagedPiece | SourcePiece]
) -> SamplingPieces | None:
    if forms is None:
        return None
    return SamplingPieces(getattr(torch, forms.dtype), *(loaded[piece] for piece in forms.piece_ids()))


def _decode_loop_pieces(
    forms: DecodeLoopForms | None, loaded: Mapping[str, PackagedPiece | SourcePiece]
) -> DecodeLoopPieces | None:
    return None if forms is None else DecodeLoopPieces(*(loaded[piece] for piece in forms.piece_ids()))


def _load_constants(artifact: Artifact, device: torch.device) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    if not artifact.constants:
        return {}
    constants = {name: value.to(device) for name, value in load(artifact.constants_data).items()}
    if set(constants) != set(artifact.constants):
        raise ArtifactError(
            f"{artifact.folder / CONSTANTS} does not hold the program's constants; compile the model again"
        )
    return constants
