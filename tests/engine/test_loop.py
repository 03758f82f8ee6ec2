"""The engine over a fake model: answers, refusals, streams, control, the end."""

import os
import signal
import time

import pytest

from mllm_compile.engine import streams
from mllm_compile.engine.streams import Countdown
from mllm_compile.errors import EngineDeadError, RequestError
from tests.engine.cases import params, start, until
from tests.fakes import (
    ENDLESS,
    EOS,
    ROOM_FOR_ENDLESS,
    VOCAB_SIZE,
    FakeStepRunner,
    all_pages_are_back,
    expected_tokens,
    fake_engine,
    recite,
)
from tests.hang_guard import HANG_S

# --- answers ----------------------------------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_prompts(engine):
    prompts = [[1 + i] * (1 + 7 * (i % 5)) for i in range(20)]
    outputs = engine.generate(prompts, params())
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.token_ids for output in outputs] == [expected_tokens(prompt, 8) for prompt in prompts]
    assert all(output.finished and output.finish_reason == "length" for output in outputs)


def test_prompts_may_be_a_text_texts_or_token_ids(engine):
    expected = expected_tokens(b"abc", 8)
    for prompts in ("abc", ["abc"], [97, 98, 99], [[97, 98, 99]], ["abc", [97, 98, 99]]):
        outputs = engine.generate(prompts, params())
        assert [output.token_ids for output in outputs] == [expected] * len(outputs)
        assert outputs[0].text == bytes(expected).decode()
    assert engine.generate("abc", params())[0].prompt == "abc"
    assert engine.generate([]) == []


def test_each_prompt_can_have_its_own_parameters(engine):
    outputs = engine.generate(["a", "b", "c"], [params(max_tokens=n) for n in (1, 5, 9)])
    assert [len(output.token_ids) for output in outputs] == [1, 5, 9]


def test_the_engine_s_defaults_apply_without_parameters():
    with fake_engine(default_params=params(max_tokens=3)) as engine:
        assert len(engine.generate("a")[0].token_ids) == 3


def test_an_end_of_sequence_token_ends_the_answer_and_is_not_shown():
    with fake_engine(FakeStepRunner(recite("Hi 世界"))) as engine:
        output = engine.generate(":", params(max_tokens=50))[0]
        assert (output.text, output.finish_reason, output.outputs[0].stop_reason) == ("Hi 世界", "stop", None)
        assert output.token_ids[-1] == EOS
        shown = engine.generate(":", params(max_tokens=50, skip_special_tokens=False, include_stop_str_in_output=True))
        assert shown[0].text == "Hi 世界<256>"


def test_a_stop_token_ends_the_answer():
    with fake_engine(FakeStepRunner(recite("one.two"))) as engine:
        output = engine.generate(":", params(max_tokens=50, stop_token_ids=[ord(".")]))[0]
        assert (output.text, output.finish_reason, output.outputs[0].stop_reason) == ("one", "stop", ord("."))


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_answer(include):
    with fake_engine(FakeStepRunner(recite("one END two"))) as engine:
        wish = params(max_tokens=50, stop=["END", "zzz"], include_stop_str_in_output=include)
        output = engine.generate(":", wish)[0]
        assert output.text == ("one END" if include else "one ")
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", "END")
        assert output.token_ids == list(b"one END")  # the token that was in flight is dropped
        assert all_pages_are_back(engine)


def test_a_stop_string_made_of_the_last_allowed_token_counts():
    with fake_engine(FakeStepRunner(recite("one END two"))) as engine:
        output = engine.generate(":", params(max_tokens=7, stop="END"))[0]
        assert (output.text, output.finish_reason, output.outputs[0].stop_reason) == ("one ", "stop", "END")


def test_a_stop_string_before_min_tokens_does_not_end_the_answer():
    with fake_engine(FakeStepRunner(recite("ab ab ab"))) as engine:
        output = engine.generate(":", params(max_tokens=50, stop="b", min_tokens=4))[0]
        assert (output.text, len(output.token_ids)) == ("ab a", 5)


def test_text_that_looked_like_a_stop_string_is_in_the_answer():
    with fake_engine(FakeStepRunner(recite("one EN"))) as engine:
        assert engine.generate(":", params(max_tokens=50, stop="END"))[0].text == "one EN"
        assert engine.generate(":", params(max_tokens=5, stop="END"))[0].text == "one E"


