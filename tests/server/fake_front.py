"""A server over fake_backend.py: `python -m tests.server.fake_front OPTIONS SETTINGS`, both JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from mllm_compile.errors import MllmError
from mllm_compile.process import child_python
from mllm_compile.process.log_lines import start_log
from mllm_compile.server import engine_process, supervisor
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.serve import run_server
from mllm_compile.server.spare import Spare

_LEAP_S = 400.0


def leap_while_there(path: Path) -> None:
    """The supervisor's clock leaps each time that it is read while a file is there, which a test makes."""
    leaps = 0

    def monotonic() -> float:
        nonlocal leaps
        leaps += path.exists()
        return time.monotonic() + leaps * _LEAP_S

    supervisor.time = SimpleNamespace(monotonic=monotonic)  # type: ignore[assignment]


def main() -> None:
    given, settings = sys.argv[1:]
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(given).items()}
    if "MLLM_FAKE_LEAPS" in os.environ:
        leap_while_there(Path(os.environ["MLLM_FAKE_LEAPS"]))
    start_log(logging.INFO, options.get("log", "text"), text="%(message)s")
    served = ServeOptions(model="fake", **options)

    def command_of(descriptor: str) -> list[str]:
        return child_python.command("tests.server.fake_backend", descriptor, settings)

    spare = Spare(["tests.server.fake_backend"]) if "MLLM_FAKE_SPARE" in os.environ else None
    try:
        if "MLLM_FAKE_EARLY" not in os.environ:
            run_server(served, command_of, spare=spare)
            return
        engine_process.command_line = lambda options: command_of
        with engine_process.early_engine(served) as early:
            run_server(served, command_of, early)
    except MllmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        if spare is not None:
            spare.close()


if __name__ == "__main__":
    main()
