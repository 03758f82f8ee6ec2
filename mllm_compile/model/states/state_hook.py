"""The hook into Transformers' recurrent layers and short convolutions: the functions that they call emit ops of ours.

Mixers of all kinds call a few functions of known names (a causal convolution, a gated delta rule, a scan). Their module
defines them or takes them from a kernel package (`use_kernel_func_from_hub_with_fallback`). For a trace alone these are
replaced in the modules that the model's layers are defined in; the self-check compares with the model's own. No model
is named: every module with such functions is hooked. Mixers that have none are unhooked_mixers.py's.

Transformers calls them with a batch of one and, without a cache, from no state: with packed tokens and a state a
request, that is the served call. Other arguments of a call are written into the op's `refusals` for model/supported.py.
"""

from __future__ import annotations

import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import mllm_compile.runtime.ops.states.trace  # noqa: F401  (defines the ops)
from mllm_compile.model.states.unhooked_mixers import unhooked_mixers

# Arguments of Transformers' functions that change nothing for packed tokens without a cache: how to compute.
_WITHOUT_EFFECT = frozenset({"chunk_size", "use_associative_scan", "use_mambapy"})


def causal_conv(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """A causal convolution as Transformers calls it: hidden_states [1, C, T], weight [C, K] → [1, C, T]."""
    fused = "silu" if activation in ("silu", "swish") else ""
    out = torch.ops.mllm.causal_conv(
        hidden_states[0].transpose(0, 1), weight, bias, fused, "; ".join(_refusals(kwargs))
    )
    if activation and not fused:
        from transformers.activations import ACT2FN

        out = ACT2FN[activation](out)
    shaped: torch.Tensor = out.transpose(0, 1)[None]
    return shaped


def gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The gated delta rule over query, key [1, T, Hk, D], value [1, T, Hv, Dv] → [1, T, Hv, Dv], and no state."""
    tokens = (query[0], key[0], value[0], g[0], beta[0])
    made_elsewhere = (None, None, None, None)  # gates and the norm behind, until passes find them
    settings = (use_qk_l2norm_in_kernel, 0.0, "", "; ".join(_refusals(kwargs)))
    out = torch.ops.mllm.gated_delta(*tokens, *made_elsewhere, *settings)
    return out[None], None


def ssd(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int | None = None,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **kwargs: Any,
) -> torch.Tensor:
    """Mamba-2's scan over hidden_states [1, T, H, P] → float32 [1, T, H, P]."""
    least, most = map(float, dt_limit)
    bounds = (least, None if math.isinf(most) else most)
    made_elsewhere = (None, None)  # the norm behind, until a pass finds it
    settings = (dt_softplus, *bounds, False, 0.0, 1, "; ".join(_refusals(kwargs)))
    out = torch.ops.mllm.ssd(hidden_states[0], dt[0], A, B[0], C[0], D, dt_bias, *made_elsewhere, *settings)
    shaped: torch.Tensor = out[None]
    return shaped


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Mamba-1's scan over hidden_states [1, C, T] → [1, C, T]."""
    gate = None if z is None else z[0].transpose(0, 1)
    x, dt, B, C = (values[0].transpose(0, 1) for values in (hidden_states, dt, B, C))
    out = torch.ops.mllm.selective_scan(
        x, dt, A, B, C, D, gate, delta_bias, delta_softplus, False, "; ".join(_refusals(kwargs))
    )
    shaped: torch.Tensor = out.transpose(0, 1)[None]
    return shaped


# A function's name in its kernel package, or its own → its replacement.
_HOOKS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv,
    "chunk_gated_delta_rule": gated_delta,
    "chunk_kda": gated_delta,
    "mamba_chunk_scan_combined": ssd,
    "selective_scan_fn": selective_scan,
}


def has_states(model: torch.nn.Module) -> bool:
    """True if its code has a function, or a mixer of its own, that `states_as_ops` replaces."""
    functions = (function for namespace in _namespaces(model) for function in list(namespace.values()))
    return any(_kernel_name(function) in _HOOKS for function in functions) or any(unhooked_mixers(model))


@contextmanager
def states_as_ops(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, the model's recurrent layers and convolutions emit ops of ours."""
    replaced = []
    own = [(mixer.module, *method) for mixer in unhooked_mixers(model) for method in mixer.methods.items()]
    for module, name, method in own:
        setattr(module, name, types.MethodType(method, module))
    try:
        for namespace in _namespaces(model):
            for name, function in list(namespace.items()):
                hook = _HOOKS.get(_kernel_name(function) or "")
                if hook is not None:
                    replaced.append((namespace, name, function))
                    namespace[name] = _in_place_of(function, hook)
        yield
    finally:
        for namespace, name, function in replaced:
            namespace[name] = function
        for module, name, _ in own:
            delattr(module, name)


def _in_place_of(function: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook without the arguments that `function` does not name: mixers hand on whatever they were called with."""
    named = tuple(inspect.signature(function).parameters)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **{name: value for name, value in kwargs.items() if name in named})

    return replacement


def _namespaces(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The globals of the modules that define the model's layers."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    return [vars(sys.modules[name]) for name in names if not name.startswith("torch.")]


def _kernel_name(function: Any) -> str | None:
    """The name that a function has in its kernel package, as the decorator that looks there keeps it; else its own."""
    wrapped = function
    while isinstance(wrapped, types.FunctionType):
        kept = dict(zip(wrapped.__code__.co_freevars, wrapped.__closure__ or (), strict=True))
        if "func_name" in kept:
            return str(kept["func_name"].cell_contents)
        wrapped = getattr(wrapped, "__wrapped__", None)
    return function.__name__ if isinstance(function, types.FunctionType) else None


def _refusals(kwargs: Mapping[str, Any]) -> list[str]:
    said = (name for name in sorted(kwargs) if kwargs[name] is not None and kwargs[name] is not False)
    return [f"keyword {name}" for name in said if name not in _WITHOUT_EFFECT]
