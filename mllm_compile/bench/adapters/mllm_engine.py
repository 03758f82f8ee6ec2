"""Our own engine, through its public interface."""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.adapters.base import check_output
from mllm_compile.bench.measure.images import features_a_side
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.measure.workloads import Call
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.engine.async_engine import AsyncEngine
from mllm_compile.engine.engine import Engine
from mllm_compile.media.prompt import MediaItem, MediaPrompt
from mllm_compile.process.progress import reporter_for
from mllm_compile.runtime.media.grids import GridTower
from mllm_compile.runtime.media.tower import Grid
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.version import __version__


def settings_of(config: ResolvedConfig | None) -> dict[str, Any]:
    """The settings for a record that others read too: without this machine's folders, which say nothing of speed."""
    if config is None:
        return {}
    settings = config.model_dump(mode="json", exclude={"cache": True, "model": {"folder"}})
    return {section: _without_folders(values) for section, values in settings.items()}


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    if not isinstance(value, str) or not Path(value).is_absolute():
        return value
    path, here = Path(value), Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.name


class MllmEngine:
    """See BenchEngine."""

    version = __version__

    def __init__(self, setting: Setting) -> None:
        self._engine = Engine(setting.engine_config(), reporter=reporter_for(plain_lines=True), log_interval_s=0.0)
        config = self._engine.config
        self.settings = settings_of(config)
        self.start_parts = dict(self._engine.timeline.stages)
        self.kv_tokens = None
        if config is not None:
            self.kv_tokens = self._engine.stats().kv_pages_total * config.runtime.page_size

    def generate(self, call: Call) -> None:
        params = [
            SamplingParams(temperature=call.temperature, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in call.max_tokens
        ]
        outputs = self._engine.generate(call.prompts, params, progress=False)
        for output in outputs:
            if output.error is not None:
                raise BenchmarkError(f"a request failed: {output.error}")
        check_output(call, [len(output.token_ids) for output in outputs])

    def close(self) -> None:
        self._engine.close()


class MllmImages(MllmEngine):
    """See ImageEngine. Images are random patches: no processor is asked for them."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        tower = self._engine.tower
        if isinstance(tower, str):
            self.close()
            raise BenchmarkError(f"images are not measured: {tower}")
        if type(tower) is not GridTower:
            self.close()
            raise BenchmarkError("images are measured of models whose processor gives patches with grids")
        self._tower = tower
        self._folder = setting.model_folder

    def image(self, side: int, seed: int) -> MediaItem:
        grid = self._grid(side)
        patches = np.random.default_rng(seed).standard_normal((math.prod(grid), self._tower.patch_width), np.float32)
        digest = hashlib.sha256(f"{side} {seed}".encode()).digest()
        tensors = {"pixel_values": patches, "image_grid_thw": np.array([grid])}
        return MediaItem("image", 0, self._tower.num_features(grid), digest, tensors)

    def num_features(self, side: int) -> int:
        return self._tower.num_features(self._grid(side))

    def prompt(self, before: list[int], image: MediaItem, after: list[int]) -> MediaPrompt:
        places = (self._tower.image_token_id, self._tower.video_token_id)
        before, after = ([0 if token in places else token for token in text] for text in (before, after))
        token_ids = [*before, *[self._tower.image_token_id] * image.length, *after]
        is_feature = np.zeros(len(token_ids), dtype=bool)
        is_feature[len(before) : len(before) + image.length] = True
        return MediaPrompt(token_ids, (replace(image, start=len(before)),), is_feature)

    def _grid(self, side: int) -> Grid:
        patches = features_a_side(self._folder, side) * self._tower.merge
        return 1, patches, patches


class MllmStreams:
    """See StreamEngine."""

    version = __version__

    def __init__(self, setting: Setting) -> None:
        engine = Engine(setting.engine_config(), reporter=reporter_for(plain_lines=True), log_interval_s=0.0)
        self._engine = AsyncEngine(engine)
        self.settings = settings_of(engine.config)

    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        async for output in self._engine.generate(prompt, params):
            yield len(output.token_ids)

    async def close(self) -> None:
        await self._engine.close()


def open_streams(setting: Setting) -> MllmStreams:
    """Compiles first when nothing cached fits."""
    return MllmStreams(setting)


def open_images(setting: Setting) -> MllmImages:
    """Compiles first when nothing cached fits."""
    return MllmImages(setting)


def open_engine(setting: Setting) -> MllmEngine:
    """Compiles first when nothing cached fits."""
    return MllmEngine(setting)
