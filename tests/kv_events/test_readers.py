"""Routers know what the prefix cache holds, after any history of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm_compile.engine.cache_salt import at_epoch, request_salt
from mllm_compile.engine.core.page_events import PageEvents
from mllm_compile.kv_events.blocks import Blocks
from mllm_compile.kv_events.wire import Batch, encode
from mllm_compile.runtime.schedule.pages.prefix_cache import RadixCache
from tests.kv_events.readers import Dynamo, LlmD, Typed

PAGE = 2
IMAGE = -(1 << 62)  # as media keys are, below zero
TOPIC = "kv@pod-1@Qwen/Qwen3-8B"
ADAPTER = type("Adapter", (), {"name": "sql", "digest": "d1", "version": 3})


class Watched:
    """A prefix cache of few pages, its pages' owner, and the readers of its events."""

    def __init__(self) -> None:
        self.cache = RadixCache(PAGE)
        self.free = list(range(1, 40))
        self.readers = [LlmD(TOPIC), Dynamo(PAGE), Typed()]
        self.batches: list[list[bytes]] = []
        self._blocks = Blocks()
        self._news = PageEvents([self.cache], (), lambda: [ADAPTER], self._told)

    def _told(self, rank, news) -> None:
        if events := self._blocks.events_of(news):
            number = len(self.batches).to_bytes(8, "big")
            self.batches.append([TOPIC.encode(), number, encode(Batch(1.5, events, rank))])
            for reader in self.readers:
                reader.read(self.batches[-1])

    def store(self, token_ids, salt=(), held=None):
        """A request that computes what is not cached, and ends; held: it stays locked."""
        tokens = np.array(token_ids[: len(token_ids) // PAGE * PAGE], np.int64)
        run, pages = self.cache.match_prefix(tokens, salt)
        self.cache.lock(run)
        missing = tokens.size // PAGE - pages.size
        if missing > len(self.free):
            self.free += self.cache.evict(missing - len(self.free)).tolist()
        if missing <= len(self.free):
            new = np.array([self.free.pop() for _ in range(missing)], np.int32)
            run, back = self.cache.extend(run, tokens[pages.size * PAGE :], new, salt)
            self.free += back.tolist()
        if held is None:
            self.cache.unlock(run)
        else:
            held.append(run)

    def flush(self) -> None:
        self._news.flush()

    def held(self, namespaces=False):
        """The prefixes that the cache would find, as Index has them."""
        found, left = set(), [(root, ()) for root in self.cache._roots.values()]
        salts = {id(root): salt for salt, root in self.cache._roots.items()}
        while left:
            run, path = left.pop()
            for child in run.children.values():
                salts[id(child)] = salts[id(run)]
                tokens, inner = child.token_ids.reshape(-1, PAGE).tolist(), path
                for page in tokens:
                    inner = (*inner, (tuple(page), _extra(salts[id(run)], not inner, namespaces)))
                    found.add(inner)
                left.append((child, inner))
        return {path for path in found if all(token != IMAGE for page, _ in path for token in page)}


def _extra(salt, is_first, namespaces):
    text = next((part for part in salt if isinstance(part, str)), None)
    name = "sql" if ("adapter", "d1") in salt else None
    if namespaces:
        return (name, text)
    each = () if name is None else (name,)
    return (*each, text) if is_first and text is not None else each or None


TOKENS = st.lists(st.sampled_from([1, 2, 3, IMAGE]), max_size=14)
SALTS = st.sampled_from([(), request_salt("mine", None), request_salt(None, ADAPTER), request_salt("mine", ADAPTER)])
ACTS = st.one_of(
    st.tuples(st.just("store"), TOKENS, SALTS),
    st.tuples(st.just("hold"), TOKENS, SALTS),
    st.tuples(st.just("let go")),
    st.tuples(st.just("evict"), st.integers(1, 20)),
    st.tuples(st.just("forget"), TOKENS, SALTS),
    st.tuples(st.just("cleared")),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTS, max_size=25))
def test_each_reader_knows_exactly_what_is_cached(acts):
    watched, held = Watched(), []
    for act, *what in acts:
        if act == "store":
            watched.store(*what)
        elif act == "hold":
            watched.store(*what, held=held)
        elif act == "let go" and held:
            watched.cache.unlock(held.pop())
        elif act == "evict":
            watched.free += watched.cache.evict(*what).tolist()
        elif act == "forget" and len(what[0]) >= PAGE:
            watched.cache.forget(what[0], what[1])
        elif act == "cleared":
            watched.free += watched.cache.flush().tolist()
        watched.flush()
        llm_d, dynamo, typed = watched.readers
        assert llm_d.prefixes() == typed.prefixes() == watched.held()
        assert dynamo.prefixes() == watched.held(namespaces=True)


def test_updated_weights_clear_what_older_ones_computed():
    watched = Watched()
    watched.store([1, 2, 3, 4])
    watched.store([1, 2, 5, 6], at_epoch((), 1))
    watched.store([1, 2, 7, 8], ())  # a late request of the old weights
    watched.flush()
    for reader in watched.readers:
        assert {tuple(page for page, _ in path) for path in reader.prefixes()} == {((1, 2),), ((1, 2), (5, 6))}


def test_a_router_of_other_block_names_finds_an_adapters_blocks_by_its_name():
    watched = Watched()
    watched.store([1, 2], request_salt(None, ADAPTER))
    watched.flush()
    (event,) = Typed._decoder.decode(watched.batches[0][2]).events
    assert (event.lora_name, event.lora_id, event.extra_keys) == ("sql", 3, [("sql",)])


@pytest.mark.parametrize("count", [0, 3])
def test_a_replay_gives_llm_d_the_same_index(count):
    watched = Watched()
    for token in range(1, 9):
        watched.store([token, token, 9, 9])
        watched.flush()
    late = LlmD(TOPIC)
    answers = [[b"", *frames] for frames in watched.batches[count:]]
    late.replay([*answers, [b"", b"", b"\xff" * 8, b""]], count)
    assert len(late.paths) == 2 * (8 - count)
