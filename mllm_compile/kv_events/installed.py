"""Makes a publisher where what it needs, the extra `events`, is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from mllm_compile.errors import ConfigError
from mllm_compile.runtime.config_sections import KVEventsSection

if TYPE_CHECKING:
    from mllm_compile.kv_events.publisher import KVEventPublisher

_NEEDED = {"zmq": "pyzmq", "msgspec": "msgspec"}


def check_installed() -> None:
    """
    Raises:
        ConfigError: a package is missing.
    """
    missing = [package for name, package in _NEEDED.items() if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"runtime.kv_events_config needs {', '.join(missing)}, not installed: pip install 'mllm-compile[events]', "
            "or set enable_kv_cache_events: false"
        )


def make_publisher(settings: KVEventsSection, num_ranks: int) -> KVEventPublisher:
    """
    Raises:
        ConfigError: a package is missing, or an endpoint cannot be had.
    """
    check_installed()
    from mllm_compile.kv_events.publisher import KVEventPublisher

    return KVEventPublisher(settings, num_ranks)
