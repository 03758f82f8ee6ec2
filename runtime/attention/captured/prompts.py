"""Captured prompts alone: those that begin with their first token (prefill_new.py), and those behind a prefix in the
cache (prefill_cached.py)."""

from __future__ import annotations

import numpy as np
import torch

from mllm_compile.runtime.attention.capture import CapturesPrompts
from mllm_compile.runtime.attention.captured.prefill_cached import CachedPrefillSteps
from mllm_compile.runtime.attention.captured.prefill_new import NewPrefillSteps
from mllm_compile.runtime.attention.flashinfer.planned import Planned, PrefillMetadata
from mllm_compile.runtime.attention.metadata import StepPrompts


class CapturedPrompts(CapturesPrompts):
    """The captured steps of one backend, of both kinds."""

    def __init__(self, new: NewPrefillSteps, cached: CachedPrefillSteps, planned: Planned) -> None:
        """Args: planned: the backend's."""
        self._new = new
        self._cached = cached
        self._planned = planned

    def prompt_work_bytes(self, has_prefix: bool) -> int:
        return (self._cached if has_prefix else self._new).work_bytes

    def init_forward_metadata_capture_prompts(self, num_tokens: int, work: torch.Tensor, has_prefix: bool) -> None:
        wrappers = (self._cached if has_prefix else self._new).capture(num_tokens, work)
        self._planned.set(None, PrefillMetadata(wrappers, use_ragged=not has_prefix), num_decodes=0)

    def write_prompt_work(self, num_tokens: int, memory: np.ndarray, prompts: StepPrompts) -> bool:
        if prompts.has_prefix:
            return self._cached.write(num_tokens, memory, prompts)
        return self._new.write(memory, prompts.starts)
