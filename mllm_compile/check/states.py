"""Kernels of layers with a state against the reference, on what the self-check's batches bring to each layer.

The batches hold a few short prompts alone. So the first time that a kernel is run with so many tokens, it is also run
for them as one request that goes on, and for a batch of decodes. The kernel of longer steps is run in the place of the
one for few tokens too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from mllm_compile.errors import CompileError
from mllm_compile.runtime.memory_pool import GDNPool
from mllm_compile.runtime.state.base import StateBackend, StateInputs
from mllm_compile.runtime.state.layer import StateLayer
from mllm_compile.runtime.state.metadata import Segment, StateMetadata
from mllm_compile.runtime.state.piece_backend import PieceStateBackend, StatePieces
from mllm_compile.runtime.state.torch_backend import TorchStateBackend

# ‖ours − the reference's‖ / ‖the reference's‖ of outputs and of states; roundings of bfloat16 are up to 4e-3.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
_MOST_TOKENS = 100  # of the request that goes on: the reference takes them one by one
_SPARE_ROWS = 8  # of a pool, behind the requests' rows: for batches of decodes


class StateCheck:
    """Makes the backends of a self-check, and remembers what was compared.

    Args:
        pieces: layer → its kernels.
        state_dtype: the type of sums (runtime.state_dtype), which kernels are compiled for.
    """

    def __init__(self, pieces: Mapping[str, StatePieces], state_dtype: str) -> None:
        self._pieces = pieces
        self._state_dtype = state_dtype
        self._compared: set[tuple[int, int]] = set()

    def backend(self, layers: Sequence[StateLayer], num_requests: int, device: str) -> StateBackend:
        """A backend with a pool of its own, whose `forward` raises CompileError where a kernel is wrong."""
        shapes = [(layer.state_shape, getattr(torch, layer.state_dtype(self._state_dtype))) for layer in layers]
        pool = GDNPool(num_requests + 1 + _SPARE_ROWS, shapes, device)
        return _ComparedStates(pool, self._pieces, self._compared)


class _ComparedStates(StateBackend):
    """Runs the kernels, and compares each with the reference."""

    def __init__(self, pool: GDNPool, pieces: Mapping[str, StatePieces], compared: set[tuple[int, int]]) -> None:
        self._pool = pool
        self._pieces = pieces
        self._compared = compared
        self._ours = PieceStateBackend(pool, pieces, TorchStateBackend(pool))

    def forward(self, inputs: StateInputs) -> None:
        self._ours.forward(inputs)
        pieces, num_tokens = self._pieces.get(inputs.layer.name), inputs.out.shape[0]
        if pieces is None or (key := (id(pieces.prompts), num_tokens)) in self._compared:
            return
        self._compared.add(key)
        self._compare(inputs, pieces, inputs.metadata, "prompts")
        device, earlier = str(inputs.out.device), inputs.metadata.rows[:1]  # a row that has a state by now
        length = min(num_tokens, _MOST_TOKENS)
        going_on = _metadata(inputs.metadata, earlier, (length,), num_decodes=0, device=device)
        self._compare(inputs, pieces, going_on, "a prompt that goes on")
        if pieces.prompts_of(length) is not pieces.prompts:  # no batch may have as many tokens as those are for
            longer = replace(pieces, few=None)
            self._compare(inputs, longer, going_on, "a prompt that goes on, as one of a longer step")
        count = min(num_tokens, _SPARE_ROWS)
        spare = torch.arange(count, device=device) + self._pool.num_rows - _SPARE_ROWS
        decodes = _metadata(inputs.metadata, torch.cat((earlier, spare[1:])), (1,) * count, count, device)
        self._compare(inputs, pieces, decodes, "decodes")

    def _compare(self, inputs: StateInputs, pieces: StatePieces, metadata: StateMetadata, what: str) -> None:
        """Raises CompileError where the kernels' outputs or states are not the reference's."""
        layer, before = inputs.layer, self._pool.get_state(inputs.layer.state_id)
        found = []
        for has_kernels in (True, False):
            pool = GDNPool(before.shape[0], [(layer.state_shape, before.dtype)], before.device)
            pool.get_state(0).copy_(before)
            reference = TorchStateBackend(pool)
            backend = PieceStateBackend(pool, {layer.name: pieces}, reference) if has_kernels else reference
            out = torch.zeros_like(inputs.out)
            backend.forward(replace(inputs, out=out, layer=replace(layer, state_id=0), metadata=metadata))
            found.append((out[: metadata.num_actual_tokens], pool.get_state(0)[metadata.rows]))
        for part, ours, theirs in zip(("outputs", "states"), *found, strict=True):
            error = ((ours.float() - theirs.float()).norm() / (theirs.float().norm() + 1e-20)).item()
            limit = _TOLERANCES[getattr(torch, layer.dtype)]
            if not error <= limit:
                raise CompileError(
                    f"the kernel of {layer.kind.name} (layer {layer.name}) does not compute {what} right: its {part} "
                    f"are off by {error:.2g} (limit {limit:g}). Report it with the GPU and the model's config."
                )


@dataclass(frozen=True)
class _Batch:
    """The part of a ForwardBatch that layers with a state read: new tokens and earlier ones of each request."""

    lengths: tuple[int, ...]
    earlier: tuple[int, ...]
    device: str

    @cached_property
    def extend_seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.device)

    @cached_property
    def extend_prefix_lens(self) -> torch.Tensor:
        return torch.tensor(self.earlier, dtype=torch.int32, device=self.device)


def _metadata(
    like: StateMetadata, rows: torch.Tensor, lengths: tuple[int, ...], num_decodes: int, device: str
) -> StateMetadata:
    """The metadata of requests with so many new tokens each; the first has a state."""
    earlier = (1, *(0 for _ in lengths[1:]))
    ends = torch.tensor(lengths).cumsum(0).tolist()
    segments = [
        Segment(index, ends[index] - lengths[index], ends[index], earlier[index] > 0)
        for index in range(num_decodes, len(lengths))
    ]
    return replace(
        like,
        batch=_Batch(lengths, earlier, device),  # type: ignore[arg-type]
        rows=rows,
        num_decodes=num_decodes,
        segments=segments,
        num_actual_tokens=ends[-1],
    )
