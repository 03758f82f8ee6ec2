"""Switches the attention implementation of a built model, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mllm_compile.model.refusals import refusing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The attention implementation `name` within the context.

    Raises:
        UnsupportedModelError: the model does not take it. One that does not follow Transformers' attention interface
            keeps its own with a mere warning, and what ran would not be what was asked for.
    """
    before = model.config._attn_implementation
    with refusing(f"{model.config.model_type!r} models do not take attention implementation {name!r}"):
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise ValueError("they do not follow Transformers' attention interface")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
