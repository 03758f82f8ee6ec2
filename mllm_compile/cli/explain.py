"""`mllm-compile explain CONFIG.yaml`: whether there is a runtime for a config and why not, and the key's factors."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mllm_compile.cli.arguments import ConfigArgument
from mllm_compile.config.schema import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mllm_compile.compiler.target import Target
    from mllm_compile.store.explain import Change


def explain_command(
    config: ConfigArgument,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every value whole.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of text.")] = False,
) -> None:
    """Say whether a config has a compiled runtime; if not, what changed since the nearest one."""
    engine_config = EngineConfig.from_yaml(config)

    from mllm_compile.cli.key_text import print_changes, print_key
    from mllm_compile.compiler.target import find_target
    from mllm_compile.store.explain import nearest_changes

    target = find_target(engine_config)
    problem = _problem(target)
    changes = None if problem is None else nearest_changes(target.factors, target.config.cache.dir)
    if as_json:
        print(json.dumps(_as_json(target, problem, changes), indent=1))
        return
    print(f"compiled: {target.folder}" if problem is None else f"not compiled: {problem}")
    if problem is not None and changes is None:
        print("no runtime of this model was compiled yet")
    if changes:
        print_changes(sys.stdout, changes, verbose)
    print_key(sys.stdout, target.factors, verbose)


def _problem(target: Target) -> str | None:
    """Why the target's folder cannot be served from; None: it can."""
    from mllm_compile.errors import ArtifactError
    from mllm_compile.store.artifact import open_artifact

    try:
        open_artifact(target.folder)
    except ArtifactError as error:
        return str(error)
    return None


def _as_json(target: Target, problem: str | None, changes: Sequence[Change] | None) -> dict[str, object]:
    from mllm_compile.store.key import key_of

    return {
        "compiled": problem is None,
        "problem": problem,
        "folder": str(target.folder),
        "key": key_of(target.factors),
        "factors": dict(target.factors),
        "changed": None if changes is None else [asdict(change) for change in changes],
    }
