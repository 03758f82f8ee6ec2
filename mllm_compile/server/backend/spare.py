"""The spare process of ../spare.py: imports, beside an engine that serves, and becomes what it is told to.

A thread of low priority imports, and ends. So the process itself has the usual one, which none may raise again.
numpy is imported ahead of that, as its library starts threads that keep the priority.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from mllm_compile.process.bytecode import kept_bytecode
from mllm_compile.process.no_gc import imports_unseen
from mllm_compile.process.sleeping_blas import sleeping_blas

# Names of the process while it imports, once it waits, and as an engine, in lists that show no arguments.
IMPORTS, WAITS, ENGINE = "mllm-imports", "mllm-spare", "mllm-engine"
_NICENESS = 10  # a tenth of what others get of a core; with the lowest priority a busy machine takes minutes
_FIRST = "1000"  # what serves is to outlive what waits
_MOST_TOLD = 1 << 20  # bytes of a command and its variables
_NUM_DESCRIPTORS = 3


def _import(modules: Sequence[str], done: list[str]) -> None:
    niceness = max(os.getpriority(os.PRIO_PROCESS, 0), _NICENESS)  # a server's own may be lower: none may raise it
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    with contextlib.suppress(Exception), kept_bytecode(), imports_unseen():  # an engine that starts tells what is wrong
        for module in modules:
            importlib.import_module(module)
            done.append(module)


def _is_called(name: str) -> None:
    """Names the process in lists that show no arguments: its command line stays what it was."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)


def _set_readiness_to_go(score: str) -> str:
    """Sets how readily a system that runs out of memory ends this process (proc(5), oom_score_adj); gives the score
    before."""
    path = Path("/proc/self/oom_score_adj")
    before = path.read_text()
    with contextlib.suppress(OSError):  # a container may say what it is
        path.write_text(score)
    return before


def main() -> None:
    """Entry point of the process. Its arguments are the descriptor of a socket to the server, and modules."""
    number, *modules = sys.argv[1:]
    _is_called(IMPORTS)
    score = _set_readiness_to_go(_FIRST)
    with sleeping_blas():
        import numpy as np  # noqa: F401
    done: list[str] = []
    importing = threading.Thread(target=_import, args=(modules, done), name="mllm-imports")
    importing.start()
    importing.join()
    if done != modules:
        sys.exit(1)
    with socket.socket(fileno=int(number)) as server:
        server.set_inheritable(False)
        places = [os.open(os.devnull, os.O_RDONLY) for _ in range(_NUM_DESCRIPTORS)]
        told = b""
        with contextlib.suppress(OSError):
            server.send(json.dumps(places).encode())
            _is_called(WAITS)
            told, descriptors, _, _ = socket.recv_fds(server, _MOST_TOLD, _NUM_DESCRIPTORS)
    if not told:  # the server has gone, or needs none any more
        return
    for descriptor, place in zip(descriptors, places, strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    (module, arguments), variables = json.loads(told)
    os.environ |= variables
    sys.argv[1:] = arguments
    _set_readiness_to_go(score)
    _is_called(ENGINE)
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
