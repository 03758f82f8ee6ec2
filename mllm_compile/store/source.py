"""Loads a cached runtime onto a device for ModelRunner: constants, weights, pieces and kernels, which
runtime/program/link.py binds.

Imports neither transformers, Dynamo nor Inductor. Pieces and kernels are loaded while weights stream.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import ReferenceType, ref

import torch

from mllm_compile.checkpoint.quantised import lines_on_weights
from mllm_compile.config.resolution.seen_images import images_obstacle
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import ArtifactError
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.device.arena import Arena, arena_on
from mllm_compile.runtime.ops.panels.layout import put_in_panels
from mllm_compile.runtime.program.link import LinkedProgram, current_device, link
from mllm_compile.runtime.program.loaded import LoadedModel
from mllm_compile.runtime.program.pieces import load_piece
from mllm_compile.runtime.program.projection import Projection
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.stages import stage_program
from mllm_compile.runtime.runner_config import RunnerConfig
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.runtime.updates.places import Places
from mllm_compile.runtime.weights.loader import allocate_weights, fill_random, load_weights
from mllm_compile.runtime.weights.spec import Factor
from mllm_compile.store.artifact import CONSTANTS, Artifact
from mllm_compile.store.shared_weights import shared_weights

if TYPE_CHECKING:
    from mllm_compile.store.opened import CompiledRuntime

_T = TypeVar("_T")


def runner_config(config: ResolvedConfig) -> RunnerConfig:
    """The runner's part of a config."""
    return RunnerConfig(
        dtype=getattr(torch, config.model.dtype),
        runtime=config.runtime,
        cudagraph=config.cudagraph,
        speculative=config.speculative,
        lora=config.lora,
    )


