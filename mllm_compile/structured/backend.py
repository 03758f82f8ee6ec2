"""The interface of a backend, whose library is imported when the backend is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import numpy as np

from mllm_compile.errors import ConfigError
from mllm_compile.runtime.sampling.grammar import Grammar, MaskWork
from mllm_compile.structured.form import Form
from mllm_compile.structured.vocabulary import Vocabulary


class Backend(Protocol):
    """Compiles forms and makes masks for one vocabulary. `compile` may be called by any thread, `fill` by one."""

    vocabulary: Vocabulary

    def compile(self, form: Form) -> Grammar:
        """
        Raises:
            Refused: the form is wrong, or the library does not keep to all of it.
        """

    def fill(self, work: Sequence[MaskWork], masks: np.ndarray) -> Mapping[int, str]:
        """MaskMaker.fill."""


def check_installed(names: Sequence[str]) -> list[str]:
    """Returns the backends whose library is there; imports nothing.

    Raises:
        ConfigError: none is.
    """
    if installed := [name for name in names if find_spec(name) is not None]:
        return installed
    raise ConfigError(
        f"structured_outputs need {' or '.join(names)}, which is not installed. Install the extra: "
        "pip install 'mllm-compile[structured]'."
    )


def make_backend(name: str, vocabulary: Vocabulary, threads: int) -> Backend:
    """
    Args:
        threads: that make masks, beside the caller's.

    Raises:
        ConfigError: the library is not installed, or cannot be imported.
    """
    try:
        module = import_module(f"mllm_compile.structured.{name}_backend")
    except ImportError as error:
        raise ConfigError(
            f"structured_outputs need {name}, which cannot be imported ({error}). Install the extra: "
            "pip install 'mllm-compile[structured]'."
        ) from None
    return cast(Backend, module.make(vocabulary, threads))
