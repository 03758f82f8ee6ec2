"""Hours of agents' calls in minutes, behind a server whose engine is killed and whose files are damaged meanwhile.

    python -m benchmarks.server.agent_trace --sessions 24 --scale 0.0012 --pace 0.025 --out TRACE
    python -m benchmarks.server.tier_soak configs/tiny.yaml TRACE --seconds 180 --total-tokens 2048 --host-gib 0.02

Each session asks as it would of any server: again where that says 503. Every so many seconds the engine is killed, and
one file in twenty is changed. Any other failure ends the soak with code 1, and so do tokens that a plain engine does
not give, of a sample of calls. A line says every half of a minute what the server's front holds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.script import existing_file, greedy, parser_of, positive, told_in_one_line
from benchmarks.server.kill_speed import children, engine_of
from benchmarks.server.switch_speed import Served
from benchmarks.steps.agents_speed import Replay, config_of, setting_of, tell
from benchmarks.tiers.served_answers import served_answers
from mllm_compile import Engine
from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.sources import with_runtime

_AGAIN_S = 0.2
_LIMIT_S = 300.0  # of one call
_LINE_S = 30.0
_SHOWN = ("mllm:kv_tier_pages", "mllm:kv_tier_hit_tokens", "mllm:kv_tier_failed", "mllm:engine_restarts")
_SAMPLE = 40  # calls that a plain engine answers too

Answered = tuple[list[int], int, list[int]]  # prompt, most tokens, tokens


class PatientAnswers:
    """Calls that are asked again until the server takes them.

    Attributes:
        again: how often one was.
        failures: what else the server has said.
        answered: calls and their answers.
    """

    def __init__(self, server: Served) -> None:
        self._server = server
        self.again = 0
        self.failures: list[str] = []
        self.answered: list[Answered] = []

    def answer(self, prompt: list[int], max_tokens: int) -> tuple[int, list[int]] | None:
        """See Answers."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        end = time.monotonic() + _LIMIT_S
        while time.monotonic() < end:
            status, answer = self._server.ask("POST", "/v1/completions", body | {"return_token_ids": True})
            if status == 200:
                tokens: list[int] = answer["choices"][0]["token_ids"]
                self.answered.append((prompt, max_tokens, tokens))
                details: dict[str, int] = answer["usage"].get("prompt_tokens_details") or {}
                return details.get("cached_tokens", 0), tokens
            if status != 503:
                self.failures.append(f"{status}: {str(answer)[:200]}")
                return None
            self.again += 1
            time.sleep(_AGAIN_S)
        self.failures.append(f"no answer within {_LIMIT_S:g} s")
        return None


class Trouble:
    """Kills the engine and changes files, until it is ended; tells what the front holds.

    Attributes:
        kills, damaged: how many.
    """

    def __init__(self, server: Served, files: Path, every_s: float) -> None:
        self._server, self._files, self._every_s = server, files, every_s
        self._chance = random.Random(5)
        self._is_over = threading.Event()
        self.kills = self.damaged = 0
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Trouble:
        self._running = self._pool.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._running.result()  # raises what has ended it: a soak without kills proves nothing
        self._pool.shutdown()

    def _run(self) -> None:
        began, line = time.monotonic(), 0
        while not self._is_over.wait(self._chance.uniform(0.5, 1.5) * self._every_s):
            if self._server.ask("GET", "/ready")[0] == 200:
                self.damaged += self._damage()
                os.kill(engine_of(self._server.pid), signal.SIGKILL)
                self.kills += 1
            seconds = time.monotonic() - began
            if seconds // _LINE_S > line:
                line = int(seconds // _LINE_S)
                print(f"{seconds:4.0f} s, {self.kills} kills: the front has {self.front()}")

    def front(self) -> str:
        """Memory, open files and processes of the server's front."""
        pid = self._server.pid
        status = Path(f"/proc/{pid}/status").read_text()
        resident = int(status.split("VmRSS:")[1].split()[0]) / 1024
        return f"{resident:.1f} MiB, {len(os.listdir(f'/proc/{pid}/fd'))} open files, {len(children(pid))} processes"

    def _damage(self) -> int:
        """Changes a byte of one file in twenty; how many."""
        found = [path for path in sorted(self._files.glob("*/*/*")) if "-" in path.name]
        changed = 0
        for path in self._chance.sample(found, len(found) // 20):
            try:
                with path.open("r+b") as file:
                    file.seek(self._chance.randrange(path.stat().st_size))
                    file.write(b"\x5a")
            except OSError:  # the engine has removed it
                continue
            changed += 1
        return changed


def with_files(args: Namespace, folder: Path) -> EngineConfig:
    """The config with the memory and the files behind it."""
    disk = {"kv_offloading_disk_path": str(folder), "kv_offloading_disk_size": 4 * args.host_gib}
    return with_runtime(config_of(args, args.host_gib), disk | {"kv_offloading_min_gain": 0.0})


def num_other(args: Namespace, sample: list[Answered]) -> int:
    """Answers that an engine without memory and files does not give."""
    with Engine(config_of(args, 0.0)) as engine:
        params = [greedy(most) for _, most, _ in sample]
        outputs = engine.generate([prompt for prompt, *_ in sample], params, progress=False)
    return sum(output.token_ids != tokens for output, (*_, tokens) in zip(outputs, sample, strict=True))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("trace", type=existing_file)
    parser.add_argument("--seconds", type=positive, default=180, help="(default: 180)")
    parser.add_argument("--kill-every", type=float, default=15.0, help="seconds, half to one and a half (default: 15)")
    parser.add_argument("--total-tokens", type=positive, default=70_000, help="of the KV cache (default: 70000)")
    parser.add_argument("--host-gib", type=float, default=25.0, help="of the host's memory; files get four times that")
    args = parser.parse_args()
    calls = [json.loads(line) for line in args.trace.read_text().splitlines()]
    with TemporaryDirectory() as folder, served_answers(with_files(args, Path(folder) / "files")) as server:
        answers = PatientAnswers(server.server)
        replay = Replay(answers, setting_of(args).vocab_size, calls, args.seconds)
        with Trouble(server.server, Path(folder) / "files", args.kill_every) as trouble:
            before = trouble.front()
            replay.run()
        tell(replay, args.seconds, "served")
        print(f"{trouble.kills} kills, {trouble.damaged} files changed; {answers.again} times a call was asked again")
        print(f"the front had {before} at first, and has {trouble.front()}")
        for line in server.server.text("/metrics").splitlines():
            if line.startswith(_SHOWN):
                print(f"  {line}")
    sample = random.Random(7).sample(answers.answered, min(_SAMPLE, len(answers.answered)))
    other = num_other(args, sample)
    print(f"{len(sample) - other} of {len(sample)} calls have a plain engine's tokens; failures: {answers.failures}")
    return int(bool(other or answers.failures))


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main())
