"""A request goes to the engine that has its prefix, or to one with less to do."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import pytest

from mllm_compile.server.replicas.routing import AHEAD, BLOCK, TIMES, Routing, blocks_of

NAMES = ("0", "1", "2")
SYSTEM = b"s" * 4 * BLOCK


def text(name: str, turns: int = 1) -> bytes:
    """A conversation's text, which begins as others do."""
    return SYSTEM + b"".join(f"{name}{turn}".encode().ljust(5 * BLOCK, b".") for turn in range(turns))


def loaded(routing: Routing, loads: dict[str, int]) -> ExitStack:
    """Engines with so many requests, until it is closed."""
    stack = ExitStack()
    for name, count in loads.items():
        for _ in range(count):
            stack.enter_context(routing.serving(name))
    return stack


def test_blocks_are_those_of_the_texts_begin_alone():
    whole = blocks_of(text("a", 3))
    assert blocks_of(text("a", 2)) == whole[:14]
    assert blocks_of(text("b", 3))[:4] == whole[:4] and blocks_of(text("b", 3))[4] not in whole
    assert blocks_of(b"x" * (BLOCK - 1)) == []
    assert blocks_of(b"one", SYSTEM)[0] != blocks_of(b"two", SYSTEM)[0], "an adapter, or a salt, has other pages"
    assert len(blocks_of(b"x" * 10_000 * BLOCK)) == 4096


def test_a_conversation_goes_home_and_new_ones_spread():
    routing = Routing(NAMES)
    with ExitStack() as stack:
        homes = {}
        for name in "abcdef":
            homes[name] = routing.choose(NAMES, blocks_of(text(name)))
            stack.enter_context(routing.serving(homes[name]))
        assert sorted(homes.values()) == sorted(NAMES * 2), "what all have in common is less than a half"
        for turns in (2, 3):
            for name, home in homes.items():
                assert routing.choose(NAMES, blocks_of(text(name, turns))) == home


def test_texts_that_begin_alike_spread_and_each_goes_home():
    """Their engines are idle whenever one is asked, as sessions pause; what they begin with is most of each."""
    routing = Routing(NAMES)
    for name in NAMES:
        routing.started(name, 1 << 22)
    begin = b"s" * 70 * BLOCK
    texts = [begin + f"{number}".encode().ljust(25 * BLOCK, b".") for number in range(30)]
    homes = [routing.choose(NAMES, blocks_of(one)) for one in texts]
    counts = [Counter(homes)[name] for name in NAMES]
    assert min(counts) > 4 and max(counts) < 16
    grown = [one + b"more".ljust(60 * BLOCK, b".") for one in texts]
    assert [routing.choose(NAMES, blocks_of(one)) for one in grown[::-1]] == homes[::-1]


def test_a_new_text_goes_where_most_of_it_is_unless_that_engine_was_asked_much_more_of_late():
    routing = Routing(NAMES)
    begin = b"s" * 70 * BLOCK
    (home,) = {routing.choose(NAMES, blocks_of(begin + bytes([number]) * 25 * BLOCK)) for number in range(3)}
    with loaded(routing, {home: 3}):
        assert routing.choose(NAMES, blocks_of(begin + b"x" * 25 * BLOCK)) != home, "70 blocks are no three requests"
    with loaded(routing, {home: 1}):
        assert routing.choose(NAMES, blocks_of(begin + b"\0" * 40 * BLOCK)) == home, "it goes on from an earlier one"


def test_short_texts_go_to_each_in_turn():
    routing = Routing(NAMES)
    assert [routing.choose(NAMES, []) for _ in range(6)] == [*NAMES, *NAMES]


@pytest.mark.parametrize("least", [0, 4, 40])
def test_an_engine_with_much_more_to_do_is_passed_over_and_the_bound_is_both(least):
    routing = Routing(NAMES)
    blocks = blocks_of(text("a"))
    home = routing.choose(NAMES, blocks)
    other = next(name for name in NAMES if name != home)
    most = int(max(least + AHEAD, least * TIMES))
    loads = dict.fromkeys(NAMES, least + 1) | {other: least}
    with loaded(routing, loads | {home: most}):
        assert routing.choose(NAMES, blocks) == home
    with loaded(routing, loads | {home: most + 1}):
        assert routing.choose(NAMES, blocks) == other
    with loaded(routing, loads | {home: least + 1}):
        assert routing.choose(NAMES, blocks) == other, "both have it now: the one with less to do is taken"
    assert set(routing.loads.values()) == {0}


def test_a_dead_engine_is_left_and_comes_back_without_its_prefixes():
    routing = Routing(NAMES)
    blocks = blocks_of(text("a"))
    assert routing.choose(NAMES, blocks, session="s") == "0"
    assert routing.choose(("1", "2"), blocks, session="s") == "1"
    assert routing.choose(NAMES, blocks, session="s") == "1", "a session stays where it has gone"
    routing.started("1", 1 << 20)
    routing.choose(("2",), blocks)
    with loaded(routing, {"0": 20}):
        assert routing.choose(("0", "1", "2"), blocks) == "2", "the new process has none of it"


def test_a_session_stays_whatever_its_engine_has_to_do_and_a_hint_yields():
    routing = Routing(NAMES)
    home, hinted = routing.choose(NAMES, session="s"), routing.choose(NAMES, hint="h")
    assert home != hinted and (routing.home_of("s"), routing.home_of("x")) == (home, None)
    with loaded(routing, {home: 100, hinted: 100}):
        assert routing.choose(NAMES, session="s") == home
        assert routing.choose(NAMES, hint="h") not in (home, hinted)


@pytest.mark.parametrize("has_tiers", [False, True])
def test_a_session_leaves_an_engine_that_could_not_keep_its_prefix(has_tiers):
    routing = Routing(NAMES)
    for name in NAMES:
        routing.started(name, 20 * BLOCK // 4, has_tiers)  # twenty blocks
    home = routing.choose(NAMES, blocks_of(text("a", 3)), session="a")
    assert routing.choose(NAMES, blocks_of(text("a", 3)), session="a") == home
    routing.choose((home,), blocks_of(text("b", 3)), session="b")  # makes the other's blocks leave
    with loaded(routing, {home: 1}):
        moved = routing.choose(NAMES, blocks_of(text("a", 3)), session="a")
    assert (moved == home) == has_tiers, "with tiers it may be in the host's memory"
    assert routing.home_of("a") == moved


def test_a_hint_by_the_name_of_a_session_does_not_move_it():
    routing = Routing(NAMES)
    home = routing.choose(NAMES, session="s")
    with loaded(routing, {home: 100}):
        assert routing.choose(NAMES, hint="s") != home
    assert routing.home_of("s") == home == routing.choose(NAMES, session="s")


def test_what_is_known_is_bounded_by_the_engines_cache_and_stays_a_begin():
    routing = Routing(("0",))
    routing.started("0", 20 * BLOCK // 4)  # twenty blocks
    known = routing._known["0"]
    first, second = blocks_of(text("a", 3)), blocks_of(text("b", 3))
    routing.choose(("0",), first)
    assert known.matched(first[::-1]) == len(first) == 19
    routing.choose(("0",), second)
    assert len(known.blocks) == 20 and known.matched(second[::-1]) == 19
    assert known.matched(first[::-1]) == 4 + 1, "its later blocks went first"
    assert all(block in known.blocks for block in first[:5]) and not any(block in known.blocks for block in first[5:])
