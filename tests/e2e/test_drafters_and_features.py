"""Drafters with weights of their own beside what other pages tell of: there are drafts, and answers are those without.

Updates and sleep are of the model alone: its drafter stays as it is, but for weights that are the model's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.config.schema import EngineConfig
from mllm_compile.kv_connectors.peers.meeting import VARIABLE
from mllm_compile.store.source import ArtifactSource
from tests.adapters.tiny_adapters import VOCAB, Adapters
from tests.e2e.test_apart_features import DECODE, runtime_of
from tests.e2e.test_weight_updates import write_changed
from tests.eagle_heads import random_head
from tests.kv_connectors import broken_stores
from tests.prediction_layers import save_with_prediction_layer
from tests.sample import slow_but_a_sample
from tests.sleeping_arena import Machine
from tests.tiny_model import engine_of_pages

DOCS = Path(__file__).parents[2] / "docs"
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, seed=3)
PROMPTS = [[11, 12, 13, 14] * 6, [7, 7, 81, 7, 7, 81, 7], list(range(3, 34))]
METHODS = ("draft_model", "itself", "eagle3", "mtp")
NUM_PAGES = 60


class Drafting:
    """A tiny mixture of experts with adapters, and what drafts for it."""

    def __init__(self, method: str, folder: Path) -> None:
        self.adapters = Adapters(folder, "glm4_moe" if method == "mtp" else "qwen3_moe", eos_token_id=None)
        self.model, self.cache = folder / "model", folder / "cache"
        if method == "mtp":
            save_with_prediction_layer("glm4_moe", self.model, vocab_size=VOCAB)
        drafter: dict[str, Callable[[], Path]] = {
            "draft_model": lambda: write_changed(self.model, folder / "drafter"),
            "itself": lambda: self.model,
            "eagle3": lambda: random_head(folder / "head", self.model),
        }
        self.speculative: dict[str, Any] = {
            "method": "draft_model" if method == "itself" else method,
            "num_speculative_tokens": 1 if method == "mtp" else 3,
        }
        self.is_itself = method == "itself"
        if method in drafter:
            self.speculative["model"] = str(drafter[method]())

    def config(self, drafted: bool, model: Path | None = None, **sections: Any) -> EngineConfig:
        """Of the model, or of another one of its shape that no drafter was made for."""
        runtime = {"device": "cpu", "max_model_len": 64, "max_running_requests": 8, "page_size": 4}
        return EngineConfig.from_dict(
            {
                "model": {"path": str(model or self.model), "dtype": "float32"},
                "compile": {"backend": "eager"},
                "cache": {"dir": str(self.cache)},
                **sections,
                "runtime": runtime | sections.get("runtime", {}),
                **({"speculative": self.speculative} if drafted else {}),
            }
        )

    def engine(self, drafted: bool, model: Path | None = None, **sections: Any) -> Engine:
        return engine_of_pages(self.config(drafted, model, **sections), NUM_PAGES)


def tokens(engine: Engine, prompts: Sequence[Any] = PROMPTS, **options: Any) -> list[list[int]]:
    found = [engine.generate(prompts, params, **options) for params in (GREEDY, DRAWN)]
    assert all(output.error is None for outputs in found for output in outputs)
    return [list(output.token_ids) for outputs in found for output in outputs]


def checked(drafting: Drafting, act: Callable[[Engine], Any], **sections: Any) -> None:
    """An engine gives the same with drafts and without."""
    with drafting.engine(False, **sections) as engine:
        expected = act(engine)
    with drafting.engine(True, **sections) as engine:
        assert act(engine) == expected
        assert engine.stats().drafts > 0


def check_drafted(drafting: Drafting, engine: Engine, expected: list[list[int]]) -> None:
    """Answers with drafts; a model that drafts for itself is right about most, so it has the model's weights."""
    before = engine.stats()
    assert tokens(engine) == expected
    after = engine.stats()
    num_drafted, num_accepted = (
        getattr(after, name) - getattr(before, name) for name in ("drafted_tokens", "accepted_tokens")
    )
    assert num_drafted > 0
    assert not drafting.is_itself or num_accepted > 0.8 * num_drafted


