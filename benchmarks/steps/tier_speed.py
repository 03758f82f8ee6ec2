"""Seconds to the first token of a long prompt whose KV is in the host's memory, beside the link and beside computing.

    python -m benchmarks.steps.tier_speed configs/qwen-8b-shape.yaml [--tokens 64000] [--host-gib 32] [--deterministic]

The prefix cache lets go of all pages between two turns, as a sleep has it do; the memory behind it keeps them. First
the bits of keys and values behind a load are compared with those before, and tokens with those before and computed
anew: roundings of another batch change tokens too, but in the deterministic mode. Then come the link's rate, a hit from
the host and one from the prefix cache beside a miss, decodes beside loads, and the cost of a miss with the memory and
without, by turns.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.config.sources import with_runtime
from mllm_compile.runtime.schedule.pages.watch import CacheWatcher
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.schedule.tiers.tiers import Tiers
from mllm_compile.runtime.tiers.copies import SlotCopies

_VOCABULARY = 100
_TURN = 5_700  # new tokens of an agent's call
_DECODES = [[7, index + 1] for index in range(8)]


def prompt_of(length: int) -> list[int]:
    return [random.randrange(_VOCABULARY) for _ in range(length)]


def seconds(engine: Engine, prompt: list[int]) -> float:
    began = time.perf_counter()
    engine.generate([prompt], greedy(1))
    return time.perf_counter() - began


def scheduler_of(engine: Engine) -> Scheduler:
    scheduler = engine.core._scheduler
    assert isinstance(scheduler, Scheduler), "tiers are of one rank"
    return scheduler


def drop_kv(engine: Engine) -> None:
    """Lets go of all pages; what was published is stored first."""
    engine.core.while_still(lambda requests: requests.drop_kv())


@contextmanager
def without_tiers(engine: Engine) -> Iterator[None]:
    """Has an engine do meanwhile as if it had none."""
    scheduler = scheduler_of(engine)
    tiers, watchers = scheduler.tiers, list(scheduler.pages.cache.watchers)

    def put(found: Tiers | None, watching: list[CacheWatcher]) -> None:
        scheduler.drop_kv()
        scheduler.tiers = scheduler.prompts.tiers = found
        scheduler.pages.cache.watchers[:] = watching

    engine.core.while_still(lambda requests: put(None, []))
    try:
        yield
    finally:
        engine.core.while_still(lambda requests: put(tiers, watchers))


def kv_of(engine: Engine, prompts: list[list[int]]) -> list[torch.Tensor]:
    """The bytes of all pages that the prefix cache has of prompts, [pages, n] of each layer's keys, and values."""
    scheduler, found = scheduler_of(engine), list[torch.Tensor]()
    copies = scheduler.tiers._copies if scheduler.tiers is not None else None
    assert isinstance(copies, SlotCopies), "the script has put one behind it"
    sections = copies._places[False][0].sections

    def read() -> None:
        matched = [scheduler.pages.cache.match_prefix(np.array(prompt, dtype=np.int64))[1] for prompt in prompts]
        pages = torch.from_numpy(np.concatenate(matched).astype(np.int64))
        found.extend(section.rows[pages.to(section.rows.device)].clone() for section in sections)

    engine.core.while_still(lambda requests: read())
    return found