class ArtifactSource:
    """A ModelSource over a compiled runtime and the folder that its weights are in."""

    def __init__(
        self, runtime: CompiledRuntime, reporter: Reporter, rank: int = 0, lender: ArtifactSource | None = None
    ) -> None:
        """
        Args:
            lender: the source of the model that `runtime` drafts for, which is loaded before: weights that both have
                are the model's (shared_weights.py).
        """
        self._runtime, self._artifact = runtime, runtime.artifact
        section = runtime.config.runtime
        self._rank = section.part_of(rank)
        self._stage = stage_program(runtime.artifact.program, section.stage_of(rank))
        self._weights = runtime.artifact.weights_of(self._rank)
        if runtime.artifact.program.stages:
            names = set(self._program.every_weight())
            self._weights = tuple(spec for spec in self._weights if spec.name in names)
        self._lender = lender
        self._lent = {} if lender is None else shared_weights(lender._runtime, runtime)
        self._loaded: ReferenceType[LiveWeights] | None = None
        self._config = runtime.config
        self._weights_root = runtime.weights_root
        self._reporter = reporter
        self._kernels = _beside("kernels", self._find_kernels)
        self._linking: Future[LinkedProgram] | None = None

    @property
    def _program(self) -> Program:
        return self._stage.program

    @property
    def weight_bytes(self) -> int:
        lora = self._program.lora
        of_adapters = 0 if lora is None else lora.layout.num_bytes
        return sum(spec.num_bytes for spec in self._weights if spec.name not in self._lent) + of_adapters

    def begin(self, device: torch.device) -> None:
        """Begins to load pieces and kernels, beside the caller."""
        self._begun(device)

    def _begun(self, device: torch.device) -> Future[LinkedProgram]:
        if self._linking is None:
            self._linking = _beside("pieces", partial(self._link, device))
        return self._linking

    def load(self, device: torch.device) -> LoadedModel:
        """Brings program and weights to `device`.

        Raises:
            ArtifactError: a piece cannot be loaded on this machine.
            DamagedWeightsError: packed weights are not those that were packed.
            CheckpointError: a weight file is missing, truncated, or not the one that was compiled for.
        """
        artifact = self._artifact
        with self._reporter.stage("load model"):
            linking = self._begun(device)
            arena = arena_on(device) if self._config.runtime.enable_sleep_mode else None
            live = self._load_weights(device, arena)
            self._loaded = ref(live)
            weights = {**live.tensors, **load_constants(artifact, device)}
            self._kernels.result()
            linked = linking.result()
            self._linking = None
            executor, layers = linked.bind(weights, self._rank)
            lora = linked.bind_lora(weights, device, self._rank)
        sizes, num_ranks = artifact.sizes, self._config.runtime.expert_parallel_size
        return LoadedModel(
            executor=executor,
            layers=layers,
            state_layers=self._program.state_layers,
            layer_kernels=linked.layer_kernels,
            sampling=linked.sampling,
            decode_loop=linked.decode_loop,
            verify=linked.verify,
            kernels=self._program.every_cuda_kernel(),
            media=linked.bind_media(weights),
            pooling=linked.bind_pooling(weights),
            sources=linked.bind_sources(weights),
            images=linked.bind_images(weights) if images_obstacle(self._config) is None else None,
            lora=lora,
            live=live,
            arena=arena,
            reads_hidden_states="hidden_states" in self._program.inputs,
            projection=None if self._program.projection is None else Projection.of(self._program.projection, weights),
            block=self._program.block,
            has_experts=bool(self._program.expert_weights),
            num_experts={
                # Of weights that are spread over ranks, which are all that such a program counts.
                name.rpartition(".")[0]: self._program.expert_weights[name].num_experts * num_ranks
                for name in self._program.counted_experts
            },
            num_attention_heads=sizes.num_attention_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            hidden_size=sizes.hidden_size,
            vocab_size=sizes.vocab_size,
            num_hidden_layers=sizes.num_hidden_layers,
            context_len=sizes.context_len,
            rope=self._program.rope,
            stage=self._stage if artifact.program.stages else None,
        )

    def _link(self, device: torch.device) -> LinkedProgram:
        artifact = self._artifact
        suffix = artifact.manifest.piece_suffix
        with self._reporter.stage("load pieces"), current_device(device):
            own = self._program.every_piece_id()
            pieces = {piece: load_piece(piece + suffix, artifact.pieces[piece]) for piece in own}
            return link(self._program, pieces, artifact.binaries, device)

    def _find_kernels(self) -> None:
        """Imports FlashInfer, which takes seconds and so begins first, and finds the runtime's kernels."""
        folder = self._artifact.kernels_folder
        if folder is None:
            return
        from mllm_compile.runtime.attention.flashinfer.library import use_kernels_from

        with self._reporter.stage("load FlashInfer"):
            use_kernels_from(folder)

    def _load_weights(self, device: torch.device, arena: Arena | None) -> LiveWeights:
        lent, artifact = self._weights_of_lender(), self._artifact
        specs = [spec for spec in self._weights if spec.name not in lent]
        factors: dict[Factor, float] = {}
        with current_device(device):
            weights = allocate_weights(specs, str(device), arena)
            for line in lines_on_weights(specs, self._config.model.dtype):
                self._reporter.tell(line)
            total = sum(spec.num_bytes_read for spec in specs)
            with self._reporter.stage("load weights", total=total) as stage:
                if artifact.manifest.weights.are_random:
                    fill_random(specs, weights, self._config.runtime.seed)
                else:
                    with artifact.trusted.naming_itself():
                        factors = load_weights(specs, weights, self._weights_root, stage.advance)
                panels = self._program.every_panels()
                for name, unit in panels.items():
                    if name not in lent:
                        put_in_panels(weights[name], unit)
        num_ranks = 1 + len(artifact.further_weights)
        return LiveWeights(self._weights, weights | lent, panels, factors, self._find_places, self._rank, num_ranks)

    def _weights_of_lender(self) -> dict[str, torch.Tensor]:
        """The weights that the model has already."""
        if not self._lent:
            return {}
        loaded = None if self._lender is None or self._lender._loaded is None else self._lender._loaded()
        if loaded is None:
            raise RuntimeError("internal error: a draft model was loaded ahead of the model that lends it weights")
        return {name: loaded.tensors[other] for name, other in self._lent.items()}

    def _find_places(self, rank: int) -> Places:
        """The places of tensors that an update brings to a rank."""
        artifact = self._artifact
        ranks = (artifact.weights, *artifact.further_weights)
        return Places(artifact.tensor_names(), None if artifact.manifest.weights.are_random else ranks, rank)


def _beside(name: str, work: Callable[[], _T]) -> Future[_T]:
    """Begins the work in a thread of its own."""
    thread = ThreadPoolExecutor(1, thread_name_prefix=name)
    result = thread.submit(work)
    thread.shutdown(wait=False)
    return result


def load_constants(artifact: Artifact, device: torch.device) -> dict[str, torch.Tensor]:
    """The program's weights that no checkpoint holds, on `device`.

    Raises:
        ArtifactError: the file does not hold what the program names.
    """
    from safetensors.torch import load

    if not artifact.constants:
        return {}
    constants = {name: value.to(device) for name, value in load(artifact.constants_data).items()}
    if set(constants) != set(artifact.constants):
        raise ArtifactError(
            f"{artifact.folder / CONSTANTS} does not hold the program's constants; compile the model again"
        )
    return constants
