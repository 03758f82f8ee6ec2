"""Random adapters that the self-check compares a program with: in its memory, and as hooks of Transformers' modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mllm_compile.runtime.lora.pool import Factors, LoraPool
from mllm_compile.runtime.lora.target import LoraLayout

_SIZE = 0.3  # of what they add to an output, by the root of the rank


class AdapterCase:
    """Two adapters, in the first and the last slot; one where there is one slot.

    Attributes:
        layout: of the program.
        steps: the slots of two requests, -1 without an adapter, of each batch to be run.
    """

    def __init__(self, layout: LoraLayout, dtype: torch.dtype, device: str) -> None:
        self.layout, last = layout, layout.num_slots - 1
        rank = min(4, layout.max_rank)
        self._factors = {slot: _random_factors(layout, slot, rank, dtype, device) for slot in (0, last)}
        self.steps = ((0, last), (-1, 0))

    def write(self, pool: LoraPool) -> None:
        """Puts the adapters into their slots."""
        for slot, factors in self._factors.items():
            pool.write(slot, factors)

    @contextmanager
    def added(self, model: Any, slot: int) -> Iterator[None]:
        """Lets the model's modules add what the adapter in `slot` changes; nothing for -1."""
        factors = self._factors.get(slot, {})
        with adding(model, {name: tuple(one.to(model.dtype) for one in own) for name, own in factors.items()}):
            yield


@contextmanager
def adding(model: Any, factors: Factors) -> Iterator[None]:
    """Lets the model's modules add what an adapter changes."""
    with ExitStack() as hooks:
        for weight, (a, b, *scales) in factors.items():
            if a.dim() == 3:
                hooks.enter_context(_changed_experts(model, weight, b @ a))
                continue
            module = model.get_submodule(weight.removesuffix(".weight"))
            is_embedding = isinstance(module, torch.nn.Embedding)
            hook = _adding_of_ids(a, b) if is_embedding else _adding(a, b, *scales)
            hooks.callback(module.register_forward_hook(hook).remove)
        yield


@contextmanager
def _changed_experts(model: Any, weight: str, change: torch.Tensor) -> Iterator[None]:
    """Puts other weights in the place of those [E, N, K] of a layer's experts: layers may share them."""
    name = weight.rpartition(".")
    module = model.get_submodule(name[0])
    before = module._parameters[name[2]]
    change = change.transpose(1, 2) if module.is_transposed else change
    module._parameters[name[2]] = torch.nn.Parameter(before + change, requires_grad=False)
    try:
        yield
    finally:
        module._parameters[name[2]] = before


def _adding(a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor | None = None) -> Any:
    def add(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if scales is not None:
            bias = 0 if getattr(module, "bias", None) is None else module.bias
            output = (output - bias) * scales + bias
        added: torch.Tensor = inputs[0] @ a.T @ b.T
        return output + added

    return add


def _adding_of_ids(a: torch.Tensor, b: torch.Tensor) -> Any:
    # Some embeddings multiply what they read.
    return lambda module, inputs, output: output + a.T[inputs[0]] @ b.T * getattr(module, "embed_scale", 1.0)


def _random_factors(layout: LoraLayout, seed: int, rank: int, dtype: torch.dtype, device: str) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    made: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}
    found = {}
    scaled = {one.linear for one in layout.buffers if one.scales}
    for target in layout.targets:
        shape = target.outputs, target.inputs, target.num_experts, int(target.linear in scaled)
        if shape not in made:  # layers share them, as they share weights
            a, b = (torch.randn(one, generator=generator) for one in target.shapes(rank))
            scales = [1 + _SIZE * torch.randn(shape[0], generator=generator)] * shape[3]
            made[shape] = tuple(one.to(device, dtype) for one in (a / shape[1] ** 0.5, b * _SIZE, *scales))
        found[target.weight] = made[shape]
    return found
