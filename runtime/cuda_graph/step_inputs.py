"""The inputs of a step at fixed addresses, padding included, brought there by one upload.

Captured graphs read them there. A batch with tensors elsewhere is copied in on the device.

Shape legend: T tokens of the step, R requests; M and N the most of either that fit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from mllm_compile.runtime.cuda.driver import copy_pinned
from mllm_compile.runtime.device.packed_fields import FieldLayout, layout_of, upload_fields
from mllm_compile.runtime.device.staging import StagingRing
from mllm_compile.runtime.forward_batch import ForwardBatch, MediaInputs
from mllm_compile.runtime.step_fields import StepFields

_KNOWN_LAYOUTS = 64
_WORK_ALIGNMENT = 256  # bytes, as torch aligns whole tensors
_OTHER_BYTES = 64 << 10  # of what comes with the inputs: a step's page writes for 240 pages, say
_NO_VALUES = np.zeros(0, dtype=np.int32)


class TokenPlaces:
    """The tensors that graphs read for each token; padding tokens are token 0 at position 0 of the dummy page.

    Attributes:
        input_ids, positions, out_cache_loc: [M] int64.
        rope_lens: [M] int64; zeros but for a step with prompts whose frequencies follow them.
        media: features; None: the graphs' program takes none.
        mrope_positions: [axes, M] int64 where that has axes.
        hidden_states: [M, hidden]; None: the graphs' program reads none.
        adapter_slots: [M] int32, -1 of padding; None: there is no program for adapters.
    """

    def __init__(self, input_ids: torch.Tensor, positions: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
        self.input_ids = input_ids
        self.positions = positions
        self.out_cache_loc = out_cache_loc
        self.rope_lens = torch.zeros_like(positions)
        self.media: MediaInputs | None = None
        self.mrope_positions: torch.Tensor | None = None
        self.hidden_states: torch.Tensor | None = None
        self.adapter_slots: torch.Tensor | None = None
        self._has_rope_lens = False

    @classmethod
    def zeros(cls, max_tokens: int, device: torch.device, takes_adapters: bool = False) -> TokenPlaces:
        """Places of that many tokens; with `takes_adapters` of their adapters, too."""
        places = cls(*(torch.zeros(max_tokens, dtype=torch.int64, device=device) for _ in range(3)))
        if takes_adapters:
            places.adapter_slots = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
        return places

    def take_tokens(self, batch: ForwardBatch, padded: int) -> None:
        """Token inputs of `batch`, and padding up to `padded`.

        Values that are in their places already came by StepInputs.upload, which has written the padding as well.
        """
        num_tokens = batch.num_tokens
        for place, values, padding in (
            (self.input_ids, batch.input_ids, 0),
            (self.positions, batch.positions, 0),
            (self.out_cache_loc, batch.out_cache_loc, 0),
            (self.adapter_slots, batch.adapter_slots, -1),
        ):
            if place is not None and values is not None and values.data_ptr() != place.data_ptr():
                place[:num_tokens].copy_(values)
                place[num_tokens:padded].fill_(padding)
        self.clear_rope_lens()
        if batch.rope_lens is not None:
            self.rope_lens[:num_tokens].copy_(batch.rope_lens)
            self._has_rope_lens = True
        if self.media is not None and batch.media is not None:
            self.media.features.copy_(batch.media.features)
            self.media.is_feature.copy_(batch.media.is_feature)
        if self.mrope_positions is not None and batch.mrope_positions is not None:
            self.mrope_positions.copy_(batch.mrope_positions)
        if self.hidden_states is not None and batch.hidden_states is not None:
            self.hidden_states[:num_tokens].copy_(batch.hidden_states)
            self.hidden_states[num_tokens:padded].zero_()  # finite, whatever was there

    def take_hidden_states(self, size: int, dtype: torch.dtype) -> None:
        """Makes places for hidden states of so many numbers."""
        shape = (self.positions.numel(), size)
        self.hidden_states = torch.zeros(shape, dtype=dtype, device=self.positions.device)

    def take_features(self, width: int, dtype: torch.dtype, axes: int) -> None:
        """Makes places for features of that width, and for positions where they have axes. All steps have M tokens."""
        count, device = self.positions.numel(), self.positions.device
        self.media = MediaInputs(
            torch.zeros(count, width, dtype=dtype, device=device),
            torch.zeros(count, dtype=torch.bool, device=device),
        )
        if axes > 1:
            self.mrope_positions = torch.zeros(axes, count, dtype=torch.int64, device=device)

    def clear_rope_lens(self) -> None:
        """Makes the lengths those of decodes."""
        if self._has_rope_lens:
            self.rope_lens.zero_()
            self._has_rope_lens = False


class HostBlock(NamedTuple):
    """Host memory as a step is written into it: laid out as the block of places is, or as its beginning."""

    block: np.ndarray  # all of it, uint8
    inputs: dict[str, np.ndarray]  # by name, each as long as its place
    work: np.ndarray  # uint8


class StepInputs(TokenPlaces):
    """All inputs of a step in one block of memory; the dummy row is what padding requests are.

    Attributes:
        req_pool_indices: [N] int64.
        seq_lens: [N] int32; seq_lens_cpu: the same on the host, of the last step.
        work: uint8, what attention reads of captured prompts (CapturesPrompts.write_prompt_work).
        block: uint8, all places, with room for a step's other inputs behind them.
    """

    def __init__(
        self,
        max_tokens: int,
        max_requests: int,
        padding_len: int,
        device: torch.device,
        work_bytes: int = 0,
        takes_adapters: bool = False,
    ) -> None:
        """
        Args:
            padding_len: keys that padding requests have: what attention asks for
                (CapturesDecodes.get_cuda_graph_seq_len_fill_value).
            work_bytes: of `work`.
            takes_adapters: there are places for the slots of tokens' adapters.
        """
        self.max_tokens = max_tokens
        self.max_requests = max_requests
        self.padding_len = padding_len
        largest = StepFields(
            input_ids=max_tokens,
            positions=max_tokens,
            out_cache_loc=max_tokens,
            req_pool_indices=max_requests,
            seq_lens=max_requests,
        )
        self._layout = FieldLayout(largest.inputs() | ({"adapter_slots": max_tokens} if takes_adapters else {}))
        work_start = -(-self._layout.end // _WORK_ALIGNMENT) * _WORK_ALIGNMENT
        self._work = slice(work_start, work_start + work_bytes)
        self.block = torch.zeros(self._work.stop + _OTHER_BYTES, dtype=torch.uint8, device=device)
        self.work = self.block[self._work]
        places = StepFields(**self._layout.views(self.block))
        super().__init__(places.input_ids, places.positions, places.out_cache_loc)
        self.req_pool_indices, self.seq_lens = places.req_pool_indices, places.seq_lens
        self.seq_lens.fill_(padding_len)
        if places.adapter_slots is not None:
            self.adapter_slots = places.adapter_slots.fill_(-1)
        self._padding = {"seq_lens": padding_len, "adapter_slots": -1}  # 0 of others
        self._seq_lens_on_host = np.full(max_requests, padding_len, dtype=np.int32)
        self.seq_lens_cpu = torch.from_numpy(self._seq_lens_on_host)
        self._staging = StagingRing(device)
        self._known_layouts: dict[tuple[tuple[str, int], ...], tuple[FieldLayout, dict[str, torch.Tensor]]] = {}
        self._host_blocks: dict[int, HostBlock] = {}  # by address of a staging buffer
        # Layout of the last step: a steady decode has the same shape as the one before.
        self._last_shape = (0, 0, 0)
        self._last_fields = places

    @property
    def most_other_bytes(self) -> int:
        """Bytes at the block's end, for data beside a step's inputs."""
        return self.block.nbytes - self._work.stop

    def holds(self, num_tokens: int, num_requests: int) -> bool:
        """True if a step of that size fits."""
        return num_tokens <= self.max_tokens and num_requests <= self.max_requests

    def upload(self, fields: StepFields[np.ndarray]) -> StepFields[torch.Tensor]:
        """Bring a step's inputs to their places, and padding behind them, without waiting.

        Returns:
            The places, as long as the values; and what else the step has, by the same copy, until the next upload.
        """
        inputs, others = self._divided(fields)
        packed, places = self._packed(others)
        beside = {}
        if packed.end > self.block.nbytes:
            beside = upload_fields(others, self._staging, self.block.device)
            others, (packed, places) = {}, self._packed({})
        buffer = self._staging.next(self.block.nbytes)
        host = self.host_block(buffer.memory)
        packed.write(others, host.block)
        written = self._write(inputs, host)
        if self.block.is_cuda:
            copy_pinned(buffer.memory, self.block, packed.end)
        else:
            self.block[: packed.end].copy_(buffer.memory[: packed.end])
        buffer.record()
        return _with(written, beside | places) if others or beside else written

    def write(self, fields: StepFields[np.ndarray], host: HostBlock) -> StepFields[torch.Tensor] | None:
        """Write a step's inputs, and padding behind them, into memory that a graph will copy to the places.

        Returns:
            As `upload` does, once it has; None: there is no room for what the step has beside its inputs.
        """
        inputs, others = self._divided(fields)
        packed, places = self._packed(others)
        if packed.end > host.block.nbytes:
            return None
        packed.write(others, host.block)
        return _with(self._write(inputs, host), places)

    def _divided(self, fields: StepFields[np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """A step's arrays that have places here, and those that come beside them, by name."""
        inputs, others = fields.inputs(), fields.others()
        if self.adapter_slots is not None and fields.adapter_slots is not None:
            inputs["adapter_slots"] = others.pop("adapter_slots")
        return inputs, others

    def _write(self, values: dict[str, np.ndarray], host: HostBlock) -> StepFields[torch.Tensor]:
        for name, array in host.inputs.items():
            value = values.get(name, _NO_VALUES)
            array[: value.size] = value
            array[value.size :] = self._padding.get(name, 0)
        self._seq_lens_on_host[:] = host.inputs["seq_lens"]
        shape = (values["positions"].size, values["seq_lens"].size, len(values))
        if shape != self._last_shape:
            self._last_shape = shape
            self._last_fields = StepFields(
                **{name: getattr(self, name)[: value.size] for name, value in values.items()}
            )
        return self._last_fields

    def host_block(self, memory: torch.Tensor) -> HostBlock:
        """The arrays in pinned memory that stays, [≥ all places] uint8; made once: the GPU waits for a prompt's."""
        found = self._host_blocks.get(memory.data_ptr())
        if found is None:
            inputs = {name: view.numpy() for name, view in self._layout.views(memory).items()}
            block = memory.numpy()
            found = self._host_blocks[memory.data_ptr()] = HostBlock(block, inputs, block[self._work])
        return found

    def _packed(self, others: dict[str, np.ndarray]) -> tuple[FieldLayout, dict[str, torch.Tensor]]:
        """The layout of what a step has beside its inputs, and its tensors, where it fits; kept for the next alike.

        Making them takes as long as the copy itself, and the GPU waits for a prompt's.
        """
        key = tuple((name, array.size) for name, array in others.items())
        found = self._known_layouts.pop(key, None)
        if found is None:
            layout = layout_of(others, self._work.stop)
            found = layout, layout.views(self.block) if layout.end <= self.block.nbytes else {}
            if len(self._known_layouts) == _KNOWN_LAYOUTS:
                del self._known_layouts[next(iter(self._known_layouts))]
        self._known_layouts[key] = found  # the last used is the last in order
        return found

    def take_requests(self, batch: ForwardBatch, padded: int) -> None:
        """Like take_tokens, for a decode's requests."""
        size = batch.batch_size
        if batch.req_pool_indices.data_ptr() != self.req_pool_indices.data_ptr():
            self.req_pool_indices[:size].copy_(batch.req_pool_indices)
            self.req_pool_indices[size:padded].zero_()
        if batch.seq_lens.data_ptr() != self.seq_lens.data_ptr():
            self.seq_lens[:size].copy_(batch.seq_lens)
            self.seq_lens[size:padded].fill_(self.padding_len)
            self.seq_lens_cpu[:size] = batch.seq_lens_cpu
            self.seq_lens_cpu[size:padded] = self.padding_len


def _with(places: StepFields[torch.Tensor], others: dict[str, torch.Tensor]) -> StepFields[torch.Tensor]:
    return StepFields(**places.inputs(), **places.others(), **others)
