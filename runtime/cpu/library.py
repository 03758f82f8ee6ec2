"""A library of C++ functions that a runtime holds compiled; free of torch.

Sources are beside the Python that calls them. They include the C++ standard library, OpenMP and files of runtime/
alone, so that g++ takes seconds, and export functions of plain pointers (`extern "C"`). mllm_compile/kernels/cpu.py
compiles them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RUNTIME = Path(__file__).parent.parent


@dataclass(frozen=True)
class CpuLibrary:
    """
    Attributes:
        name: the binary's file name, without its suffix.
        source: its file, seen from the folder runtime/.
        switch: the setting that does without it.
        headers: files of runtime/ that it includes, by their paths from there.
        registers_ops: it registers ops with torch, by its stable C interface, while it is loaded.
    """

    name: str
    source: str
    switch: str
    headers: tuple[str, ...] = ()
    registers_ops: bool = False

    @property
    def path(self) -> Path:
        return RUNTIME / self.source

    def text(self) -> str:
        """All that is compiled."""
        return "".join((RUNTIME / name).read_text(encoding="utf-8") for name in (*self.headers, self.source))
