"""A device of adapters without tensors, and a model whose tokens depend on a request's adapter."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mllm_compile.adapters.base_model import BaseModel
from mllm_compile.adapters.peft_folder import Matrices
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch
from tests.adapters.folders import PREFIX, peft_fields, write_adapter
from tests.fakes import FakeStepHandle, FakeStepRunner, hashed_token
from tests.hang_guard import HANG_S

BASE = BaseModel("m", {"q_proj.weight": (2, 3)}, ("q_proj",), {}, 4, torch.float32)


@dataclass
class FakeDevice:
    """Slots with a number each, which the adapters in them have as the first of their matrices."""

    num_slots: int = 2
    content: dict[int, int] = field(default_factory=dict)
    reading: threading.Event = field(default_factory=threading.Event)  # cleared: no adapter that was read is ready
    fails: int = 0  # writes that are yet to fail

    def prepared(self, matrices: Matrices) -> Matrices:
        assert self.reading.wait(HANG_S)
        return matrices

    def moment(self) -> int:
        return threading.get_ident()

    def write(self, slot: int, matrices: Matrices, behind: int) -> None:
        assert behind != threading.get_ident(), "steps go on meanwhile"
        self.content.pop(slot, None)
        if self.fails:
            self.fails -= 1
            raise RuntimeError("the device is full")
        self.content[slot] = int(matrices["q_proj.weight"][0][0, 0])

    def tell(self, slot: int, matrices: Matrices) -> None:
        assert slot in self.content, "it is written first"


class AdapterRunner(FakeStepRunner):
    """Adds the number of a request's adapter to its tokens."""

    device: FakeDevice

    def submit(self, batch: ScheduledBatch) -> FakeStepHandle:
        rows = [row for row in range(batch.num_requests) if batch.sample_mask[row]]
        self.numbers = iter([self.number(batch.requests[row].adapter_slot) for row in rows])
        return super().submit(batch)

    def number(self, slot: int) -> int:
        return 0 if slot < 0 else self.device.content[slot]

    def _run(self, token_ids: list[int], draft: list[int]) -> list[int]:
        token_ids.append(changed_token(token_ids, next(self.numbers)))
        return token_ids[-1:]


def changed_token(token_ids: list[int], number: int) -> int:
    return hashed_token([*token_ids, number]) if number else hashed_token(token_ids)


def adapter_folder(folder: Path, number: int) -> Path:
    tensors = {
        f"{PREFIX}q_proj.lora_A.weight": torch.full((1, 3), float(number)),
        f"{PREFIX}q_proj.lora_B.weight": torch.ones(2, 1),
    }
    return write_adapter(folder, tensors, peft_fields(["q_proj"], 1, lora_alpha=1))
