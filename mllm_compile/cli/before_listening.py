"""Refusals ahead of any address that is listened at: what the config and the installation alone decide."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mllm_compile.config.resolution.tiers import check_tiers, kv_transfer
from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.sources import runtime_settings
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.config_sections import PEER_CONNECTOR


def check_settings(sources: Mapping[str, EngineConfig | Path], sleep_after: str | None, *, starts: bool) -> None:
    """
    Args:
        sources: name → source, of one model without a name.
        starts: an engine is started, which needs secrets, Ray and the package of a store.

    Raises:
        ConfigError: keys exclude each other, an engine over nodes is one of several or is to end and start again, or
            a secret, Ray or a store's package is missing.
    """
    for name, source in sources.items():
        settings = runtime_settings(source)
        if settings is None:
            continue
        if settings.nnodes > 1:
            _check_nodes(name, settings.nnodes, sleep_after)
        if isinstance(source, EngineConfig):  # a compiled runtime's was checked when it was made
            kv_transfer(source.runtime.kv_transfer_config)
            check_tiers(source.runtime)
        if not starts:
            continue
        if settings.nnodes > 1:
            from mllm_compile.ranks.admission import node_secret

            node_secret()
        if settings.kv_transfer_config.kv_connector == PEER_CONNECTOR:
            from mllm_compile.kv_connectors.peers.meeting import peer_secret

            peer_secret()
        if settings.kv_transfer_config.kv_connector:
            from mllm_compile.kv_connectors import installed

            installed.check_installed(settings.kv_transfer_config)
        if settings.distributed_executor_backend == "ray":
            from mllm_compile.ranks.by_ray.installed import check_installed

            check_installed()


def _check_nodes(name: str, nnodes: int, sleep_after: str | None) -> None:
    if name:
        raise ConfigError(f"runtime.nnodes is {nnodes} for {name}: expected one model. Serve it by itself")
    if sleep_after is not None:
        raise ConfigError(
            "--sleep-after: the other nodes would end with the engine, and not start again, as runtime.nnodes is "
            f"{nnodes}. Leave it out"
        )
