"""A DFlash head (Block Diffusion for Flash Speculative Decoding, arXiv 2602.06036): one pass drafts a block of tokens.

A block is a token and masks behind it. Its layers attend to keys and values made of the model's hidden states, and to
those of the block itself, in both directions. Here a row without a token stands for a hidden state. What layers compute
in such rows, but keys and values, is not used. Which keys a row sees is the runtime's to say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_compile.config.folders.speculators import HeadConfig
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.head import Head
from mllm_compile.runtime.program.spec import HiddenProjection

_LAYERS = "qwen3"  # which the format has alone


class DFlash(Head):
    """Logits of blocks; see the module's header.

    Attributes:
        fc, hidden_norm: make one hidden state of several layers' ones; the runtime applies them.
    """

    def __init__(self, config: PreTrainedConfig, head: HeadConfig, template: Any) -> None:
        """
        Args:
            config: of the layers.
            template: the decoder that Transformers builds for it, whose modules are taken.
        """
        super().__init__(config)
        size = config.hidden_size
        self.embed_tokens, self.layers = template.embed_tokens, template.layers
        self.norm, self.rotary_emb = template.norm, template.rotary_emb
        self.fc = nn.Linear(head.num_read * size, size, bias=False)
        self.hidden_norm = type(template.norm)(size, eps=config.rms_norm_eps)
        self.head_of(head.draft_vocab_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        use_cache: bool = False,
    ) -> CausalLMOutputWithPast:
        """Logits [1, S, model's vocabulary] of input_ids [1, T], which are negative where hidden_states [1, T, hidden]
        are read."""
        x = self.embed_tokens(input_ids.clamp(min=0))
        said = self.said_to_layers(x, position_ids)
        is_read = (input_ids < 0)[..., None]
        for layer in self.layers:
            normed = layer.input_layernorm(x)
            if hidden_states is not None:
                normed = torch.where(is_read, hidden_states, normed)
            x = x + layer.self_attn(hidden_states=normed, **said)[0]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.logits_of(self.norm(x[:, rows, :])))


def dflash_model(config: PreTrainedConfig, head: HeadConfig, template: Any) -> tuple[DFlash, HiddenProjection]:
    """The head on meta, and how it reads hidden states; arguments as DFlash takes them.

    Raises:
        UnsupportedModelError: its layers are of another model than the format's.
    """
    if config.model_type != _LAYERS:
        raise UnsupportedModelError(f"its layers are of {config.model_type!r}; expected {_LAYERS}, as DFlash has them")
    model = DFlash(config, head, template)
    return model, HiddenProjection("fc.weight", eps=config.rms_norm_eps, norm_behind="hidden_norm.weight")
