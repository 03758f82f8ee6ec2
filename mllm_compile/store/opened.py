"""A runtime that was opened, with all that loading it needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.store.artifact import Artifact


@dataclass(frozen=True)
class CompiledRuntime:
    """A runtime that is ready to be loaded, and its origin.

    Attributes:
        artifact: the opened folder.
        config: the config with no `auto` left.
        weights_root: the folder that weights are read from; where it is the runtime, by its handle.
        was_cached: nothing had to be compiled.
        serves_same: opening the folder directly gives the same config and checkpoint.
        stages: (name, seconds), in order.
        drafter: its draft model's, where it has one; which may have one itself, that drafts on.
    """

    artifact: Artifact
    config: ResolvedConfig
    weights_root: Path
    was_cached: bool
    serves_same: bool
    stages: list[tuple[str, float]] = field(default_factory=list)
    drafter: CompiledRuntime | None = None

    @property
    def folder(self) -> Path:
        return self.artifact.folder

    @property
    def num_pieces(self) -> int:
        return sum(hasattr(step, "piece") for step in self.artifact.program.steps)

    @property
    def num_distinct_pieces(self) -> int:
        return len(self.artifact.program.step_pieces())
