"""Picks the class for an attention_backend name. Beside FlashInfer are the program's own kernels over latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from mllm_compile.runtime.attention.base import AttentionBackend
from mllm_compile.runtime.attention.latent.backend import LatentAttnBackend
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.layer_kernels import LinkedKernels, of_kind
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.errors import ConfigError, UnsupportedModelError
from mllm_compile.runtime.memory_pool import ReqToTokenPool
from mllm_compile.runtime.runner_config import RunnerConfig


class AttendingModel(Protocol):
    """The model's facts that a backend needs."""

    @property
    def layers(self) -> Sequence[AttentionLayer]:
        """The layers, by layer_id."""

    @property
    def layer_kernels(self) -> Mapping[str, LinkedKernels]:
        """Layer → its own kernels, if any."""


def make_attention_backend(
    config: RunnerConfig,
    model: AttendingModel,
    req_to_token_pool: ReqToTokenPool,
    device: torch.device,
    part: int = 0,
    most_decodes: int | None = None,
    short_prompts: bool = False,
) -> AttentionBackend:
    """The backend that config.runtime.attention_backend names.

    Args:
        part: which part of steps it is for, where parts run beside each other.
        most_decodes: rows of a batch at most, where batches are decodes alone; None: they have prompts, too.
        short_prompts: prompts are of few tokens, and never captured.

    Raises:
        ConfigError: no backend has that name, or it cannot compute in the model's dtype.
        DeviceError: its library or its device is missing.
        UnsupportedModelError: the model has a layer that it cannot do.
    """
    runtime = config.runtime
    if runtime.attention_backend == "torch":
        libraries = of_kind(model.layer_kernels, "paged") if runtime.takes("paged_attention") else {}
        bound = {one.name: libraries[one.name].of(one, config.dtype) for one in model.layers if one.name in libraries}
        return TorchAttnBackend(deterministic=runtime.deterministic, paged=bound)
    if chooses := [layer.name for layer in model.layers if layer.top_k]:
        raise UnsupportedModelError(
            f"an indexer chooses the keys of {chooses[0]}, which kernels do not: set runtime.attention_backend: torch"
        )
    if runtime.attention_backend == "flashinfer" and all(layer.is_latent for layer in model.layers):
        return LatentAttnBackend(
            model.layers,
            of_kind(model.layer_kernels, "latent"),
            req_to_token=req_to_token_pool.req_to_token,
            max_requests=config.max_attended * config.runtime.expert_parallel_size,
            page_size=runtime.page_size,
            dtype=config.dtype,
        )
    if runtime.attention_backend == "flashinfer":
        from mllm_compile.runtime.attention.flashinfer.wrappers import GroupWrappers
        from mllm_compile.runtime.attention.flashinfer_backend import FlashInferAttnBackend

        own = model.layer_kernels  # of other layers too, which another backend serves
        wrappers = GroupWrappers(
            model.layers,
            kv_cache_dtype=config.kv_cache_dtype,
            q_dtype=config.dtype,
            max_context_len=req_to_token_pool.max_context_len,
            req_to_token=req_to_token_pool.req_to_token,
            device=device,
            max_requests=config.max_attended * config.runtime.expert_parallel_size,
            page_size=runtime.page_size,
            deterministic=runtime.deterministic,
            kernels={one.name: own[one.name] for one in model.layers if one.name in own},
            copy_prefix=runtime.takes("copy_prefix"),
            divide_prefix=runtime.takes("divide_prefix"),
            part=part,
            most_decodes=most_decodes,
            short_prompts=short_prompts,
        )
        return FlashInferAttnBackend(wrappers)
    raise ConfigError(f"runtime.attention_backend: expected flashinfer or torch, got {runtime.attention_backend!r}")
