"""Turns errors of a foreign model while it is built, traced or checked into one line that a user can read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mllm_compile.errors import MllmError, UnsupportedModelError
from mllm_compile.runtime.files.disk_space import full_disk


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turns every exception but our own into UnsupportedModelError("{what}: {its first line}").

    A model is foreign code and may raise anything; a user needs one answer: the model is not served, and the reason. A
    full disk is not the model's fault.
    """
    try:
        yield
    except MllmError:
        raise
    except Exception as error:
        if (cause := full_disk(error)) is not None:
            raise cause from None
        raise UnsupportedModelError(f"{what}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The error's first line, without its period, and what follows its colon; its type where it says too little to be
    understood."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return line.rstrip(".") if len(line.split()) > 2 else f"{type(error).__name__}: {line}"
