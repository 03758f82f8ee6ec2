"""Parts that scripts share: their arguments, their requests, and how they tell a mistake in one line."""

from __future__ import annotations

import argparse
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NoReturn

from mllm_compile.errors import MllmError
from mllm_compile.runtime.sampling.params import SamplingParams


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser of a script's arguments, whose help shows the script's __doc__.

    From then on each line is written when it is printed, also into a pipe: a run that is cut off has shown its rows.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    """Parameters of a request that makes as many tokens, the likeliest ones, and no text of them."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **more)


def positive(text: str) -> int:
    """A number of requests, tokens or the like, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of at least 1")
    return int(text)


def existing_file(text: str) -> Path:
    """A file that is read, for argparse."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a file")
    return Path(text)


def need_gpu(count: int = 1) -> None:
    """Ends the process where torch sees fewer than `count` GPUs."""
    import torch

    if torch.cuda.device_count() < count:
        sys.exit("needs an NVIDIA GPU" if count == 1 else f"needs {count} NVIDIA GPUs")


def need_hopper(count: int = 1) -> None:
    """Ends the process where there are fewer than `count` GPUs, or where they do not run the kernels for Hopper."""
    import torch

    from mllm_compile.kernels.cuda import can_compile_kernels

    if torch.cuda.device_count() < count or not can_compile_kernels("cuda:0"):
        sys.exit(f"needs {'an NVIDIA Hopper GPU' if count == 1 else f'{count} NVIDIA Hopper GPUs'} and NVRTC")


def positives(text: str) -> list[int]:
    """Such numbers with commas between them, for argparse."""
    return [positive(one) for one in text.split(",")]


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Reads some of the known names with commas between them, for argparse."""

    def names(text: str) -> list[str]:
        for name in (asked := text.split(",")):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}; expected some of {', '.join(known)}")
        return asked

    return names


def processes_of(count: int, method: str | None = None) -> ProcessPoolExecutor:
    """A pool of so many processes, which end with this one, also where it is killed.

    Args:
        method: how they start, as multiprocessing calls it; None: its default.
    """
    return ProcessPoolExecutor(count, get_context(method), initializer=_end_with_parent)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "a pool's process has one"

    def wait() -> None:
        parent.join()
        os._exit(1)  # the main thread may compute, or wait for work that never comes

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Ends the process with the error's message where there would be a traceback."""
    try:
        yield
    except MllmError as error:
        mistake(" ".join(str(error).split()))


def mistake(message: str) -> NoReturn:
    """Ends the process as the command line does for a user's mistake: a line, and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
