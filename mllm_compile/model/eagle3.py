"""An EAGLE-3 head as a causal LM over a model's hidden states: layers of Transformers. The first reads the embeddings
too. Parameters are named as the Speculators library names them (its models/eagle3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

import mllm_compile.runtime.ops.trace  # noqa: F401  (defines torch.ops.mllm.hidden_state)
from mllm_compile.config.hub import CONFIG_FILE
from mllm_compile.config.speculators import Eagle3Config, read_eagle3
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.files.json_file import read_json_object
from mllm_compile.model.attention_hook import ATTENTION_IMPLEMENTATION, register_attention_hook
from mllm_compile.model.hf_model import HFModel, compute_constants
from mllm_compile.model.refusals import refusing
from mllm_compile.model.rope_hook import follow_rope
from mllm_compile.runtime.program.spec import HiddenProjection

_OWN_HIDDEN_STATE = 0  # the only place that a head has


class Eagle3(PreTrainedModel):
    """Logits of the token behind input_ids, of the model's hidden states at the place before; see the module's header.

    Attributes:
        fc: makes one hidden state of several layers' ones; the runtime calls it, ahead of the first pass alone.
    """

    config_class = PreTrainedConfig
    marks_hidden_states = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _keys_to_ignore_on_load_unexpected = [r"^t2d$", r"^d2t$", r"^verifier_(norm|lm_head)\."]  # noqa: RUF012

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
        self.lm_head = nn.Linear(size, eagle.draft_vocab_size, bias=False)
        if eagle.draft_vocab_size != config.vocab_size:
            # Each id of the head's vocabulary less its id of the model's.
            self.register_buffer("d2t", torch.zeros(eagle.draft_vocab_size, dtype=torch.int64))
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.embed_tokens
        return found

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
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        said: dict[str, Any] = {
            "attention_mask": create_causal_mask(
                config=self.config,
                inputs_embeds=embeds,
                attention_mask=None,
                past_key_values=None,
                position_ids=position_ids,
            ),
            "position_embeddings": self.rotary_emb(embeds, position_ids),
            "position_ids": position_ids,
        }
        x = self.layers[0](embeds, embeds if hidden_states is None else hidden_states, said)
        for layer in self.layers[1:]:
            x = layer(x, **said)
        if not self._norm_output:
            x = torch.ops.mllm.hidden_state(x, _OWN_HIDDEN_STATE)
        x = self.norm(x)
        if self._norm_output:
            x = torch.ops.mllm.hidden_state(x, _OWN_HIDDEN_STATE)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self._of_model(self.lm_head(x[:, rows, :])))

    def _of_model(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits in the model's vocabulary; tokens that the head does not know have the least number."""
        d2t = self._buffers.get("d2t")
        if d2t is None:
            return logits
        ids = (torch.arange(d2t.shape[0], device=d2t.device) + d2t).clamp(0, self.config.vocab_size - 1)
        least = torch.finfo(logits.dtype).min
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), least)
        return whole.index_copy(2, ids, logits)


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


def build_eagle3_on_meta(folder: Path, dtype: torch.dtype) -> HFModel:
    """Builds the head of a folder on meta, with our attention implementation.

    Raises:
        UnsupportedModelError: its layers are not like Llama's, or do not attend to all tokens.
        CheckpointError: config.json is not one of an EAGLE-3 head.
    """
    path = folder / CONFIG_FILE
    eagle = read_eagle3(read_json_object(path, UnsupportedModelError) or {}, path)
    register_attention_hook()
    with refusing(f"{path} is not of an EAGLE-3 head that can be built"):
        said = {name: value for name, value in eagle.layer_config.items() if name != "model_type"}
        config = AutoConfig.for_model(eagle.layer_config["model_type"], **said)
        config.tie_word_embeddings = False
        with torch.device("meta"):
            template = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_IMPLEMENTATION).model
            _check_layers(template.layers, config)
            model = Eagle3(config, eagle, template)
            nn.Module.to(model, dtype)
    nn.Module.eval(model).requires_grad_(False)
    constants, unknown, tables = compute_constants(model)
    rope, of_rope = follow_rope(model)
    norms = ["input_norm.weight"] if eagle.norm_before_fc else []
    norms += [f"fc_norm.{place}.weight" for place in range(eagle.num_read)] if eagle.fc_norm else []
    projection = HiddenProjection("fc.weight", tuple(norms), config.rms_norm_eps)
    return HFModel(
        model,
        constants | of_rope,
        unknown,
        tables=tables,
        rope=rope,
        hidden_states=(_OWN_HIDDEN_STATE,),
        projection=projection,
    )


def _check_layers(layers: Sequence[nn.Module], config: PreTrainedConfig) -> None:
    """Raises UnsupportedModelError for layers that no first one can be made from."""
    wanted = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if {name for name, _ in layers[0].named_children()} != wanted:
        raise UnsupportedModelError(f"its layers are of {config.model_type!r}; expected layers as llama's or qwen3's")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise UnsupportedModelError(f"its layers are of kind {min(kinds)}; expected full_attention")
