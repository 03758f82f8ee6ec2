"""Requests, prefixes and versions follow new weights, over fakes whose tokens depend on one weight."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mllm_compile import AsyncEngine, Engine, SamplingParams
from mllm_compile.engine.outputs import WeightVersion
from mllm_compile.errors import (
    CheckpointError,
    EngineDeadError,
    EnginePausedError,
    UpdateConflictError,
    WeightsTornError,
    WeightUpdateError,
)
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.runtime.updates.names import TensorNames
from mllm_compile.runtime.updates.places import Places
from mllm_compile.runtime.weights.formats.base import StoredTensor
from mllm_compile.runtime.weights.spec import Factor, WeightPart, WeightSpec
from tests.engine.rollouts.test_pauses import beside, rest, started
from tests.fakes import FakeStepRunner, all_pages_are_back, expected_tokens, fake_engine, hashed_token
from tests.hang_guard import HANG_S, until

PROMPT = list(range(97, 117))
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


def live_weights() -> LiveWeights:
    """Two weights: `key`, which a fake's tokens follow, and `other`, of two tensors."""
    specs = (
        WeightSpec("key", (2,), torch.float32, (WeightPart("key", "w.safetensors", 0, (2,)),)),
        WeightSpec(
            "other",
            (4, 3),
            torch.bfloat16,
            (WeightPart("a", "w.safetensors", 0, (3, 3)), WeightPart("b", "w.safetensors", 3, (1, 3))),
        ),
    )
    tensors = {spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs}
    names = TensorNames((specs,), None, (), {"tower.weight": [[3]]})
    return LiveWeights(specs, tensors, {}, {}, lambda rank: Places(names, (specs,), rank))


def following(live: LiveWeights) -> Callable[[list[int]], int]:
    """Tokens of a model that has `key`."""
    return lambda token_ids: hashed_token([int(live.tensors["key"][0]), *token_ids])


def with_key(key: int) -> Callable[[list[int]], int]:
    return lambda token_ids: hashed_token([key, *token_ids])


def tensors_of(key: int) -> dict[str, torch.Tensor]:
    return {"key": torch.tensor([key, 0.0]), "a": torch.full((3, 3), key / 2), "b": torch.ones(1, 3)}


@pytest.fixture
def live() -> LiveWeights:
    return live_weights()


@pytest.fixture
def engine(live: LiveWeights) -> Iterator[Engine]:
    with fake_engine(FakeStepRunner(following(live)), live=live) as engine:
        yield engine


@pytest.mark.parametrize("direct", [False, True])
def test_an_update_is_swapped_in_whole_at_the_same_addresses(engine, live, direct):
    places = {name: tensor.data_ptr() for name, tensor in live.tensors.items()}
    report = engine.update_weights([*tensors_of(7).items(), ("tower.weight", torch.ones(3))], direct=direct)
    assert (report.version, report.epoch, report.num_tensors, report.num_unread) == ("1", 1, 4, 1)
    assert {name: tensor.data_ptr() for name, tensor in live.tensors.items()} == places
    assert live.tensors["other"].tolist() == [[3.5] * 3] * 3 + [[1.0] * 3]
    assert engine.generate(PROMPT, SHORT)[0].token_ids == expected_tokens(PROMPT, 8, with_key(7))
    assert engine.state == "running" and not engine.weights.is_open


@pytest.mark.parametrize("mode", [None, "keep", "retract"])
@pytest.mark.parametrize("direct", [False, True])
def test_tokens_of_a_request_are_of_the_weights_that_their_version_says(engine, mode, direct):
    stream, tokens = started(engine, LONG)
    if mode is not None:
        engine.pause(mode)
    engine.update_weights(tensors_of(7).items(), version="seven", direct=direct)
    if mode is not None:
        engine.resume()
    outputs = list(stream)
    tokens += [token for output in outputs for token in output.token_ids]
    spans = outputs[-1].outputs[0].weight_versions
    assert [span.version for span in spans] in (["default", "seven"], ["default"])
    assert spans[0].start == 0 and spans[-1].end == 200
    all_ids = list(PROMPT)
    for span in spans:
        for _ in range(span.start, span.end):
            all_ids.append(with_key(0 if span.version == "default" else 7)(all_ids))
    assert tokens == all_ids[len(PROMPT) :]
    assert engine.generate(PROMPT, SHORT)[0].outputs[0].weight_versions == [WeightVersion("seven", 0, 8)]
    assert all_pages_are_back(engine)


