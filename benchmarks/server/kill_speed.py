"""Seconds until the next turn of a long session is answered whose engine was killed, and where its prefix came from.

    python -m benchmarks.server.kill_speed configs/qwen-8b-shape.yaml [--tokens 64000] [--host-gib 24] [--rounds 2]

A server's engine answers a long prompt, and is killed (SIGKILL) when its pages are stored. The next turn is asked at
once, and again until the server takes it. Its answer has to be that of the same turn before the kill. A line has the
second behind the kill in which each stage of the next engine's start was first seen. A kill waits for the server's
spare process, as most kills come later than seconds behind a start.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.script import parser_of, positive, told_in_one_line
from benchmarks.server.switch_speed import Served, served
from mllm_compile.config.schema import EngineConfig
from mllm_compile.server.backend.spare import ENGINE, WAITS

_PAGES = re.compile(r'^mllm:kv_tier_pages\{[^}]*tier="host"[^}]*\} (\S+)$', re.MULTILINE)
_FIRST = b"-m\0mllm_compile.server.backend.process\0"  # of a command line; a spare process names the module too
_LIMIT_S = 600.0
_EXTRA = 256  # tokens of turns behind the long one
_PAUSE_S = 0.05


def engine_of(front: int) -> int:
    """The process of a server's engine: the first one, or one that was spare."""
    for pid, name in children(front):
        with suppress(OSError):
            if name == ENGINE or _FIRST in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    sys.exit("the server has no engine")


def wait_for_spare(front: int) -> None:
    """Waits until the server has a process that has imported what the next engine needs."""
    end = time.monotonic() + _LIMIT_S
    while not any(name == WAITS for _, name in children(front)):
        if time.monotonic() > end:
            sys.exit("the server has no spare process")
        time.sleep(_PAUSE_S)


def children(front: int) -> list[tuple[int, str]]:
    """The processes that a server has started, and their names."""
    found = []
    for pid in Path(f"/proc/{front}/task/{front}/children").read_text().split():
        with suppress(OSError):  # it has ended since
            found.append((int(pid), Path(f"/proc/{pid}/comm").read_text().strip()))
    return found


@contextmanager
def start_watched(server: Served) -> Iterator[dict[str, float]]:
    """The second in which each stage of a start was first seen, in order."""
    stages, is_over, began = dict[str, float](), threading.Event(), time.perf_counter()

    def watch() -> None:
        while not is_over.wait(_PAUSE_S):
            status, state = server.ask("GET", "/ready")
            if status != 200 or stages:  # ready: the engine that was killed, or the next one
                stages.setdefault(state.get("stage", state["state"]), time.perf_counter() - began)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield stages
    finally:
        is_over.set()
        watcher.join()


def turn(server: Served, prompt: list[int]) -> tuple[float, list[int], dict[str, int]]:
    """Asks until it is answered: seconds, tokens, and cached tokens by tier."""
    began = time.perf_counter()
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    while time.perf_counter() - began < _LIMIT_S:
        status, answer = server.ask("POST", "/v1/completions", body)
        if status == 200:
            details: dict[str, Any] = answer["usage"].get("prompt_tokens_details") or {}
            by_tier = {"cached": details.get("cached_tokens", 0), **details.get("cached_tokens_details", {})}
            return time.perf_counter() - began, answer["choices"][0]["token_ids"], by_tier
        if status != 503:
            sys.exit(f"{status}: {answer}")
        time.sleep(_PAUSE_S)
    sys.exit(f"the server has not answered for {_LIMIT_S:g} s")


def wait_for_pages(server: Served, count: int) -> None:
    """Waits until so many pages are in the host's memory."""
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        found = _PAGES.search(server.text("/metrics"))
        if found and float(found[1]) >= count:
            return
        time.sleep(_PAUSE_S)
    sys.exit("pages were not stored")


def config_of(path: Path, folder: Path, num_tokens: int, host_gib: float) -> str:
    """A config for such prompts with such a memory, in a new file."""
    config = EngineConfig.from_yaml(path).model_dump(mode="json", exclude_defaults=True)
    shape = Path(config["model"]["path"]) / "config.json"
    if config["model"].get("load_format") == "dummy":  # a shape was never trained for any length
        facts = json.loads(shape.read_text())
        facts["max_position_embeddings"] = max(facts["max_position_embeddings"], num_tokens)
        (folder / "shape").mkdir()
        (folder / "shape" / "config.json").write_text(json.dumps(facts))
        config["model"]["path"] = str(folder / "shape")
    runtime = {"max_model_len": num_tokens, "kv_offloading_size": host_gib, "kv_offloading_min_gain": 0.0}
    config["runtime"] = config.get("runtime", {}) | runtime
    found = folder / "config.yaml"
    found.write_text(json.dumps(config))  # YAML too
    return str(found)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--tokens", type=positive, default=64_000, help="of the session (default: 64000)")
    parser.add_argument("--host-gib", type=float, default=24.0, help="of the host's memory (default: 24)")
    parser.add_argument("--rounds", type=positive, default=2, help="kills (default: 2)")
    parser.add_argument("--at-once", action="store_true", help="kill also while the server has no spare process")
    args = parser.parse_args()
    prompt = [token % 97 + 1 for token in range(args.tokens)]
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args.config, Path(folder), args.tokens + _EXTRA, args.host_gib)
        with served([config], ["--max-body", "64M"]) as server:
            began = time.monotonic()
            server.wait()
            print(f"served {time.monotonic() - began:.1f} s after the start")
            computed, _, _ = turn(server, prompt)
            following = [*prompt, 7, 8, 9]
            hit, expected, by_tier = turn(server, following)
            print(f"{len(prompt)} tokens computed in {computed:.3f} s; the next turn {hit:.3f} s, {by_tier}")
            wait_for_pages(server, (len(prompt) - 1) // 64)
            times = []
            for _ in range(args.rounds):
                if not args.at_once:
                    wait_for_spare(server.pid)
                os.kill(engine_of(server.pid), signal.SIGKILL)
                with start_watched(server) as stages:
                    taken, tokens, by_tier = turn(server, following)
                times.append(taken)
                same = "the same token" if tokens == expected else "ANOTHER token"
                print(f"behind a kill: {taken:.3f} s, {same}, {by_tier}")
                print("  " + ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items()))
            print(f"the next turn behind a kill: median {statistics.median(times):.3f} s")


if __name__ == "__main__":
    with told_in_one_line():
        main()
