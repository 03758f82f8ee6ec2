"""Stop strings over text in pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.stop import StopMatcher


def run(stops, pieces, include=False):
    matcher = StopMatcher(stops, include)
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
    matcher = StopMatcher(["\n\nQ:"])
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
