"""Says which steps of a model are captured: the sizes of its config, as far as its attention and its ranks allow."""

from __future__ import annotations

import logging

from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.graph_mode import CUDAGraphMode

logger = logging.getLogger(__name__)

# Tokens of captured prompts alone, whose inputs come in one upload, always of all its places. Beyond the last size of
# those that go on from what is in the cache a step takes so long that what a graph spares the host is little of it.
FRESH_TOKENS = (64, 128, 192, 256, 384, 512)
EXTEND_TOKENS = (16, 64, 128, 192, 256)


def dispatcher_of(runner: CapturableModel) -> GraphDispatcher:
    """The dispatcher of all sizes that are captured of a model.

    Raises:
        ConfigError: steps with prompts are to be captured whole, and cannot be.
    """
    graphs = runner.config.cudagraph
    mode, mixed_tokens = CUDAGraphMode.from_name(graphs.mode), graphs.mixed_tokens
    obstacle = runner.attn_backend.mixed_obstacle if mixed_tokens else None
    if mixed_tokens and runner.num_deals > 1:
        obstacle = "ranks with requests of their own have a kind of step each"
    if obstacle and graphs.mixed_tokens_asked:
        raise ConfigError(
            f"cudagraph.mixed_tokens is {list(mixed_tokens)}, but steps with prompts cannot be captured whole: "
            f"{obstacle}. Set it to auto or []."
        )
    if obstacle:
        logger.info("steps with prompts are not captured whole: %s", obstacle)
        mixed_tokens = ()
    cascades = [size for size in graphs.decode_requests if _is_captured_as_cascade(runner, size)]
    return GraphDispatcher(
        mode,
        graphs.piecewise_tokens,
        graphs.decode_requests,
        mixed_tokens,
        cascades,
        fresh_tokens=_prompt_sizes(runner, extends=False),
        extend_tokens=_prompt_sizes(runner, extends=True),
        tokens_alone=runner.choice is not None,
    )


def _prompt_sizes(runner: CapturableModel, extends: bool) -> list[int]:
    """The sizes for which prompts alone are captured whole, those that go on from what is in the cache or others."""
    if not runner.config.cudagraph.whole_prompts:
        return []
    if runner.communicator is not None or runner.model.has_experts:
        return []  # over ranks, and of mixtures of experts, they have not been seen
    if runner.model.rope is not None or runner.attn_backend.prompts is None:
        return []  # RoPE's lengths would be a further input
    runtime, sizes = runner.config.runtime, EXTEND_TOKENS if extends else FRESH_TOKENS
    return [size for size in sizes if size <= runtime.max_num_batched_tokens]


def _is_captured_as_cascade(runner: CapturableModel, num_requests: int) -> bool:
    """True for powers of two that may pay: a cascade takes as long for all requests of a tile."""
    runtime, backend = runner.config.runtime, runner.attn_backend
    is_power = num_requests & (num_requests - 1) == 0
    if not (runtime.cascade_attention and is_power and backend.captured_cascades is not None):
        return False
    return backend.cascades is not None and backend.cascades.cascade_pays(num_requests, runtime.max_model_len, True)
