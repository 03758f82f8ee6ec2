"""The collector is held while much is imported, and is afterwards as it was before."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from mllm_compile.process.no_gc import _MANY as MANY
from mllm_compile.process.no_gc import gc_paused, imports_unseen, see_imports


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    was_frozen = gc.get_freeze_count() > 0  # by another test, or the process of tests
    gc.unfreeze()
    yield
    gc.enable()
    if was_frozen:
        gc.freeze()


def many(size: int = MANY) -> list[list[None]]:
    return [[] for _ in range(size)]


def full_collections() -> int:
    return gc.get_stats()[-1]["collections"]


def test_nothing_is_collected_inside():
    before = sum(stats["collections"] for stats in gc.get_stats())
    with gc_paused():
        made = [[] for _ in range(100_000)]
        assert sum(stats["collections"] for stats in gc.get_stats()) == before
    assert gc.isenabled() and made


def test_what_a_user_has_dropped_is_collected_afterwards():
    dropped = type("Dropped", (), {})()
    dropped.itself = dropped
    reference = weakref.ref(dropped)
    del dropped
    with gc_paused():
        pass
    gc.collect()
    assert reference() is None


def test_the_collector_comes_back_after_an_error():
    with pytest.raises(ImportError), gc_paused():
        raise ImportError
    assert gc.isenabled()


def test_whoever_has_switched_it_off_finds_it_so():
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_what_was_made_inside_is_old_at_once_and_is_collected_when_all_is():
    kind = type("Made", (), {})
    with imports_unseen():
        made = [kind() for _ in range(1_000)]
        made[0].itself = made[0]
    young = {id(one) for generation in (0, 1) for one in gc.get_objects(generation=generation)}
    assert not young & set(map(id, made))
    reference = weakref.ref(made[0])
    del made, young
    gc.collect(1)
    assert reference() is not None
    gc.collect()
    assert reference() is None


def test_what_a_caller_has_frozen_stays_so():
    gc.freeze()
    try:
        with imports_unseen():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_after_imports_of_many_objects_one_look_at_everything_is_due():
    with imports_unseen():
        made = many()
    before = full_collections()
    see_imports()
    assert full_collections() == before + 1
    see_imports()
    assert full_collections() == before + 1 and made


def looked_already():
    gc.collect()


def import_more():
    with imports_unseen():
        pass


@pytest.mark.parametrize(
    ("size", "then", "looks"),
    [
        (10, import_more, 0),
        (MANY, import_more, 1),
        (MANY, looked_already, 0),
        (MANY, gc.disable, 0),
        (MANY, gc.freeze, 0),
    ],
)
def test_no_look_is_due_after_few_objects_nor_where_the_process_sees_to_it(size, then, looks):
    with imports_unseen():
        made = many(size)
    then()
    before = full_collections()
    see_imports()
    assert full_collections() == before + looks and made


def test_an_engine_that_was_dropped_is_free_of_the_garbage_of_its_imports():
    """Python keeps the frames behind an exception that is stored in its own; imports leave such."""

    def raise_and_keep():
        try:
            raise ImportError
        except ImportError as error:
            kept = error
        return [kept.args]

    class Owner:
        def __init__(self):
            with imports_unseen():
                self.made = [many(), raise_and_keep()]

    owner = Owner()
    reference = weakref.ref(owner)
    del owner
    assert reference() is not None
    see_imports()
    assert reference() is None


@pytest.mark.parametrize("sees", [True, False])
def test_the_collector_walks_over_imports_amid_later_work_unless_they_were_seen(sees):
    code = (
        "import gc\n"
        "from mllm_compile.process.no_gc import imports_unseen, see_imports\n"
        "with imports_unseen(): imported = [[] for _ in range(400_000)]\n"
        f"if {sees}: see_imports()\n"
        "walked = []\n"
        "def note(phase, info):\n"
        "    if (phase, info['generation']) == ('start', 2): walked.append(len(gc.get_objects()) > 400_000)\n"
        "gc.callbacks.append(note)\n"
        "answers = [[] for _ in range(95_000)]\n"  # more than 700 × 11 × 11, less than a quarter of the imports
        "print(walked)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == (["[]"] if sees else ["[True]"])
