"""A tokenizer whose Rust code panics, which is no Exception, ends the request that made it do so, and nothing else."""

import asyncio

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from mllm_compile.engine.async_engine import AsyncEngine
from mllm_compile.errors import MllmError, RequestError
from mllm_compile.text.tokenizer import Tokenizer, load_tokenizer
from tests.engine.cases import params, until
from tests.fakes import ENDLESS, ROOM_FOR_ENDLESS, FakeStepRunner, fake_engine

PANICS, LETTER = 0, 1  # ids
CANNOT_DECODE = r"the model's tokenizer cannot decode these tokens: PanicException: .*detokenize=False"
CANNOT_ENCODE = r"the model's tokenizer cannot encode this text: \w+: .*give token ids"


def a_tokenizer(**changes):
    """Of two words; its decoder strips one character at either end of each, where " " has but one."""
    backend = tokenizers.Tokenizer(models.WordLevel({" ": PANICS, "a": LETTER}, unk_token="a"))
    backend.decoder = decoders.Strip(" ", 1, 1)
    for name, value in changes.items():
        setattr(backend, name, value)
    return Tokenizer(backend)


@pytest.fixture
def runner():
    """Answers end in what panics where the prompt's first id is even."""
    return FakeStepRunner(lambda ids: PANICS if ids[0] % 2 == 0 and len(ids) == 6 else LETTER)


@pytest.fixture
def engine(runner):
    with fake_engine(runner, tokenizer=a_tokenizer(), **ROOM_FOR_ENDLESS) as engine:
        yield engine
        assert engine.is_alive
        assert engine.generate([5], params())[0].text == "a" * 8


@pytest.mark.parametrize("wish", [{}, {"stop": "@@"}, {"logprobs": 1}, {"n": 2, "temperature": 1.0}])
def test_tokens_that_cannot_be_decoded_are_their_request_s_error(engine, wish):
    wish = params(**wish)
    bad, good = engine.generate([[2], [3]], wish)
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert "cannot decode these tokens" in bad.error and good.text == "a" * 8
    with pytest.raises(MllmError, match=CANNOT_DECODE):
        engine.generate([2], wish)
    with pytest.raises(MllmError, match=CANNOT_DECODE):
        list(engine.stream([2], wish))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stop", [None, "@@"])
def test_tasks_get_that_error_too(engine, stream, stop):
    async def collect():
        return [output async for output in AsyncEngine(engine).generate([2], params(stop=stop), stream=stream)]

    with pytest.raises(MllmError, match=CANNOT_DECODE):
        asyncio.run(collect())


def test_a_stream_whose_text_fails_ends_its_request(engine):
    stream = engine.stream([2], params(max_tokens=ENDLESS))
    with pytest.raises(MllmError, match=CANNOT_DECODE):
        list(stream)
    assert list(stream) == []
    until(lambda: not engine.stats().running)
    assert engine.stats().finished == {"abort": 1}


def test_a_prompt_whose_last_tokens_cannot_be_decoded_is_refused_before_it_runs(engine, runner):
    bad, good = engine.generate([[3, PANICS], [3]], params(stop="@@"))
    assert "cannot decode these tokens" in bad.error and good.finish_reason == "length"
    for prompt in ([3, PANICS],):
        for wish in (params(stop="@@"), params()):
            with pytest.raises(MllmError, match=CANNOT_DECODE):
                engine.stream(prompt, wish)
    assert engine.stats().finished == {"length": 1}, "nothing that nobody reads runs on"


def test_an_abort_whose_last_text_fails_is_an_error_and_the_engine_goes_on(engine, monkeypatch):
    """Bytes held back as an open character are decoded once more at the end."""
    monkeypatch.setattr("mllm_compile.text.detokenizer.Detokenizer.flush", lambda self: self._window.decode([PANICS]))
    stream = engine.stream([3], params(stop="@@", max_tokens=ENDLESS), request_id="mine")
    next(stream)
    engine.abort("mine")
    with pytest.raises(MllmError, match=CANNOT_DECODE):
        list(stream)
    monkeypatch.undo()


@pytest.fixture
def slow_pattern():
    """A pattern that takes forever on many "a": the library gives up by a panic or an error."""
    pattern = Regex(r"(a+)+(a+)+(a+)+(a+)+$")
    return a_tokenizer(pre_tokenizer=pre_tokenizers.Split(pattern, "isolated"))


BACKTRACKS = "a" * 60 + "b"


def test_a_text_that_cannot_be_encoded_is_refused_alone(slow_pattern):
    with pytest.raises(RequestError, match=CANNOT_ENCODE):
        slow_pattern.encode(BACKTRACKS)
    with fake_engine(tokenizer=slow_pattern) as engine:
        bad, good = engine.generate([BACKTRACKS, "a"], params())
        assert "tokenizer cannot encode" in bad.error and good.finish_reason == "length"
        with pytest.raises(RequestError, match="tokenizer cannot encode"):
            engine.generate(BACKTRACKS, params())
        with pytest.raises(RequestError, match="tokenizer cannot encode"):
            engine.stream(BACKTRACKS, params())


def test_an_interruption_is_not_taken_for_a_fault_of_the_tokenizer():
    class Interrupted:
        def __getattr__(self, name):
            if name in ("no_truncation", "no_padding"):
                return lambda: None

            def interrupted(*args, **kwargs):
                raise KeyboardInterrupt

            return interrupted

    tokenizer = Tokenizer(Interrupted())
    for call in (lambda: tokenizer.decode([1]), lambda: tokenizer.encode("a"), lambda: tokenizer.encode_batch(["a"])):
        with pytest.raises(KeyboardInterrupt):
            call()


def test_a_tokenizer_file_that_panics_while_it_is_read_is_a_damaged_one(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")

    def panics(data):
        a_tokenizer()._backend.decode([PANICS])

    monkeypatch.setattr(tokenizers.Tokenizer, "from_buffer", panics)
    with pytest.raises(MllmError, match=r"tokenizer\.json is no valid tokenizer: PanicException"):
        load_tokenizer(tmp_path)
