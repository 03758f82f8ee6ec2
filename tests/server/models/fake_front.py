"""A server of several models: `python -m tests.server.models.fake_front OPTIONS MODELS SETTINGS`.

Its engines are forks of it (forked.py) that run fake_backend.py. OPTIONS are of ServeOptions, MODELS of ModelsOptions
but for the sources, SETTINGS of fake_backend.py by name; all JSON.
"""

from __future__ import annotations

import json
import logging
import sys

from mllm_compile.errors import MllmError
from mllm_compile.process.log_lines import start_log
from mllm_compile.server import engine_process
from mllm_compile.server.options import ModelsOptions, ServeOptions
from mllm_compile.server.serve import run_models
from tests.server.models.forked import ForkedGroup


def main() -> None:
    options, models, settings = map(json.loads, sys.argv[1:])
    start_log(logging.INFO, "text", text="%(message)s")
    engine_process.ProcessGroup = ForkedGroup  # type: ignore[assignment,misc]
    several = ModelsOptions(sources={name: name for name in settings}, **models)
    try:
        run_models(
            ServeOptions(model="", **options),
            several,
            lambda own: lambda descriptor: [own.model, descriptor, json.dumps(settings[own.model])],
        )
    except MllmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
