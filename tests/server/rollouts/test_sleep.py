"""A server's engine sleeps in place by the paths of vLLM and of SGLang."""

from __future__ import annotations

import pytest

from tests.server.harness import eventually
from tests.server.rollouts.trainer import PROMPT, Beside, changed, write_folder

GENERATED = "mllm:generated_tokens_total"


@pytest.fixture(autouse=True)
def first_weights_again(trainer, weights_folder, start, tmp_path_factory):
    """All tests have the server with its first weights, awake."""
    yield
    trainer.post("/wake_up")
    folder = write_folder(start, weights_folder / tmp_path_factory.mktemp("first").name / "first")
    trainer.post("/update_weights_from_disk", {"model_path": str(folder)})


def is_sleeping(trainer) -> bool:
    return trainer.server.get("/is_sleeping").json["is_sleeping"]


def test_answers_are_the_same_after_sleep_and_requests_meanwhile_get_503(trainer):
    before = trainer.seen()
    for _ in range(2):  # idempotent
        assert trainer.post("/sleep?level=1") == {"status": "sleeping"}
    assert is_sleeping(trainer)
    answer = trainer.server.post("/inference/v1/generate", {"token_ids": PROMPT})
    assert (answer.status, answer.error["code"]) == (503, "paused")
    assert "the engine is asleep (kv_cache, weights)" in answer.error["message"]
    assert trainer.server.get("/health").status == 200
    trainer.post("/wake_up?tags=kv_cache")
    assert is_sleeping(trainer)
    assert trainer.post("/wake_up") == {"status": "awake"}
    assert not is_sleeping(trainer) and trainer.seen() == before


def test_dropped_weights_come_again_by_tags(trainer, start, weights_folder, tmp_path):
    before = trainer.seen()
    other = changed(start, 5)
    folder = write_folder(other, weights_folder / tmp_path.name / "other")
    trainer.post("/sleep?level=2&mode=keep")
    answer = trainer.server.post("/update_weights_from_disk", {"model_path": str(folder)})
    assert (answer.status, answer.error["code"]) == (409, "update_conflict")
    assert "weights are asleep" in answer.error["message"]
    trainer.post("/wake_up?tags=weights")
    trainer.post("/update_weights_from_disk", {"model_path": str(folder)})
    trainer.post("/wake_up?tags=kv_cache")
    assert not is_sleeping(trainer) and trainer.seen() != before
    trainer.post("/sleep?level=2")
    trainer.post("/wake_up")
    answer = trainer.server.post("/inference/v1/generate", {"token_ids": PROMPT})
    assert (answer.status, answer.error["code"]) == (503, "weights_torn")
    assert "sleep of level 2 dropped them" in answer.error["message"]


def test_requests_that_are_kept_go_on(trainer):
    generated = trainer.server.figure(GENERATED)
    asked = Beside(trainer.sample, sampling_params={"max_tokens": 100, "ignore_eos": True, "temperature": 0})
    eventually(lambda: trainer.server.figure(GENERATED) > generated, "the request runs")
    trainer.post("/sleep?level=0&mode=keep")
    assert is_sleeping(trainer)
    trainer.post("/wake_up?tags=scheduling")
    trainer.post("/release_kv_cache_memory?mode=retract")
    trainer.post("/wake_up?tags=kv_cache")
    assert asked.wait()["finish_reason"] == "length"


def test_sglangs_names_do_the_same(trainer):
    before = trainer.seen()
    trainer.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    trainer.post("/release_memory_occupation", {"tags": ["weights"]})
    assert is_sleeping(trainer)
    trainer.post("/resume_memory_occupation", {"tags": ["cuda_graph"]})  # which stay in memory
    trainer.post("/resume_memory_occupation", {"tags": ["weights"]})
    assert is_sleeping(trainer)
    trainer.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert not is_sleeping(trainer) and trainer.seen() == before
    trainer.post("/release_memory_occupation")
    trainer.post("/resume_memory_occupation", {})
    assert trainer.seen() == before
