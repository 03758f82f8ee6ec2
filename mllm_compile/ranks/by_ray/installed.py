"""Refuses a start that lacks Ray; imports nothing of it."""

from __future__ import annotations

import importlib.util

from mllm_compile.errors import ConfigError


def check_installed() -> None:
    """
    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "runtime.distributed_executor_backend is ray, and Ray is not installed: pip install "
            "'mllm-compile[ray]', or set it to mp, which starts ranks as processes of the engine's."
        )
