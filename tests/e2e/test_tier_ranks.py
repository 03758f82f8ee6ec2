"""Two ranks over gloo keep their parts of pages in the host's memory: tokens are one rank's; hits are of all ranks."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.errors import DeviceError, MllmError
from tests.e2e.test_ranks import followers
from tests.tiny_model import engine_of_pages, tiny_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
BEGINNINGS = [[first, *range(3, 90)] for first in range(5)]
TURNS = [[*BEGINNINGS[number % 5][: 40 + 9 * (number % 6)], 7, number] for number in range(20)]


def _lost(message: object) -> None:
    raise DeviceError("rank 1 was lost")


def engine(cache: Path, num_ranks: int, num_pages: int | None, **runtime: Any) -> Engine:
    sizes = {"tensor_parallel_size": num_ranks, "max_num_batched_tokens": 32, "max_model_len": 128, "page_size": 8}
    sizes |= {"max_running_requests": 4}
    return engine_of_pages(tiny_config(cache, compile={"backend": "eager"}, runtime=sizes | runtime), num_pages)


def tokens(engine: Engine) -> list[list[int]]:
    found = []
    for start in range(0, len(TURNS), 4):
        found += [output.token_ids for output in engine.generate(TURNS[start : start + 4], GREEDY)]
    return found


def test_tokens_of_two_ranks_with_hits_are_those_of_one_rank_and_a_lost_rank_ends_all(eager_cache: Path) -> None:
    with engine(eager_cache, 1, None) as alone:
        expected = tokens(alone)
    tier = {"kv_offloading_size": 0.002, "kv_offloading_min_gain": 0}
    with engine(eager_cache, 2, 50, **tier) as ranks:
        assert tokens(ranks) == expected
        ranks.core.while_still(lambda requests: requests.drop_kv())
        assert tokens(ranks) == expected
        (host,) = ranks.stats().tiers
        assert host.hit_tokens > 0
        assert host.evictions > 0
        assert host.failed_loads == 0
        os.kill(followers()[0], signal.SIGKILL)
        with pytest.raises(MllmError):
            for _ in range(100):
                tokens(ranks)


def store_of(kind: str, folder: Path) -> dict[str, Any]:
    if kind == "disk":
        return {"kv_offloading_disk_path": str(folder), "kv_offloading_disk_size": 0.1}
    options = {"kv_connector": "examples.folder_store.FolderStore", "trust_local_code": True}
    return {"kv_transfer_config": options | {"kv_connector_extra_config": {"folder": str(folder)}}}


@pytest.mark.parametrize("kind", ["disk", pytest.param("connector", marks=pytest.mark.slow)])
def test_the_next_two_ranks_find_in_a_store_what_two_have_computed(
    eager_cache: Path, tmp_path: Path, kind: str
) -> None:
    with engine(eager_cache, 1, None) as alone:
        expected = tokens(alone)
    tier = {"kv_offloading_size": 0.002, "kv_offloading_min_gain": 0} | store_of(kind, tmp_path / "store")
    with engine(eager_cache, 2, 50, **tier) as ranks:
        assert tokens(ranks) == expected
    for path in list((tmp_path / "store").rglob("*p"))[::5]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with engine(eager_cache, 2, 50, **tier) as again:
        assert tokens(again) == expected
        host, below = again.stats().tiers
        assert below.hit_tokens > 0
        assert (below.failed_loads > 0) or kind == "connector"
        assert host.failed_loads == 0


def test_a_rank_that_is_lost_amid_copies_leaves_no_process_and_no_thread(eager_cache: Path) -> None:
    before, threads = set(followers()), set(threading.enumerate())
    ranks = engine(eager_cache, 2, 50, kv_offloading_size=0.002)
    copies = ranks.core._scheduler.tiers._copies  # type: ignore[union-attr]
    ranks.core.between_steps(lambda: setattr(copies, "_tell", _lost))
    with pytest.raises(MllmError, match="rank 1 was lost"):
        for _ in range(100):  # a request may have its tokens before its pages are stored
            tokens(ranks)
    ranks.close()
    assert set(followers()) == before
    left = set(threading.enumerate()) - threads
    assert not [one for one in left if one.name.startswith("mllm-tier")]