def test_several_completions_of_a_prompt_share_its_cached_pages(engine, runner):
    prompt = list(range(1, 30))
    wish = params(n=3, temperature=1.0, seed=7)
    output = engine.generate(prompt, wish)[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert [completion.token_ids for completion in output.outputs] == [expected_tokens(prompt, 8)] * 3
    requests = {request for batch in runner.batches for request in batch.admitted}
    assert sorted(request.params.seed for request in requests) == [7, 8, 9]
    assert sorted(request.num_cached_tokens for request in requests) == [0, 28, 28]


@pytest.mark.parametrize("max_tokens", [4, 1])
def test_logprobs_come_for_every_token_that_was_asked_for(engine, max_tokens):
    prompt = list(range(1, 50))  # in two chunks
    wish = params(max_tokens=max_tokens, logprobs=2, prompt_logprobs=1)
    with_scores, without = engine.generate([prompt, [5]], [wish, params()])
    assert without.logprobs is None and without.prompt_logprobs is None
    for token, entry in zip(with_scores.token_ids, with_scores.logprobs, strict=True):
        assert entry[token].logprob == -token and list(entry) == [token, 7, 8]
    assert with_scores.outputs[0].cumulative_logprob == -sum(with_scores.token_ids)
    assert with_scores.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in with_scores.prompt_logprobs[1:]] == prompt[1:]
    outputs = list(engine.stream(prompt, wish))
    assert [entry for output in outputs for entry in output.logprobs or []] == with_scores.logprobs
    assert outputs[0].prompt_logprobs == with_scores.prompt_logprobs


def test_without_a_tokenizer_prompts_are_token_ids_and_answers_have_no_text():
    with fake_engine(tokenizer=None) as engine:
        output = engine.generate([1, 2], params())[0]
        assert (output.text, output.token_ids) == ("", expected_tokens([1, 2], 8))
        for call in (
            lambda: engine.generate("text", params()),
            lambda: engine.generate([1, 2], params(stop="x")),
            lambda: engine.chat([{"role": "user", "content": "hi"}]),
        ):
            with pytest.raises(RequestError, match="no tokenizer"):
                call()


def test_metrics_say_where_the_time_went(engine):
    before = time.time()
    metrics = engine.generate("abc", params())[0].metrics
    after = time.time()
    assert 0 <= metrics.time_in_queue <= metrics.time_to_first_token <= metrics.total_time
    assert metrics.time_to_first_token == pytest.approx(metrics.time_in_queue + metrics.prefill_time)
    assert metrics.total_time == pytest.approx(metrics.time_to_first_token + metrics.decode_time)
    assert metrics.tokens_per_second == pytest.approx(8 / metrics.total_time)
    assert before <= metrics.arrival_time <= after


def test_the_next_step_is_launched_before_the_last_one_is_waited_for(engine, runner):
    runner.gate.clear()
    thread, _ = start(engine.generate, "abc", params())
    until(lambda: len(runner.batches) == 2)
    assert not runner.waited
    runner.gate.set()
    thread.join()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([1, VOCAB_SIZE], f"token 1 is {VOCAB_SIZE}; expected ids from 0 to {VOCAB_SIZE - 1}"),
        ([-1], "token 0 is -1"),
        ([1, 2.5], "integers, got float 2.5"),
        ([1, True], "integers, got bool True"),
        ([1] * 256, "256 tokens, but max_model_len is 256"),
        ("\ud800", "Unicode"),
        (17, "expected a text"),
    ],
)
def test_a_bad_prompt_is_refused(engine, prompt, message):
    with pytest.raises(RequestError, match=message):
        engine.generate(prompt, params())


def test_an_id_that_python_does_not_write_out_is_refused_too(engine):
    refused, answered = engine.generate([[10**5000], "abc"], params())
    assert "token 0 is of 16610 bits; expected ids from 0" in refused.error
    assert answered.finish_reason == "length"


def test_a_bad_prompt_among_others_does_not_hurt_them(engine):
    outputs = engine.generate([[1], [], [1] * 300, [2]], params())
    assert [output.finish_reason for output in outputs] == ["length", "error", "error", "length"]
    assert [output.error is None for output in outputs] == [True, False, False, True]
    assert "empty" in outputs[1].error and "max_model_len" in outputs[2].error
    assert outputs[3].token_ids == expected_tokens([2], 8)


