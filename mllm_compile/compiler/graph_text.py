"""The graph after each stage, as numbered text files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import fx


_GRAPH_TEXT = re.compile(r"\d{2,}_(\w+)\.txt")  # a stage's graph, as GraphDumper names it


def remove_graph_texts(folder: Path) -> None:
    """Removes the text files that an earlier `lower` wrote, which another pipeline would not all write over.

    Nothing else goes, not even a user's own `01_notes.txt`: the first line says whose file it is.
    """
    for path in folder.iterdir():
        name = _GRAPH_TEXT.fullmatch(path.name)
        if name and path.is_file() and path.read_bytes().startswith(_first_line(name[1]).encode()):
            path.unlink()


# No annotation of fx's own has a comma.
_SIGNATURE = re.compile(r"^(def forward)\((.*)\)((?: -> .*)?:)", re.MULTILINE)


def _first_line(name: str, remark: str = "") -> str:
    return f"# {name}: {remark}"


def readable(code: str) -> str:
    """Puts each parameter of a function on its own line; fx puts a thousand of them on one."""
    return _SIGNATURE.sub(
        lambda match: f"{match[1]}(\n    {match[2].replace(', ', f',{chr(10)}    ')},\n){match[3]}", code
    )


class GraphDumper:
    """Writes numbered files, one a stage: `02_pack_projections.txt`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def __call__(self, name: str, gm: fx.GraphModule, remark: str) -> None:
        # As it is now: passes change this graph and leave compiling it to the end, but each piece that they change.
        text = [_first_line(name, remark), readable(gm.graph.python_code("self").src.strip())]
        children: Any = gm.named_children()
        text += [f"# {child}\n{readable(piece.code.strip())}" for child, piece in children if hasattr(piece, "code")]
        path = self._folder / f"{self._count:02d}_{name}.txt"
        path.write_text("\n\n".join(text) + "\n", encoding="utf-8")
        self._count += 1
