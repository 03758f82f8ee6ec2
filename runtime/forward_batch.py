"""One step's batch, as every layer below the scheduler sees it, and what a forward of it gives.

Shape legend: T tokens of the step (num_tokens), R requests (batch_size), S rows of logits. In MIXED the extend_* fields
cover all R rows, decodes first, each of length 1. Built by ModelRunner.prepare_forward_batch_*; read by the attention
metadata builder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from mllm_compile.runtime.media.tower import Grid

if TYPE_CHECKING:
    from mllm_compile.runtime.graph_mode import DPMetadata
    from mllm_compile.runtime.memory_pool import KVPool, ReqToTokenPool


class ForwardMode(IntEnum):
    """The kind of a step: EXTEND computes prompt tokens (after a cached prefix or none), DECODE one token a request,
    MIXED both. TARGET_VERIFY computes the last token of each request, and drafts of what may follow some of them.

    IDLE has no request, and gives no logits. A data-parallel rank without requests has an IDLE step while others work.
    It computes a token of the dummy row, as all ranks take part in the experts' collectives.
    """

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5

    def is_extend(self) -> bool:
        """True for EXTEND, MIXED or TARGET_VERIFY: some request brings more than its last sampled token."""
        return self is ForwardMode.EXTEND or self.is_mixed() or self.is_target_verify()

    def is_prefill(self) -> bool:
        """Another name of is_extend."""
        return self.is_extend()

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        """True if every row of the batch is one token."""
        return self is ForwardMode.DECODE or self is ForwardMode.IDLE  # without further calls: asked by each layer


class Block(NamedTuple):
    """Tokens of a step that attend to each other in both directions, and to all of their request before them.

    Attributes:
        request: the request's place in the batch.
        start, end: their rows of [T].
        seq_len: tokens of the request up to the last one of them.
    """

    request: int
    start: int
    end: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class MediaInputs:
    """The inputs of a step with features of images, beside its tokens.

    Attributes:
        features: [T, W], in the model's dtype; rows of other tokens are zeros.
        is_feature: [T] bool: tokens that take a feature in place of their embedding.
        blocks: of images whose tokens see what is ahead in them, by their rows.
        blocks_in_windows: they do in layers with windows alone.
    """

    features: torch.Tensor
    is_feature: torch.Tensor
    blocks: tuple[Block, ...] = ()
    blocks_in_windows: bool = False

    def padded(self, more: int) -> MediaInputs:
        """The inputs with so many further tokens, which take none."""
        features = functional.pad(self.features, (0, 0, 0, more))
        return replace(self, features=features, is_feature=functional.pad(self.is_feature, (0, more)))

    def blocks_of(self, window_left: int) -> tuple[Block, ...]:
        """The blocks of a layer, by how far it looks back; -1: to the first token."""
        return self.blocks if window_left >= 0 or not self.blocks_in_windows else ()


@dataclass(kw_only=True)
class ForwardBatch:
    """The tensors of one step. Device tensors unless the name ends in _cpu."""

    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor  # [T] int64
    req_pool_indices: torch.Tensor  # [R] int64: rows of ReqToTokenPool
    seq_lens: torch.Tensor  # [R] int32: prefix + new
    out_cache_loc: torch.Tensor  # [T] int64: the KV slot that each new token is written to
    positions: torch.Tensor  # [T] int64
    seq_lens_cpu: torch.Tensor  # [R] int32
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KVPool
    attn_backend: Any  # an AttentionBackend, which plans and reads batches and so is above them
    extend_seq_lens: torch.Tensor | None = None  # [R] int32: new tokens of each request
    extend_prefix_lens: torch.Tensor | None = None  # [R] int32: tokens already in the KV cache
    extend_prefix_lens_cpu: torch.Tensor | None = None  # [R] int32
    extend_seq_lens_cpu: torch.Tensor | None = None  # [R] int32
    common_prefix_len: int = 0  # first tokens that all decodes have in the same pages; 0: attention reads them for each
    # Of its only prompt, where that has a prefix and all its pages follow each other: the slot of the first token.
    first_slot: int | None = None
    logits_indices: torch.Tensor | None = None  # [S] int64: rows of [T] whose logits are wanted; None: each last one
    media: MediaInputs | None = None  # where some tokens take features
    mrope_positions: torch.Tensor | None = None  # [axes, T] int64: time, row and column; None: `positions` are all
    mrope_position_deltas: torch.Tensor | None = None  # [R] int64: position less index, of tokens behind images
    # Images that the tower is to run on ahead of a batch without `media`, as Tower.read makes them: [rows, width],
    # and each one's grid. `media`, `mrope_positions` and `mrope_position_deltas` are made of them then. An engine's
    # steps come with `media`, as features of images outlive a step.
    pixel_values: torch.Tensor | None = None
    image_grid_thw: Sequence[Grid] | None = None
    rope_lens: torch.Tensor | None = None  # [T] int64, as TokenInputs has them; None: zeros
    adapter_slots: torch.Tensor | None = None  # [T] int32, -1 without an adapter; None: no request has one
    num_active_loras: int = 0  # different adapters of its requests
    hidden_states: torch.Tensor | None = None  # [T, hidden], of a drafter that reads them beside tokens; None: zeros
    dp_metadata: DPMetadata | None = None  # of ranks with requests of their own
    num_verify_tokens: int = 0  # first tokens, of a verify step: those of decodes, drafts among them
    sees_ahead: bool = False  # a request's tokens are requests of one token each that see each other (DFlash's blocks)
    greedy_across_ranks: bool = False  # likeliest tokens are all that is wanted: ranks may keep their parts of logits
    return_logprob: bool = False
    top_logprobs_nums: list[int] | None = None
    source_lens_cpu: torch.Tensor | None = None  # [R] int32: states of each one's source, of an encoder-decoder
    of_sources: ForwardBatch | None = None  # likewise: each token as a decode behind its source, once that is planned
    # Of a model whose layers attend to images, where some request has some: a SeenByTokens, which is above batches.
    seen_images: Any = None
    source_kinds: torch.Tensor | None = None  # [T] int64, on the device: its kinds
    common_attn_metadata: Any = None  # CommonAttentionMetadata.of(batch), once that was asked for

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[0]

    @property
    def seq_lens_sum(self) -> int:
        """Tokens of all requests. Never waits for the device."""
        return int(self.seq_lens_cpu.sum())

    @property
    def extend_num_tokens(self) -> int | None:
        """T of EXTEND and MIXED, else None."""
        return self.num_tokens if self.forward_mode.is_extend() else None

    @property
    def extend_start_loc(self) -> torch.Tensor:
        """[R] int32: each request's first row of T, of EXTEND and MIXED.

        Raises:
            RuntimeError: the batch has no extend_seq_lens.
        """
        if self.extend_seq_lens is None:
            raise RuntimeError(f"{self.forward_mode.name} has no extend_seq_lens: use prepare_forward_batch_extend")
        return torch.cumsum(self.extend_seq_lens, 0, dtype=torch.int32) - self.extend_seq_lens


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """The values that a program reads for each token; [T] int64 each, T padded where a graph wants it.

    Attributes:
        rope_lens: least lengths for a token's RoPE, where it depends on requests' lengths: the prompt's; 0 for decodes,
            which depend on their position alone.
        all_slots: [N * T] of N ranks that exchange tokens, 0 for padding.
        hidden_states: [T, hidden], as ForwardBatch has them.
        adapter_slots: [T] int32, likewise.
        source_kinds: likewise.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    media: MediaInputs | None = None
    mrope_positions: torch.Tensor | None = None
    rope_lens: torch.Tensor | None = None
    all_slots: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    adapter_slots: torch.Tensor | None = None
    source_kinds: torch.Tensor | None = None

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        """The inputs that a program names."""
        found = {"input_ids": self.input_ids, "positions": self.positions, "slots": self.out_cache_loc}
        if self.rope_lens is not None:
            found["rope_lens"] = self.rope_lens
        if self.all_slots is not None:
            found["all_slots"] = self.all_slots
        if self.hidden_states is not None:
            found["hidden_states"] = self.hidden_states
        if self.adapter_slots is not None:
            found["adapter_slots"] = self.adapter_slots
        if self.source_kinds is not None:
            found["source_kinds"] = self.source_kinds
        if self.mrope_positions is not None:
            found["positions"] = self.mrope_positions
        if self.media is not None:
            found |= {"features": self.media.features, "is_feature": self.media.is_feature}
        return found

    @classmethod
    def of(cls, batch: ForwardBatch) -> TokenInputs:
        given = batch.input_ids, batch.positions, batch.out_cache_loc
        media = batch.media, batch.mrope_positions
        hidden_states, adapter_slots = batch.hidden_states, batch.adapter_slots
        found = cls(*given, *media, batch.rope_lens, hidden_states=hidden_states, adapter_slots=adapter_slots)
        return found if batch.source_kinds is None else replace(found, source_kinds=batch.source_kinds)

    def padded(self, num_tokens: int) -> TokenInputs:
        """The inputs with padding up to so many tokens: token 0 at position 0, in slot 0."""
        more = num_tokens - self.input_ids.shape[0]
        ids, positions, slots = (
            functional.pad(value, (0, more)) for value in (self.input_ids, self.positions, self.out_cache_loc)
        )
        rope_lens = None if self.rope_lens is None else functional.pad(self.rope_lens, (0, more))
        axes = None if self.mrope_positions is None else functional.pad(self.mrope_positions, (0, more))
        media = None if self.media is None else self.media.padded(more)
        adapters = self.adapter_slots
        adapters = None if adapters is None else functional.pad(adapters, (0, more), value=-1)
        return TokenInputs(ids, positions, slots, media, axes, rope_lens, adapter_slots=adapters)


@dataclass(frozen=True)
class LogitsProcessorOutput:
    """The result of a forward.

    Attributes:
        next_token_logits: [S, V] in the model's dtype; S = R unless the batch's logits_indices say otherwise.
        hidden_states: [T, n * hidden], n for each token beside each other, where the program gives some (model/
            hidden_states.py); of captured prompts with padding behind them. Until the next forward.
        is_partial_vocab: they are [S, V of a rank], for Communicator.choose: of batches that are
            greedy_across_ranks, where ranks have a part of the vocabulary each.
        logits_of: logits [N, V] of further tokens, given their indices [N] int64 into the batch, until the next
            forward; of batches with return_logprob. Ranks with requests of their own have all ranks' rows, N each.
    """

    next_token_logits: torch.Tensor
    hidden_states: torch.Tensor | None = None
    logits_of: Callable[[torch.Tensor], torch.Tensor] | None = None
    is_partial_vocab: bool = False
