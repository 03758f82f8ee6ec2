"""Makes lab/fields.md: which fields of other servers' requests are refused or taken. `python docs/fields.py`"""

from __future__ import annotations

import json
from pathlib import Path

from mllm_compile.server.api.foreign_fields import FOREIGN, OF_MESSAGES, OF_RESPONSES, RENAMED, ForeignFields

_HEAD = """# Fields of requests

Made by `python docs/fields.py` from the server's own table. [The server's page](../server.md#fields) has the fields
that are served, and `/openapi.json` lists each by its path. A field of another path is refused by its name. An unknown
name is listed in the header `x-mllm-ignored`.
"""
_PATHS: tuple[tuple[str, ForeignFields], ...] = (
    ("all paths", FOREIGN),
    ("`/v1/responses`", OF_RESPONSES),
    ("`/v1/messages`", OF_MESSAGES),
)


def page() -> str:
    """The page's text."""
    parts = [_HEAD]
    parts += ["SGLang's names: " + ", ".join(f"`{name}` for `{ours}`" for name, ours in RENAMED.items()) + "."]
    for path, foreign in _PATHS:
        refused = {name: one for name, one in foreign.items() if not one.is_taken}
        parts += [
            f"\n## Refused by {path}\n",
            "A value in brackets asks for nothing, and is taken.\n",
            *_items(refused),
        ]
    parts += ["\n## Taken, and without a meaning here\n"]
    for path, foreign in _PATHS:
        where = "" if foreign is FOREIGN else f" ({path} alone)"
        parts += _items({name: one for name, one in foreign.items() if one.is_taken}, where)
    return "\n".join(parts) + "\n"


def _items(fields: ForeignFields, where: str = "") -> list[str]:
    """An item for each owner and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, one in fields.items():
        values = f" ({', '.join(f'`{json.dumps(value)}`' for value in one.nothing)})" if one.nothing else ""
        groups.setdefault((one.of, one.why), []).append(f"`{name}`{values}")
    return [f"- {of}'s {', '.join(names)}{where}: {why}." for (of, why), names in groups.items()]


if __name__ == "__main__":
    (Path(__file__).parent / "lab" / "fields.md").write_text(page(), encoding="utf-8")
