"""The metadata of a GGUF model: typed access, and the keys that nobody has asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from mllm_compile.errors import CheckpointError
from mllm_compile.runtime.short_repr import short_repr, typed_repr

T = TypeVar("T", int, float, bool, str)


class Metadata:
    """
    Args:
        path: the file, for errors.
        values: by key, as GgufHeader has them.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def find(self, key: str, kind: type[T]) -> T | None:
        """The value of a key, or None; an int where a float is asked for is one.

        Raises:
            CheckpointError: it has another type.
        """
        self._asked.add(key)
        value = self._values.get(key)
        if value is None or type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return kind(value)
        raise self.refused(key, f"expected {kind.__name__}, got {typed_repr(value)}")

    def get(self, key: str, kind: type[T]) -> T:
        """The value of a key that has to be there."""
        if (value := self.find(key, kind)) is None:
            raise CheckpointError(f"{self.path} lacks the key {key}, which a GGUF model has. Download it again.")
        return value

    def number(self, key: str) -> int | float | bool | None:
        """A number; of an array whose values are all the same, that one.

        Raises:
            CheckpointError: it is no number, or layers differ.
        """
        self._asked.add(key)
        value = self._values.get(key)
        if isinstance(value, tuple) and value and len(set(value)) == 1:
            value = value[0]
        if value is None or isinstance(value, int | float):
            return value
        raise self.refused(key, f"expected one number for all layers, got {typed_repr(value)}")

    def texts(self, key: str) -> list[str] | None:
        """The strings of an array, or None.

        Raises:
            CheckpointError: it has others, or one is no UTF-8.
        """
        self._asked.add(key)
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, tuple) or not all(isinstance(one, bytes) for one in value):
            raise self.refused(key, f"expected texts, got {typed_repr(value)}")
        try:
            return [one.decode() for one in value]
        except UnicodeDecodeError as error:
            raise self.refused(key, f"holds what is no UTF-8 ({error})") from None

    def numbers(self, key: str, count: int) -> tuple[int | float, ...] | None:
        """The `count` numbers of an array, or None."""
        self._asked.add(key)
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, tuple) or len(value) != count or isinstance(next(iter(value), 0), bytes):
            raise self.refused(key, f"expected {count} numbers, got {typed_repr(value)}")
        return value

    def numbers_or_one(self, key: str, count: int) -> tuple[int | float, ...] | None:
        """The `count` numbers of an array, or one number so many times; or None."""
        if isinstance(value := self._values.get(key), int | float):
            self._asked.add(key)
            return (value,) * count
        return self.numbers(key, count)

    def unread(self, prefix: str) -> list[str]:
        """The keys that begin so, and were not asked for."""
        return sorted(key for key in self._values if key.startswith(prefix) and key not in self._asked)

    def shown(self, key: str) -> str:
        return short_repr(self._values[key])

    def refused(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key}: {why}.")
