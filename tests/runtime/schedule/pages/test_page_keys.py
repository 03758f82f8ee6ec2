"""Names of pages, and what watchers of the prefix cache are told: at last by a random history."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm_compile.runtime.schedule.pages.page_keys import PageKeys
from mllm_compile.runtime.schedule.pages.page_run import PageRun
from mllm_compile.runtime.schedule.pages.prefix_cache import RadixCache

PAGE = 2


class Witness:
    """Keeps the keys that can be found, by what it is told."""

    def __init__(self, keys: PageKeys) -> None:
        self.keys, self.found = keys, Counter[bytes]()

    def stored(self, run: PageRun) -> None:
        self.found.update(self.keys.of(run))

    def removed(self, run: PageRun, num_kept: int) -> None:
        self.found.subtract(self.keys.of(run)[num_kept:])

    def forgotten(self, run: PageRun) -> None:
        self.found.subtract(self.keys.of(run))
        for child in run.children.values():
            self.forgotten(child)

    def cleared(self) -> None:
        self.found.clear()


def keys_in(cache: RadixCache, keys: PageKeys) -> Counter[bytes]:
    """The keys of all runs that can be found, made anew."""
    found: Counter[bytes] = Counter()
    for salt, root in cache._roots.items():
        below = [(keys.root(salt), child) for child in root.children.values()]
        while below:
            parent, run = below.pop()
            chain = keys.chain(parent, run.token_ids)
            found.update(chain)
            below += [(chain[-1], child) for child in run.children.values()]
    return found


def test_a_key_says_the_salt_the_secret_and_all_tokens_up_to_its_page() -> None:
    keys = PageKeys(b"secret", PAGE)
    chain = keys.chain(keys.root(()), [1, 2, 3, 4, 5])
    assert len(chain) == 2
    assert keys.chain(chain[0], [3, 4]) == chain[1:]
    others = [
        keys.chain(keys.root(()), [1, 2, 3, 5])[1],
        keys.chain(keys.root(()), [0, 2, 3, 4])[1],
        keys.chain(keys.root(("salt",)), [1, 2, 3, 4])[1],
        PageKeys(b"another", PAGE).chain(PageKeys(b"another", PAGE).root(()), [1, 2, 3, 4])[1],
    ]
    assert len({chain[1], *others}) == 5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 1), max_size=10)), max_size=30))
def test_watchers_know_at_any_time_what_can_be_found(history: list[tuple[int, list[int]]]) -> None:
    cache = RadixCache(PAGE)
    keys = cache.use_keys(b"secret")
    witness = Witness(keys)
    cache.watchers.append(witness)
    next_page, locked = 0, []
    for kind, tokens in history:
        salt = ("salt",) if len(tokens) > 7 else ()
        if kind <= 2:
            whole = tokens[: len(tokens) // PAGE * PAGE]
            pages = np.arange(next_page, next_page + len(whole) // PAGE, dtype=np.int32)
            next_page += pages.size
            at = locked.pop() if kind == 2 and locked and locked[-1] and not salt else None
            end, _ = cache.extend(at, whole, pages, salt)
            locked.append(end)
            if kind:
                cache.unlock(locked.pop())
        elif kind == 3:
            cache.evict(len(tokens))
        elif kind == 4:
            cache.forget(np.array(tokens[:PAGE]), salt)
        elif len(tokens) > 5:
            cache.flush()
        elif locked:
            cache.unlock(locked.pop())
        assert +witness.found == keys_in(cache, PageKeys(b"secret", PAGE))
