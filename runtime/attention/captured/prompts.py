"""Captured prompts alone: those that begin with their first token (fresh.py), and those that go on from what is in the
cache (extends.py)."""

from __future__ import annotations

import numpy as np
import torch

from mllm_compile.runtime.attention.capture import CapturesPrompts
from mllm_compile.runtime.attention.captured.extends import ExtendSteps
from mllm_compile.runtime.attention.captured.fresh import FreshSteps
from mllm_compile.runtime.attention.flashinfer.planned import Planned, PrefillMetadata
from mllm_compile.runtime.attention.metadata import StepPrompts


class CapturedPrompts(CapturesPrompts):
    """The captured steps of one backend, of both kinds."""

    def __init__(self, fresh: FreshSteps, extends: ExtendSteps, planned: Planned) -> None:
        """Args: planned: the backend's."""
        self._fresh = fresh
        self._extends = extends
        self._planned = planned

    def prompt_work_bytes(self, extends: bool) -> int:
        return (self._extends if extends else self._fresh).work_bytes

    def init_forward_metadata_capture_prompts(self, num_tokens: int, work: torch.Tensor, extends: bool) -> None:
        wrappers = (self._extends if extends else self._fresh).capture(num_tokens, work)
        self._planned.set(None, PrefillMetadata(wrappers, use_ragged=not extends), num_decodes=0)

    def write_prompt_work(self, num_tokens: int, memory: np.ndarray, prompts: StepPrompts) -> bool:
        if prompts.extends:
            return self._extends.write(num_tokens, memory, prompts)
        return self._fresh.write(memory, prompts.starts)
