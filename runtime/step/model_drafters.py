"""The drafter of a draft model: one of the three that step/ has."""

from __future__ import annotations

from mllm_compile.runtime.cuda_graph.model import ChainedDrafts
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.step.draft_model import ModelDrafter
from mllm_compile.runtime.step.hidden_drafter import HiddenDrafter
from mllm_compile.runtime.step.host_page_table import HostPageTable
from mllm_compile.runtime.step.parallel_drafter import ParallelDrafter


def model_drafter(model: ModelRunner, pages: HostPageTable, chain: ChainedDrafts | None) -> ModelDrafter:
    """The drafter by a draft model; arguments as HiddenDrafter takes them."""
    if model.model.block is not None:
        return ParallelDrafter(model, pages, chain, model.model.block)
    return HiddenDrafter(model, pages, chain) if model.model.reads_hidden_states else ModelDrafter(model, pages)
