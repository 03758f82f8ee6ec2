"""config.json of a GGUF model, from its metadata and the shapes of its tensors.

A key that is not known, and might change what the model computes, is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.gguf.architectures import ARCHITECTURES, Architecture
from mllm_compile.gguf.facts import ARCHITECTURE_KEY, ModelFacts
from mllm_compile.gguf.metadata import Metadata
from mllm_compile.runtime.short_repr import short_repr

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_ROPE_FREQS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (_ROPE_FREQS, _LONG, _SHORT)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_NEEDED = ("block_count", "embedding_length", "attention.head_count", "context_length")
# Keys of a model's own section that say nothing about what it computes.
_SAYS_NOTHING = ("tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.attn_factor")
_OF_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}

_SPECIAL_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def architecture_of(metadata: Metadata, tensors: Collection[str]) -> Architecture:
    """
    Args:
        metadata: of the file.
        tensors: the names of all tensors.

    Raises:
        UnsupportedModelError: it is one that is not read.
    """
    name = metadata.get(ARCHITECTURE_KEY, str)
    found = ARCHITECTURES.get(name)
    if found is None:
        raise UnsupportedModelError(
            f"{metadata.path}: GGUF files of the architecture {short_repr(name)} are not read; read are "
            f"{', '.join(sorted(ARCHITECTURES))}. Set model.path to the model that it was made of, as safetensors."
        )
    if found.variant is None:
        return found
    sign, variant = found.variant
    return variant if sign in tensors or metadata.number(f"{name}.{sign}") else found


def model_config(facts: ModelFacts, architecture: Architecture) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        CheckpointError: keys are missing, or do not fit the tensors.
        UnsupportedModelError: something that the file says is not read.
    """
    return _Config(facts, architecture).content()