def test_prefixes_of_other_weights_are_not_shared(engine):
    assert engine.generate(PROMPT, SHORT)[0].outputs[0].weight_versions is None
    assert engine.generate(PROMPT, SHORT)[0].num_cached_tokens == 16
    stream, tokens = started(engine, LONG)  # it has the old prefix, and goes on
    engine.pause("keep")
    engine.update_weights(tensors_of(7).items())
    engine.resume()
    first, again = (engine.generate(PROMPT, SHORT)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 16)
    assert first.token_ids == again.token_ids == expected_tokens(PROMPT, 8, with_key(7))
    after = engine.generate(PROMPT + rest(stream, tokens)[:60], SHORT)[0]
    assert after.num_cached_tokens == len(PROMPT), "pages of one that lived through the update are nobody's prefix"


def test_a_label_alone_marks_tokens_and_keeps_prefixes(engine):
    engine.generate(PROMPT, SHORT)
    engine.weights.label("v2")
    answer = engine.generate(PROMPT, SHORT)[0]
    assert answer.num_cached_tokens == 16 and answer.outputs[0].weight_versions == [WeightVersion("v2", 0, 8)]
    assert engine.weights.version == "v2" and engine.weights.epoch == 0


def test_prefixes_may_be_kept(engine):
    engine.generate(PROMPT, SHORT)
    engine.update_weights(tensors_of(7).items(), keep_prefix_cache=True)
    assert engine.generate(PROMPT, SHORT)[0].num_cached_tokens == 16


def test_tokens_behind_a_stop_string_are_in_no_span(engine):
    answer = expected_tokens(PROMPT, 200)
    stop = bytes(answer[20:23]).decode()
    params = SamplingParams(max_tokens=200, ignore_eos=True, stop=[stop])
    engine.weights.label("v")
    output = engine.generate(PROMPT, params)[0].outputs[0]
    assert output.weight_versions == [WeightVersion("v", 0, len(output.token_ids))]


Change = Callable[[dict[str, Any]], Any]
REFUSED: dict[str, tuple[Change, str]] = {
    "unknown": (lambda t: t | {"keys": t["key"]}, "this model has no tensor 'keys'. Did you mean 'key'?"),
    "misshapen": (lambda t: t | {"a": t["a"][:2]}, r"tensor 'a': expected shape \[3, 3\], got \[2, 3\]"),
    "of another type": (
        lambda t: t | {"a": t["a"].to(torch.int8)},
        "tensor 'a': expected float32 or float16 or bfloat16, got int8",
    ),
    "NaN": (lambda t: t | {"b": torch.full((1, 3), float("nan"))}, "tensor 'b' holds NaN or inf"),
    "beyond the type": (lambda t: t | {"b": torch.full((1, 3), 3.4e38)}, "tensor 'b' holds NaN or inf in 3 of its 3"),
    "missing": (lambda t: {"key": t["key"], "b": t["b"]}, "the update lacks 'a'. Send them, or begin one with partial"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_wrong_is_named_and_the_old_weights_serve_on(engine, live, fault):
    change, message = REFUSED[fault]
    before = {name: tensor.clone() for name, tensor in live.tensors.items()}
    sums = engine.weights.sums()
    with pytest.raises(WeightUpdateError, match=message):
        engine.update_weights(change(tensors_of(7)).items())
    assert all(torch.equal(before[name], tensor) for name, tensor in live.tensors.items())
    assert engine.weights.sums() == sums and engine.weights.epoch == 0
    assert engine.generate(PROMPT, SHORT)[0].token_ids == expected_tokens(PROMPT, 8, with_key(0))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("/folder", r"got str '/folder'\. update_weights_from_folder takes"),
        (tensors_of(1), r"got a dict\. Give its items\(\)"),
        (3, "got int 3"),
        ([("head", 3)], r"got tuple \('head', 3\) among them"),
        ([torch.ones(2)], "got Tensor .* among them"),
    ],
)
def test_what_are_no_tensors_by_name_is_said_and_the_old_weights_serve_on(engine, given, said):
    before = engine.generate(PROMPT, SHORT)[0].token_ids
    with pytest.raises(WeightUpdateError, match=said):
        engine.update_weights(given)
    assert engine.generate(PROMPT, SHORT)[0].token_ids == before
    assert engine.weights.version == "default"


