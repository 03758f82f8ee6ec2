"""`mllm-compile CONFIG.yaml`: compile, or find what was compiled before."""

from __future__ import annotations

import sys

from mllm_compile.cli.arguments import ConfigArgument
from mllm_compile.config import EngineConfig
from mllm_compile.console import print_table
from mllm_compile.progress import reporter_for


def compile_command(config: ConfigArgument) -> None:
    """Compile the model of a config into a cached runtime (the default command)."""
    engine_config = EngineConfig.from_yaml(config)

    from mllm_compile.compile import load_or_compile

    runtime = load_or_compile(engine_config, reporter_for(plain_lines=True))
    if runtime.was_cached:
        print(f"already compiled: {runtime.folder}")
        return
    total = sum(seconds for _, seconds in runtime.stages)
    rows = [(name, f"{seconds:.2f}") for name, seconds in runtime.stages]
    print_table(sys.stdout, "compiled", ("stage", "seconds"), [*rows, ("total", f"{total:.2f}")])
    print(f"pieces: {runtime.num_pieces}, distinct: {runtime.num_distinct_pieces}")
    print(f"runtime: {runtime.folder}")
