"""The table of docs/rollouts.md: an engine with each feature is, after an update, one that started with its weights.

So it is after sleep. Memory that was given back holds NaN here, as far as it is this process's.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.errors import ConfigError, WeightUpdateError
from tests.adapters.tiny_adapters import Adapters
from tests.e2e.test_weight_updates import tensors_of, write_changed
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as shape_of
from tests.sample import slow_but_a_sample
from tests.sleeping_arena import Machine
from tests.tiny_model import TINY, engine_of_pages, tiny_config
from tests.tiny_vision import image, media_prompt, save_vision_model, vision_engine_config

PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"
PROMPTS = [[41, 30, 77, 102, 5, 90, 12, 5] * 2, [7, 7, 81, 7, 7, 81, 7, 7, 81], list(range(3, 34))]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
EAGER = {"backend": "eager"}


def answers(engine: Engine, **options: Any) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY, **options)]


def update_while_running(engine: Engine, folder: Path, mode: str) -> None:
    """With requests that are kept over the update, and their prompts in the prefix cache."""
    running = [engine.stream(prompt, GREEDY) for prompt in PROMPTS]
    for stream in running:
        next(stream)
    engine.pause(mode)
    engine.update_weights_from_folder(folder)
    engine.resume()
    for stream in running:
        assert list(stream)[-1].finish_reason == "length"


def sleep_while_running(engine: Engine, folder: Path, expected: list[list[int]]) -> None:
    """With requests that are computed anew; the folder's weights come again after level 2."""
    for level in (1, 2):
        running = [engine.stream(prompt, GREEDY) for prompt in PROMPTS]
        for stream in running:
            next(stream)
        engine.sleep(level, "retract")
        engine.wake_up(["weights"])
        if level == 2:
            engine.update_weights(tensors_of(folder).items())
        engine.wake_up()
        for stream in running:
            assert list(stream)[-1].finish_reason == "length"
        assert answers(engine) == expected


def check(
    cache: Path,
    scratch: Path,
    served: Path = TINY,
    num_pages: int | None = None,
    quantization: str = "auto",
    **sections: Any,
) -> None:
    other = write_changed(served, scratch / "other")
    sections["runtime"] = sections.get("runtime", {}) | {"enable_sleep_mode": True}
    config, fresh_config = (
        tiny_config(cache, model={"path": str(folder), "quantization": quantization}, compile=EAGER, **sections)
        for folder in (served, other)
    )
    with engine_of_pages(fresh_config, num_pages) as fresh:
        expected = answers(fresh)
    with engine_of_pages(config, num_pages) as engine:
        before = answers(engine)
        for mode in ("keep", "retract"):
            update_while_running(engine, other, mode)
            assert answers(engine) == expected != before
            engine.update_weights(tensors_of(served).items())
            assert answers(engine) == before
        sleep_while_running(engine, served, before)


def check_weights(cache: Path, scratch: Path) -> None:
    save_tiny_model(shape_of("mixtral", tie_word_embeddings=True), scratch / "model")
    check(scratch / "cache", scratch, scratch / "model", quantization="int4", runtime={"max_model_len": 64})


def check_states(cache: Path, scratch: Path) -> None:
    save_tiny_model(shape_of("qwen3_next"), scratch / "model")
    check(scratch / "cache", scratch, scratch / "model", runtime={"max_model_len": 64, "page_size": 4})


def check_images_and_determinism(cache: Path, scratch: Path) -> None:
    check(cache, scratch, runtime={"deterministic": True, "max_num_batched_tokens": 16, "max_running_requests": 8})
    folder = scratch / "model"
    save_vision_model("qwen2_vl", folder)
    changed = write_changed(folder, scratch / "changed")
    prompts = [media_prompt([5, 6], image(1, (1, 4, 6)), [7, 8]), [9, 10, 11]]

    def say(engine: Engine) -> list[list[int]]:
        return [output.token_ids for output in engine.generate(prompts, GREEDY)]

    with Engine(vision_engine_config(changed, scratch / "cache")) as fresh:
        expected = say(fresh)
    with Engine(vision_engine_config(folder, scratch / "cache", enable_sleep_mode=True)) as engine:
        before = say(engine)
        engine.update_weights_from_folder(changed)  # features of the image are of other weights
        assert say(engine) == expected != before
        engine.sleep(2)
        engine.wake_up(["weights"])
        engine.update_weights_from_folder(folder)
        engine.wake_up()
        assert say(engine) == before


