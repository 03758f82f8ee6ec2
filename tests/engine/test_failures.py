"""Steps, devices and schedulers that fail: which requests get an error, and which go on."""

import weakref
from dataclasses import replace

import numpy as np
import pytest

from mllm_compile.engine.core import loop, steps
from mllm_compile.errors import DeviceError, DeviceMemoryError, EngineDeadError, MllmError, RequestError
from mllm_compile.runtime.sampling.params import NO_TOKEN, NONE_ALLOWED
from tests.engine.cases import params, start, until
from tests.fakes import (
    FakeStepRunner,
    StepFailed,
    all_pages_are_back,
    expected_tokens,
    fake_engine,
    hashed_token,
)
from tests.hang_guard import HANG_S


@pytest.mark.parametrize("where", ["fail_submit", "fail_wait"])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(engine, runner, where, step):
    getattr(runner, where)[step] = StepFailed("boom")
    outputs = engine.generate([[i] for i in range(1, 9)], params())  # four of them run at once
    failed = [output for output in outputs if output.finish_reason == "error"]
    fine = [output for output in outputs if output.finish_reason == "length"]
    assert failed and fine and len(failed) + len(fine) == 8
    assert all("boom" in output.error and "goes on" in output.error for output in failed)
    for output in outputs:
        count = len(output.token_ids)
        assert output.token_ids == expected_tokens(output.prompt_token_ids, count)
    assert engine.generate("abc", params())[0].token_ids == expected_tokens(b"abc", 8)


def test_a_failed_step_s_tensors_are_let_go(runner):
    class Tensor:
        pass

    held = []

    def submit(batch):
        activations = Tensor()
        held.append(weakref.ref(activations))
        raise StepFailed("boom")

    runner.submit = submit
    with fake_engine(runner) as engine:
        outputs = engine.generate(["abc", "def"], params())
        assert [output.finish_reason for output in outputs] == ["error", "error"]
        assert [ref() for ref in held] == [None] * len(held)


def test_two_steps_lost_in_a_row(engine, runner):
    runner.fail_wait |= {2: StepFailed("first"), 3: StepFailed("second")}
    with pytest.raises(MllmError, match="first"):
        engine.generate("abc", params())
    assert engine.is_alive


def test_running_out_of_memory_is_named(engine, runner):
    runner.fail_submit[1] = DeviceMemoryError("a step of 1 tokens does not fit")
    with pytest.raises(DeviceMemoryError, match="does not fit"):
        engine.generate("abc", params())


def test_a_failed_step_ends_all_completions_of_its_prompt(engine, runner):
    runner.fail_wait[3] = StepFailed("boom")
    outputs = engine.generate([list(range(1, 30)), [5]], [params(n=6, temperature=1.0), params()])
    assert [completion.finish_reason for completion in outputs[0].outputs] == ["error"] * 6
    assert len(outputs[0].outputs[0].token_ids) > 0


def test_a_stream_whose_step_fails_raises_after_what_it_had(engine, runner):
    runner.fail_wait[4] = StepFailed("boom")
    tokens = []
    with pytest.raises(MllmError, match="boom"):
        for output in engine.stream("abc", params(stop="@@")):
            tokens += output.token_ids
    assert tokens == expected_tokens(b"abc", len(tokens))


def test_a_device_that_does_not_answer_kills_the_engine(runner):
    def check_device():
        raise StepFailed("illegal memory access")

    with fake_engine(runner, check_device=check_device) as engine:
        runner.fail_wait[3] = StepFailed("boom")
        outputs = engine.generate([[i] for i in range(1, 9)], params())
        assert {output.finish_reason for output in outputs} == {"error"}
        assert all("illegal memory access" in output.error for output in outputs)
        assert not engine.is_alive
        for call in (lambda: engine.generate("abc"), lambda: engine.stream("abc")):
            with pytest.raises(EngineDeadError, match="boom"):
                call()
        assert engine.stats().finished == {"error": 8}


@pytest.mark.parametrize("call", [lambda engine: engine.pause("keep"), lambda engine: engine.weights.label("v")])
def test_a_device_lost_in_the_step_that_a_call_waits_for_kills_the_engine_too(runner, call):
    def check_device():
        raise StepFailed("illegal memory access")

    runner.gate_from = 1
    runner.gate.clear()
    with fake_engine(runner, check_device=check_device) as engine:
        runner.fail_wait[2] = StepFailed("boom")
        request, outputs = start(engine.generate, "abc", params())
        until(lambda: len(runner.batches) > 2)  # the engine waits for the second one, and takes calls behind it
        called, answers = start(call, engine)
        until(lambda: engine.core._inbox)
        runner.gate.set()
        for thread in (request, called):
            thread.join(HANG_S)
        for error in (*outputs, *answers):
            assert isinstance(error, EngineDeadError) and "illegal memory access" in str(error)
        assert len(outputs) == len(answers) == 1 and not engine.is_alive


def test_an_engine_that_has_nothing_to_do_says_that_it_can_do_nothing_any_more(runner, monkeypatch):
    monkeypatch.setattr(loop, "_CLOSED_POLL_S", 0.01)
    faults = []

    def check_idle():
        if faults:
            raise faults[0]

    with fake_engine(runner, check_idle=check_idle) as engine:
        assert engine.generate("abc", params()).pop().finish_reason != "error"
        assert engine.is_alive
        faults.append(DeviceError("rank 1 (process 7) was ended by signal 9"))
        until(lambda: not engine.is_alive)
        with pytest.raises(
            EngineDeadError, match=r"nothing to do: DeviceError: rank 1 .* was ended by signal 9\. Close"
        ):
            engine.generate("abc")


