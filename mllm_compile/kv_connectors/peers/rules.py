"""The requests for pages that an engine takes: its role, and the hosts that it asks.

A request names the host that is asked, so hosts are listed: a client cannot have an engine connect anywhere else.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mllm_compile.errors import RequestError
from mllm_compile.runtime.config_sections import PEER_CONNECTOR, KVTransferSection
from mllm_compile.runtime.sampling.params import SamplingParams

_FIELD = "kv_transfer_params"


@dataclass(frozen=True)
class PeerRules:
    """
    Attributes:
        role: kv_producer, kv_consumer or kv_both; empty: nothing is handed over.
        hosts: names, addresses and networks that may be asked; None: the engine knows.
    """

    role: str = ""
    hosts: Sequence[str] | None = ()

    @classmethod
    def of(cls, asked: KVTransferSection) -> PeerRules:
        """The rules of a config."""
        return cls(asked.kv_role, asked.hosts) if asked.names_peers else cls()

    @classmethod
    def told(cls, config: Mapping[str, Any]) -> PeerRules:
        """The rules of a config as a front knows it: without the hosts, which the engine checks."""
        asked = config.get("runtime", {}).get("kv_transfer_config", {})
        return cls(asked.get("kv_role", ""), None) if asked.get("kv_connector") == PEER_CONNECTOR else cls()

    def check(self, params: SamplingParams) -> None:
        """
        Raises:
            RequestError: a request asks for what this engine does not do.
        """
        asked = params.kv_transfer_params
        if asked is None:
            return
        if not self.role:
            raise RequestError(
                f"{_FIELD}: expected none: this engine hands no pages over. Set runtime.kv_transfer_config "
                "(docs/apart.md)."
            )
        is_decode = asked.do_remote_decode
        name = "do_remote_decode" if is_decode else "do_remote_prefill"
        lacking = "kv_consumer" if is_decode else "kv_producer"
        if self.role == lacking:
            raise RequestError(f"{_FIELD}.{name}: expected false: runtime.kv_transfer_config.kv_role is {self.role}.")
        if asked.do_remote_decode and params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs: expected none beside kv_transfer_params.do_remote_decode. Ask the decode engine, "
                "which computes such prompts itself."
            )
        if asked.do_remote_prefill and self.hosts is not None and not self.allows(asked.remote_host or ""):
            raise RequestError(
                f"{_FIELD}.remote_host: expected one of {', '.join(self.hosts)}, got {asked.remote_host}. Add it to "
                "kv_connector_extra_config.hosts of runtime.kv_transfer_config, if it is a prefill engine's."
            )

    def allows(self, host: str) -> bool:
        """True if a host may be asked."""
        return any(host == one or _is_in(host, one) for one in self.hosts or ())


def _is_in(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:  # one is a name
        return False
