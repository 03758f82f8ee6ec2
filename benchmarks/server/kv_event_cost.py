"""Measures what KV events take of the engine's thread in a step, beside the prefix cache's own work. No model runs.

Run: python -m benchmarks.server.kv_event_cost

Each step publishes a prompt of so many tokens and evicts another. With events the thread copies tokens and pages, and
writes them to the socket of the server's front, which a thread here reads.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time

import numpy as np

from benchmarks.script import parser_of, positive, positives
from mllm_compile.engine.core.page_events import PageEvents
from mllm_compile.kv_events.news import News
from mllm_compile.runtime.schedule.pages.prefix_cache import RadixCache
from mllm_compile.server.wire import messages
from mllm_compile.server.wire.channel import Channel

PAGE = 64
CACHED = 20  # prompts


def front() -> Channel:
    """The engine's end of a channel whose other end is read."""
    ours, theirs = (Channel(end) for end in socket.socketpair())

    def read() -> None:
        while not theirs.is_over:
            theirs.wait(0.5)

    threading.Thread(target=read, daemon=True).start()
    return ours


def microseconds(tokens: int, steps: int, channel: Channel | None) -> float:
    """The median time of a step."""
    cache, events = RadixCache(PAGE), None

    def tell(rank: int, news: list[News]) -> None:
        assert channel is not None, "there are events only with a channel"
        channel.send(messages.encode_event(messages.PagesChanged(rank, news)))

    if channel is not None:
        events = PageEvents([cache], (), tuple, tell)
    times = []
    for step in range(steps):
        token_ids = np.arange(step * tokens, (step + 1) * tokens, dtype=np.int64)
        pages = np.arange(1, tokens // PAGE + 1, dtype=np.int32) + step * (tokens // PAGE)
        began = time.perf_counter()
        end, _ = cache.extend(None, token_ids, pages)
        cache.unlock(end)
        if step > CACHED:
            cache.evict(tokens // PAGE)
        if events is not None:
            events.flush()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positives, default=[64, 512, 8192, 65536], help="of a step's prompt")
    parser.add_argument("--steps", type=positive, default=200)
    args = parser.parse_args()
    channel = front()
    for tokens in args.tokens:
        rounds = [[microseconds(tokens, args.steps, one) for one in (None, channel)] for _ in range(5)]
        alone, told = (statistics.median(times) for times in zip(*rounds, strict=True))
        print(f"{tokens:,} tokens: {alone:.0f} µs alone, {told:.0f} µs with events")


if __name__ == "__main__":
    main()
