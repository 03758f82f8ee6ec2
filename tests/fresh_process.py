"""Python that has imported some packages and nothing else: each question to it is answered in a fork of its own.

For tests of what is imported, or done to a process. A process for each of them would import torch again and again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Runs what it is told, and then each line of its input in a fork, with its output in a file whose name it says.
_ANSWERS = """
import json, os, sys, tempfile, traceback
exec(sys.argv[1], {"__name__": "__main__"})
for line in sys.stdin:
    with tempfile.NamedTemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = 0
            try:
                exec(json.loads(line), {"__name__": "__main__"})
            except BaseException:
                code = 1
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([code, open(output.name).read()]), flush=True)
"""


class FreshProcess:
    """A process that has imported what it was told; made by `fresh_process`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, code: str) -> str:
        """The code's output in a fork; it has to end without an exception."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(code), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        exit_code, said = json.loads(answer)
        assert exit_code == 0, said
        return str(said)


@contextmanager
def fresh_process(imports: str, environment: Mapping[str, str] | None = None) -> Iterator[FreshProcess]:
    """One that has run `imports` in this environment, beside the tests' own."""
    paths = os.pathsep.join(filter(None, ((environment or {}).get("PYTHONPATH"), str(ROOT))))
    process = subprocess.Popen(
        [sys.executable, "-c", _ANSWERS, imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {}), "PYTHONPATH": paths},
    )
    with process:
        yield FreshProcess(process)