def test_a_prompt_that_the_cache_can_never_hold_is_refused():
    with fake_engine(num_pages=5) as engine:
        with pytest.raises(RequestError, match="KV pages"):
            engine.generate([1] * 17, params())
        assert engine.generate([1] * 8, params())[0].finish_reason == "length"


def test_wrong_parameters_are_refused(engine):
    with pytest.raises(RequestError, match="one for each of the 2 prompts, got 3"):
        engine.generate(["a", "b"], [params()] * 3)
    with pytest.raises(RequestError, match="expected SamplingParams"):
        engine.generate("a", {"max_tokens": 3})
    with pytest.raises(RequestError, match="stop_token_ids"):
        engine.generate(["a", "b"], params(stop_token_ids=[VOCAB_SIZE]))
    outputs = engine.generate(["a", "b"], [params(stop_token_ids=[VOCAB_SIZE]), params()])
    assert [output.finish_reason for output in outputs] == ["error", "length"]


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", [{}, {"stop": "hel"}, {"stop": "ll", "include_stop_str_in_output": True}, {"n": 2}])
def test_a_stream_adds_up_to_the_answer(wish):
    text = "Grüße, 世界! Shall it help? 👩‍👩‍👧"
    wish = params(max_tokens=100, **({"temperature": 1.0} | wish if "n" in wish else wish))
    with fake_engine(FakeStepRunner(recite(text))) as engine:
        answer = engine.generate("x:", wish)[0]
        outputs = list(engine.stream("x:", wish))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for completion in answer.outputs:
            parts = [part for output in outputs for part in output.outputs if part.index == completion.index]
            assert "".join(part.text for part in parts) == completion.text
            assert [t for part in parts for t in part.token_ids] == completion.token_ids
            assert [part.finish_reason for part in parts][-1] == completion.finish_reason
            assert parts[-1].stop_reason == completion.stop_reason
            assert not any("\ufffd" in part.text for part in parts)
        assert outputs[-1].metrics is not None


def test_tokens_are_streamed_while_the_rest_is_still_to_come(roomy_engine):
    stream = roomy_engine.stream("abc", params(max_tokens=ENDLESS))
    first = next(stream)
    assert first.token_ids and not first.finished
    stream.close()
    assert list(stream) == []


@pytest.mark.parametrize("leave", ["close", "del", "with"])
def test_leaving_a_stream_aborts_its_request(roomy_engine, leave):
    stream = roomy_engine.stream("abc", params(max_tokens=ENDLESS))
    next(stream)
    if leave == "close":
        stream.close()
    elif leave == "with":
        with stream:
            pass
    del stream
    until(lambda: roomy_engine.stats().running == 0)
    assert roomy_engine.stats().finished == {"abort": 1}


def test_a_stream_of_a_refused_prompt_raises(engine):
    with pytest.raises(RequestError, match="empty"):
        engine.stream("")
    with pytest.raises(RequestError, match="max_model_len"):
        list(engine.stream([1] * 300, params()))


# --- control ----------------------------------------------------------------------------------------------------------


def test_an_aborted_request_keeps_what_it_had(roomy_engine):
    outputs = []
    for output in roomy_engine.stream("abc", params(max_tokens=ENDLESS), request_id="mine"):
        outputs.append(output)
        if len(outputs) == 3:
            roomy_engine.abort("mine")
    tokens = [token for output in outputs for part in output.outputs for token in part.token_ids]
    assert outputs[-1].finish_reason == "abort"
    assert len(tokens) >= 3 and tokens == expected_tokens(b"abc", len(tokens))


def test_aborting_a_request_that_waits_or_is_unknown(engine, runner):
    runner.gate.clear()
    streams = [engine.stream("abc", params(), request_id=str(i)) for i in range(10)]
    engine.abort("9")
    engine.abort("nobody")
    runner.gate.set()
    reasons = [list(stream)[-1].finish_reason for stream in streams]
    assert reasons == ["length"] * 9 + ["abort"]


def test_several_can_be_aborted_at_once_and_what_is_no_id_hurts_nobody(engine, runner):
    runner.gate.clear()
    streams = [engine.stream("abc", params(), request_id=str(i)) for i in range(4)]
    for wrong in (7, ["1", 7], None):
        with pytest.raises(RequestError, match="request_id: expected a text or a list of texts, got"):
            engine.abort(wrong)
    engine.abort(["1", "2"])
    runner.gate.set()
    reasons = [list(stream)[-1].finish_reason for stream in streams]
    assert reasons == ["length", "abort", "abort", "length"]


