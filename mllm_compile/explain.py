"""Why a config is a hit or a miss: its factors beside those of the nearest runtime of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mllm_compile.artifact import Manifest
from mllm_compile.cache_contents import stored_runtimes
from mllm_compile.cache_key import changed_parts

_SAME_MODEL = ("model config", "weights")  # a runtime that shares none of them is of another model


@dataclass(frozen=True)
class Change:
    """A factor whose value is another one, or the parts of it that are."""

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
    """What differs, in the order of the factors."""
    found = []
    for name in dict.fromkeys([*now, *then]):
        new, old = now.get(name, "-"), then.get(name, "-")
        if new != old:
            new, old = changed_parts(new, old)
            found.append(Change(name, old, new))
    return found


def miss_note(factors: Mapping[str, str], nearest: Manifest | None) -> str:
    """One line on why there is no runtime yet."""
    if nearest is None:
        return "nothing was compiled for this model yet"
    changed = changes(factors, nearest.factors)
    if not changed:
        return "the runtime of this key is unusable"
    return "since the nearest runtime changed " + "; ".join(
        f"{change.factor}: {change.then} -> {change.now}" for change in changed
    )
