"""Incremental detokenizing: whole characters only, and the text of all tokens at once."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from mllm_compile.text.byte_runs import MOST_HELD, REPLACEMENT
from mllm_compile.text.clean_spaces import SpaceCleaner, without_spaces_before_punctuation
from mllm_compile.text.detokenizer import Detokenizer, detokenize
from mllm_compile.text.tokenizer import Tokenizer
from tests.fakes import ByteTokenizer


class CountingTokenizer(ByteTokenizer):
    """Counts the tokens that it decodes."""

    def __init__(self):
        self.num_decoded = 0

    def decode(self, token_ids, skip_special_tokens=True, *, as_it_is=False):
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ("▁the", "▁cat", "s", "▁", "▁▁", ".", "é", "世", REPLACEMENT)


def falling_back(*pieces):
    """A tokenizer as SentencePiece models have it: ▁ is a space, stripped at the start; bytes fall back in runs."""
    vocab = {piece: token_id for token_id, piece in enumerate(["</s>", *pieces])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.add_special_tokens(["</s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


FALLING_BACK = falling_back(*BYTES, *WORDS)


def byte_ids(data):
    return [FALLING_BACK.token_to_id(BYTES[byte]) for byte in data]


def pieces_of(detokenizer, token_ids):
    return [*(detokenizer.push([t]) for t in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界! 👩‍👩‍👧 ok", "é" * 50, "😀" * 40])
def test_no_piece_holds_half_a_character(text):
    pieces = pieces_of(Detokenizer(ByteTokenizer(), []), list(text.encode()))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_an_unfinished_character_is_shown_as_such_at_the_end():
    ids = list("ab€".encode()[:-1])
    assert pieces_of(Detokenizer(ByteTokenizer(), []), ids)[-1] == REPLACEMENT
    assert detokenize(ByteTokenizer(), [], ids) == "ab" + REPLACEMENT


def test_the_replacement_character_itself_is_text_like_any_other():
    text = f"a{REPLACEMENT}b{REPLACEMENT}{REPLACEMENT}" + REPLACEMENT * 30 + "c"
    assert "".join(pieces_of(Detokenizer(ByteTokenizer(), []), list(text.encode()))) == text


@given(st.lists(st.integers(0, 257), max_size=120), st.lists(st.integers(0, 127), max_size=10), st.booleans())
def test_any_bytes_give_streamed_what_they_give_at_once(ids, prompt, skip):
    streamed = "".join(pieces_of(Detokenizer(ByteTokenizer(), prompt, skip), ids))
    assert streamed == detokenize(ByteTokenizer(), prompt, ids, skip) == ByteTokenizer().decode(ids, skip)


@given(st.lists(st.text(min_size=1, max_size=3), max_size=40), st.data())
def test_several_tokens_at_once_give_the_same_text(words, data):
    ids = list("".join(words).encode())
    detokenizer, shown = Detokenizer(ByteTokenizer(), []), ""
    while ids:
        count = data.draw(st.integers(1, 9))
        shown += detokenizer.push(ids[:count])
        ids = ids[count:]
    assert shown + detokenizer.flush() == "".join(words)


def test_a_leading_space_survives_after_a_prompt():
    tokenizer = falling_back("▁Hello", "▁world")
    assert detokenize(tokenizer, [1], [2]) == " world"
    assert pieces_of(Detokenizer(tokenizer, [1]), [2]) == [" world", ""]


def test_leading_spaces_survive_a_long_stream_with_special_tokens_between():
    tokenizer = falling_back("▁a", "b", "▁")
    ids = [1, 2, 0, 0, 1, 3, 1, 0] * 20
    expected = tokenizer.decode(ids)
    assert "".join(pieces_of(Detokenizer(tokenizer, []), ids)) == expected


def test_bytes_that_fall_back_are_joined_to_characters():
    tokenizer = falling_back("▁x", *(f"<0x{b:02X}>" for b in "世界".encode()))
    ids = [1, 2, 3, 4, 5, 6, 7, 1] * 10
    pieces = pieces_of(Detokenizer(tokenizer, []), ids)
    assert "".join(pieces) == tokenizer.decode(ids) and not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_that_the_prompt_left_open_belongs_to_the_answer():
    head, tail = list("a€".encode()[:-1]), ["€".encode()[-1], ord("!")]
    assert detokenize(ByteTokenizer(), head, tail) == "€!"
    assert "".join(pieces_of(Detokenizer(ByteTokenizer(), head), tail)) == "€!"


@pytest.mark.parametrize("token", [ord("a"), 0x80, 0xF0, 257])
def test_the_work_per_token_does_not_grow(token):
    tokenizer = CountingTokenizer()
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=False)
    for _ in range(2000):
        detokenizer.push([token])
    assert tokenizer.num_decoded < 2000 * 100


def test_skipped_special_tokens_cost_nothing():
    tokenizer = CountingTokenizer()
    detokenizer = Detokenizer(tokenizer, [])
    assert all(detokenizer.push([257]) == "" for _ in range(100))
    assert tokenizer.num_decoded == 0


def in_pushes(detokenizer, ids, counts):
    """The text of ids that come several at a time."""
    pieces = []
    for count in counts:
        pieces.append(detokenizer.push(ids[:count]))
        ids = ids[count:]
    return [*pieces, detokenizer.push(ids), detokenizer.flush()]


def _flat(lists):
    return [one for own in lists for one in own]


# Mostly bytes of characters, whole or broken, with words and ends between.
_CHARACTERS = st.sampled_from(["é", "世", "😀", "a", " ", "ü"]).map(lambda text: byte_ids(text.encode()))
_BROKEN = st.sampled_from(["世", "😀"]).map(lambda text: byte_ids(text.encode()[:-1]))
_OTHERS = st.integers(0, FALLING_BACK.vocab_size - 1).map(lambda token_id: [token_id])
_WORDS = st.integers(257, FALLING_BACK.vocab_size - 1).map(lambda token_id: [token_id])
_ANSWERS = st.lists(st.one_of(_CHARACTERS, _CHARACTERS, _WORDS, _BROKEN, _OTHERS), max_size=40).map(_flat)
_COUNTS = st.lists(st.integers(1, 9), max_size=40)


@given(_ANSWERS, _COUNTS, st.booleans())
def test_bytes_that_fall_back_give_streamed_what_the_tokenizer_gives_at_once(ids, counts, skip):
    expected = FALLING_BACK.decode(ids, skip)
    assert "".join(pieces_of(Detokenizer(FALLING_BACK, [], skip), ids)) == expected
    assert "".join(in_pushes(Detokenizer(FALLING_BACK, [], skip), ids, counts)) == expected
    assert detokenize(FALLING_BACK, [], ids, skip) == expected


@given(st.lists(_WORDS, min_size=1, max_size=9).map(_flat), _ANSWERS, _COUNTS)
def test_after_a_prompt_too(prompt, ids, counts):
    both, before = FALLING_BACK.decode(prompt + ids), FALLING_BACK.decode(prompt)
    assert before + "".join(in_pushes(Detokenizer(FALLING_BACK, prompt), ids, counts)) == both
    assert before + detokenize(FALLING_BACK, prompt, ids) == both


def test_a_character_of_bytes_that_the_prompt_left_open_belongs_to_the_answer():
    prompt = [FALLING_BACK.token_to_id("▁the"), *byte_ids("é".encode()), *byte_ids("世".encode()[:2])]
    answer = [*byte_ids("世".encode()[2:]), FALLING_BACK.token_to_id("s")]
    assert pieces_of(Detokenizer(FALLING_BACK, prompt), answer) == ["", "世s", ""]
    assert detokenize(FALLING_BACK, prompt, answer) == "世s"


def test_a_bad_byte_is_known_at_once_and_a_run_is_not_held_for_ever():
    detokenizer = Detokenizer(FALLING_BACK, [])
    assert [detokenizer.push([one]) for one in byte_ids(b"a\xffb")] == ["", REPLACEMENT * 2, REPLACEMENT]
    whole = byte_ids("世".encode() * 200)
    pieces = pieces_of(Detokenizer(FALLING_BACK, []), whole)
    assert "".join(pieces) == "世" * 200
    assert max(map(len, pieces)) <= MOST_HELD // 3
    assert detokenize(FALLING_BACK, [], [*whole, *byte_ids(b"\xff")]).startswith("世" * (MOST_HELD // 3))
    assert detokenize(FALLING_BACK, [], [*whole, *byte_ids(b"\xff")]) == "".join(
        pieces_of(Detokenizer(FALLING_BACK, []), [*whole, *byte_ids(b"\xff")])
    )


@given(st.lists(st.integers(0, 257), max_size=120), _COUNTS, st.booleans())
def test_any_bytes_give_in_pushes_of_several_what_they_give_at_once(ids, counts, skip):
    shown = in_pushes(Detokenizer(ByteTokenizer(), [], skip), ids, counts)
    assert "".join(shown) == ByteTokenizer().decode(ids, skip)


def test_a_push_of_several_tokens_shows_all_but_an_open_character():
    detokenizer = Detokenizer(ByteTokenizer(), [])
    assert detokenizer.push(list("abc€".encode()[:-1])) == "abc"
    assert detokenizer.push(["€".encode()[-1]]) == "€"


@given(st.lists(st.text(" .?!,'nmtsvexr", max_size=6), max_size=20))
def test_spaces_before_punctuation_go_from_a_stream_as_from_the_whole_text(pieces):
    cleaner = SpaceCleaner()
    shown = "".join([*map(cleaner.push, pieces), cleaner.flush()])
    assert shown == without_spaces_before_punctuation("".join(pieces))


def test_words_are_not_held_long_for_spaces_before_punctuation():
    cleaner = SpaceCleaner()
    assert [cleaner.push(text) for text in ("hello", " do", " n", "'t", " x", "enon")] == [
        *("hello", "", " do", ""),
        *("n't", " xenon"),
    ]
