"""A runtime's key and what changed in it, for people: grouped, in lines as wide as the terminal, hashes shortened."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Mapping, Sequence
from typing import TextIO

from mllm_compile.inductor.patches import PATCHES, SWITCH
from mllm_compile.process.console import text_width
from mllm_compile.store.explain import Change, change_text, grouped, shortened
from mllm_compile.store.key import key_of

_UNUSED = "unused"


def print_key(stream: TextIO, factors: Mapping[str, str], whole: bool) -> None:
    """Prints the factors by group.

    Args:
        whole: every value as it is, and those that mean nothing here too.
    """
    print(f"key {key_of(factors)}", file=stream)
    name_width = max(map(len, factors))
    for group, values in grouped(factors).items():
        print(f"  {group}", file=stream)
        for name, value in values.items():
            if whole or value != _UNUSED:
                _print_pair(stream, f"    {name.ljust(name_width)}  ", value if whole else shortened(value))
        unused = [name for name, value in values.items() if value == _UNUSED]
        if unused and not whole:
            _print_pair(stream, f"    {_UNUSED.ljust(name_width)}  ", ", ".join(unused))


def print_changes(stream: TextIO, changes: Sequence[Change], whole: bool) -> None:
    """Prints the changes since the nearest runtime, a line or more a factor.

    Args:
        whole: every part that differs with its hash, not the names of some.
    """
    print("changed since the nearest runtime", file=stream)
    name_width = max(len(change.factor) for change in changes)
    for change in changes:
        text = f"{change.then} -> {change.now}" if whole else change_text(change)
        _print_pair(stream, f"  {change.factor.ljust(name_width)}  ", text)


def print_patches(stream: TextIO) -> None:
    """Prints what a compile replaces inside torch, with the gain of each and what happens without it."""
    version = importlib.metadata.version("torch")
    print(f"replaced inside torch (${SWITCH} leaves names out)", file=stream)
    name_width = max(len(patch.name) for patch in PATCHES)
    for patch in PATCHES:
        always = "" if patch.can_be_left_out else "; always on"
        text = f"{patch.gain}; without it {patch.without}{always} (torch {patch.versions}: {', '.join(patch.replaces)})"
        if obstacle := patch.version_obstacle(version):
            text = f"left out, as {obstacle}; {text}"
        _print_pair(stream, f"  {patch.name.ljust(name_width)}  ", text)


def _print_pair(stream: TextIO, name: str, value: str) -> None:
    """A value behind its name, its further lines below its first."""
    lines = textwrap.wrap(value, max(20, text_width(stream) - len(name)), break_on_hyphens=False) or [""]
    for index, line in enumerate(lines):
        print(f"{name if index == 0 else ' ' * len(name)}{line}", file=stream)
