"""An EAGLE-3 head, or one of P-EAGLE (arXiv 2602.01469), which has a hidden state for masks beside. The first layer
reads the embeddings too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

import mllm_compile.runtime.ops.trace  # noqa: F401  (defines torch.ops.mllm.hidden_state)
from mllm_compile.config.folders.speculators import Eagle3Config
from mllm_compile.model.head import OWN_HIDDEN_STATE, Head
from mllm_compile.runtime.program.spec import HiddenProjection


class Eagle3(Head):
    """Logits of the token behind input_ids, of the model's hidden states at the place before; see the module's header.

    Attributes:
        fc: makes one hidden state of several layers' ones; the runtime calls it, ahead of the first pass alone.
    """

    marks_hidden_states = True

    def __init__(self, config: PreTrainedConfig, eagle: Eagle3Config, template: Any) -> None:
        """
        Args:
            config: of the layers.
            template: the decoder that Transformers builds for it, whose modules are taken.
        """
        super().__init__(config)
        size, first = config.hidden_size, template.layers[0]
        make_norm = type(first.input_layernorm)
        self._norm_output = eagle.norm_output
        self.embed_tokens = template.embed_tokens
        self.fc = nn.Linear(eagle.num_read * size, size, bias=False)
        if eagle.norm_before_fc:
            self.input_norm = make_norm(eagle.num_read * size, eps=config.rms_norm_eps)
        if eagle.fc_norm:
            self.fc_norm = nn.ModuleList(make_norm(size, eps=config.rms_norm_eps) for _ in range(eagle.num_read))
        hidden_norm = make_norm(size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([_FirstLayer(first, hidden_norm, eagle), *template.layers[1:]])
        self.norm, self.rotary_emb = template.norm, template.rotary_emb
        self.head_of(eagle.draft_vocab_size)
        if eagle.block is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, eagle.num_read * size))
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        use_cache: bool = False,
    ) -> CausalLMOutputWithPast:
        """Logits [1, S, model's vocabulary] of input_ids [1, T]. Hidden states are [1, T, hidden]; without them the
        embeddings take their place."""
        embeds = self.embed_tokens(input_ids)
        said = self.said_to_layers(embeds, position_ids)
        x = self.layers[0](embeds, embeds if hidden_states is None else hidden_states, said)
        for layer in self.layers[1:]:
            x = layer(x, **said)
        if not self._norm_output:
            x = torch.ops.mllm.hidden_state(x, OWN_HIDDEN_STATE)
        x = self.norm(x)
        if self._norm_output:
            x = torch.ops.mllm.hidden_state(x, OWN_HIDDEN_STATE)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.logits_of(x[:, rows, :]))


class _FirstLayer(nn.Module):
    """A layer whose attention reads the embeddings beside the hidden states, each behind a norm."""

    def __init__(self, layer: Any, hidden_norm: nn.Module, eagle: Eagle3Config) -> None:
        super().__init__()
        self._norm_before_residual = eagle.norm_before_residual
        self.self_attn, self.mlp, self.hidden_norm = layer.self_attn, layer.mlp, hidden_norm
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        for name in ("q_proj", "k_proj", "v_proj"):
            own: nn.Linear = getattr(layer.self_attn, name)
            wide = nn.Linear(2 * own.in_features, own.out_features, bias=own.bias is not None)
            setattr(self.self_attn, name, wide)

    def forward(self, embeds: torch.Tensor, hidden_states: torch.Tensor, said: dict[str, Any]) -> torch.Tensor:
        normed = self.hidden_norm(hidden_states)
        residual = normed if self._norm_before_residual else hidden_states
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        x = residual + self.self_attn(hidden_states=both, **said)[0]
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def eagle3_model(config: PreTrainedConfig, head: Eagle3Config, template: Any) -> tuple[Eagle3, HiddenProjection]:
    """The head on meta, and how it reads hidden states; arguments as Eagle3 takes them."""
    model = Eagle3(config, head, template)
    norms = ["input_norm.weight"] if head.norm_before_fc else []
    norms += [f"fc_norm.{place}.weight" for place in range(head.num_read)] if head.fc_norm else []
    mask = None if head.block is None else "mask_hidden"
    return model, HiddenProjection("fc.weight", tuple(norms), config.rms_norm_eps, mask=mask)