def check_drafts_and_adapters(cache: Path, scratch: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    check(cache, scratch, speculative=drafts)
    adapters = Adapters(scratch / "adapters")
    other = write_changed(scratch / "adapters" / "model", scratch / "adapters" / "other")
    with Engine(adapters.config(scratch / "cache", runtime={"enable_sleep_mode": True})) as engine:
        adapters.load(engine)
        asked = partial(answers, engine, adapter=["all", None, "some"])
        before = asked()
        engine.sleep(1)
        engine.wake_up()
        assert asked() == before
        engine.sleep(2)
        engine.wake_up()
        engine.update_weights_from_folder(other)
        found = asked()
        first = scratch / "adapters" / "model"
        first.rename(scratch / "adapters" / "kept")
        shutil.copytree(other, first)
    with Engine(adapters.config(scratch / "cache")) as fresh:
        adapters.load(fresh)
        assert found == answers(fresh, adapter=["all", None, "some"]) != before


def refused(message: str, asleep: str, **sections: Any) -> Callable[[Path, Path], None]:
    def run(cache: Path, scratch: Path) -> None:
        sleepy = sections | {"runtime": sections.get("runtime", {}) | {"enable_sleep_mode": True}}
        with (
            pytest.raises((ConfigError, WeightUpdateError), match=asleep),
            Engine(tiny_config(cache, compile=EAGER, **sleepy)) as engine,
        ):
            engine.sleep(1)
            engine.wake_up()
            assert len(answers(engine)) == len(PROMPTS)
            engine.sleep(2)
        with Engine(tiny_config(cache, compile=EAGER, **sections)) as engine:
            with pytest.raises(WeightUpdateError, match=message):
                engine.update_weights(tensors_of(TINY).items())
            assert engine.state == "running"
            with suppress(WeightUpdateError):
                engine.weights.start(direct=True)
            assert len(answers(engine)) == len(PROMPTS)

    return run


SKIPPED = refused("runtime.skip_compiled is set", "keeps its memory", runtime={"skip_compiled": True})
DORA = refused("lora.dora is set", "lora.dora is set", lora={"max_adapters": 1, "dora": True})
CHECKS: dict[str, tuple[str, str, Callable[[Path, Path], None]]] = {
    "tied, packed, expert, quantised weights": ("works", "works", check_weights),
    "prefix cache, preemption": (
        "works",
        "works",
        partial(check, num_pages=5, runtime={"page_size": 16, "max_model_len": 48}),
    ),
    "recurrent states": ("works", "works", check_states),
    "images, deterministic mode": ("works", "works", check_images_and_determinism),
    "drafts, adapters": (
        "works; a drafter's own weights and adapters stay as they are",
        "works; they stay as they are",
        check_drafts_and_adapters,
    ),
    "several ranks": ("works", "works", partial(check, runtime={"tensor_parallel_size": 2})),
    "`skip_compiled`": ("refused", "refused", SKIPPED),
    "`lora.dora`": ("refused", "refused at level 2", DORA),
}


def test_the_page_says_what_is_tested_here():
    says = "((?:works|refused)[^|]*)"
    table = PAGE.read_text().partition("| feature | with updates | with sleep |")[2].partition("\n\n")[0]
    rows = re.findall(rf"^\| ([^|]+) \| {says} \| {says} \|$", table, re.MULTILINE)
    assert rows == [(feature, *columns) for feature, (*columns, _) in CHECKS.items()]


@pytest.fixture(autouse=True)
def lost_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and KV caches of this process are lost where sleep says so."""
    machine = Machine()
    for module in ("store.source", "runtime.model_runner"):
        monkeypatch.setattr(f"mllm_compile.{module}.arena_on", lambda device: machine.arena())


@pytest.mark.parametrize("feature", slow_but_a_sample(CHECKS, 1))
def test_a_feature_works_with_updates_and_sleep_or_is_refused_by_name(feature, eager_cache, tmp_path):
    CHECKS[feature][2](eager_cache, tmp_path)
