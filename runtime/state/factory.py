"""Makes the backend of a model: its attention's alone, or one for its layers with a state too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import torch

from mllm_compile.runtime.attention.base import AttentionBackend
from mllm_compile.runtime.attention.factory import AttendingModel, make_attention_backend
from mllm_compile.runtime.attention.layer_kernels import of_kind
from mllm_compile.runtime.attention.split.page_table import PageTable
from mllm_compile.runtime.errors import UnsupportedModelError
from mllm_compile.runtime.memory_pool import GDNPool, ReqToTokenPool
from mllm_compile.runtime.runner_config import RunnerConfig
from mllm_compile.runtime.state.base import StateBackend
from mllm_compile.runtime.state.held import HeldStates
from mllm_compile.runtime.state.hybrid_backend import HybridAttnBackend
from mllm_compile.runtime.state.layer import StateLayer
from mllm_compile.runtime.state.mixed import MixedStateSteps
from mllm_compile.runtime.state.piece_backend import PieceStateBackend
from mllm_compile.runtime.state.torch_backend import TorchStateBackend


class StatefulModel(AttendingModel, Protocol):
    """The model's facts that a backend needs, also of layers with a state."""

    @property
    def state_layers(self) -> Sequence[StateLayer]:
        """The layers with a state, by state_id; there may be none."""


def make_backend(
    config: RunnerConfig,
    model: StatefulModel,
    req_to_token_pool: ReqToTokenPool,
    state_pool: GDNPool,
    device: torch.device,
    part: int = 0,
    weights: Iterable[torch.Tensor] = (),
    short_prompts: bool = False,
) -> AttentionBackend:
    """The backend that computes a model's attention, and its layers with a state.

    Args:
        part, short_prompts: as make_attention_backend has them.
        weights: as HeldStates has them.

    Raises:
        ConfigError, DeviceError: as make_attention_backend.
        UnsupportedModelError: the model has a layer that it cannot do, or not in the deterministic mode.
    """
    make_attention = partial(
        make_attention_backend, config, model, req_to_token_pool, device, part, short_prompts=short_prompts
    )
    if not model.state_layers:
        return make_attention()
    is_deterministic = config.runtime.deterministic
    pieces, without = of_kind(model.layer_kernels, "state"), _without_kernel(model)
    if is_deterministic and device.type == "cuda" and without is not None:
        raise UnsupportedModelError(
            f"runtime.deterministic makes each token a row of its own, which layer {without} cannot take: no kernel "
            "has states of its size, and the host would have to see which tokens are of one request. Set "
            "runtime.deterministic: false."
        )
    states: StateBackend = TorchStateBackend(state_pool, is_deterministic)
    if pieces:
        states = PieceStateBackend(state_pool, pieces, states)
    mixed = MixedStateSteps(config.max_rows, device) if without is None else None
    held = HeldStates(states, state_pool.num_rows - 1, weights)
    if model.layers:
        return HybridAttnBackend(make_attention(), states, held, mixed)
    slots = req_to_token_pool.req_to_token
    pages = PageTable(slots, max(slots.shape[0], config.max_attended), config.runtime.page_size).pages
    return HybridAttnBackend(None, states, held, mixed, pages)


def draft_obstacle(config: RunnerConfig, model: StatefulModel, device: torch.device) -> str | None:
    """Why steps of the model take no drafts; None: they do."""
    if not model.state_layers:
        return None
    if config.runtime.expert_parallel_size > 1:
        return "layers carry states, and ranks have requests of their own (runtime.expert_parallel_size)"
    if device.type != "cuda":
        return None
    if config.runtime.deterministic:
        return "runtime.deterministic makes each token a row of its own, and a step leaves its states"
    if (without := _without_kernel(model)) is not None:
        return f"no kernel serves the states of {without}, and the device alone knows how many tokens hold"
    return None


def _without_kernel(model: StatefulModel) -> str | None:
    """The first layer with a state that has no kernel."""
    pieces = of_kind(model.layer_kernels, "state")
    return next((layer.name for layer in model.state_layers if layer.name not in pieces), None)