class _Config:
    def __init__(self, facts: ModelFacts, architecture: Architecture) -> None:
        self._facts, self._architecture = facts, architecture
        self._path = facts.metadata.path

    def content(self) -> dict[str, Any]:
        facts, architecture, metadata = self._facts, self._architecture, self._facts.metadata
        for ours in _NEEDED:
            if ours in architecture.keys:
                facts.needed(ours)
        found = {
            theirs: value for ours, theirs in architecture.keys.items() if (value := facts.number(ours)) is not None
        }
        vocabulary, hidden = self._embedding()
        config = {
            "model_type": architecture.model_type,
            **architecture.values,
            **found,
            "vocab_size": vocabulary,
            "tie_word_embeddings": not facts.has(_HEAD),
            **{name: metadata.number(key) for name, key in _SPECIAL_TOKENS.items()},  # classes have defaults
        }
        if hidden != facts.number("embedding_length"):
            raise facts.misfit("embedding_length", f"{_EMBEDDING} has {hidden}")
        if architecture.has_heads:
            self._add_heads(config)
        if architecture.has_rope:
            self._add_rope(config)
        for key in architecture.nulls:
            config[key] = config.get(key) or None
        if architecture.own is not None:
            architecture.own(facts, config)
        if unread := [key for key in metadata.unread(f"{facts.name}.") if not key.endswith(_SAYS_NOTHING)]:
            raise UnsupportedModelError(
                f"{self._path}: {unread[0]} ({metadata.shown(unread[0])}) is not read, and may change "
                "what the model computes. Set model.path to the model that it was made of, as safetensors."
            )
        return config

    def _embedding(self) -> tuple[int, int]:
        shape = self._facts.shape(_EMBEDDING)
        if len(shape) != 2:
            raise CheckpointError(f"{self._path} lacks the matrix {_EMBEDDING}. Download it again.")
        said = self._facts.number("vocab_size")
        if said not in (None, shape[0]):
            raise self._facts.misfit("vocab_size", f"{_EMBEDDING} has {shape[0]} rows")
        return shape[0], shape[1]

    def _add_heads(self, config: dict[str, Any]) -> None:
        facts, architecture = self._facts, self._architecture
        heads = int(facts.needed("attention.head_count"))
        if not 0 < heads <= facts.needed("embedding_length"):
            raise facts.misfit("attention.head_count", f"embedding_length is {facts.needed('embedding_length')}")
        usual = int(facts.needed("embedding_length")) // heads
        sizes = {key: facts.number(f"attention.{key}") for key in ("key_length", "value_length")}
        head_dim = int(sizes["key_length"] or usual)
        if sizes["value_length"] not in (None, head_dim):
            raise UnsupportedModelError(
                f"{self._path}: heads have {head_dim} numbers of a key and {sizes['value_length']} of a "
                "value; expected as many."
            )
        if architecture.has_head_dim:
            config["head_dim"] = head_dim
        elif head_dim != usual:
            raise facts.misfit("attention.key_length", f"{architecture.model_type} has {usual} a head")
        self._head_dim = head_dim
        if (theirs := architecture.keys.get("attention.head_count_kv")) is not None:
            config.setdefault(theirs, heads)
        if (key := architecture.attention_biases) is not None:
            config[key] = facts.has("blk.0.attn_q.bias")
        if architecture.mlp_biases:
            config["mlp_bias"] = facts.has("blk.0.ffn_down.bias")

    def _add_rope(self, config: dict[str, Any]) -> None:
        """The base, the part of a head that turns, and how angles follow the length."""
        facts = self._facts
        theta = facts.number("rope.freq_base")
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(10_000.0 if theta is None else theta)}
        turning = facts.number("rope.dimension_count")
        if turning not in (None, self._head_dim):
            rope["partial_rotary_factor"] = turning / self._head_dim
            config["partial_rotary_factor"] = rope["partial_rotary_factor"]
        self._turning = int(self._head_dim if turning is None else turning)
        rope |= self._scaling(config)
        if self._architecture.local_theta is not None:
            local = facts.number("rope.freq_base_swa") or self._architecture.local_theta
            config["rope_parameters"] = {
                "full_attention": rope,
                "sliding_attention": {"rope_type": "default", "rope_theta": float(local)},
            }
        else:
            config["rope_parameters"] = rope

    def _scaling(self, config: dict[str, Any]) -> dict[str, Any]:
        facts = self._facts
        kind = facts.text("rope.scaling.type")
        factor, original = facts.number("rope.scaling.factor"), facts.number("rope.scaling.original_context_length")
        if facts.has(_LONG) or facts.has(_SHORT):
            original = original or config["max_position_embeddings"]
            config["original_max_position_embeddings"] = original
            return {
                "rope_type": "longrope",
                "long_factor": facts.numbers(_LONG, self._turning // 2),
                "short_factor": facts.numbers(_SHORT, self._turning // 2),
                "original_max_position_embeddings": original,
            }
        if facts.has(_ROPE_FREQS):
            return self._llama3()
        if kind in (None, "none") and factor in (None, 0, 1):
            return {}
        if kind == "linear" and factor:
            return {"rope_type": "linear", "factor": float(factor)}
        if kind == "yarn" and factor and original:
            betas = {theirs: value for ours, theirs in _OF_YARN.items() if (value := facts.number(ours)) is not None}
            found = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
            return found | {name: float(value) for name, value in betas.items()}
        raise UnsupportedModelError(
            f"{self._path}: rotary embeddings are scaled by {short_repr(kind)} with the factor "
            f"{short_repr(factor)}; read are linear, yarn, and what rope_freqs or rope_factors say."
        )

    def _llama3(self) -> dict[str, Any]:
        """The parameters of Llama 3.1's factors; they have to give the factors again."""
        found = self._facts.numbers(_ROPE_FREQS, self._turning // 2)
        factor = max(found)
        rope = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        theta = self._facts.number("rope.freq_base")
        expected = [_llama3_factor(i / len(found), float(theta or 10_000.0), factor) for i in range(len(found))]
        if not all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(found, expected, strict=True)):
            raise UnsupportedModelError(
                f"{self._path}: {_ROPE_FREQS} holds other factors than Llama 3.1's (1, 4, 8192), which alone are read."
            )
        return rope


def _llama3_factor(place: float, theta: float, factor: float) -> float:
    """The number that a frequency is divided by, as Transformers' llama3 has it."""
    low, high, length = (
        _LLAMA3["low_freq_factor"],
        _LLAMA3["high_freq_factor"],
        _LLAMA3["original_max_position_embeddings"],
    )
    wavelength = 2 * math.pi * theta**place
    if wavelength < length / high:
        return 1.0
    if wavelength > length / low:
        return factor
    smooth = (length / wavelength - low) / (high - low)
    stretched: float = 1 / ((1 - smooth) / factor + smooth)
    return stretched
