"""Checks what a config asks for behind the KV cache."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from mllm_compile.config.schema_runtime import KVTransferConfig, RuntimeConfig
from mllm_compile.errors import ConfigError, RequestError
from mllm_compile.runtime.config_sections import PEER_CONNECTOR, KVTransferSection, WritePolicy
from mllm_compile.runtime.sampling.transfer_params import KVTransferParams

_OF_PEERS = ("hold_s", "hosts", "transport")
_TRANSPORTS = ("auto", "nixl")


def kv_transfer(asked: KVTransferConfig) -> KVTransferSection:
    """
    Raises:
        ConfigError: it names no class, or code that is not trusted.
    """
    found = KVTransferSection(**asked.model_dump())
    if found.names_peers:
        _check_peers(found)
        return found
    path = found.import_path
    for key in ("kv_role", "kv_ip", "kv_port"):
        if getattr(found, key) != getattr(KVTransferSection(), key):
            raise ConfigError(
                f"runtime.kv_transfer_config.{key} is {getattr(found, key)}, and kv_connector is {path or 'not set'}: "
                "it is of kv_connector: PeerConnector (docs/apart.md). Leave it out, or name that."
            )
    for key in ("kv_connector_module_path", "kv_connector_extra_config"):
        if getattr(found, key) and not path:
            raise ConfigError(
                f"runtime.kv_transfer_config.{key} is set, and kv_connector is not: there is no store. Name its class."
            )
    if path and "." not in path:
        raise ConfigError(
            f"runtime.kv_transfer_config.kv_connector is {path}, without a module: vLLM's own connectors are not here. "
            "Give PeerConnector for other engines (docs/apart.md), or for a store of your own package.module.Class, or "
            "kv_connector_module_path (docs/lab/tiers.md)."
        )
    if path and not asked.trust_local_code:
        raise ConfigError(
            f"runtime.kv_transfer_config names {path}, which is imported and run as this user. If you trust it, set "
            "runtime.kv_transfer_config.trust_local_code: true."
        )
    return found


def _check_peers(asked: KVTransferSection) -> None:
    """
    Raises:
        ConfigError: an option of PeerConnector is none, or of another kind.
    """
    options = asked.kv_connector_extra_config
    place = "runtime.kv_transfer_config.kv_connector_extra_config"
    for name in options:
        if name not in _OF_PEERS:
            raise ConfigError(f"{place}.{name}: PeerConnector has no such option. Known: {', '.join(_OF_PEERS)}.")
    hosts = options.get("hosts", [""])
    if not isinstance(hosts, list | tuple) or not all(isinstance(one, str) for one in hosts):
        raise ConfigError(f"{place}.hosts: expected a list of names, addresses and networks, got {hosts!r}.")
    for network in (one for one in hosts if "/" in one):
        try:
            ipaddress.ip_network(network, strict=False)
        except ValueError:
            raise ConfigError(f"{place}.hosts: expected a network such as 10.1.0.0/16, got {network}.") from None
    hold_s = options.get("hold_s", 60.0)
    if isinstance(hold_s, bool) or not isinstance(hold_s, int | float) or not 0 <= hold_s <= 86400:
        raise ConfigError(f"{place}.hold_s: expected seconds from 0 to 86400, got {hold_s!r}.")
    if (transport := options.get("transport", "auto")) not in _TRANSPORTS:
        raise ConfigError(f"{place}.transport: expected one of {', '.join(_TRANSPORTS)}, got {transport!r}.")
    try:
        KVTransferParams(remote_host=asked.kv_ip)  # as answers tell it
    except RequestError:
        raise ConfigError(
            f"runtime.kv_transfer_config.kv_ip: expected an address of this host, got {asked.kv_ip!r:.80}."
        ) from None
    if _is_any(asked.kv_ip):
        raise ConfigError(
            "runtime.kv_transfer_config.kv_ip: expected the one address at which others reach this host, as answers "
            f"tell it; got {asked.kv_ip}, which is any."
        )


def _is_any(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_unspecified
    except ValueError:  # a name
        return False


def write_policy(asked: RuntimeConfig) -> WritePolicy | None:
    """The policy that a config asks for; `auto`: a tier below may outlive a crash, so it gets all. None without
    memory behind the KV cache, where check_tiers refuses any."""
    if not asked.kv_offloading_size:
        return None
    policy = asked.kv_offloading_write_policy
    if policy is not None and policy != "auto":
        return policy
    has_more = asked.kv_offloading_disk_path or asked.kv_transfer_config.kv_connector
    return "write_through" if has_more else "write_back"


def check_tiers(asked: RuntimeConfig) -> None:
    """
    Raises:
        ConfigError: there is memory behind the KV cache, and something that it does not work with.
    """
    _check_below(asked)
    if asked.kv_offloading_size:
        _check_names(asked)
        _check_ranks(asked)
    else:
        _check_nothing_needs_memory(asked)


def _check_below(asked: RuntimeConfig) -> None:
    """Checks what is behind the host's memory: files, a store, or other engines."""
    path, size, store = asked.kv_offloading_disk_path, asked.kv_offloading_disk_size, asked.kv_transfer_config
    if store.kv_connector and path:
        raise ConfigError(
            f"runtime.kv_transfer_config names {store.kv_connector}, and runtime.kv_offloading_disk_path is {path}: "
            "one is behind the host's memory. Set one of them alone."
        )
    if store.kv_connector == PEER_CONNECTOR:
        kept = {
            "kv_offloading_memory_file": asked.kv_offloading_memory_file is not None,
            "kv_offloading_write_policy": asked.kv_offloading_write_policy == "write_back",
        }
        if (key := _first(kept)) is not None:
            raise ConfigError(
                f"runtime.{key} is {getattr(asked, key)}, and runtime.kv_transfer_config names {PEER_CONNECTOR}: "
                "memory that engines share ends with its own, and nothing is written below. Set one of them alone."
            )
    if bool(path) != bool(size):
        raise ConfigError(
            f"runtime.kv_offloading_disk_path is {path or 'not set'} and runtime.kv_offloading_disk_size is {size:g} "
            "GiB. Set both, or none."
        )


