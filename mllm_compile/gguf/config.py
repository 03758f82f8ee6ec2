"""config.json of a GGUF model, from its metadata and the shapes of its tensors.

A key that is not known, and might change what the model computes, is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.gguf.architectures import ARCHITECTURES, Architecture
from mllm_compile.gguf.metadata import Metadata
from mllm_compile.runtime.short_repr import short_repr

ARCHITECTURE_KEY = "general.architecture"
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_ROPE_FREQS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (_ROPE_FREQS, _LONG, _SHORT)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Keys of a model's own section that say nothing about what it computes.
_SAYS_NOTHING = ("tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.attn_factor")

_SPECIAL_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}

ReadNumbers = Callable[[str], list[float]]


def architecture_of(metadata: Metadata) -> Architecture:
    """
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
    has_experts = bool(metadata.number(f"{name}.expert_count"))
    return found.with_experts if has_experts and found.with_experts is not None else found


def model_config(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], read: ReadNumbers) -> dict[str, Any]:
    """The content of config.json.

    Args:
        metadata: of the file.
        shapes: of all tensors.
        read: the numbers of a small tensor.

    Raises:
        CheckpointError: keys are missing, or do not fit the tensors.
        UnsupportedModelError: the architecture, or something that it says, is not read.
    """
    return _Config(metadata, shapes, read).content()


