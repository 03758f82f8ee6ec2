"""Incremental detokenizing: whole characters only, and the text of all tokens at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.text.detokenizer import REPLACEMENT, Detokenizer, detokenize
from tests.fakes import ByteTokenizer


class CountingTokenizer(ByteTokenizer):
    """Counts the tokens that it decodes."""

    def __init__(self):
        self.num_decoded = 0

    def decode(self, token_ids, skip_special_tokens=True):
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


class PieceTokenizer:
    """Decodes as SentencePiece models do: ▁ is a space, stripped at the start; bytes fall back in whole runs."""

    special_token_ids = frozenset({0})

    def __init__(self, *pieces):
        self.pieces = ["</s>", *pieces]

    def decode(self, token_ids, skip_special_tokens=True):
        text, run = "", []
        for piece in [*(self.pieces[t] for t in token_ids if not (skip_special_tokens and t == 0)), ""]:
            if piece.startswith("<0x"):
                run.append(int(piece[3:5], 16))
                continue
            try:
                text += bytes(run).decode()
            except UnicodeDecodeError:
                text += REPLACEMENT * len(run)
            run = []
            text += piece.replace("▁", " ")
        return text.removeprefix(" ")


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
    tokenizer = PieceTokenizer("▁Hello", "▁world")
    assert detokenize(tokenizer, [1], [2]) == " world"
    assert pieces_of(Detokenizer(tokenizer, [1]), [2]) == [" world", ""]


def test_leading_spaces_survive_a_long_stream_with_special_tokens_between():
    tokenizer = PieceTokenizer("▁a", "b", "▁")
    ids = [1, 2, 0, 0, 1, 3, 1, 0] * 20
    expected = tokenizer.decode(ids)
    assert "".join(pieces_of(Detokenizer(tokenizer, []), ids)) == expected


def test_bytes_that_fall_back_are_joined_to_characters():
    tokenizer = PieceTokenizer("▁x", *(f"<0x{b:02X}>" for b in "世界".encode()))
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
