"""The runner's settings, with nothing left to decide: the engine resolves every 'auto' before it gets here."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mllm_compile.runtime.config_sections import CudaGraphSection, LoraSection, RuntimeSection, SpeculativeSection

# Of a row, at least: a request may go without drafts for some steps.
LEAST_KEPT_HIDDEN_STATES = 8
MOST_VERIFIED = 256  # tokens: more of them take longer than plain decodes of as many requests


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Settings of one ModelRunner, already validated against the model and the device by the engine's config."""

    dtype: torch.dtype  # of weights and activations
    runtime: RuntimeSection
    cudagraph: CudaGraphSection = field(default_factory=lambda: CudaGraphSection(mode="none"))
    speculative: SpeculativeSection = field(default_factory=SpeculativeSection)
    lora: LoraSection = field(default_factory=LoraSection)
    num_pages: int | None = None  # a fixed number of KV pages in place of the memory profile
    debug_graphs: bool = False  # check at every replay that no input of a captured piece has moved
    forward_times_interval_s: float = 0.0  # > 0: log median forward times so often, at the price of waiting for each

    # Rows of a draft model's pass behind a captured verify step: attention sees a request in each. 0: it makes none.
    most_chained: int = 0

    @property
    def kv_cache_dtype(self) -> torch.dtype:
        """Type of keys and values in the cache."""
        dtype: torch.dtype = getattr(torch, self.runtime.kv_cache_dtype)
        return dtype

    @property
    def max_rows(self) -> int:
        """Most requests of a step."""
        runtime = self.runtime
        if runtime.deterministic and not runtime.any_rows:
            return runtime.max_num_batched_tokens
        return min(runtime.max_running_requests, runtime.max_num_batched_tokens)

    @property
    def max_attended(self) -> int:
        """Most requests that attention sees in a step: of a captured verify step each token is one, and so in the
        deterministic mode."""
        most_rows = self.runtime.max_num_batched_tokens if self.runtime.deterministic else self.max_rows
        return max(most_rows, self.max_verified, self.most_chained)

    @property
    def max_verified(self) -> int:
        """Most tokens of a captured verify step, padding included; 0: none is captured."""
        runtime, depths = self.runtime, self.speculative.captured_depths
        is_captured = self.cudagraph.decode_requests and self.cudagraph.sample_in_graph
        if not depths or not is_captured or runtime.deterministic:
            return 0
        return min(MOST_VERIFIED, runtime.max_running_requests * (1 + depths[-1]), runtime.max_num_batched_tokens)

    def longest_kept(self, num_layers: int) -> int:
        """Most tokens of a request whose hidden states a drafter of so many layers keeps."""
        return self.speculative.most_drafted + num_layers

    def num_kept_hidden_states(self, num_layers: int) -> int:
        """Most tokens whose hidden states a drafter of so many layers keeps; as it makes room for longer drafts it has
        the room before as well."""
        longest = self.longest_kept(num_layers)
        of_row = LEAST_KEPT_HIDDEN_STATES + (longest if longest > LEAST_KEPT_HIDDEN_STATES else 0)
        return of_row * (self.runtime.max_running_requests + 1)

    @property
    def max_sampled(self) -> int:
        """Most rows of logits that a step samples."""
        runtime = self.runtime
        if runtime.deterministic and not runtime.any_rows:
            return runtime.max_num_batched_tokens
        num_drafted = self.speculative.most_drafted_of(runtime.max_running_requests)
        return min(runtime.max_running_requests + num_drafted, runtime.max_num_batched_tokens)