def test_an_id_in_use_is_refused_and_its_owner_is_not_hurt(engine, runner):
    runner.gate.clear()
    first = engine.stream("abc", params(), request_id="same")
    second = engine.stream("xyz", params(), request_id="same")
    with pytest.raises(RequestError, match="in use"):
        next(second)
    second.close()
    runner.gate.set()
    assert list(first)[-1].finish_reason == "length"


def test_a_more_urgent_request_is_served_first(engine, runner):
    runner.gate.clear()
    blockers = [start(engine.generate, [i], params()) for i in range(1, 5)]
    until(lambda: engine_is_full(runner))
    waiting = [engine.stream([200], params(max_tokens=1), priority=priority) for priority in (5, -5)]
    runner.gate.set()
    assert [list(stream)[-1].finished for stream in waiting] == [True, True]
    for thread, _ in blockers:
        thread.join(HANG_S)
    admitted = [r.priority for batch in runner.batches for r in batch.admitted if r.prompt_token_ids == [200]]
    assert admitted == [-5, 5]


def engine_is_full(runner):
    return sum(len(batch.admitted) for batch in runner.batches) >= 1


def test_many_threads_share_one_engine(engine):
    prompts = [[[thread + 1, i] for i in range(6)] for thread in range(16)]
    running = [start(engine.generate, batch, params()) for batch in prompts]
    for (thread, results), batch in zip(running, prompts, strict=True):
        thread.join(HANG_S)
        assert [output.token_ids for output in results[0]] == [expected_tokens(prompt, 8) for prompt in batch]


