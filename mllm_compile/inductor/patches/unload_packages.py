"""Makes packages that a process can unload: glibc never unloads some libraries, Inductor's for two reasons.

Each start of the embedded model left 5 MiB behind, and four unlinked files under $TMPDIR that took room until the
process ended (torch 2.13, CPU).
"""

from __future__ import annotations

from typing import Any

# A package's interface keeps its last error in a string a thread (2.13; without one nothing is replaced). A
# library whose thread-local data has something to destroy stays until each thread that touched it ends; a string a
# thread that is never destroyed does not hold it.
_LAST_ERROR = "static thread_local std::string g_aoti_last_error;"
_LAST_ERROR_KEPT = "static thread_local std::string& g_aoti_last_error = *new std::string;"


def with_nothing_to_destroy(interface: str) -> str:
    """Source of a package's interface, its thread-local data without destructors."""
    return interface.replace(_LAST_ERROR, _LAST_ERROR_KEPT)


def mark_nothing_unique() -> None:
    """Makes Inductor tell g++ so, in this process and its forks; it has no option for a flag (2.11 to 2.15).

    By default g++ marks static variables of inline functions and templates (std::regex alone has dozens) as unique in a
    process. A library with such a symbol is never unloaded.
    """
    from torch._inductor import cpp_builder

    plain = cpp_builder._get_shared_cflags

    def flags(*arguments: Any) -> list[str]:  # whether to link; from torch 2.14 on first the compiler
        own = ["fno-gnu-unique"] if cpp_builder.is_gcc() else []  # clang marks nothing so, and knows no such flag
        return [*plain(*arguments), *own]

    cpp_builder._get_shared_cflags = flags  # type: ignore[assignment]
