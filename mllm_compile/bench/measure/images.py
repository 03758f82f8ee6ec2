"""Times prompts with images through an engine: new ones, the same again, and text alone of the same length."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.adapters.base import ImageEngine
from mllm_compile.bench.measure.workloads import Call, ImagesWork, PromptIds, largest_token_id
from mllm_compile.bench.timing.clock import wall_seconds
from mllm_compile.bench.timing.rounds import by_turns
from mllm_compile.process.progress import reporter_for

Seconds = dict[str, list[float]]


def features_a_side(model_folder: str, side: int) -> int:
    """Features along a side of a square image of side × side pixels, rounded as the processors of towers with grids
    do.

    Raises:
        BenchmarkError: the model's config.json tells of no such tower.
    """
    vision = json.loads((Path(model_folder) / "config.json").read_bytes()).get("vision_config", {})
    try:
        side_patches: int = max(1, round(side / (vision["patch_size"] * vision["spatial_merge_size"])))
        return side_patches
    except (KeyError, TypeError):
        raise BenchmarkError(
            f"images are not measured: {model_folder}/config.json has no vision_config with patch_size and "
            "spatial_merge_size. Give a model whose tower takes patches with grids."
        ) from None


def measure_images(engine: ImageEngine, work: ImagesWork, batch: int, vocab_size: int, name: str) -> Seconds:
    """Seconds of each call by its name, `work.repeats` of them after one warm-up; the calls take turns.

    Names: "new images", "same images" and "text" make one token a request, "whole, behind images" and "whole, text" all
    of them. New images are new in every repeat, and so is all text.

    Args:
        name: shown beside what is left.
    """
    draw = random.Random(batch)
    last = largest_token_id(vocab_size)
    seeds = itertools.count()
    images: list[object] = []

    def ids(length: int) -> PromptIds:
        return [[draw.randint(0, last) for _ in range(length)] for _ in range(batch)]

    half = work.text_len // 2
    length = engine.num_features(work.side) + work.text_len

    def behind_images() -> list[object]:
        befores, afters = ids(half), ids(work.text_len - half)
        return [engine.prompt(*parts) for parts in zip(befores, images, afters, strict=True)]

    def behind_new_images() -> list[object]:
        images[:] = [engine.image(work.side, next(seeds)) for _ in range(batch)]
        return behind_images()

    def text() -> list[object]:
        return list(ids(length))

    with reporter_for(plain_lines=True).stage(name, total=5 * (1 + work.repeats)) as stage:

        def take(prompts: Callable[[], list[object]], max_tokens: int) -> float:
            call = Call(prompts=prompts(), max_tokens=[max_tokens] * batch)
            seconds = wall_seconds(lambda: engine.generate(call))
            stage.advance()
            return seconds

        takes = {
            "new images": partial(take, behind_new_images, 1),
            "same images": partial(take, behind_images, 1),
            "whole, behind images": partial(take, behind_images, work.output_len),
            "text": partial(take, text, 1),
            "whole, text": partial(take, text, work.output_len),
        }
        return by_turns(takes, work.repeats)
