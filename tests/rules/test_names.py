"""docs/lab/names.md is true: each name that it calls present is there, and no name that it calls absent is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "names.md"
PRESENT = ("names", "kept for it")  # heads of the second column; of the third table's one more, which says why
ABSENT = ("not there yet", "names, why")


def rows(are_present: bool) -> Iterator[tuple[str, str]]:
    """(home, name) of every table whose names are present, or absent."""
    is_wanted = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            is_wanted = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "home":
            head = "names, why" if cells[-1] == "why" else cells[1]
            assert head in (*PRESENT, *ABSENT), f"a table with {head}: present or absent?"
            is_wanted = head in (PRESENT if are_present else ABSENT)
        elif is_wanted and not cells[0].startswith("-"):
            for name in re.findall(r"`([^`]+)`", cells[1]):
                yield cells[0].strip("`"), name


def home_of(path: str) -> Any:
    """The module or class of a dotted path below mllm_compile."""
    module, _, last = f"mllm_compile.{path}".rpartition(".")
    return getattr(import_module(module), last) if last[0].isupper() else import_module(f"{module}.{last}")


def has(home: Any, name: str) -> bool:
    """True if a module or class has the name: a field, or an attribute that its methods set, among them."""
    if called := re.fullmatch(r"(\w+)\((\w+)\)", name):
        return called[2] in inspect.signature(getattr(home, called[1])).parameters
    if hasattr(home, name) or not inspect.isclass(home):
        return hasattr(home, name)
    mro = [one for one in home.__mro__ if one.__module__.startswith("mllm_compile")]
    is_set = re.compile(rf"\bself\.{name}\b(: [^=\n]+)? = ")
    return any(name in inspect.get_annotations(one) or is_set.search(inspect.getsource(one)) for one in mro)


def test_the_page_has_names_of_both_kinds():
    present, absent = list(rows(are_present=True)), list(rows(are_present=False))
    assert len(present) > 100 and len(absent) > 30
    assert not set(present) & set(absent)


@pytest.mark.parametrize("are_present", [True, False], ids=["present", "absent"])
def test_names_are_where_the_page_says(are_present: bool):
    wrong = [f"{home}.{name}" for home, name in rows(are_present) if has(home_of(home), name) is not are_present]
    assert not wrong, f"docs/lab/names.md is wrong of {wrong}"


def test_a_name_is_found_in_any_form():
    runner = home_of("runtime.model_runner.ModelRunner")
    for name in ("forward", "vocab_size", "graph_runner", "forward_pass_id", "sample(top_ps)", "config"):
        assert has(runner, name)
    for name in ("forwards", "sample(top_p)", "graph"):
        assert not has(runner, name)