def check_updates(drafting: Drafting, folder: Path) -> None:
    """With requests that are kept or computed anew over the update."""
    other = write_changed(drafting.model, folder / "other")
    with drafting.engine(False) as engine:
        before = tokens(engine)
    with drafting.engine(False, other) as engine:
        after = tokens(engine)
    with drafting.engine(True) as engine:
        assert tokens(engine) == before != after
        for mode, weights, expected in (("keep", other, after), ("retract", drafting.model, before)):
            running = [engine.stream(prompt, GREEDY) for prompt in PROMPTS]
            begun = [next(stream) for stream in running]
            engine.pause(mode)
            engine.update_weights_from_folder(weights)
            engine.resume()
            assert [list(stream)[-1].finish_reason for stream in running] == ["length"] * len(begun)
            check_drafted(drafting, engine, expected)


def check_sleep(drafting: Drafting, folder: Path) -> None:
    with drafting.engine(False) as engine:
        expected = tokens(engine)
    with drafting.engine(True, runtime={"enable_sleep_mode": True}) as engine:
        for level in (1, 2):
            running = [engine.stream(prompt, GREEDY) for prompt in PROMPTS]
            begun = [list(next(stream).token_ids) for stream in running]
            engine.sleep(level, "retract")
            engine.wake_up(["weights"])
            if level == 2:
                engine.update_weights_from_folder(drafting.model)
            engine.wake_up()
            ended = [
                sum((list(delta.token_ids) for delta in stream), start)
                for start, stream in zip(begun, running, strict=True)
            ]
            assert ended == expected[: len(PROMPTS)]
            check_drafted(drafting, engine, expected)


def check_tiers(drafting: Drafting, folder: Path) -> None:
    def act(engine: Engine) -> Any:
        first = tokens(engine)
        engine.core.while_still(lambda requests: requests.drop_kv())
        again = engine.generate(PROMPTS, GREEDY)
        assert sum(output.num_host_tokens for output in again) > 0
        return first, [list(output.token_ids) for output in again]

    checked(drafting, act, runtime={"kv_offloading_size": 0.01, "kv_offloading_min_gain": 0})


def check_stores(drafting: Drafting, folder: Path) -> None:
    """A second engine begins behind what the first has stored."""
    store = {"kv_connector": "tests.kv_connectors.broken_stores.MemoryStore", "trust_local_code": True}
    runtime = {"kv_offloading_size": 0.01, "kv_offloading_min_gain": 0, "kv_transfer_config": store}
    with drafting.engine(False) as engine:
        expected = tokens(engine)
    broken_stores.SHARED.clear()
    for _ in range(2):
        with drafting.engine(True, runtime=runtime) as engine:
            assert tokens(engine) == expected
            assert engine.stats().drafts > 0
            hits = engine.stats().tiers[1].hit_tokens
    assert hits > 0


def check_engines_apart(drafting: Drafting, folder: Path) -> None:
    with drafting.engine(False) as engine:
        expected = tokens(engine)[: len(PROMPTS)]
    with ExitStack() as opened:
        prefill, decode = (
            opened.enter_context(drafting.engine(True, runtime=runtime_of(role, max_model_len=64)))
            for role in ("kv_producer", "kv_consumer")
        )
        told = prefill.generate(PROMPTS, replace(GREEDY, max_tokens=1, kv_transfer_params=DECODE))
        params = [replace(GREEDY, kv_transfer_params=output.kv_transfer_params) for output in told]
        answers = decode.generate(PROMPTS, params)
        assert [list(output.token_ids) for output in answers] == expected
        assert sum(output.num_disk_tokens for output in answers) > 0
        assert decode.stats().drafts > 0


