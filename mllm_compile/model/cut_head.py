"""A drafter's head cut to some tokens: a pass reads their rows alone, and drafts no other token (FR-Spec, arXiv
2502.14856). Answers are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mllm_compile.errors import ConfigError, UnsupportedModelError
from mllm_compile.model.hf_model import HFModel


class CutHead(nn.Module):
    """Logits of all tokens, of a head with `token_ids` alone; the others have the least number.

    Attributes:
        weight: [tokens, hidden].
        token_ids: [tokens] int64, ascending; in no checkpoint.
    """

    def __init__(self, head: Any, num_tokens: int) -> None:
        super().__init__()
        weight = head.weight
        self._vocab_size = weight.shape[0]
        self.weight = nn.Parameter(weight.new_empty((num_tokens, weight.shape[1])), requires_grad=False)
        self.register_buffer("token_ids", weight.new_empty(num_tokens, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, hidden] → [1, S, vocabulary] of x [1, S, hidden]."""
        logits = nn.functional.linear(x, self.weight)
        whole = logits.new_full((*logits.shape[:-1], self._vocab_size), torch.finfo(logits.dtype).min)
        return whole.index_copy(logits.dim() - 1, self.get_buffer("token_ids"), logits)


def with_cut_head(built: HFModel, token_ids: Sequence[int]) -> HFModel:
    """The drafter on meta with its head cut to these tokens, ascending.

    Raises:
        ConfigError: a token is beyond the vocabulary.
        UnsupportedModelError: the head has tokens of its own already, or a bias.
    """
    model: Any = built.model
    head, size = model.get_output_embeddings(), built.sizes().vocab_size
    if token_ids[-1] >= size:
        raise ConfigError(
            f"speculative.token_map holds token {token_ids[-1]}, and the vocabulary has {size}: expected tokens from 0 "
            f"to {size - 1}. Use the map that was made for this model."
        )
    if head.weight.shape[0] < size:
        raise UnsupportedModelError(
            f"speculative.token_map is set, and the head has {head.weight.shape[0]} of {size} tokens by itself. Leave "
            "it out."
        )
    if head.bias is not None:
        raise UnsupportedModelError("speculative.token_map is set, and the head has a bias. Leave it out.")
    name = built.embedding_and_head()[1].removesuffix(".weight")
    owner, _, leaf_name = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf_name, CutHead(head, len(token_ids)))
    constant = {f"{name}.token_ids": torch.tensor(token_ids)}
    return replace(built, constants=built.constants | constant)