def test_a_fault_in_the_scheduler_kills_the_engine_and_nobody_waits_for_ever(runner):
    with fake_engine(runner) as engine:
        runner.gate.clear()
        running = [start(engine.generate, "abc", params()) for _ in range(6)]
        until(lambda: runner.batches)
        engine.core._scheduler.update = None
        runner.gate.set()
        for thread, results in running:
            thread.join(HANG_S)
            assert isinstance(results[0], EngineDeadError) and "internal error" in str(results[0])


def test_a_tokenizer_that_fails_hurts_only_its_request(engine, runner, monkeypatch):
    decode = type(engine.tokenizer).decode

    def fragile(self, token_ids, skip_special_tokens=True, **options):
        if ord("!") in token_ids:
            raise ValueError("cannot decode")
        return decode(self, token_ids, skip_special_tokens, **options)

    monkeypatch.setattr(type(engine.tokenizer), "decode", fragile)
    runner.next_token = lambda ids: ord("!") if ids[0] == 1 and len(ids) == 4 else 97
    outputs = engine.generate([[1], [2]], params(stop="@@"))
    assert [output.finish_reason for output in outputs] == ["error", "length"]
    assert "cannot decode" in outputs[0].error


class KeepingAll(FakeStepRunner):
    """Tells of each token that filters kept 16."""

    def submit(self, batch):
        handle = super().submit(batch)
        kept = {place: np.packbits(np.ones(16, dtype=bool)) for place in range(len(handle.output.score_rows))}
        handle.output = replace(handle.output, kept=kept)
        return handle


def test_kept_tokens_of_an_answer_are_bounded(monkeypatch):
    monkeypatch.setattr(steps, "MOST_KEPT", 40)
    mask = {"temperature": 1.0, "top_p": 0.9, "logprobs": 0, "return_sampling_mask": True}
    with fake_engine(KeepingAll()) as engine:
        short, long = engine.generate(["abc", "abd"], [params(**mask, max_tokens=2), params(**mask)])
        assert short.finish_reason == "length" and [len(one) for one in short.outputs[0].sampling_mask] == [16, 16]
        assert "return_sampling_mask: expected up to 40 kept tokens in an answer, got 48 after 3 tokens" in long.error
        assert all_pages_are_back(engine)


# --- logits that are no numbers ---------------------------------------------------------------------------------------


def without_numbers_after(*prompt: int, count: int = 0):
    """A model that computes no numbers for this prompt once it has `count` tokens of output."""

    def next_token(token_ids):
        is_broken = tuple(token_ids[: len(prompt)]) == prompt and len(token_ids) == len(prompt) + count
        return NO_TOKEN if is_broken else hashed_token(token_ids)

    return next_token


@pytest.mark.parametrize("count", [0, 3])
def test_logits_that_are_no_numbers_end_their_request_alone_and_are_counted(engine, runner, count):
    runner.next_token = without_numbers_after(7, 8, count=count)
    prompts = [[1, 2, 3], [7, 8], [4], [5, 5]]
    outputs = engine.generate(prompts, params())
    for prompt, output in zip(prompts, outputs, strict=True):
        if prompt == [7, 8]:
            assert output.finish_reason == "error"
            assert "hold NaN or inf" in output.error and "model.dtype: float32" in output.error
            assert output.token_ids == expected_tokens(prompt, count)
        else:
            assert (output.error, output.token_ids) == (None, expected_tokens(prompt, 8))
    stats = engine.stats()
    assert (stats.broken_logits, stats.finished["error"], stats.finished["length"]) == (1, 1, 3)
    assert "NaN or inf logits 1" in str(stats)
    assert all_pages_are_back(engine)


def test_a_request_that_forbids_all_tokens_is_told_so_and_is_no_broken_one(engine, runner):
    broken = without_numbers_after(7, 8, count=2)
    runner.next_token = lambda token_ids: NONE_ALLOWED if broken(token_ids) == NO_TOKEN else hashed_token(token_ids)
    with pytest.raises(RequestError, match=r"^allowed_token_ids, min_tokens: all tokens are forbidden at the end"):
        engine.generate([7, 8], params(allowed_token_ids=[1], min_tokens=3))
    assert engine.stats().broken_logits == 0
    assert all_pages_are_back(engine)


def test_a_single_prompt_and_a_stream_without_numbers_raise(engine, runner):
    runner.next_token = without_numbers_after(7, 8, count=2)
    with pytest.raises(MllmError, match="output after 2 tokens hold NaN"):
        engine.generate([7, 8], params())
    tokens = []
    with pytest.raises(MllmError, match="output after 2 tokens hold NaN"):
        for output in engine.stream([7, 8], params()):
            tokens += output.token_ids
    assert tokens == expected_tokens([7, 8], 2)


def test_a_late_reader_gets_the_tokens_before_the_failure(engine, runner):
    runner.next_token = without_numbers_after(7, 8, count=2)
    stream = engine.stream([7, 8], params())
    until(lambda: engine.stats().broken_logits == 1)
    assert next(stream).token_ids == expected_tokens([7, 8], 2)
    with pytest.raises(MllmError, match="output after 2 tokens hold NaN"):
        next(stream)
    assert list(stream) == []


def test_a_prompt_without_numbers_ends_all_of_its_answers_also_those_that_wait_for_it(engine, runner):
    prompt = list(range(1, 12))
    runner.next_token = without_numbers_after(*prompt)
    output = engine.generate([prompt, [3]], [params(n=6, temperature=1.0), params()])[0]
    assert [completion.finish_reason for completion in output.outputs] == ["error"] * 6
    assert engine.stats().broken_logits == 1
    assert all_pages_are_back(engine)
