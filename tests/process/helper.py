"""A helper process for test_helper_process.py: it does what a request names."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable

from mllm_compile.process.helper_server import Answer, serve

MUCH = b"a warning of a library\n" * (1 << 16)  # many times what a pipe holds


def main() -> None:
    """Answers requests until the pipe of requests ends."""
    serve(_open)


def _open(first: bytes) -> Callable[[bytes], Answer]:
    _do(first)
    return _do


def _do(request: bytes) -> Answer:
    for word in request.decode().split():
        if word == "talk":
            os.write(2, MUCH)
        elif word == "sleep":
            time.sleep(1000)
        elif word == "close":
            os.close(2)
        elif word == "die":
            os.write(2, b"my last words\n")
            sys.exit(3)
        elif word == "more":
            os.write(2, b"working\n")
            select.select([0], [], [])
        elif word == "boast":
            return b"A", bytes(1 << 20)
    return b"A", request
