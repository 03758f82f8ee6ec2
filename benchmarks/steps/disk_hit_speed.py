"""Seconds to the first token of a prompt whose keys and values are in files alone, beside reading these files.

    python -m benchmarks.steps.disk_hit_speed configs/qwen-8b-shape.yaml [--tokens 20000] [--host-gib 8] [--folder /tmp]

An engine computes prompts, and writes their pages as it closes; the next one has no page elsewhere. Ahead of each hit,
and of the reads, the files leave the system's cache.
"""

from __future__ import annotations

import os
import random
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from benchmarks.steps.tier_speed import for_length
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.config.sources import with_runtime
from mllm_compile.engine.outputs import RequestOutput

_PROMPTS = 2
_VOCABULARY = 100
_READERS = 8
_SETTLE_S = 4.0  # behind a start: all of the host's memory is registered then


def answered(engine: Engine, prompt: list[int]) -> tuple[float, RequestOutput]:
    """Seconds to a first token, and the answer."""
    began = time.perf_counter()
    (output,) = engine.generate([prompt], greedy(1), progress=False)
    return time.perf_counter() - began, output


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def cool(folder: Path) -> None:
    """Has the system forget what is in files, so that the drive is read."""
    os.sync()
    for path in files_in(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path) -> int:
    with path.open("rb", buffering=0) as file:
        return len(file.read())


def rate(folder: Path) -> tuple[float, float]:
    """Bytes a second of many readers, and bytes."""
    began = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as readers:
        total = sum(readers.map(read, files_in(folder)))
    return total / (time.perf_counter() - began), total


def measure(config: EngineConfig, prompts: list[list[int]], folder: Path, settle_s: float) -> None:
    with Engine(config) as engine:
        print(machine_line(str(engine.config.runtime.device)))
        answered(engine, prompts[0][:_VOCABULARY])
        expected = [answered(engine, prompt) for prompt in prompts]
    cool(folder)
    with Engine(config) as engine:
        time.sleep(settle_s)
        for prompt, (computed_s, computed) in zip(prompts, expected, strict=True):
            cool(folder)
            seconds, output = answered(engine, prompt)
            same = "the same token" if output.token_ids == computed.token_ids else "ANOTHER token"
            print(
                f"computed {computed_s:.3f} s; a hit {seconds:.3f} s, {output.num_disk_tokens} tokens of files, "
                f"{output.num_host_tokens} of the host's memory, {same}"
            )
    cool(folder)
    cold, num_bytes = rate(folder)
    again, _ = rate(folder)
    print(
        f"{num_bytes / 1e9:.2f} GB of files read by {_READERS} threads at {cold / 1e9:.2f} GB/s: "
        f"{num_bytes / cold / len(prompts):.3f} s a prompt; from the system's cache at {again / 1e9:.2f} GB/s"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--tokens", type=positive, default=20_000, help="of each prompt (default: 20000)")
    parser.add_argument(
        "--host-gib", type=float, default=8.0, help="of the host's memory (default: 8); files have twice"
    )
    parser.add_argument("--folder", type=Path, help="on the drive; a new folder in it has the files")
    parser.add_argument("--settle", type=float, default=_SETTLE_S, help="seconds ahead of hits (default: 4)")
    args: Namespace = parser.parse_args()
    random.seed(1)
    prompts = [[random.randrange(_VOCABULARY) for _ in range(args.tokens)] for _ in range(_PROMPTS)]
    with TemporaryDirectory() as shape, TemporaryDirectory(dir=args.folder) as folder:
        runtime = {
            "max_model_len": args.tokens + 256,
            "kv_offloading_size": args.host_gib,
            "kv_offloading_min_gain": 0.0,
            "kv_offloading_disk_path": folder,
            "kv_offloading_disk_size": 2 * args.host_gib,
        }
        config = with_runtime(EngineConfig.from_yaml(args.config), runtime)
        measure(for_length(config, args.tokens + 256, Path(shape)), prompts, Path(folder), args.settle)


if __name__ == "__main__":
    with told_in_one_line():
        main()
