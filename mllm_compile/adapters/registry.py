"""The adapters that requests may name: each with a version, which a load of the same name replaces.

Used from any thread. A folder is read and checked on the thread that loads it, and its name stands for the new version
only when all of it was right. A request keeps the version that it began with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mllm_compile.adapters.base_model import BaseModel
from mllm_compile.adapters.peft_folder import Matrices, read_adapter
from mllm_compile.config.names import check_adapter_name
from mllm_compile.errors import CheckpointError, MllmError, RequestError
from mllm_compile.runtime.short_repr import short_repr

_SHOWN = 10  # names in a message
MAX_REGISTERED = 10_000


@dataclass(frozen=True, eq=False)
class Adapter:
    """One version of an adapter; another version is another one.

    Attributes:
        name: as requests name it.
        version: from 1 on; also one that is loaded behind an unload of its name has a number of its own.
        folder: the folder that it was read from, and is read from again.
        digest: of its files.
        rank: its highest.
        num_bytes: of its matrices on the device's side.
    """

    name: str
    version: int
    folder: Path
    digest: str
    rank: int
    num_bytes: int


def read_again(base: BaseModel, adapter: Adapter) -> Matrices:
    """The matrices of a version, read from its folder.

    Raises:
        MllmError: as read_adapter; or the folder holds another adapter now.
    """
    tensors = read_adapter(adapter.folder, base, is_known=True)
    if tensors.digest != adapter.digest:
        raise CheckpointError(
            f"{adapter.folder} has changed since it was loaded as version {adapter.version} of "
            f"{short_repr(adapter.name)}. Load it again, in place, to serve what it holds now"
        )
    return tensors.matrices


class AdapterRegistry:
    """The adapters of one engine.

    Args:
        base: the model that they are of.
        place: brings a new version to the device if there is room.
        retire: hears of a version that no request will name any more.
    """

    def __init__(
        self, base: BaseModel, place: Callable[[Adapter, Matrices], None], retire: Callable[[Adapter], None]
    ) -> None:
        self._base = base
        self._place = place
        self._retire = retire
        self._lock = threading.Lock()
        self._adapters: dict[str, Adapter] = {}
        self._busy: set[str] = set()  # names that are being loaded
        self._unloaded: dict[str, int] = {}  # name → its last version, of the names that were unloaded last
        self._resumed: dict[str, str] = {}  # name → the digest of that version, of an engine before this one

    def load(self, name: str, folder: Path, *, replace: bool = False) -> Adapter:
        """Reads an adapter and registers it; its name keeps its version where the same files were loaded before.

        Args:
            replace: a name that is taken gets a new version; else it is refused.

        Raises:
            RequestError: the name is malformed, taken, or being loaded.
            UnsupportedModelError, CheckpointError: as read_adapter.
        """
        self._begin(name, replace)
        try:
            tensors = read_adapter(folder, self._base)
            earlier = self._adapters.get(name)  # nobody else loads or unloads this name meanwhile
            if earlier is not None and (earlier.digest, earlier.folder) == (tensors.digest, folder):
                return earlier
            last = self._unloaded.get(name, 0) if earlier is None else earlier.version
            version = last if self._resumed.get(name) == tensors.digest else last + 1
            adapter = Adapter(name, version, folder, tensors.digest, tensors.rank, tensors.num_bytes)
            self._place(adapter, tensors.matrices)
            with self._lock:
                self._adapters[name] = adapter
                self._unloaded.pop(name, None)
                self._resumed.pop(name, None)
        finally:
            with self._lock:
                self._busy.discard(name)
        if earlier is not None:
            self._retire(earlier)
        return adapter

    def resume(self, name: str, version: int, digest: str) -> None:
        """Takes note of the version that a lost engine had, before `load`: the same files keep it."""
        with self._lock:
            self._unloaded[name], self._resumed[name] = version, digest

    def unload(self, name: str) -> None:
        """Takes a name back. Requests that named it go on to their end.

        Raises:
            RequestError: there is no such adapter, or it is being loaded.
        """
        with self._lock:
            if name in self._busy:
                raise RequestError(f"adapter {short_repr(name)} is being loaded; unload it when that is over")
            adapter = self._adapters.pop(name, None)
            if adapter is None:
                raise self._unknown(name)
            self._unloaded[name] = adapter.version
            if len(self._unloaded) > MAX_REGISTERED:
                del self._unloaded[next(iter(self._unloaded))]
        self._retire(adapter)

    def find(self, name: str) -> Adapter:
        """The version that a name stands for now.

        Raises:
            RequestError: there is no such adapter.
        """
        adapter = self._adapters.get(name) if isinstance(name, str) else None
        if adapter is None:
            raise self._unknown(name)
        return adapter

    def all(self) -> list[Adapter]:
        """All of them, in the order of their first loads."""
        with self._lock:
            return list(self._adapters.values())

    def _begin(self, name: str, replace: bool) -> None:
        try:
            check_adapter_name(name)
        except ValueError as error:
            raise RequestError(f"expected {error}") from None
        with self._lock:
            if name in self._busy:
                raise RequestError(f"adapter {name!r} is being loaded; load it again when that is over")
            if name in self._adapters and not replace:
                raise RequestError(
                    f"adapter {name!r} has already been loaded, as version {self._adapters[name].version}. Load it "
                    "in place (replace=True, load_inplace) to replace it"
                )
            if len(self._adapters) + len(self._busy) >= MAX_REGISTERED and name not in self._adapters:
                raise RequestError(f"{MAX_REGISTERED:,} adapters are loaded; unload one first")
            self._busy.add(name)

    def _unknown(self, name: object) -> MllmError:
        names = list(self._adapters)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        known = f"loaded are {', '.join(names[:_SHOWN])}{more}" if names else "none is loaded"
        return RequestError(f"there is no adapter {short_repr(name)}; {known}")
