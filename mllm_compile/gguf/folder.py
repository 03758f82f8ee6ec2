"""The model folder of a GGUF file: config.json and the tokenizer, written into the cache, and links to the file itself.

The folder is named by the files' places, sizes and times. Everything behind it reads a model folder as any other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mllm_compile.errors import CheckpointError
from mllm_compile.files.cache_folders import auto_cache_dir, make_private
from mllm_compile.files.writable_place import cache_place
from mllm_compile.gguf.config import architecture_of, model_config
from mllm_compile.gguf.facts import ModelFacts
from mllm_compile.gguf.metadata import Metadata
from mllm_compile.gguf.tokenizer import tokenizer_files

_VERSION = 2  # of what is written here


class GgufModel(NamedTuple):
    """A folder that holds what was made of a file, and links to the file's parts; the names of their block types."""

    folder: Path
    files: tuple[Path, ...]
    types: tuple[str, ...]


def open_gguf(parts: Sequence[Path], cache_dir: str) -> GgufModel:
    """Makes the model folder of a GGUF file, if it is not there yet.

    Args:
        parts: as gguf_parts gives them.
        cache_dir: `cache.dir` of the config.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedModelError: its architecture or tokenizer is not read.
        ConfigError: the cache cannot be written.
    """
    base = Path(auto_cache_dir()[0] if cache_dir == "auto" else cache_dir)
    place = base / "gguf" / f"{_slug(parts[0])}-{_identity(parts)}"
    links = tuple(place / one.name for one in parts)
    if not place.is_dir():
        _write(place, parts, _contents(parts))
    return GgufModel(place, links, _block_types(links))  # by the links: all that follows reads headers by them


def _slug(path: Path) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in path.stem)[:80]


def _identity(parts: Sequence[Path]) -> str:
    lines = [f"{_VERSION}\n"]
    for path in parts:
        try:
            facts = path.stat()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
        lines.append(f"{path.absolute()} {facts.st_size} {facts.st_mtime_ns}\n")
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


def _block_types(parts: Sequence[Path]) -> tuple[str, ...]:
    """The block types of tensors that are not plain numbers, sorted."""
    from mllm_compile.runtime.weights.gguf_header import read_gguf

    kinds = {kind for path in parts for kind in read_gguf(path).types.values()}
    return tuple(sorted(kind.name for kind in kinds if kind.dtype is None))


def _contents(parts: Sequence[Path]) -> dict[str, str]:
    from mllm_compile.runtime.weights.gguf_header import read_gguf

    headers = [read_gguf(path) for path in parts]
    metadata = Metadata(parts[0], headers[0].metadata)
    _check_parts(metadata, parts)
    places = {name: (path, header) for path, header in zip(parts, headers, strict=True) for name in header.tensors}
    shapes = {name: header.shape(name) for name, (_, header) in places.items()}
    expected = metadata.number("split.tensors.count")
    if sum(len(header.tensors) for header in headers) != len(shapes) or expected not in (None, len(shapes)):
        raise CheckpointError(
            f"{parts[0]}: its parts hold {len(shapes)} tensors, it says {expected}. Download it again."
        )

    def read(name: str) -> list[float]:
        import torch

        from mllm_compile.runtime.weights.header import read_bytes

        path, header = places[name]
        entry = header.tensors[name]
        return torch.frombuffer(bytearray(read_bytes(path, entry)), dtype=entry.dtype).double().tolist()

    config = model_config(ModelFacts(metadata, shapes, read), architecture_of(metadata, shapes))
    config["dtype"] = _dtype({kind.name for header in headers for kind in header.types.values()})
    return {"config.json": json.dumps(config, indent=1)} | tokenizer_files(metadata, config["vocab_size"])


def _dtype(types: set[str]) -> str:
    """The model's own type, as far as the file says it: blocks become 16 bits."""
    if types <= {"F32", "F64"}:
        return "float32"
    return "float16" if types <= {"F32", "F16"} else "bfloat16"


def _check_parts(metadata: Metadata, parts: Sequence[Path]) -> None:
    said = metadata.number("split.count")
    if said not in (None, 0, len(parts)) or metadata.number("split.no") not in (None, 0):
        raise CheckpointError(
            f"{parts[0]} is part {metadata.number('split.no')} of {said} by its header, and one of {len(parts)} by its "
            "name. Give files the names that they were downloaded with."
        )


def _write(place: Path, parts: Sequence[Path], contents: Mapping[str, str]) -> None:
    """Writes a folder beside its place, and moves it there: a reader finds all of it or nothing."""
    make_private(place.parent)
    with cache_place(place.parent).writing():
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=place.parent))
        try:
            for name, text in contents.items():
                (scratch / name).write_text(text, encoding="utf-8")
            for path in parts:
                os.symlink(path.absolute(), scratch / path.name)
            os.rename(scratch, place)
        except FileExistsError:
            pass
        except OSError:
            if not place.is_dir():  # another process may have been first
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
