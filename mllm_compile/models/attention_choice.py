"""Switches the attention implementation of a built model, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mllm_compile.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def attention_implementation(model: PreTrainedModel, *names: str) -> Iterator[None]:
    """The first of `names` that the model supports, within the context.

    Raises:
        UnsupportedModelError: it supports none of them. A model that does not follow Transformers' attention interface
            keeps its own with a mere warning, and what ran would not be what was asked for.
    """
    before = model.config._attn_implementation
    try:
        if not any(_switch(model, name) for name in names):
            raise UnsupportedModelError(
                f"{model.config.model_type!r} models do not follow Transformers' attention interface: none of "
                f"{', '.join(names)} can be chosen"
            )
        yield
    finally:
        _switch(model, before)


def _switch(model: PreTrainedModel, name: str) -> bool:
    try:
        model.set_attn_implementation(name)
    except ValueError:
        return False
    return bool(model.config._attn_implementation == name)
