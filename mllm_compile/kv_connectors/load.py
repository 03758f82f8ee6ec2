"""Imports the store that a config names, which the config has said to trust."""

from __future__ import annotations

import importlib

from mllm_compile.errors import ConfigError
from mllm_compile.kv_connectors.installed import no_class
from mllm_compile.runtime.config_sections import KVTransferSection
from mllm_compile.runtime.tiers.connector import Namespace
from mllm_compile.runtime.tiers.guarded import GuardedConnector, MakeConnector


def connector_of(asked: KVTransferSection, namespace: Namespace) -> GuardedConnector:
    """The store, behind its guard.

    Raises:
        ConfigError: there is no such class.
        KVConnectorError: it cannot be used now.
    """
    made, options = class_of(asked.import_path), asked.kv_connector_extra_config
    return GuardedConnector(made, namespace, options, asked.timeout_s, asked.import_path)


def class_of(import_path: str) -> MakeConnector:
    """The class of that name, whose module is imported.

    Raises:
        ConfigError: the module or the class is missing.
    """
    module_name, _, class_name = import_path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module's own code runs here
        raise ConfigError(
            f"runtime.kv_transfer_config names {import_path}, and {module_name} cannot be imported: "
            f"{type(error).__name__}: {error}. Put its folder on PYTHONPATH, or name another."
        ) from error
    found: MakeConnector | None = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise no_class(module_name, class_name)
    return found
