"""Methods of a model's modules that compute the same in another way while the model is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_CUT = "_maybe_slice_kv_shared_inputs"


@contextmanager
def with_methods(methods: Sequence[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Within the context these modules have such methods, by name."""
    for module, name, method in methods:
        setattr(module, name, method)
    try:
        yield
    finally:
        for module, name, _ in methods:
            delattr(module, name)


@contextmanager
def with_forwards(forwards: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Within the context these modules compute so."""
    with with_methods([(module, "forward", forward) for module, forward in forwards.items()]):
        yield


@contextmanager
def norms_by_formula(model: torch.nn.Module) -> Iterator[None]:
    """Within the context torch's own RMS norms are computed by their formula: of the op T's strides are asked."""
    norms = [module for module in model.modules() if isinstance(module, torch.nn.RMSNorm)]
    with with_forwards({norm: partial(_rms_norm, norm) for norm in norms}):
        yield


@contextmanager
def keeping_all_tokens(model: torch.nn.Module) -> Iterator[None]:
    """Within the context layers that take keys of earlier layers compute all tokens: a model may cut its tokens and
    masks to those whose logits are wanted, by a branch on T."""
    with with_methods([(module, _CUT, _all_tokens) for module in model.modules() if hasattr(module, _CUT)]):
        yield


def rescale_outputs(model: Any) -> None:
    """Has a model that halves its hidden states every so many layers, and once divides weights in place for it, divide
    what these weights give: by powers of two, which is exact. RWKV does so at its first forward."""
    for owner in model.modules():
        if not hasattr(owner, "_rescale_layers"):
            continue
        owner._rescale_layers, owner.layers_are_rescaled = _nothing, True
        for index, block in enumerate(owner.blocks if owner.config.rescale_every > 0 else ()):
            divisor = 2 ** (index // owner.config.rescale_every)
            for linear in (block.attention.output, block.feed_forward.value) if divisor > 1 else ():
                linear.register_forward_hook(partial(_divided, divisor))


def _nothing() -> None:
    pass


def _divided(divisor: int, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output / divisor


def _rms_norm(norm: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    dims = [-1 - index for index in range(len(norm.normalized_shape))]
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    exact = x.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(dims, keepdim=True) + eps)
    return (exact if norm.weight is None else exact * norm.weight).to(x.dtype)


def _all_tokens(*inputs: Any, **others: Any) -> tuple[Any, ...]:
    """The inputs as they are; the last says which rows of logits are wanted."""
    return inputs[:-1]
