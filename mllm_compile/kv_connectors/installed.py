"""Refuses a start without the package of the store that a config names; runs nothing of it."""

from __future__ import annotations

import importlib.util
import sys

from mllm_compile.config.schema_runtime import KVTransferConfig
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.config_sections import PEER_CONNECTOR, KVTransferSection


def check_installed(asked: KVTransferConfig | KVTransferSection) -> None:
    """
    Raises:
        ConfigError: there is no such package. What lacks in it is told when it is imported (load.py).
    """
    if asked.kv_connector_extra_config.get("transport") == "nixl" and asked.kv_connector == PEER_CONNECTOR:
        if importlib.util.find_spec("nixl") is None:
            raise ConfigError(
                "runtime.kv_transfer_config.kv_connector_extra_config.transport is nixl, and there is no package nixl "
                "here: pip install 'mllm-compile[nixl]'. Or set auto."
            )
        return
    module = asked.kv_connector_module_path or asked.kv_connector.rpartition(".")[0]
    package = module.partition(".")[0]
    if package and package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"runtime.kv_transfer_config names {module}, and there is no package {package} here. Put its folder on "
            "PYTHONPATH, or name another."
        )
