"""The small batches of a self-check, and their run through a program: attention within each request, in plain torch.

program.py compares the logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mllm_compile.check.states import StateCheck
from mllm_compile.runtime.attention.base import AttentionInputs
from mllm_compile.runtime.attention.layer import AttentionLayer, KeyChoice
from mllm_compile.runtime.collectives.base import current
from mllm_compile.runtime.collectives.lockstep import run_lockstep
from mllm_compile.runtime.forward_context import set_forward_context
from mllm_compile.runtime.memory_pool import KVPool
from mllm_compile.runtime.ops import family
from mllm_compile.runtime.ops.trace import attention_reference
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.link import current_device
from mllm_compile.runtime.program.spec import ModelSizes, Program
from mllm_compile.runtime.schedule.rope_lengths import RopeLengths
from mllm_compile.runtime.state.base import StateBackend, StateInputs
from mllm_compile.runtime.state.metadata import Segment, StateMetadata

if TYPE_CHECKING:
    from mllm_compile.model.hf_model import HFModel

Bound = tuple[ProgramExecutor, tuple[AttentionLayer, ...]]
Requests = list[torch.Tensor]  # of each request one tensor, [its tokens]

REQUEST_LENGTHS = (5, 3)
_CHECKED_KEYS = 2  # that indexers choose in a check, so that some of so short requests are not
SECOND_REQUEST_POSITION = 100


def few_of(choice: KeyChoice) -> KeyChoice:
    """The choice in a check of an indexer that has this one."""
    return KeyChoice(min(choice.top_k, _CHECKED_KEYS), min(choice.block, 2), min(choice.local, 1))


def small_requests(
    sizes: ModelSizes, device: str, rope: RopeLengths | None = None, second: int = SECOND_REQUEST_POSITION
) -> tuple[Requests, Requests]:
    """Token ids and positions of each request; the second, which begins at `second`, is a long text's where RoPE
    follows its length."""
    context_len = sizes.context_len
    if rope is not None:
        second = rope.boundary + 1
        context_len = second + REQUEST_LENGTHS[1] if rope.of_each_length else context_len
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, sizes.vocab_size, (length,), generator=generator).to(device) for length in REQUEST_LENGTHS]
    starts = (0, max(0, min(second, context_len - REQUEST_LENGTHS[1])))
    return ids, [
        torch.arange(start, start + length, device=device)
        for start, length in zip(starts, REQUEST_LENGTHS, strict=True)
    ]


def batches_of(program: Program, ids: Requests, positions: Requests) -> list[tuple[Requests, Requests]]:
    """Ids and positions of each batch, the smallest first: every variant of a piece runs, the one for any number last.

    Variants for more than one token are for multiples of the requests' tokens, which are 8.
    """
    sizes = {variant.max_size for variant in program.all_variants()}
    batches = [([ids[0][:1]], [positions[0][:1]])] if 1 in sizes else []
    tokens = sum(REQUEST_LENGTHS)
    most = max(sizes, default=1)
    ranges = sorted({size for name, members in program.kernels.items() for size in family(name).step_sizes(members)})
    buckets = [size // tokens for size in ranges if tokens < size <= most]
    counts = [1, *(count - 1 if count > 2 else count for count in buckets)]  # also with fewer than a kernel is for
    for fewer, size in itertools.pairwise((1, *sorted(sizes - {1}))):
        if not any(fewer < count * tokens <= size for count in counts):
            counts.append(size // tokens)
    beyond = [most // tokens + 1] if most > 1 else []
    batches += [(ids * count, positions * count) for count in (*sorted(counts), *beyond)]
    return batches


def num_different(requests: Requests) -> int:
    """Number of distinct requests in a batch of `batches_of`, which repeats them."""
    return min(len(requests), len(REQUEST_LENGTHS))


@dataclass(frozen=True)
class PackedRequests:
    """Stands for batch and backend: attends within each request; what is written to the cache is not read.

    Attributes:
        lengths: the lengths of the different requests, one after another.
        copies: how often those follow.
        blocks: tokens of the first that see each other in both directions, first and end.
        blocks_in_windows: they do in layers with windows alone.
    """

    lengths: tuple[int, ...]
    copies: int
    token_to_kv_pool: KVPool
    states: StateBackend
    device: str
    blocks: Sequence[tuple[int, int]] = ()
    blocks_in_windows: bool = False

    rope = None  # as a backend's: q and k come rotated

    @property
    def batch(self) -> PackedRequests:
        return self

    @property
    def attn_backend(self) -> PackedRequests:
        return self

    @property
    def num_actual_tokens(self) -> int:
        return sum(self.lengths) * self.copies

    @property
    def extend_seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lengths * self.copies, dtype=torch.int32, device=self.device)

    @property
    def extend_prefix_lens(self) -> torch.Tensor:
        return torch.zeros_like(self.extend_seq_lens)

    def of_states(self) -> StateMetadata:
        """The metadata of layers with a state; each copy is a request."""
        ends = itertools.accumulate(self.lengths * self.copies)
        starts = [0, *ends]
        segments = [Segment(index, *span, has_state=False) for index, span in enumerate(itertools.pairwise(starts))]
        return StateMetadata(
            batch=self,  # type: ignore[arg-type]
            rows=torch.arange(1, len(starts), device=self.device),
            num_decodes=0,
            segments=segments,
            num_actual_tokens=starts[-1],
        )

    def writes_kv(self, layer: AttentionLayer) -> bool:
        return False

    def forward_state(self, inputs: StateInputs) -> None:
        self.states.forward(inputs)

    def forward(self, inputs: AttentionInputs) -> None:
        layer, params, few = inputs.layer, inputs.layer.params, few_of(inputs.layer.choice)
        sinks = None if layer.sink_logits is None else layer.sink_logits.repeat(self.copies)
        start = 0
        for length in self.lengths:
            # Copies of a request are further heads of one: a call for each took most of a check's time.
            queries, keys, values = (
                self._of_request(x, start, length).transpose(0, 1).flatten(1, 2) for x in (inputs.q, inputs.k, inputs.v)
            )
            index = None
            if inputs.index is not None:  # copies are alike
                of_index = (*inputs.index, inputs.k[:, 0, -layer.index_dim :])
                index = [self._of_request(x, start, length)[0] for x in of_index]
                if layer.index_block:  # each of its heads is of some of attention's
                    index[0] = index[0].repeat(1, self.copies, 1)
                keys = keys[..., : -layer.index_dim]
            attended = attention_reference(
                *(queries, keys, values, sinks, params.sm_scale, params.logits_soft_cap, params.window_left),
                alibi_slopes=layer.alibi_slopes * self.copies,
                chunk=layer.chunk,
                latent=layer.v_head_dim if layer.is_latent else 0,
                up=layer.up_weight,
                index=index,
                top_k=few.top_k,
                index_block=few.block,
                index_local=few.local,
                blocks=() if start or (self.blocks_in_windows and params.window_left < 0) else self.blocks,
            ).unflatten(1, (self.copies, -1))
            self._of_request(inputs.out, start, length).copy_(attended.transpose(0, 1))
            start += length

    def _of_request(self, x: torch.Tensor, start: int, length: int) -> torch.Tensor:
        """[copies, length, H, D] of [T, H, D]."""
        part: torch.Tensor = x.unflatten(0, (self.copies, -1))[:, start : start + length]
        return part


def some_rows(tokens: int, device: str) -> torch.Tensor:
    """Picks every second row, the last one first: a pass may have moved their gather to where it does not belong."""
    return torch.arange(tokens - 1, -1, -2, device=device)


def run_ranks(
    ranks: Sequence[Bound],
    ids: list[torch.Tensor],
    positions: list[torch.Tensor],
    rows: torch.Tensor | None,
    device: str,
    dtype: torch.dtype,
    states: StateCheck,
    adapters: Sequence[int] = (),
) -> tuple[torch.Tensor, ...]:
    """Runs run_program on all ranks beside each other; returns the first one's logits."""
    if len(ranks) == 1:
        return run_program(*ranks[0], ids, positions, rows, device, dtype, states, adapters)

    def run(rank: int) -> tuple[torch.Tensor, ...]:
        with current_device(torch.device(device)):
            return run_program(*ranks[rank], ids, positions, rows, device, dtype, states, adapters)

    return run_lockstep(len(ranks), run)[0]


