"""Captured prompts that take their inputs from the host's memory, as captured decodes do (decode_loop.py).

Each copy and each kernel ahead of a prompt's graph takes the host a twentieth of a millisecond, and the GPU waits. So
the graph begins with a kernel that reads the step from pinned memory, over the bus. These are tokens, slots and
attention's list of work, also for launches behind the graph. The memory has REPLAY_SLOTS slots. The graphs use them one
after another, whichever graph runs; the last word of a slot names the next one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mllm_compile.runtime.cuda_graph.capture import WeakTensor
from mllm_compile.runtime.cuda_graph.step_inputs import HostBlock, StepInputs
from mllm_compile.runtime.ops.tokens.replay_slots import REPLAY_SLOTS
from mllm_compile.runtime.step_fields import StepFields

_OTHER_BYTES = 16 << 10  # of what comes with the inputs
_WORD = torch.int64


class PromptSlots:
    """The replay slots of captured prompts; see the module's header. Used by one thread."""

    def __init__(self, inputs: StepInputs) -> None:
        """
        Args:
            inputs: the places that captured prompts read.
        """
        self._inputs = inputs
        num_bytes = inputs.block.nbytes - inputs.most_other_bytes + _OTHER_BYTES
        num_words = num_bytes // _WORD.itemsize
        self._places = inputs.block[: num_words * _WORD.itemsize].view(1, -1).view(_WORD)
        self._memory = torch.zeros(REPLAY_SLOTS, num_words, dtype=_WORD, pin_memory=True)
        self._memory[:, -1] = torch.arange(1, REPLAY_SLOTS + 1) % REPLAY_SLOTS
        self._memory_of_device = WeakTensor(self._memory).tensor()
        self._next_of_device = torch.zeros(1, dtype=_WORD, device=inputs.block.device)
        self._blocks = [inputs.host_block(slot.view(torch.uint8)[: -_WORD.itemsize]) for slot in self._memory]
        self._events = [torch.cuda.Event() for _ in range(REPLAY_SLOTS)]
        self._next = 0

    # In a capture -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Puts the first kernels of captured prompts on the stream."""
        torch.index_select(self._memory_of_device, 0, self._next_of_device, out=self._places)
        self._next_of_device.copy_(self._places[0, -1:])

    def captured(self) -> None:
        """Ends the captures: the first replay uses the first slot, whatever ran ahead of captures."""
        self._next_of_device.zero_()

    # Before and after a replay ----------------------------------------------------------------------------------------

    def write(
        self, fields: StepFields[np.ndarray], write_work: Callable[[np.ndarray], bool]
    ) -> StepFields[torch.Tensor] | None:
        """Writes the step that the next replay is to run; None: it takes more than there is room for.

        Args:
            fields: as StepInputs.upload takes them.
            write_work: writes attention's work, or says that it cannot.

        Returns:
            Where the fields will be on the device, once the replay has begun, until the next one or the next upload.
        """
        self._events[self._next].synchronize()  # at once when never recorded
        block: HostBlock = self._blocks[self._next]
        return self._inputs.write(fields, block) if write_work(block.work) else None

    def replayed(self) -> None:
        """Notes that the replay of the written slot is queued."""
        self._events[self._next].record()
        self._next = (self._next + 1) % REPLAY_SLOTS
