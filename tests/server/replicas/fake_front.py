"""Several engines of one model: `python -m tests.server.replicas.fake_front OPTIONS COUNT SETTINGS`.

Its engines are forks of it (tests/server/models/forked.py) that run fake_backend.py.
"""

from __future__ import annotations

import json
import logging
import sys

from mllm_compile.errors import MllmError
from mllm_compile.process.log_lines import start_log
from mllm_compile.server import engine_process
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.serve import run_replicas
from tests.server.models.forked import ForkedGroup


def main() -> None:
    options, count, settings = map(json.loads, sys.argv[1:])
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    start_log(logging.INFO, "text", text="%(message)s")
    engine_process.ProcessGroup = ForkedGroup  # type: ignore[assignment,misc]
    try:
        run_replicas(
            ServeOptions(model="fake", **options),
            (None,) * count,
            lambda own: lambda descriptor: [own.name_in_log, descriptor, json.dumps(settings)],
        )
    except MllmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
