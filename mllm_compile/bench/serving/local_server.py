"""A server of this project for the time of a measurement."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.error import URLError

from mllm_compile.bench import BenchmarkError
from mllm_compile.process import child_python
from mllm_compile.process.group import ProcessGroup

_POLL_S = 0.1
_END_S = 30.0
_LISTENS = re.compile(r"listening at (http://\S+),")


@dataclass(frozen=True)
class LocalServer:
    """A server, by its URL and the id of its front's process."""

    url: str
    pid: int


@contextlib.contextmanager
def served(model: str, *options: str) -> Iterator[LocalServer]:
    """A server of `model`, which is ready.

    Args:
        options: further ones of `mllm-compile serve`.

    Raises:
        BenchmarkError: it does not start.
    """
    command = child_python.command("mllm_compile", "serve", model, "--port", "0", "--max-queue", "100000", *options)
    process = ProcessGroup(command, env=child_python.environment(), stderr=subprocess.PIPE, text=True, errors="replace")
    try:
        url = _url_of(process)
        while not _is_ready(url):
            if process.poll() is not None:
                raise BenchmarkError(f"the server of {model} has ended while it started; `mllm-compile serve` says why")
            time.sleep(_POLL_S)
        yield LocalServer(url, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill_group()


def _url_of(process: ProcessGroup) -> str:
    """The URL that it says; what it says after that goes on to this process's standard error."""
    said = []
    for line in process.stderr or ():
        found = _LISTENS.search(line)
        if found:
            threading.Thread(target=_pass_on, args=(process,), daemon=True).start()
            return found[1]
        said.append(line.strip().removeprefix("mllm-compile: error: "))
    raise BenchmarkError(f"the server does not start: {' '.join(said)[-400:]}")


def _pass_on(process: ProcessGroup) -> None:
    for line in process.stderr or ():
        if " 200 in " not in line:  # a line a request is too much
            print(line, end="", file=sys.stderr)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
