"""A torch module that learns: what trainers have beside engines, on one device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.hang_guard import HANG_S


def _nothing() -> None:
    pass


class Learner:
    """Transformers' model of a folder, which learns fixed random texts.

    Args:
        dtype: of its weights; on a device.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).train()
        self._optimiser = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self._generator = torch.Generator().manual_seed(5)

    def step(self, amid: Callable[[], None] = _nothing, behind: Callable[[], None] = _nothing) -> float:
        """One step of training.

        Args:
            amid: called between forward and backward, when activations are held.
            behind: called between backward and the optimiser, when gradients are.

        Returns:
            The loss.
        """
        ids = torch.randint(3, 90, (4, 48), generator=self._generator).to(self.model.device)
        loss = self.model(ids, labels=ids, use_cache=False).loss
        amid()
        loss.backward()
        behind()
        self._optimiser.step()
        self._optimiser.zero_grad()
        return loss.item()


class InThread:
    """A learner's steps in a thread of their own."""

    def __init__(self, learner: Learner, num_steps: int) -> None:
        self._losses: list[float] = []

        def run() -> None:
            for _ in range(num_steps):
                self._losses.append(learner.step())

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def losses(self) -> list[float]:
        """Waits for its end."""
        self._thread.join(HANG_S)
        assert not self._thread.is_alive(), "the learner did not end"
        return self._losses
