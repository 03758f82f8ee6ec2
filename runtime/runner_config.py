"""The runner's settings, with nothing left to decide: the engine resolves every 'auto' before it gets here."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Settings of one ModelRunner, already validated against the model and the device by the engine's config."""

    device: str  # cpu | cuda:N
    dtype: torch.dtype  # of weights and activations
    attention_backend: str  # torch | flashinfer
    page_size: int  # tokens in a KV page
    kv_cache_dtype: torch.dtype
    mem_fraction_static: float  # share of the device's memory for weights + KV + graphs (CUDA only)
    max_model_len: int  # longest prompt + output, tokens
    max_running_requests: int
    max_num_batched_tokens: int  # budget of one step, prompt chunks included
    enable_prefix_cache: bool = True
    deterministic: bool = False  # every step is max_num_batched_tokens rows of one token each; see step/plan.py
    seed: int = 0
    cudagraph_mode: str = "none"  # none | piecewise | full | full_decode_only | full_and_piecewise
    piecewise_tokens: tuple[int, ...] = ()  # captured token counts, ascending
    decode_requests: tuple[int, ...] = ()  # captured request counts, ascending
    mixed_tokens: tuple[int, ...] = ()  # captured token counts of whole steps with prompts, ascending
    mixed_tokens_asked: bool = False  # refuse them where attention cannot be captured so, in place of leaving them out
    sample_in_graph: bool = False  # captured decodes choose their tokens, where the program has kernels for that
    num_pages: int | None = None  # a fixed number of KV pages in place of the memory profile
    skip_compiled: bool = False  # run LoadedModel.eager in place of the compiled program
    debug_graphs: bool = False  # check at every replay that no input of a captured piece has moved
    forward_times_interval_s: float = 0.0  # > 0: log median forward times so often, at the price of waiting for each

    @property
    def max_rows(self) -> int:
        """Most rows of logits that a step samples, and of requests that attention sees."""
        if self.deterministic:
            return self.max_num_batched_tokens
        return min(self.max_running_requests, self.max_num_batched_tokens)