def test_a_tensor_may_come_once(engine):
    with pytest.raises(WeightUpdateError, match="tensor 'key' came twice in this update"):
        engine.update_weights([*tensors_of(7).items(), ("key", torch.zeros(2))])


def test_a_scale_of_the_kv_cache_is_the_loaded_one():
    factor = Factor(StoredTensor("scale", "w.safetensors", (1,), torch.float32), is_divided=False)
    specs = (WeightSpec("key", (2,), torch.float32, (WeightPart("key", "w.safetensors", 0, (2,), factor=factor),)),)
    names = TensorNames((specs,), None, (), {})
    live = LiveWeights(specs, {"key": torch.ones(2)}, {}, {factor: 4.0}, lambda rank: Places(names, (specs,), rank))
    with fake_engine(live=live) as engine:
        for scale, message in (([4.0, 4.0], r"'scale': expected one number, got shape \[2\]"), ([8.0], "is a scale")):
            with pytest.raises(WeightUpdateError, match=message):
                engine.update_weights([("scale", torch.tensor(scale))])
        engine.weights.start()
        with pytest.raises(WeightUpdateError, match=r"expected one number, got shape \[1048576, 1024\]"):
            engine.weights.check_announced(["scale"], [(1 << 20, 1024)], [torch.float32])
        engine.weights.abandon("it was refused")
        engine.update_weights([("scale", torch.tensor([4.0])), ("key", torch.tensor([1.0, 2.0]))])
    assert live.tensors["key"].tolist() == [4.0, 8.0]


@pytest.mark.parametrize("options", [{}, {"direct": True}, {"partial": True}], ids=str)
def test_what_the_tensors_leave_of_a_vector_stays_zeros(options, monkeypatch):
    """Memory of a copy that is to be filled may hold anything."""
    monkeypatch.setattr(torch, "empty_like", lambda tensor: torch.full_like(tensor, torch.nan))
    parts = WeightPart("q.bias", "w.safetensors", 0, (2,)), WeightPart("v.bias", "w.safetensors", 3, (1,))
    specs = (WeightSpec("q+k+v.bias", (4,), torch.float32, parts),)
    names = TensorNames((specs,), None, (), {})
    live = LiveWeights(specs, {"q+k+v.bias": torch.zeros(4)}, {}, {}, lambda rank: Places(names, (specs,), rank))
    with fake_engine(live=live) as engine:
        engine.update_weights([("q.bias", torch.tensor([1.0, 2.0])), ("v.bias", torch.tensor([3.0]))], **options)
    assert live.tensors["q+k+v.bias"].tolist() == [1.0, 2.0, 0.0, 3.0]


def test_a_sum_of_the_sender_is_compared(engine):
    engine.weights.start()
    with pytest.raises(WeightUpdateError, match="'key' is not what was sent: its sum differs"):
        engine.weights.receive(tensors_of(7).items(), {"key": 1})
    assert not engine.weights.is_open


def test_announcements_are_checked_before_anything_is_sent(engine):
    weights, tensors = engine.weights, tensors_of(7)
    weights.start()
    announced = list(tensors), [tensor.shape for tensor in tensors.values()], [t.dtype for t in tensors.values()]
    weights.check_announced(*announced)
    wrong = {
        "this model has no tensor 'c'": (["c"], [(1,)], [torch.float32]),
        "'a' was announced twice": (["a", "a"], [(3, 3)] * 2, [torch.float32] * 2),
        "1 names, 0 shapes and 1 types": (["a"], [], [torch.float32]),
    }
    for message, one in wrong.items():
        with pytest.raises(WeightUpdateError, match=message):
            weights.check_announced(*one)
    weights.receive(tensors.items())
    assert weights.finish("v").version == "v"


def test_what_is_missing_can_still_be_sent(engine):
    tensors = tensors_of(7)
    last = {"a": tensors.pop("a")}
    engine.weights.start()
    engine.weights.receive(tensors.items())
    with pytest.raises(WeightUpdateError, match="lacks 'a'"):
        engine.weights.finish()
    engine.weights.receive(last.items())
    assert engine.weights.finish().num_tensors == 3


