"""Ops of ours in plain torch, where the real ones, which need CUDA and Triton, cannot be defined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mllm_compile.passes import fx_match


@contextmanager
def stand_in_ops(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Defines ops of the library `mllm`, by their schemas, and lets passes put them into pieces on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("the real ops are defined where there is a GPU")
    library = torch.library.Library("mllm", "FRAGMENT")
    for schema, function in functions.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fx_match, "KERNEL_DEVICE_TYPE", "cpu")
        yield
    del library
