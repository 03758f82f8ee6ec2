"""KVTransferParams: from where a prompt's keys and values come, or that another engine will fetch them.

The names are those that vLLM's proxies pass between a prefill and a decode engine as `kv_transfer_params`. Pure Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.sampling.param_checks import by_name_alone, refused

_FIELD = "kv_transfer_params"
MOST_TEXT = 256  # characters
_MOST_PAGES = 1 << 22
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")


@by_name_alone("do_remote_decode=True", {})
@dataclass(frozen=True, kw_only=True)
class KVTransferParams:
    """The words of a request about its prompt's pages. Immutable. At most one of the first two is true.

    Attributes:
        do_remote_decode: another engine will fetch them: the answer says from where.
        do_remote_prefill: they are fetched from the engine that the others name; what does not come is computed.
        remote_engine_id: its id; another one that listens there is not asked.
        remote_request_id: the request that computed them there; for people.
        remote_block_ids: the pages that are fetched, by their number within the prompt, ascending.
        remote_host, remote_port: where it listens.
        tp_size: its tensor ranks; 1.

    Raises:
        RequestError: A value of the wrong type or out of range.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: tuple[int, ...] | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("do_remote_decode", "do_remote_prefill"):
            if not isinstance(getattr(self, name), bool):
                raise _refused(name, "true or false", getattr(self, name))
        for name in ("remote_engine_id", "remote_request_id", "remote_host"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and 0 < len(value) <= MOST_TEXT):
                raise _refused(name, f"a text of 1 to {MOST_TEXT} characters", value)
        if self.remote_engine_id is not None and not self.remote_engine_id.isprintable():  # it goes into logs
            raise _refused("remote_engine_id", "a text of characters that can be printed", self.remote_engine_id)
        if self.remote_host is not None and not _HOST.fullmatch(self.remote_host):
            raise _refused("remote_host", "an address or a name", self.remote_host)
        if self.remote_port is not None and not _is_number(self.remote_port, 1, 65535):
            raise _refused("remote_port", "an integer from 1 to 65535", self.remote_port)
        if self.tp_size is not None and not _is_number(self.tp_size, 1, 1):
            raise _refused("tp_size", "1: pages of tensor ranks are not handed over", self.tp_size)
        object.__setattr__(self, "remote_block_ids", _pages(self.remote_block_ids))
        if self.do_remote_decode and self.do_remote_prefill:
            raise _refused("do_remote_decode", "false beside do_remote_prefill", True)
        if self.do_remote_prefill:
            for name in ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"):
                if getattr(self, name) is None:
                    raise _refused(name, "it beside do_remote_prefill, as the prefill engine has answered", None)

    @classmethod
    def of(cls, value: Any) -> KVTransferParams | None:
        """The parameters that a request's field holds; None where it asks for nothing.

        Raises:
            RequestError: it is no such value, or has a member that is unknown.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise refused(_FIELD, "an object, or none", value, "Pass on what the prefill engine has answered.")
        known = {one.name for one in fields(cls)}
        for name in value:
            if name not in known:
                raise refused(_FIELD, f"members of {', '.join(sorted(known))}", name, "Leave it out.")
        given = {name: one for name, one in value.items() if one is not None}
        asked = cls(**given)
        return asked if asked.do_remote_decode or asked.do_remote_prefill else None

    def to_wire(self) -> dict[str, Any]:
        """The members that are set, as JSON has them."""
        told = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in told.items()
            if value is not None
        }


def _pages(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) > _MOST_PAGES:
        raise _refused("remote_block_ids", "a list of numbers of pages", value)
    last = -1
    for one in value:
        if not _is_number(one, last + 1, _MOST_PAGES):
            raise _refused("remote_block_ids", "ascending numbers of pages, from 0", one)
        last = one
    return tuple(value)


def _is_number(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _refused(name: str, expected: str, value: Any) -> RequestError:
    return refused(f"{_FIELD}.{name}", expected, value)
