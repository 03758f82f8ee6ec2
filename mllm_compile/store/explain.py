"""Explains why a config is a hit or a miss: compares its factors with the nearest runtime's of the same model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mllm_compile.store.artifact import Manifest
from mllm_compile.store.contents import stored_runtimes
from mllm_compile.store.key import DRAFT_MODEL, MACHINE_FACTORS, PACKED_WEIGHTS, changed_parts

_FILE_HASH = re.compile(r"\S+ [0-9a-f]{8}")
_LONG_HASH = re.compile(r"\b[0-9a-f]{12,64}\b")
_SAME_MODEL = ("model config", "weights")  # a runtime that shares none of them is of another model


@dataclass(frozen=True)
class Change:
    """A factor with another value, or the parts of it that differ."""

    factor: str
    then: str
    now: str


def nearest_runtime(factors: Mapping[str, str], cache_dir: str | Path) -> Manifest | None:
    """The usable runtime of the same model with the fewest other factors; the last used one of several."""
    manifests = [runtime.manifest for runtime in stored_runtimes(cache_dir) if runtime.manifest is not None]
    related = [
        manifest
        for manifest in manifests
        if any(manifest.factors.get(name) == factors[name] != "random" for name in _SAME_MODEL)
    ]
    return min(related, key=lambda manifest: len(changes(factors, manifest.factors)), default=None)


def changes(now: Mapping[str, str], then: Mapping[str, str]) -> list[Change]:
    """The factors that differ, in their order."""
    found = []
    for name in dict.fromkeys([*now, *then]):
        new, old = now.get(name, "-"), then.get(name, "-")
        if new != old:
            new, old = changed_parts(new, old)
            found.append(Change(name, old, new))
    return found


def nearest_changes(factors: Mapping[str, str], cache_dir: str | Path) -> list[Change] | None:
    """The changes since the nearest runtime; None if nothing of the model was compiled."""
    nearest = nearest_runtime(factors, cache_dir)
    return None if nearest is None else changes(factors, nearest.factors)


def miss_note(factors: Mapping[str, str], nearest: Manifest | None) -> str:
    """One line on why there is no runtime yet."""
    if nearest is None:
        return "nothing was compiled for this model yet"
    changed = changes(factors, nearest.factors)
    if not changed:
        return "the runtime of this key is unusable"
    return "since the nearest runtime changed " + "; ".join(
        f"{change.factor}: {change_text(change)}" for change in changed
    )


def change_text(change: Change) -> str:
    """A factor's old and new value in a few words; for many files their names."""
    sides = [[part for part in side.split(", ") if part != "-"] for side in (change.then, change.now)]
    if all(_FILE_HASH.fullmatch(part) for side in sides for part in side):
        names = list(dict.fromkeys(part.rpartition(" ")[0] for side in sides for part in side))
        more = f" and {len(names) - _MOST_PARTS} more" if len(names) > _MOST_PARTS else ""
        return ", ".join(names[:_MOST_PARTS]) + more
    return f"{shortened(change.then)} -> {shortened(change.now)}"


# Groups, the most asked for first; a factor of no group is in the last one.
_GROUPS = {
    "model": ("model config", "model code", "text", "weights", "quantisation", PACKED_WEIGHTS, DRAFT_MODEL),
    "config": (
        "dtype",
        "backend",
        "expert stats",
        "attention",
        "states",
        "part",
        "token map",
        "tensor parallel",
        "expert parallel",
        "max traced tokens",
    ),
    "machine": MACHINE_FACTORS,
    "compiler": ("format", "transformers", "passes", "sources"),
}
_MOST_PARTS = 3


def grouped(factors: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The factors by group: model, config, machine, compiler. Every factor is in one group."""
    *_, last = _GROUPS
    group_of = {name: group for group, names in _GROUPS.items() for name in names}
    found = {group: {name: factors[name] for name in names if name in factors} for group, names in _GROUPS.items()}
    found[last] |= {name: value for name, value in factors.items() if name not in group_of}
    return {group: values for group, values in found.items() if values}


def shortened(value: str) -> str:
    """A factor's value for people: hashes cut, many parts counted and hashed together."""
    parts = value.split(", ")
    if len(parts) > _MOST_PARTS:
        what = "files" if all(_FILE_HASH.fullmatch(part) for part in parts) else "parts"
        return f"{len(parts)} {what}, together {hashlib.sha256(value.encode()).hexdigest()[:8]}"
    return ", ".join(_LONG_HASH.sub(lambda match: match[0][:8], part) for part in parts)
