"""The base of heads that draft: causal LMs over a model's hidden states, of layers of Transformers. Parameters are
named as the Speculators library names them (its models/)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask

OWN_HIDDEN_STATE = 0  # the only place that a head has


class Head(PreTrainedModel):
    """The parts that heads of every kind have. A subclass sets `embed_tokens` and `rotary_emb`, and has `forward`."""

    config_class = PreTrainedConfig
    embed_tokens: nn.Module
    rotary_emb: nn.Module
    _supports_sdpa = True
    _supports_attention_backend = True
    _keys_to_ignore_on_load_unexpected = [r"^t2d$", r"^d2t$", r"^verifier_(norm|lm_head)\."]  # noqa: RUF012

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def head_of(self, draft_vocab_size: int) -> None:
        """Makes the head, of so many of the model's tokens."""
        self.lm_head = nn.Linear(self.config.hidden_size, draft_vocab_size, bias=False)
        if draft_vocab_size != self.config.vocab_size:
            # Each id of the head's vocabulary less its id of the model's.
            self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))

    def logits_of(self, x: torch.Tensor) -> torch.Tensor:
        """Logits in the model's vocabulary, of [1, S, hidden]; tokens that the head does not know have the least
        number."""
        logits: torch.Tensor = self.lm_head(x)
        d2t = self._buffers.get("d2t")
        if d2t is None:
            return logits
        ids = (torch.arange(d2t.shape[0], device=d2t.device) + d2t).clamp(0, self.config.vocab_size - 1)
        least = torch.finfo(logits.dtype).min
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), least)
        return whole.index_copy(2, ids, logits)

    def said_to_layers(self, embeds: torch.Tensor, position_ids: torch.Tensor | None) -> dict[str, Any]:
        """The further arguments of each layer; without `position_ids` from 0 on."""
        if position_ids is None:
            position_ids = torch.arange(embeds.shape[1], device=embeds.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embeds,
            attention_mask=None,
            past_key_values=None,
            position_ids=position_ids,
        )
        rotation = self.rotary_emb(embeds, position_ids)
        return {"attention_mask": mask, "position_embeddings": rotation, "position_ids": position_ids}
