"""The sizes of a runner's model under the names that callers of ModelRunner know; made when they are asked for."""

from __future__ import annotations

import torch

from mllm_compile.runtime.program.loaded import LoadedModel
from mllm_compile.runtime.runner_config import RunnerConfig


class RunnerSizes:
    """The sizes that a ModelRunner has after load_model."""

    config: RunnerConfig
    model: LoadedModel

    @property
    def is_generation(self) -> bool:
        """True if the model gives logits of next tokens; the only kind that is compiled."""
        return True

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the model, those with a state among them."""
        return self.model.num_hidden_layers

    @property
    def num_attention_heads(self) -> int:
        """Query heads of a layer, of this rank."""
        return self.model.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values of a layer, of this rank."""
        return self.model.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Numbers of a query head."""
        return self.model.head_dim

    @property
    def hidden_size(self) -> int:
        """Numbers of a token between layers."""
        return self.model.hidden_size

    @property
    def vocab_size(self) -> int:
        """Numbers of a row of logits."""
        return self.model.vocab_size

    @property
    def context_len(self) -> int:
        """Positions that the model was made for; a request has at most runtime.max_model_len."""
        return self.model.context_len

    @property
    def sliding_window_size(self) -> int | None:
        """Tokens that a query of the windowed layers sees, itself included; None: no layer has a window."""
        windows = {layer.window_left + 1 for layer in self.model.layers if layer.window_left >= 0}
        return max(windows, default=None)

    @property
    def max_running_requests(self) -> int:
        """Requests that a rank runs side by side: rows 1 to this of the table of slots."""
        return self.config.runtime.max_running_requests

    @property
    def kv_cache_dtype(self) -> torch.dtype:
        """Type of keys and values in the cache."""
        return self.config.kv_cache_dtype
