"""`mllm-compile explain MODEL`: whether there is a runtime for a model and why not, and the key's factors."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mllm_compile.cli.arguments import ModelArgument
from mllm_compile.config.sources import config_or_runtime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mllm_compile.compiler.target import Target
    from mllm_compile.config.resolved import ResolvedConfig
    from mllm_compile.config.schema import EngineConfig
    from mllm_compile.store.artifact import Artifact
    from mllm_compile.store.explain import Change


@dataclass(frozen=True)
class _Explained:
    """
    Attributes:
        folder: where the runtime is or would be.
        problem: why it cannot be served from; None: it can.
        changes: since the nearest runtime of the model; None without such a runtime.
        weights: what becomes of quantised weights; None where they are plain, or a runtime's own.
        steps: what the compile found of deterministic steps that the key's factors do not say.
    """

    folder: Path
    factors: Mapping[str, str]
    problem: str | None
    changes: Sequence[Change] | None = None
    weights: str | None = None
    steps: str | None = None


def explain_command(
    model: ModelArgument,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every value whole.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of text.")] = False,
) -> None:
    """Say whether a model has a compiled runtime; if not, what changed since the nearest one."""
    source = config_or_runtime(model)
    explained = _of_runtime(source) if isinstance(source, Path) else _of_config(source, model)
    if as_json:
        print(json.dumps(_as_json(explained), indent=1))
        return

    from mllm_compile.cli.key_text import print_changes, print_key, print_patches

    print(f"not compiled: {explained.problem}" if explained.problem else f"compiled: {explained.folder}")
    for line in (explained.weights, explained.steps):
        if line:
            print(line)
    if explained.changes:
        print_changes(sys.stdout, explained.changes, verbose)
    print_key(sys.stdout, explained.factors, verbose)
    if verbose:
        print_patches(sys.stdout)


def _of_config(config: EngineConfig, model: str) -> _Explained:
    from mllm_compile.compiler.target import alike_target, find_target, has_alike_steps
    from mllm_compile.store.explain import nearest_changes

    target = find_target(config)
    changes = nearest_changes(target.factors, target.config.cache.dir)
    found = _artifact(target, model, is_known=changes is not None)
    weights = _quantised(target)
    if isinstance(found, str):
        return _Explained(target.folder, target.factors, found, changes, weights)
    steps = _steps(alike_target(config, target).config) if has_alike_steps(target, found) else None
    return _Explained(target.folder, target.factors, None, None, weights, steps)


def _steps(config: ResolvedConfig) -> str:
    from mllm_compile.compiler.target import alike_steps

    return f"{alike_steps(config)}, as was found when this runtime was compiled"


def _quantised(target: Target) -> str | None:
    if target.model.scheme is None or not target.model.weight_files:
        return None
    import torch

    from mllm_compile.checkpoint.tensors import read_model_tensors

    model = target.model
    tensors = read_model_tensors(model)
    return tensors.line(getattr(torch, target.config.model.dtype), target.config.model.keeps_weights)


def _of_runtime(folder: Path) -> _Explained:
    """Tells if an engine can be made from the folder as it is."""
    from mllm_compile.compiler.load_or_compile import open_runtime
    from mllm_compile.errors import MllmError
    from mllm_compile.store.artifact import read_manifest
    from mllm_compile.store.key import asks_for_any_rows

    factors = read_manifest(folder).factors
    try:
        config = open_runtime(folder).config
    except MllmError as error:
        return _Explained(folder, factors, str(error))
    is_alike = asks_for_any_rows(factors) and not config.runtime.any_rows
    return _Explained(folder, factors, None, steps=_steps(config) if is_alike else None)


def _artifact(target: Target, model: str, is_known: bool) -> Artifact | str:
    """The target's runtime, or the reason why it cannot be served from.

    Args:
        model: the argument as it was given.
        is_known: there is a runtime of the model, if another.
    """
    from mllm_compile.errors import ArtifactError
    from mllm_compile.store.artifact import open_artifact

    if not os.path.lexists(target.folder):
        which = "the model as it is asked for now" if is_known else "this model yet"
        return f"there is no runtime of {which}; `mllm-compile {model}` makes one"
    try:
        return open_artifact(target.folder)
    except ArtifactError as error:
        return str(error)


def _as_json(explained: _Explained) -> dict[str, object]:
    from mllm_compile.store.key import key_of

    return {
        "compiled": explained.problem is None,
        "problem": explained.problem,
        "folder": str(explained.folder),
        "key": key_of(explained.factors),
        "factors": dict(explained.factors),
        "weights": explained.weights,
        "steps": explained.steps,
        "changed": None if explained.changes is None else [asdict(change) for change in explained.changes],
    }
