"""Transformers' own model, built without its weights: on meta, then as fake tensors of the target device.

Owns what a trace needs of the model and what no checkpoint holds (non-persistent buffers, computed once on the CPU).
Weights are runtime/weight_loader.py's business; which checkpoint tensor is which parameter is weights.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model_errors import first_line, refusing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import PreTrainedConfig, PreTrainedModel

    from mllm_compile.runtime.program import LayerSpec


NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class ModelSizes:
    """The figures that the runtime wants to know of a model; layers' own shapes are in the traced graph."""

    num_hidden_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    context_len: int


@dataclass(frozen=True)
class HFModel:
    """A model on meta, and the values of its non-persistent buffers.

    Attributes:
        model: every parameter on meta, in its final dtype.
        constants: buffer name → value on the CPU; these are in no checkpoint.
    """

    model: PreTrainedModel
    constants: dict[str, torch.Tensor]

    @property
    def text_config(self) -> PreTrainedConfig:
        return self.model.config.get_text_config(decoder=True)

    def sizes(self, layers: Sequence[LayerSpec] = ()) -> ModelSizes:
        """What the model's config says; of heads, where `layers` are given, the largest that they have.

        Raises:
            UnsupportedModelError: the config does not say what every causal LM has.
        """
        hidden_size = self._size("hidden_size")
        num_heads = max((layer.num_heads for layer in layers), default=0) or self._size("num_attention_heads")
        num_kv_heads = max((layer.num_kv_heads for layer in layers), default=0)
        head_dim = max((layer.head_dim for layer in layers), default=0)
        return ModelSizes(
            num_hidden_layers=self._size("num_hidden_layers"),
            num_attention_heads=num_heads,
            num_kv_heads=num_kv_heads or self._size("num_key_value_heads", num_heads),
            head_dim=head_dim or self._size("head_dim", hidden_size // num_heads),
            hidden_size=hidden_size,
            vocab_size=self._size("vocab_size"),
            context_len=self._size("max_position_embeddings", NO_LIMIT),
        )

    def _size(self, name: str, otherwise: int | None = None) -> int:
        """Transformers' attribute maps give each config these names, whatever its own are."""
        with refusing(f"config.json of this {self.model.config.model_type!r} model"):
            value = getattr(self.text_config, name, None)
        value = otherwise if value is None else value
        if type(value) is not int or value < 1:
            raise UnsupportedModelError(
                f"config.json of this {self.model.config.model_type!r} model says no {name} (got {value!r})"
            )
        return value


def build_on_meta(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> HFModel:
    """Builds the causal LM of a model folder on meta, with our attention implementation.

    Raises:
        UnsupportedModelError: Transformers knows no causal LM for this config, or building it fails.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise UnsupportedModelError(
            f"Transformers cannot read {folder}/config.json: {first_line(error)} "
            "Check `model_type` there, or install a newer transformers."
        ) from error
    return build_config_on_meta(config, dtype, trust_remote_code)


def build_config_on_meta(config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False) -> HFModel:
    """As build_on_meta, from a config object."""
    from transformers import AutoModelForCausalLM

    from mllm_compile.models.attention_hook import ATTENTION_IMPLEMENTATION, register_attention_hook

    register_attention_hook()
    _refuse_batch_dependent_rope(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=ATTENTION_IMPLEMENTATION,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
    except Exception as error:
        raise UnsupportedModelError(
            f"{config.model_type!r} is not a causal language model that Transformers can build with a custom attention "
            f"implementation: {first_line(error)}"
        ) from error
    model.eval().requires_grad_(False)
    return HFModel(model, compute_constants(model))


def compute_constants(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Values of the non-persistent buffers (rotary frequencies, embedding scales), computed on the CPU.

    The model's own `_init_weights` is what computes them when Transformers loads a checkpoint; here it runs on
    NaN-filled copies, so that one it does not fill is noticed instead of served.

    Raises:
        UnsupportedModelError: a buffer is neither in checkpoints nor filled by `_init_weights`.
    """
    constants: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        names = [n for n, b in module._buffers.items() if b is not None and n in module._non_persistent_buffers_set]
        if not names:
            continue
        meta_buffers = {name: module._buffers[name] for name in names}
        for name, meta in meta_buffers.items():
            filler = float("nan") if meta.is_floating_point() else _INTEGER_SENTINEL.get(meta.dtype, 0)
            module._buffers[name] = torch.full(meta.shape, filler, dtype=meta.dtype, device="cpu")
        with torch.no_grad(), torch.device("cpu"):
            model._init_weights(module)
        for name, meta in meta_buffers.items():
            full_name = f"{module_name}.{name}" if module_name else name
            constants[full_name] = _checked_constant(full_name, module._buffers[name])
            module._buffers[name] = meta
    return constants


def fake_copy(model: PreTrainedModel, mode: FakeTensorMode, device: str) -> dict[int, str]:
    """Replaces every parameter and buffer by a fake tensor of `device`, ties kept.

    Returns:
        id of each fake parameter or buffer → its (first) fully-qualified name.
    """
    fakes: dict[int, torch.Tensor] = {}
    names: dict[int, str] = {}
    originals: list[torch.Tensor] = []  # kept alive: ids of collected tensors are reused

    def fake(tensor: torch.Tensor, name: str) -> torch.Tensor:
        if id(tensor) not in fakes:
            with mode:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=False)
            originals.append(tensor)
            fakes[id(tensor)] = copy
            names[id(copy)] = name
        return fakes[id(tensor)]

    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    tensors[name] = fake(tensor, prefix + name)  # type: ignore[assignment]
    return names


_INTEGER_SENTINEL = {torch.int64: -(2**62), torch.int32: -(2**30)}


def _checked_constant(name: str, value: torch.Tensor | None) -> torch.Tensor:
    if value is None or value.device.type != "cpu":
        raise UnsupportedModelError(f"buffer {name!r} is in no checkpoint and could not be computed on the CPU")
    sentinel = _INTEGER_SENTINEL.get(value.dtype)
    unfilled = (
        torch.isnan(value).any() if value.is_floating_point() else sentinel is not None and (value == sentinel).any()
    )
    if unfilled:
        raise UnsupportedModelError(
            f"buffer {name!r} is in no checkpoint, and the model's _init_weights does not fill it: its value is unknown"
        )
    return value.detach().clone()


def _refuse_batch_dependent_rope(config: Any) -> None:
    """RoPE whose frequencies follow the batch's longest position would let one request change another."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    per_kind = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    for rope in per_kind:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"rope_type {rope['rope_type']!r} depends on the longest position in the batch, so one request would "
                "change another; it is not supported. Set a static rope_type in the model's config.json."
            )
