"""Refuses what a config asks for and the model's layers cannot have; these are known after the trace."""

from __future__ import annotations

from collections.abc import Container, Iterable

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import ConfigError, UnlikeRowsError
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.state.layer import StateLayer


def check_any_rows(config: ResolvedConfig, layers: Iterable[LayerSpec], with_own: Container[str]) -> None:
    """Refuses steps of any number of rows for a model with layers that may depend on it.

    Args:
        layers: all that attend; with_own: those that decode by kernels of the program.

    Raises:
        UnlikeRowsError: there is such a layer.
    """
    without = next((layer.name for layer in layers if layer.name not in with_own), None)
    if config.runtime.any_rows and without is not None:
        raise UnlikeRowsError(f"the model has {without}, whose decodes are not by kernels of the program")


def check_cascade_layers(config: ResolvedConfig, layers: Iterable[LayerSpec]) -> None:
    """Refuses cascades that are asked for, of a model without a layer that has them; `auto` does without.

    Args:
        layers: all that attend.
    """
    is_auto = any(choice.key == "runtime.cascade_attention" for choice in config.choices)
    if config.runtime.cascade_attention and not is_auto and not any(layer.takes_cascade for layer in layers):
        raise ConfigError(
            "runtime.cascade_attention is true, but no layer of this model can read a shared prefix once: expected one "
            "with keys and values of its own (no latents) that sees all tokens, without sinks, soft cap, ALiBi or "
            "chunks. Set it to auto or false."
        )


def check_state_dtype(config: ResolvedConfig, layers: Iterable[StateLayer]) -> None:
    """
    Raises:
        ConfigError: states are to have fewer bits, and one of these layers, all with a state, has exponents in its own.
    """
    dtype, found = config.runtime.state_dtype, next((one for one in layers if one.kind.holds_exponents), None)
    if dtype != "float32" and found is not None:
        raise ConfigError(
            f"runtime.state_dtype is {dtype}, but {found.name} keeps exponents in its state, whose small changes "
            "are lost in so few bits. Set it to float32."
        )
