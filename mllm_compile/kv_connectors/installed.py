"""Refuses a start without the package of the store that a config names, or without its class; runs nothing of them."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from mllm_compile.config.schema_runtime import KVTransferConfig
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.config_sections import PEER_CONNECTOR, KVTransferSection

_MAY_MAKE_NAMES = ("import *", "__getattr__", "globals(", "exec(", "setattr(")


def check_installed(asked: KVTransferConfig | KVTransferSection) -> None:
    """
    Raises:
        ConfigError: there is no such package, or its module is a file that does not name the class. What else lacks is
            told when it is imported (load.py).
    """
    if asked.kv_connector_extra_config.get("transport") == "nixl" and asked.kv_connector == PEER_CONNECTOR:
        if importlib.util.find_spec("nixl") is None:
            raise ConfigError(
                "runtime.kv_transfer_config.kv_connector_extra_config.transport is nixl, and there is no package nixl "
                "here: pip install 'mllm-compile[nixl]'. Or set auto."
            )
        return
    module = asked.kv_connector_module_path or asked.kv_connector.rpartition(".")[0]
    package, *inner = module.split(".")
    if not package:
        return
    is_there = package in sys.modules
    spec = getattr(sys.modules[package], "__spec__", None) if is_there else importlib.util.find_spec(package)
    if spec is None and not is_there:
        raise ConfigError(
            f"runtime.kv_transfer_config names {module}, and there is no package {package} here. Put its folder on "
            "PYTHONPATH, or name another."
        )
    class_name = asked.kv_connector.rpartition(".")[2]
    if not _may_have(_inner_spec(spec, inner), class_name):
        raise no_class(module, class_name)


def no_class(module: str, class_name: str) -> ConfigError:
    """The error about a module without the class."""
    return ConfigError(
        f"runtime.kv_transfer_config names {module}.{class_name}, and {module} has no class {class_name}. Name the "
        "class that follows KVConnector (docs/lab/tiers.md)."
    )


def _inner_spec(spec: ModuleSpec | None, inner: list[str]) -> ModuleSpec | None:
    """The spec of a module within a package, which is not imported; None: its path does not tell."""
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    return spec


def _may_have(spec: ModuleSpec | None, name: str) -> bool:
    """False of a module whose source neither has the name nor makes names that it does not have."""
    if spec is None or not (spec.origin or "").endswith(".py"):
        return True
    try:
        source = Path(spec.origin or "").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # its import tells
        return True
    return any(text in source for text in (name, *_MAY_MAKE_NAMES))
