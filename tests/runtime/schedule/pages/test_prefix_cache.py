"""The radix tree over pages, at last against one with a node for each page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm_compile.runtime.schedule.pages.page_run import PageRun
from mllm_compile.runtime.schedule.pages.prefix_cache import RadixCache
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


def test_what_is_left_of_a_run_keeps_no_memory_of_the_tokens_that_are_gone() -> None:
    cache = RadixCache(page_size=2)
    end, _ = insert(cache, list(range(2000)), list(range(1, 1001)))
    for length in range(1998, 0, -2):  # each ends a page earlier than the one before
        cache.match_prefix(np.arange(length))
    arrays = [array for run in cache.path_of(end) for array in (run.token_ids, run.pages)]
    owners = {id(owner): owner for owner in [array if array.base is None else array.base for array in arrays]}
    assert sum(owner.nbytes for owner in owners.values()) <= 2 * (2000 * 8 + 1000 * 4)

    other = RadixCache(page_size=2)
    end, _ = insert(other, list(range(2000)), list(range(1, 1001)))
    other.unlock(end)
    other.evict(999)
    assert end is not None and end.token_ids.base is None and end.token_ids.tolist() == [0, 1]


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


class Page:
    """A cached page of the model of the tree, where each page is a node."""

    def __init__(self, parent: Page | None, page: int = 0) -> None:
        self.parent = parent
        self.page = page
        self.children: dict[tuple[int, ...], Page] = {}
        self.locks = 0
        self.used = 0  # when it was unlocked last

    def path(self) -> list[Page]:
        """The pages to this one, the first one first."""
        return [] if self.parent is None else [*self.parent.path(), self]

    def below(self) -> list[Page]:
        """All pages behind this one."""
        return [page for child in self.children.values() for page in (child, *child.below())]


class Model:
    """The same cache, page by page, with a tree for each salt; `states` are pages, the least recently used first."""

    def __init__(self, num_states: int) -> None:
        self.roots: dict[int, Page] = {}
        self.pages: list[Page] = []
        self.states: list[Page] = []
        self.num_states = num_states
        self.clock = 0

    def root(self, salt: int) -> Page:
        return self.roots.setdefault(salt, Page(None))

    def match(self, at: Page, tokens: list[int]) -> Page:
        while (child := at.children.get(tuple(tokens[:SIZE]))) is not None:
            at, tokens = child, tokens[SIZE:]
        return at

    def extend(self, at: Page, tokens: list[int], pages: list[int]) -> tuple[Page, list[int]]:
        """The new end, once locked from `at` on, and the pages that it does not take."""
        there, given = at.path(), self.match(at, tokens)
        duplicates = pages[: len(given.path()) - len(there)]
        at = given
        for index in range(len(duplicates), len(pages)):
            new = Page(at, pages[index])
            at.children[tuple(tokens[index * SIZE : (index + 1) * SIZE])] = new
            self.pages.append(new)
            at = new
        for page in at.path()[len(there) :]:
            page.locks += 1
        return at, duplicates

    def unlock(self, end: Page) -> None:
        self.clock += 1
        for page in end.path():
            page.locks -= 1
            page.used = self.clock

    def evict(self, count: int) -> list[int]:
        evicted = []
        for _ in range(count):
            leaves = [page for page in self.pages if not page.locks and not page.children]
            if not leaves:
                break
            page = min(leaves, key=lambda leaf: leaf.used)
            evicted.append(page.page)
            self.pages.remove(page)
            self.states = [kept for kept in self.states if kept is not page]
            assert page.parent is not None
            page.parent.children = {key: child for key, child in page.parent.children.items() if child is not page}
        return evicted

    def forget(self, salt: int, tokens: list[int]) -> list[int]:
        """The unlocked ones of the pages that are found no more."""
        top = self.root(salt).children.pop(tuple(tokens[:SIZE]), None)
        if top is None:
            return []
        top.parent = Page(None)
        top.parent.children[tuple(tokens[:SIZE])] = top
        return [page.page for page in (top, *top.below()) if not page.locks]

    def unlocked(self) -> int:
        return sum(not page.locks for page in self.pages)


SIZE = 2  # tokens of a page
EVENTS = ["publish", "go on", "lock", "lock a state", "keep a state", "unlock", "unlock", "unlock", "evict"]
# Pages that many prompts begin with, then some of three kinds (two differ in their last token alone), and perhaps a
# part of one.
PROMPTS = st.tuples(
    st.integers(0, 5), st.lists(st.sampled_from([(0, 0), (0, 1), (1, 0)]), max_size=2), st.sampled_from([0, 0, 1])
).map(lambda parts: [0] * parts[0] * SIZE + [token for page in parts[1] for token in page] + [0] * parts[2])


def check_runs(cache: RadixCache, model: Model, held: list[tuple[PageRun | None, Page]]) -> None:
    """Counts, locks and states are the model's, and memory is held for twice what is cached at most."""
    assert (cache.num_pages, cache.evictable_pages) == (len(model.pages), model.unlocked())
    runs = {run for end, _ in held for run in cache.path_of(end)} | set(cache._unlocked)
    assert sorted(page for run in runs for page in run.pages.tolist()) == sorted(page.page for page in model.pages)
    locks = {page.page: page.locks for page in model.pages}
    assert all(locks[page] == run.locks for run in runs for page in run.pages.tolist()), "a run's users are the same"
    for array in [array for run in runs for array in (run.token_ids, run.pages)]:
        assert array.base is None or array.base.size <= 2 * array.size
    assert [run.pages[-1] for run in cache.states._rows] == [page.page for page in model.states]  # type: ignore[attr-defined]
    assert cache.states.num_kept + cache.states.num_free == model.num_states
    for end, page in held:
        pages = [run.pages.tolist() for run in cache.path_of(end)]
        assert [one for run in pages[::-1] for one in run] == [one.page for one in page.path()]


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(EVENTS * 3 + ["forget", "flush"]), st.integers(0, 1), PROMPTS, st.integers(0, 100)),
        min_size=20,
        max_size=60,
    )
)
def test_any_sequence_agrees_with_a_tree_of_single_pages(events: list[tuple[str, int, list[int], int]]) -> None:
    model, next_page = Model(num_states=3), 1
    cache = RadixCache(SIZE, StateSnapshots(first_row=50, count=model.num_states))
    held: list[tuple[PageRun | None, Page]] = []
    for event, salt, tokens, number in events:
        found = model.match(model.root(salt), tokens)
        assert hit(cache, tokens, (salt,)) == [page.page for page in found.path()]
        whole = tokens[: len(tokens) // SIZE * SIZE] or [0] * SIZE
        new = list(range(next_page, next_page + len(whole) // SIZE))
        if event == "publish":
            next_page += len(new)
            end, duplicates = insert(cache, whole, new, (salt,))
            page, expected = model.extend(model.root(salt), whole, new)
            assert duplicates == expected
            held.append((end, page))
        elif event == "go on" and held:
            next_page += len(new)
            at, page = held.pop(number % len(held))
            given = np.array(new, dtype=np.int32)
            assert cache.has_next(at, whole, (salt,)) == (tuple(whole[:SIZE]) in page.children)
            end, duplicates = cache.extend(at, whole, given)
            page, expected = model.extend(page, whole, new)
            assert duplicates.tolist() == expected
            held.append((end, page))
        elif event == "lock":
            end, _ = cache.match_prefix(np.array(tokens), (salt,))
            cache.lock(end)
            for one in found.path():
                one.locks += 1
            held.append((end, found)) if end is not None else None
        elif event == "lock a state":
            end, pages, num_matched = cache.match_state(np.array(tokens), (salt,))
            with_state = [page for page in found.path() if page in model.states]
            expected_pages = with_state[-1].path() if with_state else []
            assert (pages.tolist(), num_matched) == ([page.page for page in expected_pages], len(found.path()))
            assert (end is None) == (not with_state)
            if end is not None:
                cache.states.use(end)
                cache.lock(end)
                model.states.append(model.states.pop(model.states.index(with_state[-1])))
                for one in expected_pages:
                    one.locks += 1
                held.append((end, with_state[-1]))
        elif event == "keep a state":
            row = cache.states.reserve()
            assert row is not None
            if len(model.states) == model.num_states:
                model.states.pop(0)
            end = cache.run_to(np.array(whole), (salt,))
            found = model.match(model.root(salt), whole)
            assert (end is not None) == (len(found.path()) * SIZE == len(whole))
            if end is None or found in model.states:
                cache.states.release(row)
            else:
                cache.states.keep(end, row)
                model.states.append(found)
        elif event == "unlock" and held:
            end, page = held.pop(number % len(held))
            cache.unlock(end)
            model.unlock(page)
        elif event == "evict":
            count = number % 6
            assert cache.evict(count).tolist() == model.evict(count)
        elif event == "forget":
            assert sorted(cache.forget(whole, (salt,)).tolist()) == sorted(model.forget(salt, whole))
        elif event == "flush":
            model.roots.clear()
            assert cache.flush().tolist() == model.evict(model.unlocked())
        check_runs(cache, model, held)
