"""Fetches pictures that a request names by an address, from the hosts that the config allows and no others."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPException
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from mllm_compile.errors import RequestError
from mllm_compile.media.limits import MAX_FETCH_SECONDS, MAX_FILE_BYTES
from mllm_compile.media.sources import Source, SourceItem, bounded
from mllm_compile.runtime.shown import shown

_AT_ONCE = 8  # of a prompt
_WAIT_S = 5.0  # for a connection, and for each next byte
_READ_BYTES = 1 << 16
_GIVE = "Give the picture's bytes, or a data URL (data:image/png;base64,…)."


def fetched(items: Sequence[SourceItem], domains: Collection[str]) -> list[SourceItem]:
    """The same items, with bytes in place of addresses.

    Args:
        domains: the hosts that may be asked, in small letters.

    Raises:
        RequestError: an address has another host, does not answer with a file, or that is too large or takes too long.
    """
    named = [
        (frame.url, item.where if item.kind == "image" else f"{item.where}, frame {n}")
        for item in items
        for n, frame in enumerate(item.frames)
        if frame.url is not None
    ]
    asked = [(_allowed(url, where, domains), where) for url, where in named]  # all of them, before the first is fetched
    if not asked:
        return list(items)
    with ThreadPoolExecutor(min(_AT_ONCE, len(asked)), thread_name_prefix="fetch") as pool:
        found = iter(list(pool.map(lambda one: _fetch(one[0], one[1], domains), asked)))
    return [
        replace(item, frames=tuple(frame if frame.url is None else Source(next(found)) for frame in item.frames))
        for item in items
    ]


def _allowed(url: str, where: str, domains: Collection[str]) -> str:
    """The address, put together again of the parts that were looked at.

    Raises:
        RequestError: it may not be fetched.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise RequestError(f"{where}: {shown(url)} is no address ({error}). {_GIVE}") from None
    has_odd_characters = not url.isascii() or any(one <= " " or one in '\\"<>' for one in url)
    if parts.scheme not in ("http", "https") or not host or parts.username is not None or has_odd_characters:
        raise RequestError(f"{where}: {shown(url)} is no plain address over http or https. {_GIVE}")
    if host not in domains:
        whose = "none is fetched" if not domains else f"pictures are fetched from {', '.join(sorted(domains))} alone"
        raise RequestError(
            f"{where}: {shown(url)} is an address, and {whose}. Fetch it yourself and give its bytes, or a data URL "
            "(data:image/png;base64,…); or name its host in the config's media.allowed_domains."
        )
    place = f"[{host}]" if ":" in host else host
    place = place if port is None else f"{place}:{port}"
    return f"{parts.scheme}://{place}{parts.path or '/'}{'?' + parts.query if parts.query else ''}"


class _WithinDomains(HTTPRedirectHandler):
    """Follows an answer that names another address if that may be fetched, too."""

    def __init__(self, where: str, domains: Collection[str]) -> None:
        self._where, self._domains = where, domains

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        return super().redirect_request(req, fp, code, msg, headers, _allowed(newurl, self._where, self._domains))


def _fetch(url: str, where: str, domains: Collection[str]) -> bytes:
    """
    Args:
        url: one that is allowed.
    """
    request = Request(url, headers={"User-Agent": "mllm_compile", "Accept": "image/*"})
    until = time.monotonic() + MAX_FETCH_SECONDS
    data = bytearray()
    try:
        with build_opener(_WithinDomains(where, domains)).open(request, timeout=_WAIT_S) as answer:
            while len(data) <= MAX_FILE_BYTES and (some := answer.read1(_READ_BYTES)):
                data += some
                if time.monotonic() > until:
                    raise TimeoutError(f"it takes more than {MAX_FETCH_SECONDS} s")
    except HTTPError as error:
        error.close()
        raise RequestError(f"{where}: {shown(url)} answers with status {error.code}, not a picture. {_GIVE}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise RequestError(f"{where}: {shown(url)} cannot be fetched ({reason}). {_GIVE}") from None
    return bounded(bytes(data), where)
