"""A request goes to the engine that has its prefix, or to one with less to do."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack

import pytest

from mllm_compile.server.replicas.keys import keys_of
from mllm_compile.server.replicas.routing import AHEAD, TIMES, Routing
from mllm_compile.server.replicas.text import BLOCK, Text

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
    whole, other = Text.of(text("a", 3)).blocks, Text.of(text("b", 3)).blocks
    assert Text.of(text("a", 2)).blocks == whole[:14]
    assert other[:4] == whole[:4] and other[4] not in whole
    assert Text.of(b"x" * (BLOCK - 1)).blocks == [] and Text.of(b"x" * (BLOCK + 3)).tail_bytes == 3
    long = Text.of(b"x" * 10_000 * BLOCK)
    assert len(long.blocks) == 4096 and long.tail_bytes == 0


def test_an_adapter_or_a_salt_has_other_blocks():
    bodies = (json.dumps({"model": model, "prompt": "s" * 2 * BLOCK}).encode() for model in ("one", "two"))
    one, two = (keys_of("/v1/completions", body, None).text.blocks for body in bodies)
    assert one[0] != two[0]


def test_a_conversation_goes_home_and_new_ones_spread():
    routing = Routing(NAMES)
    with ExitStack() as stack:
        homes = {}
        for name in "abcdef":
            homes[name] = routing.choose(NAMES, Text.of(text(name)))
            stack.enter_context(routing.serving(homes[name]))
        assert sorted(homes.values()) == sorted(NAMES * 2), "what all have in common is less than a half"
        for turns in (2, 3):
            for name, home in homes.items():
                assert routing.choose(NAMES, Text.of(text(name, turns))) == home


def test_texts_that_begin_alike_spread_and_each_goes_home():
    """Their engines are idle whenever one is asked, as sessions pause; what they begin with is most of each."""
    routing = Routing(NAMES)
    for name in NAMES:
        routing.started(name, 1 << 22)
    begin = b"s" * 70 * BLOCK
    texts = [begin + f"{number}".encode().ljust(25 * BLOCK, b".") for number in range(30)]
    homes = [routing.choose(NAMES, Text.of(one)) for one in texts]
    counts = [Counter(homes)[name] for name in NAMES]
    assert min(counts) > 4 and max(counts) < 16
    grown = [one + b"more".ljust(60 * BLOCK, b".") for one in texts]
    assert [routing.choose(NAMES, Text.of(one)) for one in grown[::-1]] == homes[::-1]


def chat(*contents: str) -> tuple[str, bytes]:
    """A path, and a body with messages of a system and of others by turns."""
    roles = ("system", *("user", "assistant") * len(contents))
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return "/v1/chat/completions", json.dumps({"model": "tiny", "messages": messages}).encode()


def completion(*contents: str) -> tuple[str, bytes]:
    return "/v1/completions", json.dumps({"prompt": "".join(contents), "model": "tiny"}).encode()


@pytest.mark.parametrize("request_of", [chat, completion])
@pytest.mark.parametrize("begin", [70 * BLOCK, 70 * BLOCK + 300])
def test_short_questions_behind_one_beginning_spread_and_each_goes_home(request_of, begin):
    """All of a question may be behind the last whole block: it counts none the less."""
    routing = Routing(NAMES)
    for name in NAMES:
        routing.started(name, 1 << 22)

    def chosen(*contents: str) -> str:
        return routing.choose(NAMES, keys_of(*request_of("s" * begin, *contents), None).text)

    questions = [f"{number} is how much?" for number in range(30)]
    homes = [chosen(one) for one in questions]
    counts = [Counter(homes)[name] for name in NAMES]
    assert min(counts) > 4 and max(counts) < 16
    for growth in (("Much.", "Why?"), ("Much.", "Why?", "w" * 900, "More.")):
        assert [chosen(one, *growth) for one in questions[::-1]] == homes[::-1]
    assert [chosen(one) for one in questions[::-1]] == homes[::-1], "asked again"


def test_a_tail_of_each_length_is_known_until_its_text_is_forgotten():
    routing = Routing(NAMES)
    routing.started("0", 600 * BLOCK // 4)
    texts = [SYSTEM + bytes([number % 256]) * number for number in range(1, BLOCK)]
    for one in texts:
        routing.choose(("0",), Text.of(one))
    with loaded(routing, {"0": 3}):
        assert routing.choose(NAMES, Text.of(SYSTEM + b"another")) != "0"
        for one in (texts[0], texts[255], texts[-1]):
            assert routing.choose(NAMES, Text.of(one + b"more")) == "0"
        routing.choose(("0",), Text.of(b"y" * 500 * BLOCK))
        assert len(routing._known["0"].blocks) == 600, "four blocks of the texts are left, and 96 tails"
        assert routing.choose(NAMES, Text.of(texts[-50] + b"more")) == "0"
        assert routing.choose(NAMES, Text.of(texts[50] + b"more")) != "0"


def test_a_new_text_goes_where_most_of_it_is_unless_that_engine_was_asked_much_more_of_late():
    routing = Routing(NAMES)
    begin = b"s" * 70 * BLOCK
    (home,) = {routing.choose(NAMES, Text.of(begin + bytes([number]) * 25 * BLOCK)) for number in range(3)}
    with loaded(routing, {home: 3}):
        assert routing.choose(NAMES, Text.of(begin + b"x" * 25 * BLOCK)) != home, "70 blocks are no three requests"
    with loaded(routing, {home: 1}):
        assert routing.choose(NAMES, Text.of(begin + b"\0" * 40 * BLOCK)) == home, "it goes on from an earlier one"


def test_of_engines_with_as_few_requests_a_new_text_displaces_what_was_not_used_for_longest():
    routing, names = Routing(NAMES), ("0", "1")
    for name in names:
        routing.started(name, 20 * BLOCK // 4)  # twenty blocks
        routing.choose((name,), Text.of(name.encode() * 19 * BLOCK + b"."))
    for _ in range(3):
        routing.choose(("0",))  # asked more of late, by texts that leave no block
    assert routing.choose(names, Text.of(b"x" * 10 * BLOCK)) == "0"
    assert routing.choose(names, Text.of(b"y" * 10 * BLOCK)) == "0", "the rest of the same text is older still"
    assert routing.choose(names, Text.of(b"z" * 10 * BLOCK)) == "1"
    with loaded(routing, {"1": 1}):
        assert routing.choose(names, Text.of(b"a" * 9 * BLOCK)) == "0", "its requests count more"


def test_short_texts_go_to_each_in_turn():
    routing = Routing(NAMES)
    assert [routing.choose(NAMES) for _ in range(6)] == [*NAMES, *NAMES]
    for name in NAMES:
        routing.started(name, 20 * BLOCK // 4)
        routing.choose((name,), Text.of(name.encode() * 19 * BLOCK + b"."))
    assert [routing.choose(NAMES) for _ in range(6)] == [*NAMES, *NAMES], "also where caches are full"


@pytest.mark.parametrize("least", [0, 4, 40])
def test_an_engine_with_much_more_to_do_is_passed_over_and_the_bound_is_both(least):
    routing = Routing(NAMES)
    prompt = Text.of(text("a"))
    home = routing.choose(NAMES, prompt)
    other = next(name for name in NAMES if name != home)
    most = int(max(least + AHEAD, least * TIMES))
    loads = dict.fromkeys(NAMES, least + 1) | {other: least}
    with loaded(routing, loads | {home: most}):
        assert routing.choose(NAMES, prompt) == home
    with loaded(routing, loads | {home: most + 1}):
        assert routing.choose(NAMES, prompt) == other
    with loaded(routing, loads | {home: least + 1}):
        assert routing.choose(NAMES, prompt) == other, "both have it now: the one with less to do is taken"
    assert set(routing.loads.values()) == {0}


def test_a_dead_engine_is_left_and_comes_back_without_its_prefixes():
    routing = Routing(NAMES)
    prompt = Text.of(text("a"))
    assert routing.choose(NAMES, prompt, session="s") == "0"
    assert routing.choose(("1", "2"), prompt, session="s") == "1"
    assert routing.choose(NAMES, prompt, session="s") == "1", "a session stays where it has gone"
    routing.started("1", 1 << 20)
    routing.choose(("2",), prompt)
    with loaded(routing, {"0": 20}):
        assert routing.choose(("0", "1", "2"), prompt) == "2", "the new process has none of it"


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
    home = routing.choose(NAMES, Text.of(text("a", 3)), session="a")
    assert routing.choose(NAMES, Text.of(text("a", 3)), session="a") == home
    routing.choose((home,), Text.of(text("b", 3)), session="b")  # makes the other's blocks leave
    with loaded(routing, {home: 1}):
        moved = routing.choose(NAMES, Text.of(text("a", 3)), session="a")
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
    texts = [Text.of(text(name, 3)) for name in "ab"]
    first, second = (one.blocks for one in texts)
    routing.choose(("0",), texts[0])
    assert known.matched(first[::-1]) == len(first) == 19
    routing.choose(("0",), texts[1])
    assert len(known.blocks) == 20 and known.matched(second[::-1]) == 19
    assert known.matched(first[::-1]) == 4 + 1, "its later blocks went first"
    assert all(block in known.blocks for block in first[:5]) and not any(block in known.blocks for block in first[5:])