def check_bits(engine: Engine, longest: int) -> bool:
    """Compares keys and values behind loads with those before, bit by bit."""
    prompts = [prompt_of(random.randrange(longest // 2, longest)) for _ in range(4)]
    engine.generate(prompts, greedy(1))
    before = kv_of(engine, prompts)
    drop_kv(engine)
    loaded = sum(output.num_host_tokens for output in engine.generate(prompts, greedy(1)))
    after = kv_of(engine, prompts)
    wrong = sum(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    print(
        f"keys and values of {before[0].shape[0]} pages, {loaded} tokens of them loaded: those of {wrong} of "
        f"{len(before)} layers differ",
        flush=True,
    )
    return not wrong and loaded > 0


def check_tokens(engine: Engine, longest: int) -> bool:
    """Compares tokens behind loads with those before, and those computed anew with them, beside running decodes."""
    prompts = [prompt_of(random.randrange(longest // 8, longest)) for _ in range(8)]

    def answers() -> list[list[int]]:
        return [output.token_ids for output in engine.generate([*prompts, *_DECODES], greedy(48))]

    first, warm = answers(), answers()
    drop_kv(engine)
    behind = answers()
    (host, *_) = engine.stats().tiers
    engine.flush_prefix_cache()
    anew = answers()
    alike, hits, control = (sum(map(list.__eq__, first, other)) for other in (behind, warm, anew))
    print(
        f"tokens behind loads: {alike} of {len(first)} answers alike; behind hits of the prefix cache {hits}; computed "
        f"anew {control}; {host}",
        flush=True,
    )
    return alike == len(first)


def link_rates() -> tuple[float, float]:
    """Bytes a second from the host and to it, of one large copy."""
    if not torch.cuda.is_available():
        return float("nan"), float("nan")
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    rates = []
    for target, source in ((device, host), (host, device)):
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        rates.append(host.nbytes / min(times))
    return rates[0], rates[1]


def measure_hits(engine: Engine, num_tokens: int, rounds: int) -> list[int]:
    prompt = prompt_of(num_tokens)
    miss = seconds(engine, prompt)
    cached = statistics.median(seconds(engine, prompt) for _ in range(rounds))
    times = []
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
        flush=True,
    )
    print(
        f"link {from_host / 1e9:.1f} GB/s in, {to_host / 1e9:.1f} out: bytes over link {1e3 * floor:.0f} ms, a hit "
        f"{hit / floor if floor else 0:.2f} x; copies ran at {copied / 1e9:.1f} GB/s, "
        f"stores at {after.stored_bytes / max(after.store_seconds, 1e-9) / 1e9:.1f}",
        flush=True,
    )
    return prompt


def measure_decodes(engine: Engine, prompt: list[int], rounds: int) -> None:
    """Times of decodes alone, and beside loads that follow each other without a pause."""

    def taken() -> float:
        began = time.perf_counter()
        engine.generate(_DECODES, greedy(256))
        return time.perf_counter() - began

    ratios = []
    for _ in range(rounds):
        alone, is_over, count = taken(), threading.Event(), 0

        def ask(is_over: threading.Event = is_over) -> None:
            nonlocal count
            while not is_over.is_set():
                engine.core.between_steps(lambda: forget_long(engine, prompt))
                engine.generate([prompt], greedy(1))
                count += 1

        asker = threading.Thread(target=ask)
        asker.start()
        beside = taken()
        is_over.set()
        asker.join()
        ratios.append(beside / alone)
        print(f"8 x 256 decodes alone {1e3 * alone:.0f} ms; beside {count} loads {1e3 * beside:.0f} ms", flush=True)
    print(f"decodes beside loads take {statistics.median(ratios):.3f} x those alone", flush=True)


def forget_long(engine: Engine, prompt: list[int]) -> None:
    """Lets the prefix cache go of what nobody uses; the memory behind it keeps its own."""
    scheduler = scheduler_of(engine)
    assert scheduler.tiers is not None, "the script has put one behind it"
    scheduler.tiers.settle()
    scheduler.rows.flush_prefix_cache()


def measure_misses(engine: Engine, length: int, rounds: int) -> None:
    """The cost of prompts that are nowhere, with the memory and without, by turns."""
    with_them: list[float] = []
    without: list[float] = []
    for _ in range(rounds):
        with_them += [seconds(engine, prompt_of(length)) for _ in range(6)]
        with without_tiers(engine):
            without += [seconds(engine, prompt_of(length)) for _ in range(6)]
    ratio = statistics.median(with_them) / statistics.median(without)
    print(
        f"a miss of {length} tokens: {1e3 * statistics.median(with_them):.2f} ms with the memory, "
        f"{1e3 * statistics.median(without):.2f} without: {ratio:.4f} x",
        flush=True,
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
    parser.add_argument("--deterministic", action="store_true", help="compare tokens in the deterministic mode, alone")
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
        is_right = check_bits(engine, min(6_000, args.tokens))
        is_right &= check_tokens(engine, min(6_000, args.tokens)) or not args.deterministic
        if args.deterministic or not is_right:
            return not is_right
        prompt = measure_hits(engine, args.tokens, args.rounds)
        measure_misses(engine, min(_TURN, args.tokens), args.rounds)
        measure_decodes(engine, prompt, args.rounds)
    return 0


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main())
