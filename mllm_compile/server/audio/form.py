"""Bodies of multipart/form-data (RFC 7578): the parts lie in the body, which is in memory, and are not copied.

Strict and bounded: what is no such body is refused, and nothing is guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mllm_compile.server.api.errors import ApiError, bad_request

KIND = "multipart/form-data"
_MOST_PARTS = 64
_MOST_HEAD = 4 << 10  # bytes
_MOST_TEXT = 64 << 10  # of a part that is a text
_TOKEN = r"[!#$%&'*+.^`|~\w-]+"
_PARAMETER = re.compile(rf';[ \t]*({_TOKEN})=({_TOKEN}|"(?:[^"\\]|\\.)*")[ \t]*', re.ASCII)
# RFC 2046: 1 to 70 of these, the last one no space.
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_PLAIN_ENCODINGS = ("7bit", "8bit", "binary")


@dataclass(frozen=True, slots=True)
class Part:
    """A field of a form.

    Attributes:
        is_file: it has a file's name.
        data: a view of the body.
    """

    name: str
    is_file: bool
    data: memoryview

    @property
    def text(self) -> str:
        """
        Raises:
            ApiError: it is a file, too long, or no UTF-8.
        """
        if self.is_file:
            raise bad_request(f"{self.name}: expected a text, got a file", self.name)
        if len(self.data) > _MOST_TEXT:
            most = f"expected at most {_MOST_TEXT:,} bytes, got {len(self.data):,}"
            raise bad_request(f"{self.name}: {most}", self.name)
        try:
            return bytes(self.data).decode()
        except UnicodeDecodeError as error:
            raise bad_request(f"{self.name}: it is no UTF-8 ({error})", self.name) from None


def parts_of(content_type: str | None, body: bytes) -> list[Part]:
    """The parts of a form, in their order.

    Args:
        content_type: the request's header, which names the boundary.

    Raises:
        ApiError: it is no form, or has too many parts.
    """
    delimiter = b"--" + _boundary_of(content_type)
    view = memoryview(body)
    parts: list[Part] = []
    if not body.startswith(delimiter):
        raise _malformed("it does not begin with the boundary that Content-Type names")
    at = len(delimiter)
    while body[at : at + 2] == b"\r\n":
        head_end = body.find(b"\r\n\r\n", at, at + _MOST_HEAD)
        if head_end < 0:
            raise _malformed(f"the head of part {len(parts) + 1} does not end within {_MOST_HEAD:,} bytes")
        start = head_end + 4
        end = body.find(b"\r\n" + delimiter, start)
        if end < 0:
            raise _malformed(f"part {len(parts) + 1} does not end with the boundary")
        if len(parts) == _MOST_PARTS:
            raise _malformed(f"it has more than {_MOST_PARTS} parts")
        parts.append(_part(body[at + 2 : head_end], view[start:end]))
        at = end + 2 + len(delimiter)
    if body[at:] not in (b"--", b"--\r\n"):
        raise _malformed("expected the next part, or the end, behind a boundary")
    return parts


def _boundary_of(content_type: str | None) -> bytes:
    kind, parameters = _header_of(content_type or "")
    if kind.lower() != KIND:
        got = repr(kind[:60]) if kind else "no Content-Type"
        raise bad_request(f"expected a form with a file, as {KIND}, got {got}")
    boundary = parameters.get("boundary", "")
    if not _BOUNDARY.fullmatch(boundary):
        raise _malformed("Content-Type names no boundary of 1 to 70 characters")
    return boundary.encode()


def _header_of(text: str) -> tuple[str, dict[str, str]]:
    """The value of a header, and its parameters.

    Raises:
        ApiError: it is malformed.
    """
    value, _, _ = text.partition(";")
    at, found = len(value), {}
    while at < len(text):
        match = _PARAMETER.match(text, at)
        if match is None:
            raise _malformed("a header has parameters that cannot be read")
        name, given = match[1].lower(), match[2]
        if name in found:
            raise _malformed(f"a header has {name} twice")
        found[name] = re.sub(r"\\(.)", r"\1", given[1:-1]) if given.startswith('"') else given
        at = match.end()
    return value.strip(), found


def _part(head: bytes, data: memoryview) -> Part:
    headers: dict[str, str] = {}
    for line in head.split(b"\r\n"):
        name, colon, value = line.decode("utf-8", "replace").partition(":")
        if not colon or name.lower() in headers:
            raise _malformed("a part has a malformed header, or one twice")
        headers[name.lower()] = value.strip()
    kind, parameters = _header_of(headers.get("content-disposition", ""))
    if kind.lower() != "form-data" or not parameters.get("name"):
        raise _malformed("a part has no Content-Disposition: form-data with a name")
    encoding = headers.get("content-transfer-encoding", "binary").lower()
    if encoding not in _PLAIN_ENCODINGS:
        raise _malformed("a part has a Content-Transfer-Encoding; expected its bytes as they are")
    return Part(parameters["name"], "filename" in parameters or "filename*" in parameters, data)


def _malformed(why: str) -> ApiError:
    return bad_request(f"the body is no form: {why}")