def check_sessions(drafting: Drafting, folder: Path) -> None:
    def act(engine: Engine) -> Any:
        first = tokens(engine, session="one")[: len(PROMPTS)]
        turns = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, first, strict=True)]
        return first, tokens(engine, turns, session="one")

    checked(drafting, act)


def check_adapters(drafting: Drafting, folder: Path) -> None:
    def act(engine: Engine) -> Any:
        drafting.adapters.load(engine)
        return tokens(engine, adapter=["all", None, "some"])

    checked(drafting, act, lora={"max_adapters": 2, "max_rank": 8})


def check_scores(drafting: Drafting, folder: Path) -> None:
    """Scores of each mode, the draws' kept tokens, and the experts of all tokens."""

    scores: list[list[float]] = []

    def act(engine: Engine) -> Any:
        found: list[Any] = []
        scores.append([])
        for mode in ("raw_logprobs", "tempered_logprobs", "processed_logprobs"):
            asked = replace(DRAWN, top_k=5, logprobs=1, logprobs_mode=mode, return_routed_experts=True)
            for output in engine.generate(PROMPTS, replace(asked, return_sampling_mask=True)):
                (one,) = output.outputs
                scores[-1] += [scored[token].logprob for scored, token in zip(one.logprobs, one.token_ids, strict=True)]
                kept = [np.asarray(ids).tolist() for ids in one.sampling_mask]
                found.append([list(one.token_ids), kept, np.asarray(one.routed_experts).tolist()])
        return found

    checked(drafting, act, runtime={"routed_experts": True})
    plain, drafted = scores
    assert np.abs(np.array(plain) - np.array(drafted)).max() < 1e-4


# What other pages' tables have a row of, where drafts are of n-grams; here drafters have weights.
CHECKS: dict[str, Callable[[Drafting, Path], None]] = {
    "updates": check_updates,
    "sleep": check_sleep,
    "tiers": check_tiers,
    "stores": check_stores,
    "engines apart": check_engines_apart,
    "sessions": check_sessions,
    "adapters": check_adapters,
    "scores": check_scores,
}


@pytest.fixture(autouse=True)
def lost_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and KV caches are lost where sleep says so; engines apart have a secret."""
    machine = Machine()
    for module in ("store.source", "runtime.model_runner"):
        monkeypatch.setattr(f"mllm_compile.{module}.arena_on", lambda device: machine.arena())
    monkeypatch.setenv(VARIABLE, "a secret of engines")


@pytest.mark.parametrize(("method", "feature"), slow_but_a_sample(product(METHODS, CHECKS), 1))
def test_a_drafter_with_weights_goes_with_a_feature(method: str, feature: str, tmp_path: Path) -> None:
    CHECKS[feature](Drafting(method, tmp_path), tmp_path)


def test_a_start_loads_pieces_of_both_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, ArtifactSource]] = []

    def noting(name: str) -> None:
        method = getattr(ArtifactSource, name)

        def noted(source: ArtifactSource, device: torch.device) -> Any:
            called.append((name, source))
            return method(source, device)

        monkeypatch.setattr(ArtifactSource, name, noted)

    drafting = Drafting("itself", tmp_path)
    with drafting.engine(True):
        pass  # it is compiled
    noting("begin")
    noting("load")
    with drafting.engine(True) as engine:
        assert engine.generate(PROMPTS[:1], GREEDY)[0].token_ids
    assert [name for name, _ in called] == ["begin", "load", "load"]
    (_, begun), (_, of_model), (_, of_drafter) = called
    assert begun is of_drafter is not of_model


def test_the_pages_that_are_said_to_have_a_row_for_drafts_have_one() -> None:
    (said,) = re.findall(r"^.*have a row for drafts\.", (DOCS / "speculation.md").read_text(), re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([\w/-]+\.md)", said.rpartition("\n\n")[2])
    assert len(links) > 6
    for link in links:
        rows = [line for line in (DOCS / link).read_text().splitlines() if line.startswith("| ")]
        assert any(re.search("draft|specul", row) for row in rows), link
