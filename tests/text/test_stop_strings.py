"""Stop strings over text in pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.text.stop_strings import StopMatcher


def run(stops, pieces, include=False):
    matcher = StopMatcher(tuple(stops), include)
    shown = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown.append(text)
        if matched is not None:
            return "".join(shown), matched
    return "".join([*shown, matcher.flush()]), None


def test_the_text_ends_before_the_stop_string():
    assert run(["END"], ["one two END three"]) == ("one two ", "END")


def test_the_stop_string_is_kept_when_asked_for():
    assert run(["END"], ["one E", "ND three"], include=True) == ("one END", "END")


def test_what_could_become_a_stop_string_is_held_back_until_it_does_not():
    matcher = StopMatcher(("\n\nQ:",))
    assert matcher.push("yes\n") == ("yes", None)
    assert matcher.push("\nQ") == ("", None)
    assert matcher.push("uite") == ("\n\nQuite", None)


def test_held_back_text_belongs_to_the_answer_when_it_ends_otherwise():
    assert run(["END"], ["an E", "N"]) == ("an EN", None)


def test_the_stop_string_that_is_complete_first_wins():
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")


def test_of_stop_strings_that_end_together_the_longest_wins():
    assert run(["c", "abc"], ["xabc"]) == ("x", "abc")


def test_a_false_start_inside_a_stop_string_does_not_hide_it():
    assert run(["aab"], ["a", "a", "a", "b", "c"]) == ("a", "aab")


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.sets(st.integers(0, 30)),
    include=st.booleans(),
)
def test_how_the_text_is_cut_does_not_matter(text, stops, cuts, include):
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(stops, pieces, include) == run(stops, list(text), include)
    shown, matched = run(stops, [text], include)
    if matched is None:
        assert shown == text and not any(stop in text for stop in stops)
    elif not include:
        assert not any(stop in shown for stop in stops) and (shown + matched) in text


def naive(stops, text):
    """The shortest beginning of the text that ends with a stop text, less the longest such one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=7), min_size=1, max_size=8),
)
def test_it_finds_what_looking_at_each_stop_text_finds(text, stops):
    assert run(stops, list(text)) == naive(stops, text)


@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=4),
)
def test_no_more_is_held_back_than_could_become_a_stop_text(text, stops):
    matcher, shown = StopMatcher(tuple(stops)), ""
    for end, character in enumerate(text, start=1):
        new, matched = matcher.push(character)
        if matched is not None:
            return
        shown += new
        held = text[len(shown) : end]
        assert any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(text[at:end]) for stop in stops for at in range(len(shown)))


def num_steps(stops, text):
    """Moves of the automaton for a text of one character a push."""
    matcher = StopMatcher(tuple(stops))
    counts = 0
    automaton = matcher._automaton

    class Counted(list):
        def __getitem__(self, state):
            nonlocal counts
            counts += 1
            return super().__getitem__(state)

    before, automaton.next = automaton.next, Counted(automaton.next)
    for character in text:
        assert matcher.push(character)[1] is None
    automaton.next = before
    return counts


def test_the_work_per_character_does_not_grow_with_the_stop_texts():
    text = ("a" * 60 + "b") * 20
    few, many = ["a" * 61], ["a" * size + "c" for size in range(4, 64)] + ["a" * 61]
    assert num_steps(many, text) <= 5 * len(text)
    assert num_steps(few, text) <= 5 * len(text)
    assert num_steps(["a" * 4000], "a" * 3999 + "b" + "a" * 3999) <= 5 * 8000


def test_equal_stop_texts_share_what_is_made_of_them():
    one, other = StopMatcher(("END", "\n\n")), StopMatcher(("END", "\n\n"))
    assert one._automaton is other._automaton
    assert one.push("E") == ("", None) and other.push("x") == ("x", None)
