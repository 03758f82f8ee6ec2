"""A store of KV pages in a folder that several servers share: a `kv_connector` to copy from, and its own test.

    python examples/folder_store.py /mnt/shared/kv      # tests it there
    mllm-compile serve MODEL.yaml

with MODEL.yaml, on each server, with PYTHONPATH at the repository's root:

    runtime:
      kv_offloading_size: 16
      kv_transfer_config:
        kv_connector: examples.folder_store.FolderStore
        kv_connector_extra_config: {folder: /mnt/shared/kv}
        trust_local_code: true

The engine has the values' sums checked, and gives up a store that hangs. What goes when the folder is full is left to
its owner: a value that is gone is computed.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mllm_compile.kv_connectors import VERSION, KVConnectorError, Namespace, Place
from mllm_compile.kv_connectors.conformance import check


class FolderStore:
    """A KVConnector. Files are this user's alone, as they tell prompts; those of another owner are not read.

    Raises:
        KVConnectorError: others can change the folder, or it cannot be used.
    """

    version = VERSION

    def __init__(self, namespace: Namespace, options: Mapping[str, Any]) -> None:
        if set(options) != {"folder"}:
            raise KVConnectorError(f"kv_connector_extra_config: expected folder alone, got {sorted(options)}")
        root = Path(options["folder"])
        self._folder = root / namespace.name
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_own(root, others=0o022)
            _check_own(self._folder, others=0o077)
            if not (root / "secret").exists():
                _write(root / "secret", secrets.token_bytes(32), may_replace=False)
            secret = bytearray(32)
            if not _read(root / "secret", memoryview(secret)):
                raise KVConnectorError(f"{root / 'secret'}: expected a file of 32 bytes, of this user alone (0600)")
            self.secret = bytes(secret)
        except OSError as error:
            raise KVConnectorError(f"{root}: {error.strerror}") from error

    def lookup(self, places: Sequence[Place]) -> list[bool]:
        """Tells which files there are."""
        return [(self._folder / place.name).exists() for place in places]

    def load(self, places: Sequence[Place], buffers: Sequence[memoryview]) -> list[bool]:
        """Reads files."""
        return [_read(self._folder / place.name, buffer) for place, buffer in zip(places, buffers, strict=True)]

    def store(self, places: Sequence[Place], values: Sequence[memoryview]) -> list[bool]:
        """Writes files, whole or not at all."""
        return [_write(self._folder / place.name, value) for place, value in zip(places, values, strict=True)]

    def remove(self, places: Sequence[Place]) -> None:
        """Removes files."""
        for place in places:
            (self._folder / place.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Files stay."""


def _check_own(folder: Path, others: int) -> None:
    """
    Args:
        others: bits of the mode that may not be set.

    Raises:
        KVConnectorError: it is a link, another user's, or open to others.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & others:
        mode = stat.S_IMODE(status.st_mode)
        raise KVConnectorError(
            f"{folder}: expected a folder of user {os.getuid()} that is closed to others; got one of user "
            f"{status.st_uid} with mode {mode:o} (chmod 700 {folder})"
        )


def _read(path: Path, buffer: memoryview) -> bool:
    """False: there is no such file of this user alone."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            is_own = status.st_uid == os.getuid() and not status.st_mode & 0o077
            return is_own and status.st_size == len(buffer) and file.readinto(buffer) == len(buffer)
    except OSError:
        return False


def _write(path: Path, value: bytes | memoryview, may_replace: bool = True) -> bool:
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(value)
        if may_replace:
            beside.rename(path)
        else:
            os.link(beside, path)  # of two that begin at once one wins
            beside.unlink()
    except OSError:
        beside.unlink(missing_ok=True)
        return False
    return True


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for sentence in check(lambda namespace: FolderStore(namespace, {"folder": sys.argv[1]})):
        print(f"holds: {sentence}")
