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

    A model that does not follow Transformers' attention interface keeps its own, and gets the masks of `name`.

    Raises:
        UnsupportedModelError: the model does not take it.
    """
    before = str(model.config._attn_implementation)
    with refusing(f"{model.config.model_type!r} models do not take attention implementation {name!r}"):
        _choose(model, name)
    try:
        yield
    finally:
        _choose(model, before)


def _choose(model: PreTrainedModel, name: str) -> None:
    if model._can_set_attn_implementation():  # if not, set_attn_implementation does nothing but warn
        model.set_attn_implementation(name)
    else:
        model.config._attn_implementation = name
