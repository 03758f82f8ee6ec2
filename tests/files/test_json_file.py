"""JSON files of a model: texts in them are Unicode, or the file is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mllm_compile.errors import CheckpointError
from mllm_compile.files.json_file import json_object

PATH = Path("tokenizer_config.json")


@pytest.mark.parametrize(
    "data", [rb'{"a": "\ud800"}', rb'{"\uDFFF": 1}', rb'{"a": ["\ude00\ud83d"]}', rb'{"a": "\uD83D."}']
)
def test_half_a_character_is_refused(data):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read as JSON: .*surrogates") as error:
        json_object(data, PATH, CheckpointError)
    str(error.value).encode()


@pytest.mark.parametrize(
    ("data", "text"), [(rb'{"a": "\ud83d\ude00"}', "\U0001f600"), (rb'{"a": "\\ud800"}', "\\ud800")]
)
def test_pairs_and_written_escapes_are_texts(data, text):
    assert json_object(data, PATH, CheckpointError) == {"a": text}
