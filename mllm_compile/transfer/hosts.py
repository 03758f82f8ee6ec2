"""Tells this machine's addresses from others. Free of torch, as a server's front asks too."""

from __future__ import annotations

import ipaddress


def is_local(host: str) -> bool:
    """True for an address of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
