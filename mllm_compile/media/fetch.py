"""Fetches images and sounds that a request names by an address, from the hosts that the config allows and no others."""

from __future__ import annotations

import io
import socket
import ssl
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from mllm_compile.errors import RequestError
from mllm_compile.media.file_sources import FileKind, Source, SourceItem, bounded, file_kind
from mllm_compile.media.limits import MAX_FETCH_SECONDS, MAX_PROMPT_FETCH_SECONDS
from mllm_compile.runtime.short_repr import short_repr

_AT_ONCE = 8  # of a prompt
_WAIT_S = 5.0  # for a connection, and for each next byte
_GRACE_S = 0.5  # after a fetch's time, in which it says more about its end
_SHORTEST_S = 0.001  # 0 would mean not to wait
_GIVE = "Give the file's bytes, or a data URL (data:image/png;base64,…)."


def fetched(items: Sequence[SourceItem], domains: Collection[str]) -> list[SourceItem]:
    """The same items, with bytes in place of addresses.

    Args:
        domains: the hosts that may be asked, in small letters.

    Raises:
        RequestError: an address has another host, does not answer with a file, or that is too large or takes too long.
    """
    named = [
        (frame.url, f"{item.where}, frame {n}" if item.kind == "video" else item.where, file_kind(item.kind))
        for item in items
        for n, frame in enumerate(item.frames)
        if frame.url is not None
    ]
    asked = [
        (_allowed(url, where, domains), where, kind) for url, where, kind in named
    ]  # all of them, before the first is fetched
    if not asked:
        return list(items)
    found = iter(_fetch_all(asked, domains))
    return [
        replace(item, frames=tuple(frame if frame.url is None else Source(next(found)) for frame in item.frames))
        for item in items
    ]


def _fetch_all(asked: Sequence[tuple[str, str, FileKind]], domains: Collection[str]) -> list[bytes]:
    """The files of addresses that are allowed.

    A system call that looks a name up cannot be ended from here. A fetch that is late for it is left behind, and its
    thread ends with the call.
    """
    pool = ThreadPoolExecutor(min(_AT_ONCE, len(asked)), thread_name_prefix="fetch")
    end = time.monotonic() + MAX_PROMPT_FETCH_SECONDS
    found: list[bytes] = []
    try:
        for first in range(0, len(asked), _AT_ONCE):
            until = min(time.monotonic() + MAX_FETCH_SECONDS, end)
            group = asked[first : first + _AT_ONCE]
            fetches = [pool.submit(_fetch, url, where, kind, domains, until) for url, where, kind in group]
            for fetch, (url, where, _) in zip(fetches, group, strict=True):
                try:
                    found.append(fetch.result(_left(until) + _GRACE_S))
                except FutureTimeoutError:
                    raise _failed(url, where, _late()) from None
        return found
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _late() -> TimeoutError:
    return TimeoutError(
        f"it takes more than {MAX_FETCH_SECONDS:g} s, or all files of the prompt more than "
        f"{MAX_PROMPT_FETCH_SECONDS:g} s"
    )


def _failed(url: str, where: str, reason: object) -> RequestError:
    return RequestError(f"{where}: {short_repr(url)} cannot be fetched ({reason}). {_GIVE}")


def _allowed(url: str, where: str, domains: Collection[str]) -> str:
    """The address, put together again of the parts that were looked at.

    Raises:
        RequestError: it may not be fetched.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise RequestError(f"{where}: {short_repr(url)} is no address ({error}). {_GIVE}") from None
    has_odd_characters = not url.isascii() or any(one <= " " or one in '\\"<>' for one in url)
    if parts.scheme not in ("http", "https") or not host or parts.username is not None or has_odd_characters:
        raise RequestError(f"{where}: {short_repr(url)} is no plain address over http or https. {_GIVE}")
    if host not in domains:
        whose = (
            "none is fetched"
            if not domains
            else f"images and sounds are fetched from {', '.join(sorted(domains))} alone"
        )
        raise RequestError(
            f"{where}: {short_repr(url)} is an address, and {whose}. Fetch it yourself and give its bytes, or a data "
            "URL (data:image/png;base64,…); or name its host in the config's media.allowed_domains."
        )
    place = f"[{host}]" if ":" in host else host
    place = place if port is None else f"{place}:{port}"
    return f"{parts.scheme}://{place}{parts.path or '/'}{'?' + parts.query if parts.query else ''}"


class _Until(io.RawIOBase):
    """A connection's bytes, until a time: a host that drips them gets no more of it than any other."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._socket, self._until = sock, until
        self._bytes = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = _left(self._until)
        if not left:
            raise _late()
        self._socket.settimeout(min(_WAIT_S, left))
        try:
            return self._bytes.readinto(buffer)
        except TimeoutError:
            if left < _WAIT_S:
                raise _late() from None
            raise

    def close(self) -> None:
        self._bytes.close()
        super().close()


class _Answer(HTTPResponse):
    """An answer whose head, sizes of chunks and body are read until a time alone."""

    def __init__(self, sock: socket.socket, *args: Any, until: float, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_Until(sock, until))


def _timed(kind: type[HTTPConnection], until: float, host: str, *, timeout: float, **options: Any) -> HTTPConnection:
    """A connection of a kind, whose answer is read until a time."""
    connection = kind(host, timeout=max(_SHORTEST_S, min(timeout, _left(until))), **options)
    connection.response_class = partial(_Answer, until=until)  # type: ignore[assignment]
    return connection


class _TimedHTTP(HTTPHandler):
    def __init__(self, until: float) -> None:
        super().__init__()
        self._until = until

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(_timed, HTTPConnection, self._until), req)


class _TimedHTTPS(HTTPSHandler):
    def __init__(self, until: float) -> None:
        super().__init__()
        self._until = until

    def https_open(self, req: Request) -> HTTPResponse:
        kind = partial(_timed, HTTPSConnection, self._until)
        return self.do_open(kind, req, context=ssl.create_default_context())


class _WithinDomains(HTTPRedirectHandler):
    """Follows an answer that names another address if that may be fetched, too."""

    def __init__(self, where: str, domains: Collection[str]) -> None:
        self._where, self._domains = where, domains

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        fp.close()  # urllib would read all of its body, whatever its size
        return super().redirect_request(req, fp, code, msg, headers, _allowed(newurl, self._where, self._domains))


def _fetch(url: str, where: str, kind: FileKind, domains: Collection[str], until: float) -> bytes:
    """
    Args:
        url: one that is allowed.
        until: the time by which it ends, except the system's own delays.
    """
    request = Request(url, headers={"User-Agent": "mllm_compile", "Accept": f"{kind.mime}*"})
    opener = build_opener(_TimedHTTP(until), _TimedHTTPS(until), _WithinDomains(where, domains))
    try:
        with opener.open(request, timeout=_WAIT_S) as answer:
            data = answer.read(kind.most + 1)
    except HTTPError as error:
        error.close()
        raise RequestError(
            f"{where}: {short_repr(url)} answers with status {error.code}, not {kind.a_noun}. {_GIVE}"
        ) from None
    except (OSError, HTTPException, ValueError) as error:
        raise _failed(url, where, error.reason if isinstance(error, URLError) else error) from None
    return bounded(data, where, kind)
