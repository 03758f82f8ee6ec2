"""Stores of your own behind the host's memory: the interface that they follow (docs/lab/tiers.md)."""

from mllm_compile.runtime.tiers.connector import VERSION, KVConnector, KVConnectorError, Namespace
from mllm_compile.runtime.tiers.place import Place

__all__ = ["VERSION", "KVConnector", "KVConnectorError", "Namespace", "Place"]
