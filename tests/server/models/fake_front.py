"""A server of several models over fake_backend.py: `python -m tests.server.models.fake_front OPTIONS MODELS SETTINGS`.

OPTIONS are of ServeOptions, MODELS of ModelsOptions but for the sources, SETTINGS of fake_backend.py by name; all JSON.
"""

from __future__ import annotations

import json
import logging
import sys

from mllm_compile.errors import MllmError
from mllm_compile.process.log_lines import start_log
from mllm_compile.server.options import ModelsOptions, ServeOptions
from mllm_compile.server.serve import run_models


def main() -> None:
    options, models, settings = map(json.loads, sys.argv[1:])
    start_log(logging.INFO, "text", "%(message)s")
    several = ModelsOptions(sources={name: name for name in settings}, **models)
    try:
        run_models(
            ServeOptions(model="", **options),
            several,
            lambda own: (
                lambda descriptor: [
                    sys.executable, "-m", "tests.server.fake_backend", descriptor, json.dumps(settings[own.model]),
                ]
            ),
        )  # fmt: skip
    except MllmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