def test_calls_at_a_wrong_moment_are_conflicts(engine):
    for call in (
        engine.weights.finish,
        lambda: engine.weights.receive([]),
        lambda: engine.weights.check_announced([], [], []),
    ):
        with pytest.raises(UpdateConflictError, match="no update of the weights is open"):
            call()
    engine.weights.start()
    for call in (engine.weights.start, lambda: engine.update_weights(tensors_of(7).items())):
        with pytest.raises(UpdateConflictError, match="an update of the weights is open"):
            call()
    engine.weights.abandon("a test")
    engine.weights.abandon("again")
    engine.update_weights(tensors_of(7).items())


class Lost(RuntimeError):
    """A sender that is gone."""


def broken_off(tensors: dict[str, torch.Tensor], count: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(tensors.items())[:count]
    raise Lost("the sender is gone")


def test_a_swap_whose_caller_was_interrupted_does_not_happen(live, monkeypatch):
    runner = FakeStepRunner(following(live), gate_from=1)
    runner.gate.clear()
    with fake_engine(runner, live=live) as engine:
        answer = beside(engine.generate, PROMPT, SHORT)
        until(lambda: len(runner.batches) > 1)
        left = []

        def interrupted(function):
            left.append(beside(while_still, function))
            until(lambda: engine.core._inbox or engine.core._commands)  # where it stays while a step is held
            raise KeyboardInterrupt

        while_still = engine.core.while_still
        monkeypatch.setattr(engine.core, "while_still", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(tensors_of(7).items(), version="seven")
        runner.gate.set()
        with pytest.raises(UpdateConflictError, match="abandoned before it was swapped in"):
            left[0].result(HANG_S)
        assert answer.result(HANG_S)[0].token_ids == expected_tokens(PROMPT, 8, with_key(0))
        assert (engine.weights.version, engine.weights.epoch) == ("default", 0)


def test_a_direct_update_whose_beginning_was_interrupted_holds_nothing_up(engine, monkeypatch):
    def interrupted(function):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.core, "while_still", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(tensors_of(7).items(), direct=True)
    assert engine.state == "running" and not engine.weights.is_open
    assert engine.generate(PROMPT, SHORT)[0].token_ids == expected_tokens(PROMPT, 8, with_key(0))


@pytest.mark.parametrize("count", range(4))
def test_a_staged_update_that_breaks_off_costs_nothing(engine, live, count):
    stream, tokens = started(engine, LONG)
    with pytest.raises(Lost):
        engine.update_weights(broken_off(tensors_of(7), count))
    assert rest(stream, tokens) == expected_tokens(PROMPT, 200, with_key(0))
    assert engine.state == "running" and not live.tensors["key"].any()


@pytest.mark.parametrize("mode", ["keep", "retract"])
@pytest.mark.parametrize("ended_by", ["another update", "another pause", "resume"])
def test_a_pause_whose_update_breaks_off_refuses_newcomers_until_somebody_is_there(engine, mode, ended_by):
    def break_off():
        with pytest.raises(Lost):
            engine.update_weights(broken_off(tensors_of(7), 1))

    break_off()
    engine.pause(mode)  # whose update is yet to come
    held = beside(engine.generate, PROMPT, SHORT)
    until(lambda: engine.stats().waiting + engine.stats().running == 1, "it is queued")
    break_off()
    with pytest.raises(EnginePausedError, match=r"an update of its weights broke off \(the sender is gone\)"):
        engine.generate(PROMPT, SHORT)
    assert engine.state == "paused"
    if ended_by == "another update":
        engine.weights.start()
    elif ended_by == "another pause":
        engine.pause(mode)
    else:
        engine.resume()
    newcomer = beside(engine.generate, PROMPT, SHORT)
    if ended_by != "resume":
        until(lambda: engine.stats().waiting + engine.stats().running == 2, "the newcomer is queued")
    engine.resume()
    for one in (held, newcomer):
        assert one.result(HANG_S)[0].token_ids == expected_tokens(PROMPT, 8, with_key(0))


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("mended_directly", [False, True])
def test_a_direct_update_that_breaks_off_leaves_the_engine_torn_until_one_is_whole(engine, count, mended_directly):
    stream, tokens = started(engine, LONG)
    with pytest.raises(Lost):
        engine.update_weights(broken_off(tensors_of(7), count), direct=True)
    assert (engine.state == "torn") == (count > 0)
    if count:
        for call in (lambda: engine.generate(PROMPT, SHORT), engine.resume, lambda: engine.weights.start(partial=True)):
            with pytest.raises(WeightsTornError, match=r"torn: an update broke off \(the sender is gone\)\."):
                call()
        with pytest.raises(WeightUpdateError, match="lacks"):
            engine.update_weights([], direct=mended_directly)
        assert engine.state == "torn" and engine.weights.epoch == 0
        engine.pause("keep")
    engine.update_weights(tensors_of(9).items(), direct=mended_directly)
    engine.resume()
    assert len(rest(stream, tokens)) == 200
    assert engine.generate(PROMPT, SHORT)[0].token_ids == expected_tokens(PROMPT, 8, with_key(9))


@pytest.mark.parametrize("first", ["key", "b"])
def test_a_direct_update_with_nan_is_refused_by_name_at_its_end_and_leaves_the_engine_torn(engine, first):
    new = tensors_of(7) | {"b": torch.full((1, 3), float("nan"))}
    order = [first, *(name for name in new if name != first)]
    with pytest.raises(WeightUpdateError, match="tensor 'b' holds NaN or inf in 3 of its 3"):
        engine.update_weights([(name, new[name]) for name in order], direct=True)
    assert engine.state == "torn" and engine.weights.epoch == 0
    engine.update_weights(tensors_of(9).items(), direct=True)
    assert engine.generate(PROMPT, SHORT)[0].token_ids == expected_tokens(PROMPT, 8, with_key(9))


def test_nobody_waits_for_the_requests_of_a_torn_engine(engine):
    stream, _ = started(engine, LONG)
    engine.weights.start(direct=True)
    waiting = beside(engine.pause, "wait")
    until(lambda: engine.core.gate.drained)
    with pytest.raises(Lost):
        engine.weights.receive(broken_off(tensors_of(7), 1))
    with pytest.raises(WeightsTornError):
        waiting.result(HANG_S)
    with pytest.raises(WeightsTornError):
        engine.pause("wait")
    engine.update_weights(tensors_of(7).items())
    engine.resume()
    assert list(stream)[-1].finish_reason == "length"


def test_no_step_runs_while_weights_are_written_and_requests_wait(engine):
    engine.weights.start(direct=True)
    assert len(engine.generate(PROMPT, SHORT)[0].token_ids) == 8, "until the first tensor comes"
    steps, (first, *others) = engine.stats().steps, tensors_of(7).items()
    engine.weights.receive([first])
    assert engine.state == "updating"
    with pytest.raises(UpdateConflictError, match="a direct update of the weights is open"):
        engine.resume()
    answer = beside(engine.generate, PROMPT, SHORT)
    until(lambda: engine.stats().waiting)
    engine.weights.receive(others)
    assert not answer.done() and engine.stats().steps == steps
    engine.weights.finish()
    assert answer.result(HANG_S)[0].token_ids == expected_tokens(PROMPT, 8, with_key(7))


def test_an_update_that_is_open_ends_with_its_engine(live):
    came, goes_on = threading.Event(), threading.Event()

    def fed():
        for tensor in tensors_of(7).items():
            yield tensor
            came.set()
            goes_on.wait(HANG_S)

    with fake_engine(live=live) as engine:
        engine.weights.start()
        engine.weights.receive(list(tensors_of(7).items())[:1])
        update = weakref.ref(engine.weights._open)
    gc.collect()
    assert not engine.weights.is_open and update() is None
    with fake_engine(live=live) as engine:
        engine.weights.start()
        feeding = beside(engine.weights.receive, fed())
        assert came.wait(HANG_S)
    goes_on.set()
    with pytest.raises(EngineDeadError, match="closed"):
        feeding.result(HANG_S)
    assert not engine.weights.is_open


def test_a_partial_update_leaves_the_rest(engine, live):
    engine.update_weights(tensors_of(7).items())
    engine.update_weights([("b", torch.full((1, 3), 2.0))], partial=True)
    assert live.tensors["other"].tolist() == [[3.5] * 3] * 3 + [[2.0] * 3] and int(live.tensors["key"][0]) == 7


def test_single_values_are_replaced(engine, live):
    engine.update_weights(tensors_of(7).items())
    engine.weights.start(partial=True)
    engine.weights.receive_delta("a", torch.tensor([0, 8], dtype=torch.int32), torch.tensor([5.0, 6.0]))
    engine.weights.receive_delta("key", torch.tensor([0]), torch.tensor([4.0]))
    engine.weights.finish()
    expected = torch.full((4, 3), 3.5)
    expected[3], expected[0, 0], expected[2, 2] = 1.0, 5.0, 6.0
    assert torch.equal(live.tensors["other"].float(), expected)
    assert engine.generate(PROMPT, SHORT)[0].token_ids == expected_tokens(PROMPT, 8, with_key(4))


WRONG_DELTAS = {
    "an index of 'a' is beyond its 9 values": ([9], [1.0]),
    "an index of 'a' is beyond its": ([-1], [1.0]),
    "an index of 'a' is there twice": ([1, 1], [1.0, 2.0]),
    "hold NaN or inf": ([1], [float("nan")]),
    "expected indices .n.": ([1, 2], [1.0]),
}


@pytest.mark.parametrize("message", WRONG_DELTAS)
def test_wrong_places_of_values_are_refused(engine, live, message):
    indices, values = WRONG_DELTAS[message]
    engine.weights.start(partial=True)
    with pytest.raises(WeightUpdateError, match=message):
        engine.weights.receive_delta("a", torch.tensor(indices), torch.tensor(values))
    assert not engine.weights.is_open and not live.tensors["other"].any()


def test_values_come_in_partial_updates_alone(engine):
    engine.weights.start()
    with pytest.raises(WeightUpdateError, match="Begin a staged one"):
        engine.weights.receive_delta("a", torch.tensor([0]), torch.tensor([1.0]))


def test_an_engine_without_weights_says_so():
    with fake_engine() as engine, pytest.raises(WeightUpdateError, match="there are no weights to update"):
        engine.update_weights([])


def test_single_values_under_both_names_of_a_tie_are_equal():
    specs = (WeightSpec("head", (2, 3), torch.float32, (WeightPart("head", "w.safetensors", 0, (2, 3)),)),)
    names = TensorNames((specs,), None, (("head", "embedding"),), {})
    live = LiveWeights(specs, {"head": torch.zeros(2, 3)}, {}, {}, lambda rank: Places(names, (specs,), rank))
    places = torch.tensor([1, 4])
    with fake_engine(live=live) as engine:
        for other in (lambda: engine.weights.receive_delta("embedding", places, torch.tensor([1.0, 3.0])),
                      lambda: engine.weights.receive([("embedding", torch.ones(2, 3))])):  # fmt: skip
            engine.weights.start(partial=True)
            engine.weights.receive_delta("head", places, torch.tensor([1.0, 2.0]))
            with pytest.raises(WeightUpdateError, match="'head' and 'embedding' are one weight"):
                other()
            assert not live.tensors["head"].any()
        engine.weights.start(partial=True)
        for name in ("head", "embedding"):
            engine.weights.receive_delta(name, places, torch.tensor([1.0, 2.0]))
        report = engine.weights.finish()
    assert not report.is_whole
    assert live.tensors["head"].tolist() == [[0, 1, 0], [0, 2, 0]]


@pytest.mark.parametrize("shape", [(1 << 40,), (3, 1), ()])
def test_what_is_not_read_has_its_shape_all_the_same(engine, shape):
    engine.weights.start()
    with pytest.raises(WeightUpdateError, match=r"'tower.weight': expected shape \[3\]"):
        engine.weights.check_announced(["tower.weight"], [shape], [torch.float32])
    engine.weights.check_announced(["tower.weight"], [(3,)], [torch.bfloat16])


def test_updates_and_pauses_are_awaited(live):
    async def run() -> None:
        async with AsyncEngine(fake_engine(FakeStepRunner(following(live)), live=live)) as engine:
            await engine.pause("keep")
            assert engine.is_paused and engine.state == "paused"
            report = await engine.update_weights(tensors_of(7).items(), version="seven")
            assert report.is_whole
            with pytest.raises(CheckpointError, match="expected a folder"):
                await engine.update_weights_from_folder("/nowhere")
            await engine.resume()
            (answer,) = [one async for one in engine.generate(PROMPT, SHORT, stream=False)]
            assert answer.outputs[0].token_ids == expected_tokens(PROMPT, 8, with_key(7))

    asyncio.run(run())


def test_a_closed_engine_that_is_still_there_holds_no_weights():
    live = live_weights()
    gone = weakref.ref(live)
    with fake_engine(FakeStepRunner(), live=live) as engine:
        del live
        engine.update_weights(tensors_of(7).items())
    gc.collect()
    assert gone() is None
    for late in (engine.weights.start, engine.weights.sums, lambda: engine.weights.device):
        with pytest.raises(EngineDeadError, match="the engine is closed"):
            late()
