"""The texts that a model which pools reads of its callers, and those that it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from mllm_compile.engine.pooling import texts
from mllm_compile.engine.pooling.texts import TextReader
from mllm_compile.errors import RequestError
from mllm_compile.runtime.pooling.facts import PoolingFacts
from mllm_compile.text.tokenizer import load_tokenizer
from tests.fake_pooling import WIDTH, fake_numbers, fake_pooling_engine
from tests.pooling_folder import save_word_tokenizer


def _reader(tokenizer: Any = None) -> TextReader:
    return TextReader(tokenizer, PoolingFacts(task="embed", rules=("mean",), width=1, outputs=1), 100, 64)


def test_arrays_are_ids_where_they_hold_whole_numbers():
    for ids in ([5, 6], np.array([5, 6]), np.array([5, 6], np.uint16)):
        assert [one.ids.tolist() for one in _reader().read(ids)] == [[5, 6]]
    assert [one.ids.tolist() for one in _reader().read(np.array([[5, 6], [7, 8]]))] == [[5, 6], [7, 8]]
    with pytest.raises(RequestError, match="expected a text or token ids"):
        _reader().read(np.array([0.5, np.nan]))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no tokenizer"):
        _reader().read(np.array(["a", "b"]))  # type: ignore[arg-type]  # texts


@pytest.mark.parametrize("cut_to", [0, 65, -2, 1.5, "3", True])
def test_a_cut_is_a_number_of_tokens(cut_to):
    with pytest.raises(RequestError, match=r"truncate_prompt_tokens is .* expected 1 to 64, or -1"):
        _reader().read([5], cut_to=cut_to)


def test_a_query_is_not_read_with_any_number_of_documents():
    with pytest.raises(
        RequestError, match=r"the pairs have 68,\d+,\d+ characters together; expected at most 67,108,864"
    ):
        _reader().read_pairs([("q" * (1 << 20), "d")] * 65)
    with pytest.raises(RequestError, match="there are 65,537 texts; expected at most 65,536"):
        _reader().read_pairs([("q", "d")] * 65_537)


def test_portions_of_texts_are_read_as_one_after_another(tmp_path, monkeypatch):
    save_word_tokenizer(tmp_path)
    reader = _reader(load_tokenizer(tmp_path))
    asked: Any = [f"w{number}" for number in range(10, 20)]
    whole = [one.ids.tolist() for one in reader.read([*asked, [7]])]
    monkeypatch.setattr(texts, "_PORTION", 7)
    assert [one.ids.tolist() for one in reader.read([*asked, [7]])] == whole
    assert len(reader.read_pairs([("w1", one) for one in asked])) == 10


@pytest.mark.parametrize("priority", ["high", 0.5, None])
def test_a_priority_that_is_no_number_hurts_no_other_call(priority):
    with fake_pooling_engine(None, {}) as engine:
        with pytest.raises(RequestError, match="priority"):
            engine.embed([5], priority=priority)
        assert len(engine.embed([5], priority=-1)) == 1


def test_the_texts_of_a_step_are_read_once_the_one_ahead_has_begun(monkeypatch):
    asked = [[number % 100] * 20 for number in range(60)]  # of 20 tokens; a step takes 512
    with fake_pooling_engine(None, {}) as engine:
        begun, read, taken = engine.pooling.core, TextReader._read, []

        def watched(self, listed, begin, *how):
            taken.append((begin, len(listed), begun.num_waiting))
            return read(self, listed, begin, *how)

        monkeypatch.setattr(TextReader, "_read", watched)
        answers = engine.embed(asked, normalize=False)
    assert taken == [(0, 26, 0), (26, 26, 0), (52, 8, 0)], "steps have taken those ahead"
    assert [list(answer.prompt_token_ids) for answer in answers] == asked
    for ids, answer in zip(asked, answers, strict=True):
        assert np.array_equal(answer.outputs.embedding, fake_numbers(ids, WIDTH))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [([5, 128], "text 40 has token id 128; expected 0 to 127"), ([], "a prompt is"), (5, "a prompt is")],
)
def test_a_bad_text_behind_a_first_step_refuses_the_call_whole(wrong, told):
    asked: Any = [[number] * 20 for number in range(40)]
    with fake_pooling_engine(None, {}) as engine:
        with pytest.raises(RequestError, match=told):
            engine.embed([*asked, wrong])
        assert len(engine.embed(asked)) == 40
        assert engine.pooling.core.num_calls == 0


def test_texts_that_are_cut_fill_steps_as_short_ones_do():
    with fake_pooling_engine(None, {}) as engine:  # a step takes 512 tokens
        engine.embed([[number % 100] * 100 for number in range(64)], truncate_prompt_tokens=8)
        assert engine.stats().steps == 1


def test_how_many_texts_a_step_takes_is_guessed_of_any():
    about = partial(texts._about_as_many, most_of_text=1000)
    assert about([[1] * 30] * 4, 0, 60) == 2
    assert about([[1] * 30] * 4, 0, 60, most_of_text=20) == 3
    assert about([[1] * 30] * 4, 1, 60) == 3
    assert about([{"prompt_token_ids": [1] * 30}] * 4, 0, 60) == 2
    assert about(["x" * 120] * 4, 0, 60) == 2
    assert about([np.ones(30, np.int64)] * 4, 0, 60) == 2
    assert about([1, None, np.float64(2)], 0, 60) == 3
