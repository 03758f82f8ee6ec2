"""Seconds to the first token of a long prompt whose KV is in the host's memory, beside the link and beside computing.

    python -m benchmarks.steps.tier_speed configs/qwen-8b-shape.yaml [--tokens 64000] [--host-gib 32] [--deterministic]

The prefix cache lets go of all pages between two turns, as a sleep has it do; the memory behind it keeps them. First
answers behind loads are compared bit by bit with those behind hits of the prefix cache (benchmarks/tiers/answers.py).
Then come the link's rate, a hit from the host and one from the prefix cache beside a miss, decodes beside loads alone,
beside requests behind loads, and beside as many behind hits of the prefix cache; and the cost of a miss with the memory
and without, by turns. --deterministic compares answers in that mode, also of requests that wait while others run.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from benchmarks.tiers.answers import compare_alone, compare_beside, compare_bits, compare_together
from benchmarks.tiers.behind import drop_kv, forget_cached, link_rates, scheduler_of, without_tiers
from benchmarks.tiers.loads import LoadsAlone
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.config.sources import with_runtime

_VOCABULARY = 100
_TURN = 5_700  # new tokens of an agent's call
_REST_S = 0.2
_DECODES = [[7, index + 1] for index in range(8)]


def prompt_of(length: int) -> list[int]:
    return [random.randrange(_VOCABULARY) for _ in range(length)]


def seconds(engine: Engine, prompt: list[int]) -> float:
    began = time.perf_counter()
    engine.generate([prompt], greedy(1))
    return time.perf_counter() - began


def check_answers(engine: Engine, longest: int) -> bool:
    """Compares answers behind loads with those behind hits of the prefix cache; tells, and whether all are right."""
    prompts = [prompt_of(random.randrange(longest // 8, longest)) for _ in range(8)]
    wrong, layers, loaded = compare_bits(engine, prompts[:4])
    print(f"{loaded} tokens loaded: keys or values of {wrong} of {layers} layers differ")
    is_right = not wrong and loaded > 0
    compared = {
        "each alone, behind a load and behind a hit": compare_alone(engine, prompts),
        "in one batch, behind loaded pages and computed ones": compare_together(engine, prompts, _DECODES),
    }
    if engine.config.runtime.deterministic:
        compared["waiting for loads beside others, and computed"] = compare_beside(engine, prompts, _DECODES)
    for what, found in compared.items():
        print(f"answers {what}: {found}")
        is_right &= found.is_right
    return is_right


def measure_hits(engine: Engine, num_tokens: int, rounds: int) -> list[int]:
    prompt = prompt_of(num_tokens)
    miss = seconds(engine, prompt)
    cached = statistics.median(seconds(engine, prompt) for _ in range(rounds))
    times = []
    (before, *_) = engine.stats().tiers
    for _ in range(rounds):
        drop_kv(engine)
        (before, *_) = engine.stats().tiers
        times.append(seconds(engine, prompt))
    (after, *_) = engine.stats().tiers
    num_bytes = after.loaded_bytes - before.loaded_bytes
    copied = num_bytes / max(after.load_seconds - before.load_seconds, 1e-9)
    from_host, to_host = link_rates()
    hit, floor = min(times), num_bytes / from_host
    listed = ", ".join(f"{1e3 * one:.0f}" for one in times)
    print(
        f"{num_tokens} tokens, {num_bytes / 1e9:.2f} GB: computed {1e3 * miss:.0f} ms, from the host {listed} ms, "
        f"from the prefix cache {1e3 * cached:.1f} ms",
    )
    print(
        f"link {from_host / 1e9:.1f} GB/s in, {to_host / 1e9:.1f} out: bytes over link {1e3 * floor:.0f} ms, a hit "
        f"{hit / floor if floor else 0:.2f} x; copies ran at {copied / 1e9:.1f} GB/s, "
        f"stores at {after.stored_bytes / max(after.store_seconds, 1e-9) / 1e9:.1f}",
    )
    return prompt


def measure_decodes(engine: Engine, prompt: list[int], rounds: int) -> None:
    """Times of decodes alone, beside loads that follow each other, beside requests behind loads, and beside as many
    behind hits of the prefix cache."""

    def taken() -> float:
        began = time.perf_counter()
        engine.generate(_DECODES, greedy(256), progress=False)
        return time.perf_counter() - began

    num_pages = len(prompt) // scheduler_of(engine).pages.page_size
    ratios: dict[str, list[float]] = {"loads alone": [], "requests behind loads": [], "requests behind hits": []}
    for _ in range(rounds):
        alone = taken()
        forget_cached(engine)
        began = time.perf_counter()
        with LoadsAlone(engine, num_pages) as loads:
            beside_copies = taken()
        rate = loads.num_bytes / (time.perf_counter() - began)
        forget_cached(engine)
        beside_loads, count = beside(taken, lambda: seconds(engine, prompt), lambda: forget_cached(engine))
        pause_s = beside_loads / max(count, 1)
        beside_hits, hits = beside(taken, lambda: seconds(engine, prompt), lambda: None, pause_s)
        print(
            f"8 x 256 decodes alone {1e3 * alone:.0f} ms; beside loads alone at {rate / 1e9:.1f} GB/s "
            f"{1e3 * beside_copies:.0f}; beside {count} requests behind loads {1e3 * beside_loads:.0f}, beside {hits} "
            f"behind hits {1e3 * beside_hits:.0f}",
        )
        for times, one in zip(ratios.values(), (beside_copies, beside_loads, beside_hits), strict=True):
            times.append(one / alone)
    told = ", ".join(f"beside {what} {statistics.median(found):.3f} x" for what, found in ratios.items())
    print(f"decodes {told} those alone")


def beside(
    taken: Callable[[], float], ask: Callable[[], object], prepare: Callable[[], None], each_s: float = 0.0
) -> tuple[float, int]:
    """Times `taken` beside calls of `ask`, each with its preparation, one in `each_s` at most; how many there were."""
    is_over, count = threading.Event(), 0

    def go_on() -> None:
        nonlocal count
        while not is_over.is_set():
            due = time.perf_counter() + each_s
            prepare()
            ask()
            count += 1
            is_over.wait(max(0.0, due - time.perf_counter()))

    asker = threading.Thread(target=go_on)
    asker.start()
    found = taken()
    is_over.set()
    asker.join()
    return found, count


def measure_misses(engine: Engine, length: int, rounds: int) -> None:
    """The cost of prompts that are nowhere, with the memory and without, by turns, each behind the same rest of the
    GPU. The memory is emptied ahead of each, so that what is computed is stored."""
    with_them: list[float] = []
    without: list[float] = []
    for number in range(2 * rounds):
        has_memory = number % 4 in (0, 3)
        engine.flush_prefix_cache()
        with nullcontext() if has_memory else without_tiers(engine):
            time.sleep(_REST_S)
            found = [seconds(engine, prompt_of(length)) for _ in range(6)]
        (with_them if has_memory else without).extend(found)
    ratio = statistics.median(with_them) / statistics.median(without)
    print(
        f"a miss of {length} tokens: {1e3 * statistics.median(with_them):.2f} ms with the memory, "
        f"{1e3 * statistics.median(without):.2f} without: {ratio:.4f} x",
    )


def for_length(config: EngineConfig, num_tokens: int, folder: Path) -> EngineConfig:
    """The config of a shape with random weights, for prompts as long as that, which it was never trained for.
    Others stay as they are."""
    source = Path(config.model.path)
    if config.model.load_format != "dummy":
        return config
    shape = json.loads((source / "config.json").read_text())
    shape["max_position_embeddings"] = max(shape["max_position_embeddings"], num_tokens)
    (folder / "config.json").write_text(json.dumps(shape))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--tokens", type=positive, default=64_000, help="of the long prompt (default: 64000)")
    parser.add_argument("--host-gib", type=float, default=32.0, help="of the host's memory (default: 32)")
    parser.add_argument("--rounds", type=positive, default=3, help="of each measurement (default: 3)")
    parser.add_argument("--deterministic", action="store_true", help="compare answers in the deterministic mode, alone")
    args = parser.parse_args()
    random.seed(0)
    runtime = {
        "max_model_len": args.tokens + 256,
        "kv_offloading_size": args.host_gib,
        "kv_offloading_min_gain": 0.0,
        "deterministic": args.deterministic,
    }
    with TemporaryDirectory() as folder:
        config = with_runtime(EngineConfig.from_yaml(args.config), runtime)
        return measure(for_length(config, args.tokens + 256, Path(folder)), args)


def measure(config: EngineConfig, args: Namespace) -> int:
    """Returns 1 where something is wrong."""
    began = time.perf_counter()
    with Engine(config) as engine:
        print(f"{machine_line(str(engine.config.runtime.device))}; started in {time.perf_counter() - began:.1f} s")
        is_right = check_answers(engine, min(6_000, args.tokens))
        if args.deterministic or not is_right:
            return not is_right
        prompt = measure_hits(engine, args.tokens, args.rounds)
        measure_misses(engine, min(_TURN, args.tokens), args.rounds)
        measure_decodes(engine, prompt, args.rounds)
    return 0


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main())
