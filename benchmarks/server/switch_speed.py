"""How long a request waits for a model that is parked, on a server of several.

    python -m benchmarks.server.switch_speed a=configs/qwen-8b-shape.yaml b=configs/qwen-8b-shape.yaml [--max-awake 1]

Asks the models by turns for one token, often enough that each is woken in every round, and once more while it is awake.
The first wait of a model has its first park in it, which takes the host's memory for the copy of its weights. A model's
token has to be the same each time.
"""

from __future__ import annotations

import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.script import parser_of, positive
from mllm_compile.process.console import print_table

_PROMPT = [5, 6, 7, 8]
_START_S = 1800


class Served:
    """A server of several models, in a process of its own.

    Args:
        said: the file of its log.
    """

    def __init__(self, process: subprocess.Popen[bytes], said: Path) -> None:
        self._process, self._said = process, said
        self._port = 0
        self._tokens: dict[str, list[int]] = {}  # of each model's first answer

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def port(self) -> int:
        """The port at which it listens, once it is ready."""
        return self._port

    def wait(self) -> dict[str, str]:
        """Waits until it is ready; the models' states, of a server of several."""
        end = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < end:
            found = re.search(r"listening at http://[^:]*:(\d+)", self._said.read_text())
            self._port = int(found[1]) if found else 0
            if self._port:
                with suppress(OSError):  # an engine that cannot start ends it
                    status, state = self.ask("GET", "/ready")
                    if status == 200:
                        models: dict[str, str] = state.get("models", {})
                        return models
            time.sleep(0.1)
        # One that refused its command line or a config has said so.
        sys.exit(2 if self._process.poll() == 2 else "the server is not ready")

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and answer."""
        status, answer = self._ask(method, path, None if body is None else json.dumps(body))
        return status, json.loads(answer)

    def text(self, path: str) -> str:
        """The body of an answer to GET."""
        return self._ask("GET", path, None)[1].decode()

    def _ask(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_START_S)
        connection.request(method, path, body)
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        return response.status, answer

    def wait_ms(self, model: str) -> float:
        """Milliseconds until a model has answered with a token."""
        began = time.perf_counter()
        body = {"model": model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        status, answer = self.ask("POST", "/v1/completions", body)
        waited_ms = 1e3 * (time.perf_counter() - began)
        if status != 200:
            sys.exit(f"{model}: {answer}")
        tokens = answer["choices"][0]["token_ids"]
        if tokens != self._tokens.setdefault(model, tokens):
            sys.exit(f"{model}: tokens behind a switch are others than before: {tokens}")
        return waited_ms

    def failures(self) -> list[str]:
        """The log's lines on models that cannot be served, and on errors."""
        return [line for line in self._said.read_text().splitlines() if re.search(r": failed: | ERROR ", line)]

    def moves(self) -> list[str]:
        """The log's lines on parks and wakes."""
        lines = self._said.read_text().splitlines()
        return [line for line in lines if re.search(r" is (parked for|awake in) | asleep in | awake in ", line)]


@contextmanager
def served(models: list[str], more: list[str]) -> Iterator[Served]:
    """A server of these models, until the block ends."""
    command = [sys.executable, "-m", "mllm_compile", "serve", *models, "--port", "0", *more]
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "log"
        with said.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield Served(process, said)
        except BaseException:  # also a limit of time
            print(said.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="+", help="each as NAME=CONFIG")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--max-awake", type=positive)
    parser.add_argument("--moves", action="store_true", help="print the log's lines on parks and wakes")
    args = parser.parse_args()
    bound = [] if args.max_awake is None else ["--max-awake", str(args.max_awake)]
    with served(args.models, bound) as server:
        began = time.monotonic()
        states = server.wait()
        names = [name for name, state in states.items() if state != "failed"]
        seconds = time.monotonic() - began
        print(f"{len(names)} of {len(states)} models served {seconds:.1f} s after the start")
        if len(names) < len(states):
            print("\n".join(server.failures()))
        asleep: dict[str, list[float]] = {name: [] for name in names}
        awake: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(args.rounds + 1):
            for name in names:
                asleep[name].append(server.wait_ms(name))
                awake[name].append(server.wait_ms(name))
                print(f"  {name}: {asleep[name][-1]:.0f} ms asleep, {awake[name][-1]:.1f} awake")
        rows = [
            (name, f"{first:.0f}", f"{statistics.median(later):.0f}", f"{max(later):.0f}",
             f"{statistics.median(awake[name][1:]):.1f}")
            for name, (first, *later) in asleep.items()
        ]  # fmt: skip
        print_table(sys.stdout, "ms until a token", ("model", "first", "later", "longest", "awake"), rows)
        if args.moves:
            print("\n".join(server.moves()[-12:]))


if __name__ == "__main__":
    main()
