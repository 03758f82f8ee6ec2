"""A device is shared out among models: all beside each other, in turns, or refused."""

from __future__ import annotations

import pytest

from mllm_compile.server.models.shares import Share, shares_of
from mllm_compile.server.wire.messages import Needs


def needs(fixed: int, least: int = 10, most: int = 1000, token: int = 1, device: str = "cuda:0", usable: int = 1000):
    return Needs(device, usable, usable, usable // 4 if device == "cpu" else usable, 20, fixed, token, least, most)


def tokens(shares) -> dict[str, int | None]:
    return {name: one.kv_tokens if isinstance(one, Share) else None for name, one in shares.items()}


def test_models_that_all_fit_have_caches_of_as_many_tokens():
    shares = shares_of({"a": needs(100), "b": needs(200, token=2), "c": needs(60)}, (), None)
    assert tokens(shares) == {"a": 145, "b": 145, "c": 145}, "(1000 - 3 * 20 - 360) / (1 + 2 + 1)"
    assert shares["b"] == Share(145, held_bytes=20, awake_bytes=200 + 2 * 145)


def test_a_cache_has_no_more_tokens_than_are_of_use_and_others_get_the_rest():
    shares = shares_of({"a": needs(100, most=50), "b": needs(200), "c": needs(60, least=300, most=400)}, (), None)
    assert tokens(shares) == {"a": 50, "b": 230, "c": 300}


def test_models_that_do_not_all_fit_get_a_half_each_of_what_pinned_ones_leave():
    shares = shares_of({"a": needs(300), "b": needs(400), "c": needs(200), "d": needs(100)}, ("d",), None)
    assert tokens(shares) == {"a": 45, "b": 290, "c": 145, "d": 130}, "920, a quarter of it for d, 690 / 2"


def test_one_that_runs_alone_gets_all_that_is_left():
    shares = shares_of({"a": needs(300), "b": needs(400)}, (), 1)
    assert tokens(shares) == {"a": 660, "b": 560}


def test_pinned_models_are_among_those_that_may_be_awake():
    models = {"a": needs(300), "b": needs(400), "p": needs(100)}
    assert tokens(shares_of(models, ("p",), 2)) == {"a": 327, "b": 227, "p": 213}, (
        "940 / 3 for p, 627 for one beside it"
    )
    assert tokens(shares_of(models, ("p",), 1)) == tokens(shares_of(models, ("p",), 2)), "one has to run at last"


def test_a_model_that_fits_at_no_turn_is_refused_with_the_sizes():
    shares = shares_of({"a": needs(300), "b": needs(700), "p": needs(250)}, ("p",), None)
    assert tokens(shares) == {"a": 13, "b": None, "p": 63}
    assert shares["b"] == (
        "it needs 710 B of cuda:0 (weights, and the KV cache of one request of 10 tokens), and 627 B are left beside "
        "the pinned ones and the processes of all. Lower its runtime.max_model_len, or serve fewer models"
    )


def test_on_a_cpu_parked_models_keep_their_memory_so_that_all_must_fit():
    models = {name: needs(400, device="cpu") for name in "abc"}
    shares = shares_of(models, (), 1)
    assert tokens(shares) == {"a": 70, "b": 70, "c": None}
    assert "whose memory stays theirs on a CPU" in shares["c"]


def test_on_a_cpu_caches_have_a_quarter_of_the_memory_together():
    assert tokens(shares_of({name: needs(100, device="cpu") for name in "ab"}, (), None)) == {"a": 125, "b": 125}


@pytest.mark.parametrize("most_awake", [None, 1, 2])
def test_no_share_exceeds_the_device(most_awake):
    models = {name: needs(fixed, least=least) for name, fixed, least in [("a", 10, 300), ("b", 500, 100), ("c", 0, 9)]}
    for share in shares_of(models, ("c",), most_awake).values():
        assert share.awake_bytes + 3 * 20 <= 1000
