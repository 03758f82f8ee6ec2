"""Random weights for the checks that run a model before its checkpoint is read: one tensor for each shape and dtype.

Layers share them, so an 8B model needs one layer's memory. Values keep activations near 1 through any depth, and
attention far from uniform, so that a wrong position, window or neighbour shows in the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mllm_compile.model.hf_model import HFModel

_VECTOR_NOISE = 0.1


def materialise(hf_model: HFModel, device: str) -> dict[str, torch.Tensor]:
    """Gives the traced model real parameters and buffers in place of its fake ones; ties are kept.

    Calling it again changes nothing.

    Returns:
        Every parameter and buffer by its fully-qualified name, under each of its names where it is tied.
    """
    shared = _SharedTensors(device)
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the fake: ids of collected tensors are reused
    by_name: dict[str, torch.Tensor] = {}
    for module_name, module in hf_model.model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if isinstance(tensor, FakeTensor):
                    if id(tensor) not in replaced:
                        replaced[id(tensor)] = tensor, _real(tensor, prefix + name, hf_model, shared)
                    tensors[name] = replaced[id(tensor)][1]
                if tensor is not None:
                    by_name[prefix + name] = tensors[name]
    return by_name


def _real(fake: torch.Tensor, name: str, hf_model: HFModel, shared: _SharedTensors) -> torch.Tensor:
    constant = hf_model.constants.get(name, hf_model.tables.get(name))
    value = shared.like(fake, name) if constant is None else constant.to(shared.device)
    if isinstance(fake, torch.nn.Parameter):
        return torch.nn.Parameter(value, requires_grad=False)
    return value.view(value.shape)  # an object of its own: one of two names would be a tie


class _SharedTensors:
    def __init__(self, device: str) -> None:
        self.device = device
        self._by_kind: dict[Any, torch.Tensor] = {}

    def like(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        is_bias = tensor.dim() < 2 and name.endswith("bias")
        kind = (tuple(tensor.shape), tensor.dtype, is_bias)
        if kind not in self._by_kind:
            value = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device)
            if tensor.is_floating_point():
                generator = torch.Generator(self.device).manual_seed(len(self._by_kind))
                mean = 1.0 if tensor.dim() < 2 and not is_bias else 0.0
                std = _VECTOR_NOISE if tensor.dim() < 2 else tensor.shape[-1] ** -0.5
                value.normal_(mean, std, generator=generator)
            self._by_kind[kind] = value
        return self._by_kind[kind]
