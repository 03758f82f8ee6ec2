"""The words of the two sides of a media worker. A body is a JSON header and bytes behind it (process/helper_server.py).

START has the model's files. A REQUEST has a text or token ids, items with their frames' sizes, and a segment's name.
Its answer says where the tensors are in that segment.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

PREPARED = b"P"
REFUSAL = b"R"  # why there is no prompt, UTF-8
TOO_MUCH_MEMORY, TOO_LARGE = b"M", b"L"  # to decode; for a segment

MAX_ANSWER = 64 << 20  # bytes: the tensors are elsewhere

_SIZE = struct.Struct(">Q")


def pack(header: dict[str, Any], blobs: Sequence[bytes]) -> bytes:
    """One body of a header and bytes."""
    head = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode("utf-8", "surrogatepass")
    return b"".join((_SIZE.pack(len(head)), head, *blobs))


def unpack(body: bytes) -> tuple[dict[str, Any], list[memoryview]]:
    """The header and the bytes of a body that `pack` has made."""
    view = memoryview(body)
    (size,) = _SIZE.unpack_from(view)
    begin = _SIZE.size + size
    header = json.loads(bytes(view[_SIZE.size : begin]))
    blobs = []
    for size in header.pop("sizes"):
        blobs.append(view[begin : begin + size])
        begin += size
    return header, blobs