def _check_nothing_needs_memory(asked: RuntimeConfig) -> None:
    """Checks that without memory behind the KV cache nothing is set that goes through it."""
    set_ones = {
        "kv_offloading_memory_file": bool(asked.kv_offloading_memory_file),
        "kv_offloading_disk_path": bool(asked.kv_offloading_disk_path),
        "kv_transfer_config": bool(asked.kv_transfer_config.kv_connector),
        "kv_offloading_write_policy": asked.kv_offloading_write_policy not in ("auto", None),
    }
    if (key := _first(set_ones)) is not None:
        raise ConfigError(
            f"runtime.{key} is set, and runtime.kv_offloading_size is 0: pages come and go through that memory. "
            "Set it to 1 or more."
        )


def _check_names(asked: RuntimeConfig) -> None:
    """Checks that pages which outlive the process can be named."""
    lasting = {
        "kv_offloading_disk_path": bool(asked.kv_offloading_disk_path),
        "kv_transfer_config": bool(asked.kv_transfer_config.kv_connector),
        "kv_offloading_memory_file": bool(asked.kv_offloading_memory_file),
    }
    if asked.skip_compiled and (key := _first(lasting)) is not None:
        raise ConfigError(
            f"runtime.{key} and runtime.skip_compiled are set: pages are named after the weights of a compiled model. "
            "Set one of them alone."
        )


def _check_ranks(asked: RuntimeConfig) -> None:
    """Checks what ranks cannot share, and what excludes any memory behind the KV cache."""
    store = asked.kv_transfer_config.kv_connector
    of_one = {
        "kv_offloading_memory_file": asked.kv_offloading_memory_file is not None,
        "kv_transfer_config": store == PEER_CONNECTOR,
    }
    shared = {"kv_offloading_disk_path": bool(asked.kv_offloading_disk_path), "kv_transfer_config": bool(store)}
    if asked.tensor_parallel_size > 1:
        if (key := _first(of_one)) is not None:
            raise ConfigError(
                f"runtime.{key} is set, which runtime.tensor_parallel_size: {asked.tensor_parallel_size} excludes: "
                "ranks share their pages with files and stores alone. Set one of them alone."
            )
        if asked.distributed_executor_backend == "ray" and (key := _first(shared)) is not None:
            raise ConfigError(
                f"runtime.{key} is set, which runtime.distributed_executor_backend: ray excludes: ranks share memory "
                "with the first one. Set mp."
            )
    obstacles = {
        "pipeline_parallel_size": asked.pipeline_parallel_size > 1,
        "expert_parallel_size": asked.expert_parallel_size > 1,
        "nnodes": asked.nnodes > 1,
        "routed_experts": asked.routed_experts,
        "enable_prefix_cache: false": not asked.enable_prefix_cache,
    }
    if (key := _first(obstacles)) is not None:
        raise ConfigError(
            f"runtime.kv_offloading_size is {asked.kv_offloading_size:g}, which runtime.{key} excludes. Set one of "
            "them alone."
        )


def _first(keys: Mapping[str, bool]) -> str | None:
    """The first of the keys that is set."""
    return next((key for key, is_set in keys.items() if is_set), None)