class _Config:
    def __init__(self, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], read: ReadNumbers) -> None:
        self._metadata, self._shapes, self._read = metadata, shapes, read
        self._architecture = architecture_of(metadata)
        self._name = metadata.get(ARCHITECTURE_KEY, str)

    def content(self) -> dict[str, Any]:
        found = {
            theirs: value for ours, theirs in self._architecture.keys.items() if (value := self._of(ours)) is not None
        }
        for ours in ("block_count", "embedding_length", "attention.head_count", "context_length"):
            if self._of(ours) is None:
                raise CheckpointError(f"{self._metadata.path} lacks the key {self._name}.{ours}. Download it again.")
        vocabulary, hidden = self._embedding()
        config = {
            "model_type": self._architecture.model_type,
            **self._architecture.values,
            **found,
            "vocab_size": vocabulary,
            "tie_word_embeddings": _HEAD not in self._shapes,
            **{name: self._metadata.number(key) for name, key in _SPECIAL_TOKENS.items()},  # classes have defaults
        }
        if hidden != self._of("embedding_length"):
            raise self._misfit("embedding_length", f"{_EMBEDDING} has {hidden}")
        self._add_heads(config)
        self._add_rope(config)
        self._add_own(config)
        if unread := [key for key in self._metadata.unread(f"{self._name}.") if not key.endswith(_SAYS_NOTHING)]:
            raise UnsupportedModelError(
                f"{self._metadata.path}: {unread[0]} ({self._metadata.shown(unread[0])}) is not read, and may change "
                "what the model computes. Set model.path to the model that it was made of, as safetensors."
            )
        return config

    def _of(self, key: str) -> Any:
        return self._metadata.number(f"{self._name}.{key}")

    def _embedding(self) -> tuple[int, int]:
        shape = self._shapes.get(_EMBEDDING, ())
        if len(shape) != 2:
            raise CheckpointError(f"{self._metadata.path} lacks the matrix {_EMBEDDING}. Download it again.")
        said = self._of("vocab_size")
        if said not in (None, shape[0]):
            raise self._misfit("vocab_size", f"{_EMBEDDING} has {shape[0]} rows")
        return shape[0], shape[1]

    def _misfit(self, key: str, why: str) -> CheckpointError:
        key = f"{self._name}.{key}"
        return CheckpointError(
            f"{self._metadata.path}: {key} is {self._metadata.shown(key)}, but {why}. Download it again."
        )

    def _add_heads(self, config: dict[str, Any]) -> None:
        hidden, heads = self._of("embedding_length"), self._of("attention.head_count")
        usual = hidden // heads
        sizes = {key: self._of(f"attention.{key}") for key in ("key_length", "value_length")}
        head_dim = sizes["key_length"] or usual
        if sizes["value_length"] not in (None, head_dim):
            raise UnsupportedModelError(
                f"{self._metadata.path}: heads have {head_dim} numbers of a key and {sizes['value_length']} of a "
                "value; expected as many."
            )
        if self._architecture.has_head_dim:
            config["head_dim"] = head_dim
        elif head_dim != usual:
            raise self._misfit("attention.key_length", f"{self._architecture.model_type} has {usual} a head")
        self._head_dim = head_dim
        if self._of("attention.head_count_kv") is None and "num_attention_heads" in config:
            config["num_key_value_heads"] = heads
        if (key := self._architecture.attention_biases) is not None:
            config[key] = "blk.0.attn_q.bias" in self._shapes
        if self._architecture.mlp_biases:
            config["mlp_bias"] = "blk.0.ffn_down.bias" in self._shapes

    def _add_rope(self, config: dict[str, Any]) -> None:
        """The base, the part of a head that turns, and how angles follow the length."""
        if not self._architecture.has_rope:
            return
        theta = self._of("rope.freq_base")
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(10_000.0 if theta is None else theta)}
        turning = self._of("rope.dimension_count")
        if turning not in (None, self._head_dim):
            rope["partial_rotary_factor"] = turning / self._head_dim
            config["partial_rotary_factor"] = rope["partial_rotary_factor"]
        self._turning = self._head_dim if turning is None else turning
        rope |= self._scaling(config)
        if self._architecture.local_theta is not None:
            local = self._of("rope.freq_base_swa") or self._architecture.local_theta
            config["rope_parameters"] = {
                "full_attention": rope,
                "sliding_attention": {"rope_type": "default", "rope_theta": float(local)},
            }
        else:
            config["rope_parameters"] = rope

    def _scaling(self, config: dict[str, Any]) -> dict[str, Any]:
        kind = self._metadata.find(f"{self._name}.rope.scaling.type", str)
        factor, original = self._of("rope.scaling.factor"), self._of("rope.scaling.original_context_length")
        if _LONG in self._shapes or _SHORT in self._shapes:
            original = original or config["max_position_embeddings"]
            config["original_max_position_embeddings"] = original
            return {
                "rope_type": "longrope",
                "long_factor": self._factors(_LONG),
                "short_factor": self._factors(_SHORT),
                "original_max_position_embeddings": original,
            }
        if _ROPE_FREQS in self._shapes:
            return self._llama3()
        if kind in (None, "none") and factor in (None, 0, 1):
            return {}
        if kind == "linear" and factor:
            return {"rope_type": "linear", "factor": float(factor)}
        if kind == "yarn" and factor and original:
            return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
        raise UnsupportedModelError(
            f"{self._metadata.path}: rotary embeddings are scaled by {short_repr(kind)} with the factor "
            f"{short_repr(factor)}; read are linear, yarn, and what rope_freqs or rope_factors say."
        )

    def _factors(self, name: str) -> list[float]:
        if self._shapes.get(name) != (self._turning // 2,):
            raise CheckpointError(
                f"{self._metadata.path}: {name} has shape {short_repr(self._shapes.get(name))}; expected "
                f"[{self._turning // 2}]."
            )
        return self._read(name)

    def _llama3(self) -> dict[str, Any]:
        """The parameters of Llama 3.1's factors; they have to give the factors again."""
        found = self._factors(_ROPE_FREQS)
        factor = max(found)
        rope = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        theta = self._of("rope.freq_base")
        expected = [_llama3_factor(i / len(found), float(theta or 10_000.0), factor) for i in range(len(found))]
        if not all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(found, expected, strict=True)):
            raise UnsupportedModelError(
                f"{self._metadata.path}: {_ROPE_FREQS} holds other factors than Llama 3.1's (1, 4, 8192), which "
                "alone are read."
            )
        return rope

    def _add_own(self, config: dict[str, Any]) -> None:
        """Adds what some architectures have beside the others."""
        architecture, layers = self._architecture, self._of("block_count")
        for key in architecture.nulls:
            config[key] = config.get(key) or None
        if architecture.wide_layers is not None:
            hidden, heads = self._of("embedding_length"), self._of("attention.head_count")
            is_wide = layers == architecture.wide_layers
            config["query_pre_attn_scalar"] = hidden // heads if is_wide else self._head_dim
        if (every := architecture.every_without_rope) > 0:
            config["no_rope_layers"] = [int((layer + 1) % every != 0) for layer in range(layers)]
        if "attention_multiplier" in architecture.keys.values():
            config.setdefault("attention_multiplier", self._head_dim**-0.5)


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
