"""Texts and pairs that are cut to a number of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from mllm_compile.text.tokenizer import load_tokenizer
from tests.pooling_folder import save_word_tokenizer


@pytest.mark.parametrize(
    ("text", "most", "ids", "kinds"),
    [
        ("w10 w11 w12", None, [2, 10, 11, 12, 3], [0] * 5),
        ("w10 w11 w12", 4, [2, 10, 11, 3], [0] * 4),
        ("w10", 4, [2, 10, 3], [0] * 3),
        (("w10", "w20 w21 w22"), 6, [2, 10, 3, 20, 21, 3], [0, 0, 0, 1, 1, 1]),
        (("w10 w11 w12", "w20"), 6, [2, 10, 11, 3, 20, 3], [0, 0, 0, 0, 1, 1]),
        (("w10 w11 w12", "w20 w21 w22"), 7, [2, 10, 11, 3, 20, 21, 3], [0, 0, 0, 0, 1, 1, 1]),
    ],
)
def test_what_the_model_expects_around_a_text_stays(
    text: str | tuple[str, str], most: int | None, ids: list[int], kinds: list[int], tmp_path: Path
) -> None:
    save_word_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode_texts([text], most) == [(ids, kinds)]  # type: ignore[list-item]
