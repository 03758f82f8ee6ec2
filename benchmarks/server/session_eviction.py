"""Measures what sessions change of the prefix cache's hits under agents, beside an LRU of messages. No model runs.

Run: python -m benchmarks.server.session_eviction trace.jsonl --tokens 700000,1500000

The trace is one of benchmarks.server.agent_trace. Calls begin in the order in which a simple server would begin them.
The cache is the engine's own, with pages of 64 tokens: once without sessions, once with each call's session, which its
last call ends. The LRU drops ends of conversations, and knows messages of any length.
"""

from __future__ import annotations

import heapq
import json
import time

import numpy as np

from benchmarks.script import existing_file, parser_of, positive, positives
from benchmarks.server.agent_trace import OVERHEAD, in_time, prompts_of
from mllm_compile.runtime.schedule.pages.sessions import SessionTag
from mllm_compile.runtime.schedule.pages.tables import PageTables

PAGE = 64
Message = tuple[str, int, int]


class Engine:
    """The prefix cache of an engine whose requests run one after another."""

    def __init__(self, tokens: int, has_sessions: bool) -> None:
        num_pages = tokens // PAGE + 1
        self._tables = PageTables(1, num_pages, num_pages, PAGE)
        self._has_sessions = has_sessions

    def call(self, session: str, prompt: list[Message], reply: Message, ends: bool) -> int:
        """The tokens of the prompt that were found."""
        sessions, tables = self._tables.cache.sessions, self._tables
        tokens = np.concatenate([token_ids(message) for message in (*prompt, reply)])
        length = tokens.size - reply[1] - OVERHEAD
        if tables.pages_for(tokens.size) >= tables.allocator.num_pages:
            return 0
        whose = SessionTag(session) if self._has_sessions else None
        begun = None if whose is None else sessions.begin(whose)
        found = tables.attach_prefix(0, tokens[: length - 1], ())
        tables.grow(0, tables.pages_for(tokens.size) - found)
        if begun is not None:
            sessions.over(begun, length, found * PAGE)
        path = list(tables.cache.path_of(tables.publish_and_release(0, tokens, tokens.size, ())))
        starts = np.cumsum([0, *(run.pages.size for run in reversed(path))])[-2::-1]
        if whose is not None:
            sessions.used(zip(path, (starts < found).tolist(), strict=True), begun, whose)
            if ends:
                sessions.end(session)
        return found * PAGE


def token_ids(message: Message) -> np.ndarray:
    """Tokens that no other message has."""
    _, tokens, seed = message
    return (seed << 24) + np.arange(tokens + OVERHEAD, dtype=np.int64)


class Lru:
    """Messages by what is before them, dropped from the ends of conversations, the least recently used first."""

    def __init__(self, tokens: int) -> None:
        self._most, self._used = tokens, 0
        self._nodes: dict[int, list[int]] = {}  # by chain: parent, tokens, children, last use
        self._heap: list[tuple[int, int, int]] = []

    def call(self, number: int, prompt: list[Message], reply: Message) -> int:
        """The tokens of the prompt that were found."""
        path, chain = [], 0
        for _, tokens, seed in (*prompt, reply):
            chain = hash((chain, seed, tokens))
            path.append((chain, tokens + OVERHEAD))
        hits, is_hit = 0, True
        for chain, tokens in path[:-1]:
            is_hit = is_hit and chain in self._nodes
            if is_hit:
                hits += tokens
                self._nodes[chain][3] = number
        self._drop(sum(tokens for chain, tokens in path if chain not in self._nodes))
        parent = 0
        for depth, (chain, tokens) in enumerate(path):
            if chain not in self._nodes:
                if self._used + tokens > self._most or (parent and parent not in self._nodes):
                    break
                self._nodes[chain] = [parent, tokens, 0, number]
                self._used += tokens
                if parent:
                    self._nodes[parent][2] += 1
            self._nodes[chain][3] = number
            heapq.heappush(self._heap, (number, -depth, chain))
            parent = chain
        return hits

    def _drop(self, needed: int) -> None:
        kept = []
        while self._used + needed > self._most and self._heap:
            last, depth, chain = entry = heapq.heappop(self._heap)
            node = self._nodes.get(chain)
            if node is None or node[3] != last:
                continue  # there is a later entry
            if node[2]:
                kept.append(entry)
                continue
            self._used -= node[1]
            del self._nodes[chain]
            if (before := self._nodes.get(node[0])) is not None:
                before[2] -= 1
                heapq.heappush(self._heap, (before[3], depth + 1, node[0]))
        for entry in kept:
            heapq.heappush(self._heap, entry)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("trace", type=existing_file)
    parser.add_argument("--tokens", type=positives, required=True, help="of the cache, with commas between")
    parser.add_argument("--concurrency", type=positive, default=32, help="sessions at once (default: 32)")
    args = parser.parse_args()
    calls = [json.loads(line) for line in args.trace.read_text().splitlines()]
    prompts = {call["id"]: prompt for call, prompt in prompts_of(calls)}
    order = in_time(calls, args.concurrency, prefill_rate=30_000.0, decode_ms=10.0)
    total = sum(call["context_tokens"] for call in order)
    print(f"{len(order)} calls, {total:,} tokens of prompts, {args.concurrency} sessions at once")
    for tokens in args.tokens:
        lru, engines = Lru(tokens), [Engine(tokens, False), Engine(tokens, True)]
        hits, seconds = [0, 0, 0], [0.0, 0.0]
        for number, call in enumerate(order):
            prompt, reply = prompts[call["id"]], ("assistant", call["out_tokens"], call["reply_seed"])
            hits[0] += lru.call(number, prompt, reply)
            for which, engine in enumerate(engines):
                began = time.perf_counter()
                hits[1 + which] += engine.call(call["session"], prompt, reply, call["ends_session"])
                seconds[which] += time.perf_counter() - began
        shares = [count / total for count in hits]
        told = [f"{share:.1%} ({share / shares[0]:.3f})" for share in shares]
        print(f"{tokens:,} tokens: LRU {told[0]}, engine {told[1]}, with sessions {told[2]}, ", end="")
        print(f"host {seconds[1] / seconds[0]:.3f} x")


if __name__ == "__main__":
    main()
