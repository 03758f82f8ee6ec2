"""A model without an engine: its ModelRunner is driven by hand (docs/low-level.md, examples/low_level.py).

The caller does the work of scheduler, step runner and sampler. `open_model` finds or compiles the runtime; `read` makes
token ids of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from mllm_compile.compiler.load_or_compile import load_or_compile, open_runtime
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.sources import EngineSource, config_or_runtime
from mllm_compile.engine.prompts import Message, Prepared, Prompt, PromptReader
from mllm_compile.engine.start.prompts import (
    ends_of_answers,
    load_text_parts,
    media_preprocessor,
    text_files,
    tower_of,
)
from mllm_compile.engine.start.runner import model_source
from mllm_compile.errors import ConfigError
from mllm_compile.process.progress import Reporter, reporter_for
from mllm_compile.process.timeline import Timeline, timeline_of
from mllm_compile.runtime.media.tiles import TileTower
from mllm_compile.runtime.media.tower import Grid
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.store.opened import CompiledRuntime
from mllm_compile.store.source import runner_config
from mllm_compile.text.tokenizer import Tokenizer


class ReadPrompt(NamedTuple):
    """A prompt as a batch takes it.

    Attributes:
        token_ids: with a placeholder for each feature of an image.
        pixel_values: [rows, width] float32 of all images, or None.
        image_grid_thw: frames, rows and columns of patches of each image, or None.
    """

    token_ids: list[int]
    pixel_values: torch.Tensor | None = None
    image_grid_thw: list[Grid] | None = None


class OpenModel:
    """A compiled runtime whose runner is driven by hand.

    Attributes:
        runner: yet to be initialised; `initialize()` loads the weights, `shutdown()` gives all memory back.
        tokenizer: None for a model that came without one.
    """

    def __init__(self, compiled: CompiledRuntime, timeline: Timeline) -> None:
        self.runner = ModelRunner(runner_config(compiled.config), model_source(compiled, timeline))
        self._compiled, self._timeline = compiled, timeline
        self.tokenizer: Tokenizer | None
        self.tokenizer, self._defaults, _ = load_text_parts(compiled, timeline)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer; of a runner that is initialised."""
        return ends_of_answers(self._defaults, self.tokenizer, self.runner.vocab_size, self._timeline)

    def read(self, prompt: Prompt) -> ReadPrompt:
        """Reads a prompt as Engine.generate does; of a runner that is initialised.

        Raises:
            RequestError: the prompt is refused.
        """
        return _read(self._reader.read([prompt])[0])

    def read_chat(self, messages: Sequence[Message]) -> ReadPrompt:
        """Reads a conversation as Engine.chat does; of a runner that is initialised.

        Raises:
            RequestError: the conversation is refused.
        """
        return _read(self._reader.renderer({})(messages))

    @cached_property
    def _reader(self) -> PromptReader:
        compiled = self._compiled
        tower = tower_of(self.runner, compiled)
        if isinstance(tower, TileTower):
            tower = "layers of the model attend to images, which a batch does not bring: an Engine serves them"
        media = media_preprocessor(compiled, text_files(compiled), compiled.config.runtime.max_model_len, tower)
        return PromptReader(self.tokenizer, self.runner.vocab_size, media, tower)


def open_model(config: EngineSource, *, reporter: Reporter | None = None) -> OpenModel:
    """Opens a model to be driven by hand: its compiled runtime, which is compiled first if no cached one fits.

    Args:
        config: as Engine takes it.
        reporter: as Engine takes it.

    Raises:
        ConfigError: the config has several ranks, drafts or adapters.
        MllmError: of the kind that says what is wrong with the config or the model.
    """
    source, timeline = config_or_runtime(config), timeline_of(reporter or reporter_for())
    if isinstance(source, Path):
        compiled = open_runtime(source, timeline)
        _check(compiled.config)
    else:
        _check(source)
        compiled = load_or_compile(source, timeline)
    return OpenModel(compiled, timeline)


def _check(config: EngineConfig | ResolvedConfig) -> None:
    runtime, method = config.runtime, config.speculative.method
    if method != "none":
        raise ConfigError(
            f"speculative.method is {method}; expected none, as the caller makes the steps of a model that is driven "
            "by hand. Leave it out, or use Engine."
        )
    own = config.lora.of_sounds if isinstance(config, ResolvedConfig) else ""
    if named := [name for name in config.lora.adapters if name != own]:
        raise ConfigError(
            f"lora.adapters has {short_repr(named[0])}; expected none, as the caller loads the "
            "adapters of a model that is driven by hand. Leave it out, or use Engine."
        )
    num_ranks = runtime.num_ranks
    if num_ranks > 1:
        raise ConfigError(
            f"the config is of {num_ranks} ranks; expected one, as nobody drives the others by hand. Set "
            "runtime.tensor_parallel_size, pipeline_parallel_size and expert_parallel_size to 1, or use Engine."
        )


def _read(prepared: Prepared) -> ReadPrompt:
    if prepared.error is not None:
        raise prepared.error
    token_ids, media = prepared.token_ids or [], prepared.media
    if media is None or not media.images:
        return ReadPrompt(token_ids)
    pixels = torch.cat([torch.from_numpy(image.pixels) for image in media.images])
    return ReadPrompt(token_ids, pixels, [image.grid for image in media.images])
