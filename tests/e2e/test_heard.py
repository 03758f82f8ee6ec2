"""The whole way of prompts with sounds, for every protocol of their towers. Tokens equal Transformers', from its own
forward in float32, in any batch and for any cut, cached or recomputed prompt.

In `make test` one model goes through all tests of `served`, another by commit.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.engine.engine import Engine as AnyEngine
from mllm_compile.errors import RequestError
from mllm_compile.runtime.program.images import ImageEncoder
from mllm_compile.runtime.step import media_steps
from tests.fakes import all_pages_are_back
from tests.sample import sample_of
from tests.stand_in_timm import standing_in
from tests.tiny_model import engine_of_pages
from tests.tiny_sounds import (
    CHUNK,
    CHUNK_MODELS,
    CLIP_MODELS,
    CONFORMER_MODELS,
    FRAMES,
    OF_BOTH,
    WINDOW_MODELS,
    Patches,
    Sound,
    chunk_of,
    save_sound_model,
    sound_prompt,
    transformers_greedy,
    transformers_logprobs,
)
from tests.tiny_vision import vision_engine_config

MAX_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
TEXT = [3, 4, 5, 6, 7]
GROUPS = (WINDOW_MODELS, CHUNK_MODELS, CONFORMER_MODELS, CLIP_MODELS)
MODELS = tuple(name for group in GROUPS for name in group)
USUAL = sample_of(MODELS, 1)


@dataclass(frozen=True)
class Served:
    """A model's folder, prompts, and Transformers' answers to them."""

    kind: str
    folder: Path
    model: Any
    every: list[Any]
    answers: list[list[int]]

    def prompt(self, *parts: Any) -> Any:
        return sound_prompt(self.kind, *parts)

    def config(self, **runtime: Any) -> Any:
        return vision_engine_config(self.folder, self.folder / "cache", **runtime)

    def engine(self, **runtime: Any) -> AnyEngine:
        return Engine(self.config(**runtime))


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in MODELS]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    with standing_in() if kind in CLIP_MODELS else nullcontext():
        yield _served(kind, folder)


def _served(kind: str, folder: Path) -> Served:
    whole = chunk_of(kind)
    every = [
        sound_prompt(kind, [5, 6], Sound(1, whole), [7, 8]),
        sound_prompt(kind, [5, 6], Sound(2, whole // 2 + 3), [7, 8, 9], Sound(3, 2 * whole + 17), [9]),
        TEXT,
        sound_prompt(kind, [11], Sound(4, _long(kind) - 4), [12] * 5, Sound(2, whole // 2 + 3), [4] * 3),
        sound_prompt(kind, [4, 3], Sound(5, 21)),  # the first token follows a feature
    ]
    model = save_sound_model(kind, folder)
    return Served(kind, folder, model, every, [transformers_greedy(model, prompt, MAX_TOKENS) for prompt in every])


def _long(kind: str) -> int:
    """Frames of a sound with more features than a step of few tokens."""
    return 3 * CHUNK if kind in CHUNK_MODELS else 5 * FRAMES


def tokens(engine: AnyEngine, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.token_ids) for output in engine.generate(prompts, params)]


def test_answers_match_transformers_in_one_batch_and_alone(served: Served) -> None:
    with served.engine(enable_prefix_cache=False) as engine:
        assert tokens(engine, served.every) == served.answers
        assert [tokens(engine, [prompt])[0] for prompt in served.every] == served.answers
        assert tokens(engine, served.every * 3) == served.answers * 3
        (output,) = engine.generate([served.every[1]], replace(GREEDY, prompt_logprobs=0, max_tokens=1))
        assert all_pages_are_back(engine)
    ours = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
    assert np.abs(np.array(ours) - transformers_logprobs(served.model, served.every[1]).numpy()).max() < 1e-4


def test_steps_of_few_tokens_cut_prompts_anywhere_and_a_hit_may_end_within_a_sound(served: Served) -> None:
    other = served.prompt([11], Sound(6, _long(served.kind) - 4), [12])  # as the long one, with another sound
    with served.engine(max_num_batched_tokens=9) as engine:
        assert tokens(engine, served.every) == served.answers
        before = engine.stats().prefix_hit_tokens
        assert tokens(engine, [other]) == [transformers_greedy(served.model, other, MAX_TOKENS)]
        assert engine.stats().prefix_hit_tokens == before
        assert [tokens(engine, [prompt])[0] for prompt in served.every] == served.answers
        assert engine.stats().prefix_hit_tokens >= before + 32
        assert all_pages_are_back(engine)


def test_a_preempted_prompt_is_computed_again(served: Served) -> None:
    params, prompts = replace(GREEDY, max_tokens=40), served.every[:1] * 3
    expected = [transformers_greedy(served.model, prompts[0], 40)] * 3
    with engine_of_pages(served.config(enable_prefix_cache=False), 8) as engine:
        assert tokens(engine, prompts, params) == expected
        assert engine.stats().preemptions > 0


def test_a_run_of_a_tower_counts_the_filling_of_short_sounds(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = chunk_of(served.kind)
    prompt = served.prompt(*(part for seed in range(9) for part in (Sound(seed, whole // 2), [5])))
    expected, chunks = transformers_greedy(served.model, prompt, MAX_TOKENS), list[int]()
    encode = ImageEncoder.encode

    def noted(encoder: ImageEncoder, pixels: Any, grids: Any, of_sounds: bool = False) -> Any:
        chunks.append(len(pixels))
        return encode(encoder, pixels, grids, of_sounds)

    of_a_chunk = int(served.prompt(Sound(0, whole)).is_feature.sum())
    monkeypatch.setattr(media_steps, "FEATURES_OF_A_RUN", 4 * of_a_chunk)
    with served.engine() as engine:
        monkeypatch.setattr(ImageEncoder, "encode", noted)
        assert tokens(engine, [prompt]) == [expected]
    assert max(chunks) == 4 and sum(chunks) == 9, chunks


def test_a_sound_and_an_image_in_one_prompt(served: Served) -> None:
    prompt = served.prompt(
        *(
            [5, 86],
            Sound(1, 150),
            [87, 92],
            Patches(2, 4, 6),
            [93, 7, 92],
            Patches(3, 8, 14),
            [93, 86],
            Sound(4, 40),
            [87],
        )
    )
    with served.engine() as engine:
        if served.kind not in OF_BOTH:
            with pytest.raises(RequestError, match=r"expected input_features|placeholders"):
                engine.generate(prompt, GREEDY)
            assert tokens(engine, served.every[:1]) == served.answers[:1]
            return
        expected = transformers_greedy(served.model, prompt, MAX_TOKENS)
        mixed = [prompt, served.every[0], TEXT, prompt]
        assert tokens(engine, mixed) == [expected, served.answers[0], served.answers[2], expected]
        assert tokens(engine, [prompt]) == [expected], "by the cache"


@pytest.mark.slow  # the pieces of text, text with features and tower: a minute of two cores for each
@pytest.mark.parametrize("kind", ["qwen2_audio", "qwen2_5_omni_thinker", "gemma4", "granite_speech"])
def test_a_compiled_runtime_hears_in_a_process_without_transformers(kind: str, tmp_path: Path) -> None:
    model = save_sound_model(kind, tmp_path / "model")
    every = [sound_prompt(kind, [5], Sound(1, chunk_of(kind)), [7], Sound(2, 30), [8]), TEXT]
    expected = [transformers_greedy(model, prompt, MAX_TOKENS) for prompt in every]
    with Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache", "inductor")) as engine:
        assert tokens(engine, every) == expected
    places = [str(tmp_path / name) for name in ("model", "cache")]
    code = (
        "import sys; from pathlib import Path; from mllm_compile import Engine\n"
        "from tests.e2e.test_heard import TEXT, Sound, chunk_of, sound_prompt, tokens, vision_engine_config\n"
        f"config = vision_engine_config(*map(Path, {places}), 'inductor')\n"
        f"every = [sound_prompt({kind!r}, [5], Sound(1, chunk_of({kind!r})), [7], Sound(2, 30), [8]), TEXT]\n"
        "with Engine(config) as engine: print(tokens(engine, every))\n"
        "assert not {'transformers', 'torch._dynamo', 'torch._inductor'} & set(sys.modules)\n"
    )
    warm = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert warm.stdout.strip().splitlines()[-1] == str(expected)
