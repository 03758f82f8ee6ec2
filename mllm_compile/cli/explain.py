"""`mllm-compile explain CONFIG.yaml`: whether there is a runtime for a config and why not, and the key's factors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mllm_compile.cli.arguments import ConfigArgument
from mllm_compile.config.schema import EngineConfig
from mllm_compile.process.console import print_table

if TYPE_CHECKING:
    from mllm_compile.compiler.target import Target


def explain_command(config: ConfigArgument) -> None:
    """Say whether a config has a compiled runtime; if not, what changed since the nearest one."""
    engine_config = EngineConfig.from_yaml(config)

    from mllm_compile.compiler.target import find_target
    from mllm_compile.store.key import key_of

    target = find_target(engine_config)
    _say_whether_it_is_compiled(target)
    print_table(sys.stdout, f"key {key_of(target.factors)}", ("factor", "value"), list(target.factors.items()))


def _say_whether_it_is_compiled(target: Target) -> None:
    from mllm_compile.errors import ArtifactError
    from mllm_compile.store.artifact import open_artifact
    from mllm_compile.store.explain import changes, nearest_runtime

    try:
        open_artifact(target.folder)
        print(f"compiled: {target.folder}")
        return
    except ArtifactError as error:
        print(f"not compiled: {error}")
    nearest = nearest_runtime(target.factors, target.config.cache.dir)
    if nearest is None:
        print("no runtime of this model was compiled yet")
        return
    changed = [(change.factor, change.then, change.now) for change in changes(target.factors, nearest.factors)]
    if changed:
        print_table(sys.stdout, "changed since the nearest runtime", ("factor", "then", "now"), changed)
