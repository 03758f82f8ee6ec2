from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm_compile.runtime.schedule.pages.prefix_cache import PageRun, RadixCache
from mllm_compile.runtime.schedule.pages.state_snapshots import StateSnapshots

SALT = ("lora", 3)


def insert(
    cache: RadixCache, tokens: list[int], pages: list[int], salt: tuple = ()
) -> tuple[PageRun | None, list[int]]:
    """Insert from the root; the path stays locked."""
    node, duplicates = cache.extend(None, tokens, np.array(pages, dtype=np.int32), salt)
    return node, duplicates.tolist()


def hit(cache: RadixCache, tokens: list[int], salt: tuple = ()) -> list[int]:
    return cache.match_prefix(np.array(tokens), salt)[1].tolist()


def test_the_longest_prefix_in_full_pages_is_found() -> None:
    cache = RadixCache(page_size=2)
    insert(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert hit(cache, [1, 2, 3, 4, 5, 6, 7]) == [7, 8, 9]
    assert hit(cache, [1, 2, 3, 4, 5]) == [7, 8]
    assert hit(cache, [1, 2, 4, 4]) == [7]
    assert hit(cache, [3, 4]) == []
    assert hit(cache, [1]) == []
    assert cache.match_prefix(np.array([9, 9]))[0] is None


def test_one_salt_never_sees_the_pages_of_another() -> None:
    cache = RadixCache(page_size=1)
    insert(cache, [1, 2], [5, 6])
    insert(cache, [1, 2], [7, 8], SALT)
    assert hit(cache, [1, 2]) == [5, 6]
    assert hit(cache, [1, 2], SALT) == [7, 8]
    assert hit(cache, [1, 2], ("lora", 4)) == []


def test_a_prefix_that_is_there_keeps_its_pages_and_the_newcomers_are_handed_back() -> None:
    cache = RadixCache(page_size=1)
    insert(cache, [1, 2], [5, 6])
    assert cache.has_next(None, [1])
    assert not cache.has_next(None, [2])
    _, duplicates = insert(cache, [1, 2, 3], [7, 8, 9])
    assert duplicates == [7, 8]
    assert hit(cache, [1, 2, 3]) == [5, 6, 9]
    assert cache.num_pages == 3


def test_a_locked_path_is_never_evicted_and_comes_free_with_its_last_lock() -> None:
    cache = RadixCache(page_size=1)
    first, _ = insert(cache, [1, 2, 3], [5, 6, 7])
    second, _ = insert(cache, [1, 2, 4], [8, 9, 10])
    assert cache.evictable_pages == 0
    cache.unlock(first)
    assert cache.evictable_pages == 1
    assert cache.evict(5).tolist() == [7]
    cache.unlock(second)
    assert sorted(cache.evict(5).tolist()) == [5, 6, 10]
    assert cache.num_pages == 0


def test_the_least_recently_used_leaf_goes_first_and_parents_after_their_children() -> None:
    cache = RadixCache(page_size=1)
    for tokens, pages in [([1, 2], [5, 6]), ([3, 4], [7, 8])]:
        node, _ = insert(cache, tokens, pages)
        cache.unlock(node)
    node, _ = cache.match_prefix(np.array([1, 2]))
    cache.lock(node)
    cache.unlock(node)
    assert [cache.evict(1).tolist() for _ in range(5)] == [[8], [7], [6], [5], []]


def test_pages_that_were_published_together_are_one_run_until_a_prefix_ends_in_its_midst() -> None:
    cache = RadixCache(page_size=2)
    end, _ = insert(cache, list(range(2000)), list(range(1, 1001)))
    assert list(cache.path_of(end)) == [end], "a prefix of a thousand pages is found and locked as one"
    middle, pages = cache.match_prefix(np.array([*range(700), 5, 5]))
    assert pages.tolist() == list(range(1, 351))
    assert list(cache.path_of(middle)) == [middle]
    assert list(cache.path_of(end)) == [end, middle], "whoever held its end holds it still"
    assert cache.match_prefix(np.arange(2000))[0] is end
    cache.unlock(end)
    assert cache.evictable_pages == cache.num_pages == 1000
    assert cache.evict(1000).tolist() == list(range(1000, 0, -1))


def test_the_halves_of_an_unlocked_run_stay_next_to_each_other_in_the_order_of_eviction() -> None:
    cache = RadixCache(page_size=1)
    for tokens, pages in [([1, 2, 3], [5, 6, 7]), ([4], [8])]:
        node, _ = insert(cache, tokens, pages)
        cache.unlock(node)
    assert hit(cache, [1, 9]) == [5]
    assert cache.evict(4).tolist() == [7, 6, 5, 8]


def test_a_run_gives_up_its_last_pages_first_and_goes_on_from_what_is_left() -> None:
    cache = RadixCache(page_size=1)
    node, _ = insert(cache, [1, 2, 3], [5, 6, 7])
    cache.unlock(node)
    assert cache.evict(2).tolist() == [7, 6]
    assert hit(cache, [1, 2, 3]) == [5]
    node, duplicates = insert(cache, [1, 2, 4], [8, 9, 10])
    assert duplicates == [8]
    assert hit(cache, [1, 2, 4]) == [5, 9, 10]
    assert cache.num_pages == 3


def test_a_run_has_its_pages_to_itself_though_whoever_gave_them_writes_on() -> None:
    cache = RadixCache(page_size=1)
    tokens, pages = np.array([1, 2]), np.array([5, 6], dtype=np.int32)
    cache.extend(None, tokens, pages)
    tokens[:], pages[:] = 0, 0
    assert hit(cache, [1, 2]) == [5, 6]


def test_a_state_stays_with_the_pages_that_it_follows_and_goes_with_the_last_of_them() -> None:
    cache = RadixCache(page_size=1, states=StateSnapshots(first_row=7, count=2))
    end, _ = insert(cache, [1, 2, 3, 4], [5, 6, 7, 8])
    cache.states.keep(end, 7)
    middle = cache.run_to(np.array([1, 2]))
    assert middle is not None
    cache.states.keep(middle, 8)
    found, pages, num_matched = cache.match_state(np.array([1, 2, 3, 9]))
    assert (found, pages.tolist(), num_matched) == (middle, [5, 6], 3)
    assert cache.match_state(np.array([1, 2, 3, 4]))[0] is end
    cache.unlock(end)
    assert cache.evict(1).tolist() == [8]
    assert cache.match_state(np.array([1, 2, 3, 4]))[1].tolist() == [5, 6]
    assert cache.states.num_kept == 1


def test_a_lock_too_few_is_an_internal_error() -> None:
    cache = RadixCache(page_size=1)
    node, _ = insert(cache, [1], [5])
    cache.unlock(node)
    with pytest.raises(RuntimeError, match="page 5 was unlocked once too often"):
        cache.unlock(node)


def test_a_flush_forgets_all_and_gives_the_used_pages_back_once_they_are_unlocked() -> None:
    cache = RadixCache(page_size=1)
    node, _ = insert(cache, [1, 2], [5, 6])
    other, _ = insert(cache, [1, 3], [5, 7])
    cache.unlock(other)
    assert cache.flush().tolist() == [7]
    assert hit(cache, [1, 2]) == []
    longer, _ = cache.extend(node, [9], np.array([8], dtype=np.int32))
    assert hit(cache, [1, 2, 9]) == []
    cache.unlock(longer)
    assert sorted(cache.evict(5).tolist()) == [5, 6, 8]


def test_an_emptied_salt_leaves_nothing_behind() -> None:
    cache = RadixCache(page_size=1)
    for i in range(100):
        node, _ = insert(cache, [1, 2], [1 + 2 * i, 2 + 2 * i], ("image", i))
        cache.unlock(node)
    cache.evict(200)
    assert not cache._roots


class Model:
    """The same cache as a plain map: (salt, prefix) to page and time of last use; locked prefixes by count."""

    def __init__(self) -> None:
        self.pages: dict[tuple[int, tuple[int, ...]], int] = {}
        self.used: dict[tuple[int, tuple[int, ...]], int] = {}
        self.locks: dict[tuple[int, tuple[int, ...]], int] = {}
        self.clock = 0

    def match(self, salt: int, tokens: tuple[int, ...]) -> list[int]:
        length = 0
        while length < len(tokens) and (salt, tokens[: length + 1]) in self.pages:
            length += 1
        return [self.pages[salt, tokens[: i + 1]] for i in range(length)]

    def change_locks(self, salt: int, tokens: tuple[int, ...], change: int) -> None:
        self.clock += 1
        for i in range(len(tokens)):
            key = (salt, tokens[: i + 1])
            self.locks[key] = self.locks.get(key, 0) + change
            self.used[key] = self.clock

    def evictable_leaves(self) -> dict[int, int]:
        """Page to time of last use."""
        parents = {(salt, prefix[:-1]) for salt, prefix in self.pages}
        return {page: self.used[key] for key, page in self.pages.items() if not self.locks[key] and key not in parents}


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["insert", "insert", "lock", "unlock", "evict"]),
            st.integers(0, 1),
            st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple),
        ),
        max_size=60,
    )
)
def test_any_sequence_agrees_with_a_map_of_prefixes(events: list[tuple[str, int, tuple[int, ...]]]) -> None:
    cache, model, held, next_page = RadixCache(page_size=1), Model(), [], 1
    for event, salt, tokens in events:
        assert hit(cache, list(tokens), (salt,)) == model.match(salt, tokens)
        if event == "insert":
            pages = list(range(next_page, next_page + len(tokens)))
            next_page += len(tokens)
            present = len(model.match(salt, tokens))
            node, duplicates = insert(cache, list(tokens), pages, (salt,))
            assert duplicates == pages[:present]
            model.pages |= {(salt, tokens[: i + 1]): pages[i] for i in range(present, len(tokens))}
            model.change_locks(salt, tokens, 1)
            held.append((node, salt, tokens))
        elif event == "lock":
            node, pages = cache.match_prefix(np.array(tokens), (salt,))
            cache.lock(node)
            model.change_locks(salt, tokens[: pages.size], 1)
            held.append((node, salt, tokens[: pages.size]))
        elif event == "unlock" and held:
            node, salt, tokens = held.pop(len(tokens) % len(held))
            cache.unlock(node)
            model.change_locks(salt, tokens, -1)
        elif event == "evict":
            leaves = model.evictable_leaves()
            for page in cache.evict(1).tolist():
                assert leaves[page] == min(leaves.values())
                del model.pages[next(key for key, value in model.pages.items() if value == page)]
                leaves = {}
            assert not leaves
        assert cache.num_pages == len(model.pages)
        assert cache.evictable_pages == sum(model.locks[key] == 0 for key in model.pages)
