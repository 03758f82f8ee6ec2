"""A causal LM of our own in Transformers' style, and ways in which it is not what it seems: what the gate must tell.

`kind` is the flaw; "plain" has none. Each flaw is one that architectures of Transformers really have.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

VOCAB, HEADS, HEAD_DIM = 64, 2, 8
HIDDEN = HEADS * HEAD_DIM


class ToyConfig(PreTrainedConfig):
    model_type = "toy"

    def __init__(self, kind: str = "plain", **kwargs: Any) -> None:
        self.kind = kind
        self.vocab_size = VOCAB
        self.hidden_size = HIDDEN
        self.num_hidden_layers = 1
        self.num_attention_heads = HEADS
        self.max_position_embeddings = 256
        self.sliding_window = 1000  # longer than any text of the self-check
        self.attention_chunk_size = 1000
        super().__init__(**kwargs)
        if kind == "no head count":
            del self.num_attention_heads
        elif kind == "no vocabulary size":
            del self.vocab_size


class ToyForCausalLM(PreTrainedModel):
    """One layer: attention, whatever the flaw adds, and a head."""

    config_class = ToyConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        if config.kind == "cannot be built":
            raise ZeroDivisionError("layers per zero")
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.places = nn.Embedding(config.max_position_embeddings, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.register_buffer("calls", torch.zeros(HIDDEN))
        if config.kind == "constant of unknown value":
            self.register_buffer("scale", torch.ones(HIDDEN), persistent=False)
        self.is_causal = config.kind != "not causal"
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        kind = self.config.kind
        if position_ids is None or kind == "own positions":
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.embedding(input_ids) + self.places(position_ids)
        if kind == "constant of unknown value":
            x = x * self.scale
        x = x + self.out(self._attend(x, position_ids))
        if kind == "state from token to token":
            x = x + x.cumsum(1) / 10
        elif kind == "convolution":
            x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]
        elif kind == "writes a buffer":
            self.calls.add_(1)
            x = x + self.calls
        elif kind == "writes a view of a weight":
            self.out.weight.view(-1).mul_(0.5)
        elif kind == "branches on length" and input_ids.shape[1] > 16:
            x = x * 2
        elif kind == "size that depends on data":
            x = x + x[:, input_ids[0] > 3].mean(1)
        elif kind == "raises":
            raise KeyError("no such layer")
        elif kind == "keeps what it computed":
            self.last = x
        elif kind == "logits of every token":
            logits_to_keep = 0
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(x[:, rows]))

    def _attend(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        kind = self.config.kind
        if kind == "direct attention":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if kind == "own scores":
            scores = (q @ k.transpose(2, 3)).tril()
            return (scores @ v).transpose(1, 2).flatten(2)
        if kind.startswith("written out"):
            return self._written_out(q, k, v, create_causal_mask(self.config, x, None, None, position_ids=position_ids))
        masks = {
            "window in the mask alone": create_sliding_window_causal_mask,
            "window in call and mask": create_sliding_window_causal_mask,
            "chunks in the mask alone": create_chunked_causal_mask,
        }
        mask = masks.get(kind, create_causal_mask)(self.config, x, None, None, position_ids=position_ids)
        said: dict[str, Any] = {}
        if kind in ("window in call and mask", "window in the call alone"):
            said["sliding_window"] = self.config.sliding_window
        if kind == "keyword of unknown meaning":
            said["key_places"] = position_ids
        if kind == "changes its mask" and mask is not None:
            mask = mask.clone()
        attend = AttentionInterface()[self.config._attn_implementation]
        return attend(self, q, k, v, mask, scaling=HEAD_DIM**-0.5, **said)[0].flatten(2)

    def _written_out(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        kind = self.config.kind
        scores = (q @ k.transpose(2, 3)).float() / 2.5
        places = torch.arange(q.shape[2], device=q.device)
        distance = places[:, None] - places
        if kind == "written out with a window of its own":
            scores = scores.masked_fill((distance < 0) | (distance > 3), torch.finfo(scores.dtype).min)
        elif kind == "written out in chunks":
            scores = scores.masked_fill((distance < 0) | (places[:, None] // 4 != places // 4), float("-inf"))
        elif kind != "written out and sees all" and mask is not None:
            scores = scores + mask
        if kind == "written out with a learned bias":
            scores = scores + self.places.weight[: q.shape[2], 0]
        elif kind == "written out with a cap":
            scores = scores.tanh()
        return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2)


def register_toy() -> None:
    """Makes the toy known to Transformers' Auto classes; calling it again changes nothing."""
    AutoConfig.register("toy", ToyConfig, exist_ok=True)
    AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)
