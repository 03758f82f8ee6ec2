"""The drafter of a draft model: one of the three that step/ has."""

from __future__ import annotations

from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.step.draft_model import ModelDrafter
from mllm_compile.runtime.step.hidden_drafter import HiddenDrafter
from mllm_compile.runtime.step.host_page_table import HostPageTable
from mllm_compile.runtime.step.parallel_drafter import ParallelDrafter


def model_drafter(model: ModelRunner, pages: HostPageTable) -> ModelDrafter:
    """The drafter by a draft model; arguments as ModelDrafter takes them."""
    if model.model.block is not None:
        return ParallelDrafter(model, pages, model.model.block)
    return HiddenDrafter(model, pages) if model.model.reads_hidden_states else ModelDrafter(model, pages)
