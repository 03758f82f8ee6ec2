"""The models that a runner takes: one that can be loaded, and one that has been."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.layer_kernels import LinkedKernels
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.device.arena import Arena
from mllm_compile.runtime.lora.pool import LoraPool
from mllm_compile.runtime.media.tiles import TileTower
from mllm_compile.runtime.media.tower import Tower
from mllm_compile.runtime.pooling.facts import PoolingFacts
from mllm_compile.runtime.program.projection import Projection
from mllm_compile.runtime.program.stages import StageProgram
from mllm_compile.runtime.sampling.sampler import SamplingPieces
from mllm_compile.runtime.schedule.rope_lengths import RopeLengths
from mllm_compile.runtime.sources.facts import SourceFacts
from mllm_compile.runtime.speculation.block import DraftBlock
from mllm_compile.runtime.state.layer import StateLayer
from mllm_compile.runtime.updates.live import LiveWeights


class Executor(Protocol):
    """A model as a function of flat tokens, in two halves. Runs inside a forward context."""

    def body(self, inputs: Mapping[str, torch.Tensor], all_rows: torch.Tensor | None = None) -> Any:
        """The part that works on tokens: {'input_ids': [T] int64, 'positions': [T] int64} → whatever `head` takes.

        With `all_rows` (0 to T - 1, int64) as much as can be is done for all tokens, not by `head` for some."""

    def head(self, body: Any, logits_indices: torch.Tensor) -> torch.Tensor:
        """Logits [S, V], in the model's dtype, of the tokens `logits_indices` [S] int64. May be called again."""

    def hidden_states(self, body: Any, num_tokens: int) -> torch.Tensor | None:
        """Hidden states [num_tokens, n * hidden] of the first tokens, for a drafter; None: it reads none."""


class TowerExecutor(Protocol):
    """A tower as a function of images."""

    def run_tower(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Tower.input_names → [F, hidden] each: features, and those for deeper layers."""


@dataclass(frozen=True)
class MediaExecutors:
    """The executors of a model that takes images, beside that for text (spec.MediaPrograms)."""

    with_features: Executor
    tower: TowerExecutor
    facts: Tower
    sound_tower: TowerExecutor | None = None  # of `facts.sound`


@dataclass(frozen=True)
class LoadedLora:
    """The executor of batches in which some request has an adapter, and the adapters that it reads.

    Attributes:
        with_features: of those with images too; None of a model that takes none.
    """

    executor: Executor
    pool: LoraPool
    with_features: Executor | None = None


@dataclass(frozen=True)
class PoolingExecutors:
    """The head and the facts of a model that pools, beside its executor (spec.PoolingPrograms)."""

    facts: PoolingFacts
    head: TowerExecutor | None


@dataclass(frozen=True)
class SourceExecutors:
    """The executor of an encoder-decoder's sources, beside its decoder's (spec.SourcePrograms)."""

    facts: SourceFacts
    program: TowerExecutor
    layers: tuple[AttentionLayer, ...]  # that attend to them, in the order of the executor's outputs


@dataclass(frozen=True)
class ImageExecutors:
    """The executors of a model some of whose layers attend to images (spec.ImagePrograms)."""

    facts: TileTower
    text: Executor
    tower: TowerExecutor
    layers: tuple[AttentionLayer, ...]  # that attend to them, in the order of the tower's outputs


@dataclass(frozen=True)
class DecodeLoopPieces:
    """The program's kernels around a captured decode (cuda_graph/decode_loop.py); arguments as those ops have them.

    Attributes:
        begin: (replay_slot, requests, last_tokens, req_to_token, input_ids, positions, out_cache_loc, rows, seq_lens,
            page_table).
        end: (logits, floats, ints, rows, seq_lens, replay_slot, last_tokens, chosen) → ([S] int64,).
    """

    begin: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    end: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class VerifyPieces:
    """The program's kernels around a captured verify step (cuda_graph/verify_loop.py); arguments as those ops have
    them.

    Attributes:
        begin: (fields, settings, last_tokens, lengths, history, req_to_token, input_ids, positions, out_cache_loc,
            rows, seq_lens, page_table, drafted).
        end: (tokens, fields, drafted, synthetic, ints, last_tokens, lengths, history, results).
    """

    begin: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    end: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model on its device, ready to run inside a forward context."""

    executor: Executor
    eager: Executor | None = None  # the model as it was before it was compiled, where config.skip_compiled asks for it
    layers: tuple[AttentionLayer, ...]  # by layer_id
    state_layers: tuple[StateLayer, ...] = ()  # by state_id
    layer_kernels: Mapping[str, LinkedKernels] = field(default_factory=dict)  # layer → its own kernels, if any
    sampling: SamplingPieces | None = None  # the program's own kernels for choosing tokens, if any
    decode_loop: DecodeLoopPieces | None = None  # and those around a captured decode
    verify: VerifyPieces | None = None  # and those around a captured verify step
    kernels: Collection[CudaKernel] = ()  # that its program calls and NVRTC has compiled; the same on all ranks
    media: MediaExecutors | None = None  # for images, where the model takes some
    pooling: PoolingExecutors | None = None  # of a model that pools
    sources: SourceExecutors | None = None  # of an encoder-decoder
    images: ImageExecutors | None = None  # of a model whose layers attend to images
    lora: LoadedLora | None = None  # for requests with adapters, where the config has them
    live: LiveWeights | None = None  # its weights, for updates; None: it cannot have any
    arena: Arena | None = None  # the memory of its weights, where that can be given back
    reads_hidden_states: bool = False  # beside tokens, of the model that it drafts for
    projection: Projection | None = None  # makes of that model's hidden states those that it reads, if they are others
    block: DraftBlock | None = None  # it drafts several tokens in one pass
    has_experts: bool = False  # some of its layers are mixtures of experts
    # Layer of experts whose choices are counted (runtime.expert_stats), in order → how many it has.
    num_experts: Mapping[str, int] = field(default_factory=dict)
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    context_len: int  # positions that the model was made for
    rope: RopeLengths | None = None  # how its RoPE follows the length of a text, if it does
    stage: StageProgram | None = None  # the stage of a pipeline that this is; None: it is the whole model


class ModelSource(Protocol):
    """Loads a model; handed to the runner, which knows nothing of artifacts and checkpoints."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that load puts on the device."""

    def begin(self, device: torch.device) -> None:
        """Begin what needs no weights, beside the caller; `load` does so itself otherwise."""

    def load(self, device: torch.device) -> LoadedModel:
        """Bring program and weights to `device`."""