@pytest.fixture
def python_handles_ctrl_c():
    """A shell's background jobs ignore it, and so would the test that is one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_aborts_the_call_and_the_engine_goes_on(engine, runner, python_handles_ctrl_c):
    runner.gate.clear()

    def interrupt():
        until(lambda: runner.batches)
        os.kill(os.getpid(), signal.SIGINT)

    thread, _ = start(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["abc"] * 9, params(max_tokens=200))
    thread.join()
    runner.gate.set()
    until(lambda: engine.stats().running == engine.stats().waiting == 0)
    assert engine.stats().finished == {"abort": 9}
    assert engine.generate("abc", params())[0].token_ids == expected_tokens(b"abc", 8)


def test_a_prefix_hit_is_counted_until_the_cache_is_flushed(engine):
    prompt = list(range(1, 21))
    assert engine.generate(prompt, params())[0].num_cached_tokens == 0
    assert engine.generate(prompt, params())[0].num_cached_tokens == 16
    assert engine.stats().prefix_hit_rate == pytest.approx(16 / 40)
    engine.flush_prefix_cache()
    assert engine.generate(prompt, params())[0].num_cached_tokens == 0


def test_preempted_requests_give_the_same_tokens():
    with fake_engine(num_pages=25) as engine:
        prompts = [[i] * 10 for i in range(1, 9)]
        outputs = engine.generate(prompts, params(max_tokens=40))
        assert engine.stats().preemptions > 0
        assert [o.token_ids for o in outputs] == [expected_tokens(prompt, 40) for prompt in prompts]
        assert all_pages_are_back(engine)


def test_forward_times_are_among_the_figures_when_they_are_measured():
    with fake_engine(forward_times=lambda: [(8, 100, 0.5), (1, 2, 0.25)]) as engine:
        assert [(row.num_tokens, row.count, row.median_ms) for row in engine.stats().forward_times] == [
            (8, 100, 0.5),
            (1, 2, 0.25),
        ]
    with fake_engine() as engine:
        assert engine.stats().forward_times == ()


def test_an_engine_that_does_nothing_logs_nothing_however_often_it_is_asked(engine, caplog):
    engine.core._log_interval_s, engine.core._next_log = 1e-9, 0.0
    caplog.set_level("INFO", "mllm_compile.engine")
    engine.generate([[1, 2, 3]], params(max_tokens=20))
    assert "running 1, waiting 0" in caplog.text
    assert all_pages_are_back(engine)  # so no step is under way
    caplog.clear()
    for _ in range(5):
        engine.stats()
    assert caplog.messages == []


def test_stats_count_what_happened(engine):
    engine.generate([[i] * 10 for i in range(6)], params())
    stats = engine.stats()
    assert (stats.generated_tokens, stats.prompt_tokens, stats.finished) == (48, 60, {"length": 6})
    assert stats.time_to_first_token.count == 6
    assert stats.time_between_tokens.count == 42
    assert stats.tokens_per_second > 0 and stats.steps > 8
    assert "running 0" in str(stats) and "first token p50" in str(stats)
    gaps = stats.time_between_tokens
    assert 0 < gaps.largest <= gaps.total and f"longest {gaps.largest * 1e3:.1f} ms" in str(stats)


def test_steps_are_timed_and_a_prompt_beside_answers_is_cut_to_the_bound():
    runner = FakeStepRunner(delay_s=0.002)
    limits = {"max_num_batched_tokens": 200, "max_step_ms": "tenfold", **ROOM_FOR_ENDLESS}
    with fake_engine(runner, **limits) as engine:
        stream = engine.stream([1] * 4, params(max_tokens=ENDLESS))
        for _ in range(10):
            next(stream)
        assert engine.stats().step_bound_ms is None, "nothing was to be cut"
        engine.generate([2] * 190, params(max_tokens=2))
        assert engine.stats().step_bound_ms > 10 * 2.0
        assert "steps with prompts up to" in str(engine.stats())


def test_a_bar_is_shown_for_long_work_when_asked_for(engine, runner, monkeypatch, capsys, caplog):
    monkeypatch.setattr(streams, "_BAR_AFTER_S", 0.0)
    engine.generate(["a"] * 3, params(), progress=True)
    assert "generate" in capsys.readouterr().err
    with caplog.at_level("INFO", logger="mllm_compile.progress"):
        engine.generate(["a"] * 3, params())
    assert capsys.readouterr().err == ""
    assert not caplog.records, "a start is in the log, not each call"


# --- the end ----------------------------------------------------------------------------------------------------------


def test_closing_aborts_running_requests_and_refuses_new_ones(runner):
    closed = []
    engine = fake_engine(runner, shutdown=lambda: closed.append(True))
    runner.gate.clear()
    thread, results = start(engine.generate, ["abc", "def"], params(max_tokens=200))
    until(lambda: runner.batches)
    closing, _ = start(engine.close)
    until(lambda: engine.core._is_closing)
    runner.gate.set()
    closing.join(HANG_S)
    thread.join(HANG_S)
    assert [output.finish_reason for output in results[0]] == ["abort", "abort"]
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate("abc")
    with pytest.raises(EngineDeadError, match="closed"):
        engine.stream("abc")
    engine.close()
    assert closed == [True]
    assert not engine.is_alive and engine.stats().finished == {"abort": 2}
    assert all_pages_are_back(engine)


def test_an_engine_that_nobody_holds_ends_its_thread():
    engine = fake_engine()
    thread = engine.core._thread
    engine.generate("abc", params())
    del engine
    thread.join(HANG_S)
    assert not thread.is_alive()


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_an_engine_that_expects_a_submission_goes_on_without_one(engine):
    for _ in range(3):
        engine.core.expect()
        assert engine.generate("abc", params())[0].token_ids == expected_tokens(b"abc", 8)
    engine.core.expect()
    assert engine.stats().waiting == 0
    engine.close()
    engine.core.expect()
    with pytest.raises(EngineDeadError):
        engine.generate("abc", params())


def test_a_caller_naps_until_an_answer_or_for_a_little_and_one_at_a_time(monkeypatch):
    submission = object()
    soon = Countdown([submission])
    soon.on_end(submission)
    assert soon.wait_in_naps()

    later, naps = Countdown([submission]), []
    wait = later.wait
    monkeypatch.setattr(later, "wait", lambda timeout_s: (naps.append(timeout_s), wait(timeout_s))[1])
    monkeypatch.setattr(streams, "_NAPPING_S", 1e-3)
    with streams._napping:
        assert not later.wait_in_naps()
    assert not naps, "another caller does"
    assert not later.wait_in_naps()
    assert naps[0] == streams._FIRST_NAP_S and set(naps[1:]) == {streams._NAP_S}, "a step is launched meanwhile"
    assert not streams._napping.locked()
    monkeypatch.setattr(streams, "_NAPPING_S", HANG_S)
    ender = start(lambda: later.on_end(submission))[0]
    assert later.wait_in_naps()
    ender.join()
