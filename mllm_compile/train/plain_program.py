"""The program that gradients go through: the same trace without a pass that is only for speed.

Its pieces run as they were traced, under autograd. Its weights are Transformers' parameters, a tensor each, where the
served program has packed some. It is a cached runtime of its own, compiled in seconds, and holds no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.schema import EngineConfig
from mllm_compile.passes.gather_rows_early import GatherRowsEarly
from mllm_compile.passes.pipeline import optional_pass_names
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime import ops
from mllm_compile.runtime.program.pieces import piece_class
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.weights.spec import WeightSpec
from mllm_compile.store.artifact import Artifact
from mllm_compile.store.source import load_constants

Piece = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class PlainProgram:
    """A program of differentiable pieces.

    Attributes:
        program: its steps.
        pieces: piece id → its function of tensors.
        weights: Transformers' parameters by name, and the tensors of the checkpoint that fill them.
        constants: weights that no checkpoint holds.
    """

    program: Program
    pieces: Mapping[str, Piece]
    weights: tuple[WeightSpec, ...]
    constants: Mapping[str, torch.Tensor]


def load_plain_program(config: ResolvedConfig, device: torch.device, timeline: Timeline) -> PlainProgram:
    """Finds or compiles the plain program of a model that is served with `config`.

    Raises:
        MllmError: the model cannot be compiled so.
    """
    artifact = load_or_compile(_plain(config), timeline).artifact
    pieces: dict[str, Piece] = {}
    for name, data in artifact.pieces.items():
        source = data.decode()
        ops.define(source)
        pieces[name] = piece_class(source, Path(name))()
    return PlainProgram(artifact.program, pieces, weights_of_text(artifact), load_constants(artifact, device))


def weights_of_text(artifact: Artifact) -> tuple[WeightSpec, ...]:
    """The weights of an artifact's text: where layers of it attend to images, other programs have more."""
    own = set(artifact.program.weights)
    return tuple(spec for spec in artifact.weights if spec.name in own)


def _plain(config: ResolvedConfig) -> EngineConfig:
    """The config of the plain program. One pass for speed stays: the head is then a step of its own, which is run for
    some rows at a time."""
    passes = [name for name in optional_pass_names() if name != GatherRowsEarly.name]
    sections = config.as_config().model_dump(mode="json")
    runtime = {name: sections["runtime"][name] for name in ("device", "max_model_len", "seed")}
    return EngineConfig.from_dict(
        {
            "model": sections["model"],
            "compile": {"backend": "eager", "disable_passes": passes},
            "cudagraph": {"mode": "none"},
            "runtime": {**runtime, "attention_backend": "torch"},
            "cache": sections["cache"],
        }
    )
