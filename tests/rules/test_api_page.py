"""docs/api.md is what `python docs/api.py` writes."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

from mllm_compile import AsyncEngine, Engine

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_docstrings_say():
    page = runpy.run_path(str(DOCS / "api.py"))["page"]()
    assert (DOCS / "api.md").read_text(encoding="utf-8") == page, "run `python docs/api.py`"


def test_every_public_name_has_a_section():
    import mllm_compile

    text = (DOCS / "api.md").read_text(encoding="utf-8")
    missing = [name for name in mllm_compile.__all__ if f"\n## {name}\n" not in text and not name.startswith("__")]
    assert not missing


def test_methods_that_are_said_to_be_engines_take_the_same():
    page = runpy.run_path(str(DOCS / "api.py"))
    shared = [name for name in page["_methods"](AsyncEngine) if page["_is_shared"](AsyncEngine, name)]
    assert "sleep" in shared
    for name in shared:
        if isinstance(inspect.getattr_static(Engine, name), property):
            continue
        ours, engines = (inspect.signature(inspect.unwrap(getattr(one, name))) for one in (AsyncEngine, Engine))
        assert ours.parameters == engines.parameters, name