def run_program(
    executor: ProgramExecutor,
    layers: tuple[AttentionLayer, ...],
    ids: list[torch.Tensor],
    positions: list[torch.Tensor],
    rows: torch.Tensor | None,
    device: str,
    dtype: torch.dtype,
    states: StateCheck,
    adapters: Sequence[int] = (),
) -> tuple[torch.Tensor, ...]:
    """Logits of all tokens, and of `rows`, where some are wanted, by the two ways to ask for them.

    Args:
        adapters: the slot of each different request, of a program for adapters.
    """
    different = num_different(ids)
    lengths, copies = tuple(len(request) for request in ids[:different]), len(ids) // different
    inputs = {"input_ids": torch.cat(ids), "positions": torch.cat(positions)}
    if "hidden_states" in executor.program.inputs:
        inputs["hidden_states"] = executor.weights["embed_tokens.weight"][inputs["input_ids"]]
    if adapters:
        by_token = np.repeat(adapters, lengths).astype(np.int32)
        inputs["adapter_slots"] = torch.from_numpy(np.tile(by_token, copies)).to(device)
    inputs["rope_lens"] = torch.cat([(request[-1:] + 1).expand(len(request)) for request in positions])
    return run_packed(executor, layers, lengths, copies, inputs, rows, device, dtype, states)


