"""Stops the garbage collector while many objects are made that stay: it would look through them again and again.

torch, Transformers, Dynamo and Inductor make 660,000 objects that stay until the process ends. Scanning them is 10 % of
the time of importing torch, and 16 % of Transformers' and Dynamo's. A trace keeps 160,000: Qwen3-8B's takes 7.1 s with
the collector, and 6.6 s and 18 MiB more without (CPU, torch 2.13, medians of three). So it is while a runtime's program
is read.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from mllm_compile.process.sleeping_blas import sleeping_blas

_MANY = 50_000  # objects; torch and the engine make 300,000


@contextmanager
def gc_paused() -> Iterator[None]:
    """Holds the collector, if it runs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def imports_unseen() -> Iterator[None]:
    """The same around imports, whose objects stay: afterwards all that is there counts as old.

    So no collection of new objects looks at it. On a CPU these took 0.25 s, until the first token. Threads that numpy
    makes meanwhile sleep.
    """
    with sleeping_blas(), gc_paused():
        yield
        num_made = gc.get_count()[0]
        if not gc.get_freeze_count():  # a caller's frozen objects stay so
            gc.freeze()
            gc.unfreeze()  # to the oldest generation: frozen, an engine that begins would be closed by no collection
        if num_made >= _MANY:
            _Due.since = _full_collections()


def see_imports() -> None:
    """Collects everything once after imports of many objects. For a moment in which nobody waits for tokens.

    Python's next look at everything is due when there is a quarter more of it than at the last. Of imports that it has
    not seen it knows none, so that one would come soon, amid an engine's steps: 0.2 to 0.6 s. Imports also leave
    garbage that refers to the frames of who imported, and so to an engine that was dropped.

    Nothing is done where the process has switched its collector off, has frozen objects, or has had such a look since.
    """
    since, _Due.since = _Due.since, None
    if since == _full_collections() and gc.isenabled() and not gc.get_freeze_count():
        gc.collect()


class _Due:
    """The number of full collections when many objects had been imported; None: none is due for imports."""

    since: int | None = None


def _full_collections() -> int:
    return int(gc.get_stats()[-1]["collections"])
