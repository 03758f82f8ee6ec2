"""Prefill apart from decode: two engines give the tokens of one, whatever becomes of the other.

Tiny random models on a CPU; each engine has its own pages, and meets the other over a port of this machine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from mllm_compile import Engine, RequestOutput, SamplingParams
from mllm_compile.errors import RequestError
from mllm_compile.kv_connectors.peers import taker
from mllm_compile.kv_connectors.peers.meeting import VARIABLE
from tests.e2e.test_tiers import KINDS, PAGE, Kind, Served, tokens_of, turns_of
from tests.kv_connectors.peers.relay import relay_to
from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.sample import slow_but_a_sample

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
ONE = replace(GREEDY, max_tokens=1, kv_transfer_params={"do_remote_decode": True})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "a secret of engines")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Served]:
    """Makes a model of each kind once."""

    found: dict[str, Served] = {}

    def of(kind: Kind) -> Served:
        if str(kind) not in found:
            folder = tmp_path_factory.mktemp(kind.architecture)
            save_tiny_model(tiny_config(kind.architecture, eos_token_id=None, bos_token_id=None), folder / "model")
            found[str(kind)] = Served(kind, folder)
        return found[str(kind)]

    return of


@pytest.fixture(scope="module")
def qwen(folders: Callable[[Kind], Served]) -> Served:
    return folders(KINDS[0])


@contextmanager
def engine(served: Served, role: str, num_pages: int | None = None, **runtime: Any) -> Iterator[Engine]:
    asked = {"kv_connector": "PeerConnector", "kv_role": role, "kv_port": 0, "timeout_s": 30.0}
    asked |= runtime.pop("transfer", {})
    sizes = {"kv_offloading_size": 0.005, "kv_transfer_config": asked} | runtime
    with served.engine(num_pages, **sizes) as made:
        yield made


def handed(prefill: Engine, prompt: list[int], params: SamplingParams = GREEDY, **changes: Any) -> SamplingParams:
    """The parameters of a prompt that a prefill engine has computed."""
    answer = prefill.generate(prompt, ONE)[0]
    assert answer.kv_transfer_params is not None
    return replace(params, kv_transfer_params=answer.kv_transfer_params | changes)


@pytest.mark.parametrize(
    ("kind", "way"), slow_but_a_sample([(kind, way) for kind in KINDS for way in ("memory", "connection")], 1)
)
def test_tokens_are_one_engines_and_whole_prompts_are_handed_over(
    folders: Callable[[Kind], Served], kind: Kind, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taker, "_read" if way == "connection" else "_received", None)
    if way == "connection":
        monkeypatch.setattr(taker, "borrow", _not_lent)
    check_tokens(folders(kind), way)


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs the extra nixl")
@pytest.mark.parametrize("kind", slow_but_a_sample(KINDS, 1))
def test_tokens_are_one_engines_over_nixl(
    folders: Callable[[Kind], Served], kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("_received", "borrow", "_copy"):
        monkeypatch.setattr(taker, other, None)
    check_tokens(folders(kind), "nixl", transfer={"kv_connector_extra_config": {"transport": "nixl"}})


def check_tokens(served: Served, way: str, **runtime: Any) -> None:
    turns = turns_of(Random(f"{served.kind} {way}"), 10)
    with served.engine() as plain:
        expected = tokens_of(plain, turns, 1)
    with (
        engine(served, "kv_producer", **runtime) as prefill,
        engine(served, "kv_consumer", 60, **runtime) as decode,
    ):
        first = [decode.generate(turn, handed(prefill, turn))[0] for turn in turns]
        assert first[0].num_cached_tokens == (len(turns[0]) - 1) // PAGE * PAGE
        assert first[0].num_disk_tokens == first[0].num_cached_tokens
        at_once = decode.generate(turns, [handed(prefill, turn) for turn in turns])
        _, peers = decode.stats().tiers
    assert [answer.token_ids for answer in first] == expected
    assert [answer.token_ids for answer in at_once] == expected
    assert peers.name == "peers" and peers.failed_loads == 0 and peers.loaded_bytes > 0


def _not_lent(*_: object) -> None:
    raise OSError("no such memory")


PROMPTS = [[number, *range(5 + number, 50 + 7 * number)] for number in range(4)]
SCORED = replace(GREEDY, max_tokens=12, logprobs=5)


def bits_of(answer: RequestOutput) -> tuple[Any, ...]:
    """Tokens, and log-probabilities to their last bit."""
    return answer.token_ids, answer.logprobs


def test_the_same_chunks_of_a_prompt_give_the_same_bits_and_other_chunks_may_not(qwen: Served) -> None:
    with engine(qwen, "kv_producer") as prefill, engine(qwen, "kv_consumer") as decode, qwen.engine() as plain:
        cold = [plain.generate(prompt, SCORED)[0] for prompt in PROMPTS]
        hits = [plain.generate(prompt, SCORED)[0] for prompt in PROMPTS]  # chunks end where those of a hand-over do
        answers = [decode.generate(prompt, handed(prefill, prompt, SCORED))[0] for prompt in PROMPTS]
    assert [one.num_disk_tokens for one in answers] == [one.num_cached_tokens for one in hits]
    assert [bits_of(one) for one in answers] == [bits_of(one) for one in hits]
    assert [one.logprobs for one in hits] != [one.logprobs for one in cold], "or nothing is shown"


def test_in_deterministic_mode_any_chunks_give_the_same_bits(qwen: Served) -> None:
    exact = {"deterministic": True}
    with qwen.engine(max_num_batched_tokens=48, **exact) as plain:
        cold = [plain.generate(prompt, SCORED)[0] for prompt in PROMPTS]
    with (
        engine(qwen, "kv_producer", max_num_batched_tokens=24, **exact) as prefill,
        engine(qwen, "kv_consumer", **exact) as decode,
    ):
        asked = [handed(prefill, prompt, SCORED) for prompt in PROMPTS]
        answers = decode.generate(PROMPTS, asked)
    assert all(one.num_disk_tokens > 0 for one in answers)
    assert [bits_of(one) for one in answers] == [bits_of(one) for one in cold]


@pytest.mark.slow
def test_both_roles_in_each_and_either_may_begin(qwen: Served) -> None:
    turns = turns_of(Random(11), 6)
    with qwen.engine() as plain:
        expected = tokens_of(plain, turns, 1)
    with engine(qwen, "kv_both") as one, engine(qwen, "kv_both") as other:
        answers = [
            second.generate(turn, handed(first, turn))[0].token_ids
            for turn, (first, second) in zip(turns, [(one, other), (other, one)] * 3, strict=True)
        ]
        assert one.stats().tiers[1].loaded_bytes > 0 and other.stats().tiers[1].loaded_bytes > 0
    assert answers == expected


def test_what_does_not_arrive_is_computed(qwen: Served, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    """Damage, cuts, an engine that has ended, one that is not the one, one that has forgotten."""
    monkeypatch.setattr(taker, "_REST_S", 0.0)
    monkeypatch.setattr(taker, "borrow", _not_lent)
    prompts = [[number, *range(3, 80)] for number in range(8)]
    with qwen.engine() as plain:
        expected = [plain.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
    with engine(qwen, "kv_consumer") as decode:

        def tokens(number: int, params: SamplingParams) -> list[int]:
            answer = decode.generate(prompts[number], params)[0]
            assert answer.token_ids == expected[number], number
            return answer.num_disk_tokens

        with engine(qwen, "kv_producer") as prefill, relay_to(handed_port(prefill)) as relay:
            asked = [handed(prefill, prompt, remote_port=relay.port) for prompt in prompts]
            relay.change = lambda direction, at, data: _flipped(data) if is_page(at, data) else data
            assert tokens(0, asked[0]) == 0
            relay.change = lambda direction, at, data: None if is_page(at, data) else data
            assert tokens(1, asked[1]) == 0
            relay.change = lambda *_: None
            assert tokens(2, asked[2]) == 0
            relay.change = lambda direction, at, data: data
            assert tokens(3, asked[3]) > 0
            assert tokens(4, handed(prefill, prompts[4], remote_engine_id="another")) == 0
            prefill.flush_prefix_cache()
            assert tokens(5, asked[5]) == 0
            gone = handed(prefill, prompts[6])
        assert tokens(6, gone) == 0
        assert tokens(7, GREEDY) == 0
        assert decode.stats().tiers[1].pages == 0  # nothing is remembered of those that came or failed
    for text in (
        "a value came damaged",
        "the connection was closed",
        "engine another is not here",
        "Connection refused",
    ):
        assert text in caplog.text


def handed_port(prefill: Engine) -> int:
    params = prefill.generate([1] * 9, ONE)[0].kv_transfer_params
    assert params is not None
    return int(params["remote_port"])


def is_page(at: int, data: bytes) -> bool:
    """True of bytes that only a prefill engine sends, behind the meeting."""
    return at + len(data) > 1500


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def test_an_engine_of_another_page_size_or_model_is_named_and_prompts_are_computed(
    qwen: Served, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = list(range(3, 60))
    with engine(qwen, "kv_producer") as prefill, engine(qwen, "kv_consumer", page_size=8) as decode:
        answer = decode.generate(prompt, handed(prefill, prompt))[0]
        assert answer.token_ids == prefill.generate(prompt, GREEDY)[0].token_ids
        assert answer.num_cached_tokens == 0
    assert "runtime.page_size is 4 there and 8 here: pages of one do not fit the other" in caplog.text


def test_pages_that_nobody_fetches_make_room_and_new_weights_end_it_all(qwen: Served) -> None:
    prompts = [[number, *range(3, 90)] for number in range(12)]
    small = {"kv_offloading_size": 0.0002, "transfer": {"kv_connector_extra_config": {"hold_s": 0}}}
    with engine(qwen, "kv_producer", **small) as prefill, engine(qwen, "kv_consumer") as decode:
        (host,) = prefill.stats().tiers
        assert 0 < host.capacity < 12 * 22
        asked = [handed(prefill, prompt) for prompt in prompts]
        found = [decode.generate(prompt, one)[0].num_disk_tokens for prompt, one in zip(prompts, asked, strict=True)]
        assert found[0] == 0 and found[-1] > 0  # the newest are there
        assert prefill.stats().tiers[0].pages <= host.capacity
        prefill.core.while_still(lambda requests: requests._scheduler.weights_changed())
        late = prefill.generate([5] * 40, ONE)[0].kv_transfer_params
        assert late is not None and late["remote_block_ids"] == []
        assert decode.generate([5] * 40, replace(GREEDY, kv_transfer_params=late))[0].num_cached_tokens == 0


def test_requests_that_do_not_fit_an_engine_are_refused(qwen: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(qwen, "kv_consumer") as decode:
        with pytest.raises(RequestError, match="do_remote_decode: expected false"):
            decode.generate([1, 2, 3], ONE)
        asked = {"do_remote_prefill": True, "remote_engine_id": "a", "remote_block_ids": [0], "remote_port": 9}
        with pytest.raises(RequestError, match=r"expected one of 127\.0\.0\.0/8, ::1, localhost, got 169\.254"):
            decode.generate([1, 2], replace(GREEDY, kv_transfer_params=asked | {"remote_host": "169.254.169.254"}))
    with qwen.engine() as plain, pytest.raises(RequestError, match="this engine hands no pages over"):
        plain.generate([1, 2, 3], ONE)
