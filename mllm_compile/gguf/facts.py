"""The facts of a GGUF model: the keys of its own section, and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.gguf.metadata import Metadata
from mllm_compile.runtime.short_repr import short_repr

ARCHITECTURE_KEY = "general.architecture"

ReadNumbers = Callable[[str], list[float]]


class ModelFacts:
    """
    Args:
        metadata: of the file.
        shapes: of all tensors.
        read: the numbers of a small tensor.

    Attributes:
        name: `general.architecture`.
    """

    def __init__(self, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], read: ReadNumbers) -> None:
        self.metadata, self._shapes, self._read = metadata, shapes, read
        self.name = metadata.get(ARCHITECTURE_KEY, str)

    def number(self, key: str) -> int | float | None:
        """A key of the section, or None; of an array whose values are all the same, that one."""
        return self.metadata.number(f"{self.name}.{key}")

    def needed(self, key: str) -> int | float:
        """Raises CheckpointError if the file lacks it."""
        if (found := self.number(key)) is None:
            raise self._lacks(key)
        return found

    def text(self, key: str) -> str | None:
        return self.metadata.find(f"{self.name}.{key}", str)

    def each_layer(self, key: str) -> tuple[int | float, ...]:
        """A number a layer; one number stands for all.

        Raises:
            CheckpointError: the file lacks it, or has another count.
        """
        found = self.metadata.numbers_or_one(f"{self.name}.{key}", int(self.needed("block_count")))
        if found is None:
            raise self._lacks(key)
        return found

    def has(self, tensor: str) -> bool:
        return tensor in self._shapes

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The tensor's shape; () where the file has none of the name."""
        return self._shapes.get(tensor, ())

    def numbers(self, tensor: str, count: int) -> list[float]:
        """The numbers of a small tensor.

        Raises:
            CheckpointError: it has another shape.
        """
        if self.shape(tensor) != (count,):
            shape = short_repr(list(self.shape(tensor)))
            raise CheckpointError(f"{self.metadata.path}: {tensor} has shape {shape}; expected [{count}].")
        return self._read(tensor)

    def misfit(self, key: str, why: str) -> CheckpointError:
        """The error on a key that does not fit the rest."""
        return CheckpointError(f"{self._said(key)}, but {why}. Download it again.")

    def unsupported(self, key: str, expected: str) -> UnsupportedModelError:
        """The error on a value of a key that the model is not served with."""
        return UnsupportedModelError(
            f"{self._said(key)}; expected {expected}. Set model.path to the model that it was made of, as safetensors."
        )

    def _said(self, key: str) -> str:
        key = f"{self.name}.{key}"
        return f"{self.metadata.path}: {key} is {self.metadata.shown(key)}"

    def _lacks(self, key: str) -> CheckpointError:
        return CheckpointError(f"{self.metadata.path} lacks the key {self.name}.{key}. Download it again.")