def run_packed(
    executor: ProgramExecutor,
    layers: tuple[AttentionLayer, ...],
    lengths: tuple[int, ...],
    copies: int,
    inputs: Mapping[str, torch.Tensor],
    rows: torch.Tensor | None,
    device: str,
    dtype: torch.dtype,
    states: StateCheck,
    blocks: Sequence[tuple[int, int]] = (),
    blocks_in_windows: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Logits as run_program's, of requests of `lengths`, `copies` times; inputs are shared by all copies, except
    slots. Tokens of the first one's `blocks` see each other in both directions, in layers with windows or in all."""
    tokens = sum(lengths) * copies
    by_name = {layer.name: layer for layer in layers}
    shapes = [layer.cache_shape for layer in layers]
    state_layers = executor.program.state_layers
    backend = states.backend(state_layers, len(lengths) * copies, device)
    pool = KVPool(tokens + 1, 1, shapes, dtype, device)
    packed = PackedRequests(lengths, copies, pool, backend, device, blocks, blocks_in_windows)
    metadata: dict[str, Any] = dict.fromkeys(by_name, packed)
    metadata |= dict.fromkeys((layer.name for layer in state_layers), packed.of_states())
    every = torch.arange(tokens, device=device)
    slots = every + 1  # 0 is padding's
    with (
        torch.no_grad(),
        set_forward_context(
            metadata,
            no_compile_layers={**by_name, **{layer.name: layer for layer in state_layers}},
            slot_mapping=dict.fromkeys(by_name, slots),
            num_tokens=tokens,
        ),
    ):
        inputs = {**inputs, "slots": slots}
        if "all_slots" in executor.program.inputs:
            inputs["all_slots"] = slots.repeat(current().size)
        body = executor.body(inputs)
        logits = executor.head(body, every)
        if rows is None:
            return (logits,)
        return logits, executor.head(body, rows), executor.head(executor.body(inputs, every), rows)


def model_requests(hf_model: HFModel, program: Program, device: str) -> tuple[Requests, Requests]:
    """The check's requests. Blocks of keys lie at places that their indexer knows by tokens' positions, from 0 on."""
    is_of_blocks = hf_model.choice is not None and hf_model.choice.block > 0
    second = 0 if is_of_blocks else SECOND_REQUEST_POSITION
    return small_requests(hf_model.sizes(program.layers), device, program.rope, second)
