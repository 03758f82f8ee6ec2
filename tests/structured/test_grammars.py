"""Forms on their way to a grammar: which backend is asked, what is kept, and what hostile ones cost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from mllm_compile.errors import ConfigError, MllmError, RequestError
from mllm_compile.runtime.sampling.grammar import MaskWork
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.structured import grammar_process
from mllm_compile.structured import grammars as grammars_module
from mllm_compile.structured.form import Form, Refused
from mllm_compile.structured.grammar_process import GrammarProcesses
from mllm_compile.structured.grammars import Grammars
from mllm_compile.structured.vocabulary import Vocabulary
from tests.hang_guard import HANG_S

BOTH = ("llguidance", "xgrammar")
# Each is small enough to be asked for. Seen to take minutes, gigabytes or the process itself in one of the backends.
CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(8000)) + '\nr8000: "a"'
REPEATS = "(?:[a-zA-Z0-9]{0,1000}[^a]{0,1000}){0,1000}"
HOSTILE = {
    "no answer": {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "left recursion": {"grammar": 'root ::= root "a"'},
    "nested groups": {"regex": "(" * 50_000 + "a" + ")" * 50_000},
    "repeats of repeats": {"regex": REPEATS},
    "many rules": {"grammar": CHAIN},
}
GOOD = {
    "a large enum": {"json": {"enum": [f"value {number}" for number in range(10_000)]}},
    "many choices": {"choice": [f"choice {number}" for number in range(15_000)]},
    "endless recursion": {
        "json": {"$defs": {"n": {"additionalProperties": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}
    },
    "nested quantifiers": {"regex": "(a+)+(b|a+)*c"},
    "a long string": {"json": {"type": "string", "maxLength": 1_000_000}},
    "many items": {"json": {"type": "array", "minItems": 100_000, "items": {"type": "string"}}},
    "ambiguity": {"grammar": 'root ::= e\ne ::= e e | e e e | "a" | "ab" e'},
}


def form(**given):
    return StructuredOutputsParams(**given)


@pytest.fixture(scope="module")
def grammars(vocabulary):
    return Grammars(lambda: vocabulary, ("llguidance",), 1)


def limited(monkeypatch, vocabulary, backend="llguidance", *, seconds=HANG_S, mask_seconds=HANG_S):
    """Grammars whose limits of time are these, at any speed."""
    monkeypatch.setattr(grammar_process, "MAX_SECONDS", seconds)
    monkeypatch.setattr(grammar_process, "MAX_MASK_SECONDS", mask_seconds)
    return Grammars(lambda: vocabulary, (backend,), 1)


def allowed(grammar, vocabulary):
    mask = np.zeros((1, vocabulary.mask_words), np.int32)
    assert not grammar.masks.fill([MaskWork(grammar.matcher(), [], 0)], mask)
    return int(np.unpackbits(mask.view(np.uint8)).sum())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_refused_in_bounded_time_and_the_next_one_is_served(grammars, vocabulary, name):
    with pytest.raises(RequestError, match=r"^structured_outputs: ") as refused:
        grammars.compile(form(**HOSTILE[name]))
    assert len(str(refused.value)) < 800
    assert allowed(grammars.compile(form(choice=[f"after {name}"])), vocabulary)


@pytest.mark.parametrize("name", GOOD)
def test_a_form_that_only_looks_hostile_is_served(monkeypatch, vocabulary, name):
    grammars = limited(monkeypatch, vocabulary)
    assert allowed(grammars.compile(form(**GOOD[name])), vocabulary)


def test_what_ends_its_process_says_so(grammars):
    with pytest.raises(RequestError, match=r"compiling the grammar gave no answer: its process ended .* Simplify it"):
        grammars.compile(form(**HOSTILE["many rules"]))


def test_a_grammar_that_takes_more_than_its_processor_time_says_so(monkeypatch, vocabulary):
    grammars = limited(monkeypatch, vocabulary, seconds=0.05)
    count = 1_000
    with pytest.raises(
        RequestError, match=r"compiling the grammar takes more than 0\.05 s of processor time\. Simplify"
    ):
        while count < 60_000:  # the work grows until it meets the limit
            grammars.compile(form(grammar="start: " + " ".join(['"a"?'] * count)))
            count *= 2


@pytest.mark.parametrize("backend", BOTH)
def test_masks_that_take_too_long_are_found_before_the_engine_has_them(monkeypatch, vocabulary, backend):
    grammars = limited(monkeypatch, vocabulary, backend, mask_seconds=-1.0)  # any time is more
    with pytest.raises(RequestError, match="regex is refused: the tokens that may follow take more than -1 s to find"):
        grammars.compile(form(regex="[a-z]+"))


def test_equal_forms_are_compiled_once(vocabulary, monkeypatch):
    grammars = Grammars(lambda: vocabulary, ("llguidance",), 1)
    tried = []
    monkeypatch.setattr(GrammarProcesses, "try_form", lambda self, form: tried.append(form))
    first = grammars.compile(form(json={"type": "object"}))
    assert grammars.compile(form(json='{ "type": "object" }')) is first
    assert grammars.compile(form(json={"type": "object"}, disable_any_whitespace=True)) is not first
    assert len(tried) == 2


def test_callers_at_the_same_time_share_one_compile(vocabulary, monkeypatch):
    grammars = Grammars(lambda: vocabulary, ("llguidance",), 1)
    begun, gate, tried, got = threading.Event(), threading.Event(), [], []

    def slow(self, form):
        tried.append(form)
        begun.set()
        gate.wait(HANG_S)

    monkeypatch.setattr(GrammarProcesses, "try_form", slow)
    threads = [threading.Thread(target=lambda: got.append(grammars.compile(form(regex="a")))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(HANG_S)
    gate.set()
    for thread in threads:
        thread.join(HANG_S)
    assert len(tried) == 1
    assert len(set(map(id, got))) == 1


def test_only_so_many_are_kept_and_those_asked_for_last(vocabulary, monkeypatch):
    grammars = Grammars(lambda: vocabulary, ("llguidance",), 1)
    monkeypatch.setattr(grammars_module, "_MOST_KEPT", 2)
    monkeypatch.setattr(GrammarProcesses, "try_form", lambda self, form: None)
    first, second = (grammars.compile(form(regex=text)) for text in "ab")
    assert grammars.compile(form(regex="a")) is first
    grammars.compile(form(regex="c"))
    assert grammars.compile(form(regex="a")) is first
    assert grammars.compile(form(regex="b")) is not second
    assert not grammars._compiling


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"json": {"not": {}}}, ["llguidance", "xgrammar"]),
        ({"structural_tag": {}}, ["llguidance", "xgrammar"]),
        ({"regex": "a"}, ["llguidance"]),
        ({"choice": ["a"]}, ["llguidance"]),
    ],
)
def test_the_second_backend_is_asked_where_it_may_take_what_the_first_refuses(vocabulary, monkeypatch, given, asked):
    names = []

    def parts_of(self, name):
        def refuse(form):
            names.append(name)
            raise Refused(f"{name} does not like it.")

        return type("Processes", (), {"try_form": staticmethod(refuse)}), None

    monkeypatch.setattr(Grammars, "_parts_of", parts_of)
    with pytest.raises(RequestError, match="is refused: llguidance: llguidance does not like it"):
        Grammars(lambda: vocabulary, BOTH, 1).compile(form(**given))
    assert names == asked


def test_a_limit_that_was_exceeded_is_not_tried_on_the_second_backend(vocabulary, monkeypatch):
    names = []

    def parts_of(self, name):
        def exceed(form):
            names.append(name)
            raise RequestError("too much")

        return type("Processes", (), {"try_form": staticmethod(exceed)}), None

    monkeypatch.setattr(Grammars, "_parts_of", parts_of)
    with pytest.raises(RequestError, match="too much"):
        Grammars(lambda: vocabulary, BOTH, 1).compile(form(json={}))
    assert names == ["llguidance"]


def test_without_a_library_the_extra_is_named(vocabulary, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ConfigError, match=r"need llguidance or xgrammar, which is not installed.*mllm-compile\[struct"):
        Grammars(lambda: vocabulary, BOTH, 1).compile(form(regex="a"))


def test_a_library_that_cannot_be_imported_is_named(vocabulary, monkeypatch):
    monkeypatch.setitem(sys.modules, "mllm_compile.structured.llguidance_backend", None)
    monkeypatch.setattr(GrammarProcesses, "try_form", lambda self, form: None)
    with pytest.raises(ConfigError, match=r"structured_outputs need llguidance, which cannot be imported"):
        Grammars(lambda: vocabulary, ("llguidance",), 1).compile(form(regex="a"))


def test_a_model_without_an_end_of_sequence_is_refused():
    with pytest.raises(RequestError, match=r"names no end-of-sequence token.*Set eos_token_id"):
        Vocabulary.of([b"a", b"b"], {7})


def test_a_vocabulary_is_the_same_after_its_way_to_a_process():
    vocabulary = Vocabulary((b"", b"a\n", b"\xff\x00", "é".encode()), (0,))
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary
    assert vocabulary.special_token_ids == [0]
    assert vocabulary.mask_words == 1


def test_a_process_that_somebody_killed_is_replaced(vocabulary):
    processes = GrammarProcesses("llguidance", vocabulary)
    processes.try_form(Form("regex", "a"))
    (process,) = processes._processes
    os.kill(process._process.pid, 9)
    process._process.wait()
    processes.try_form(Form("regex", "a"))
    assert process not in processes._processes


def test_no_process_can_be_started_is_told(vocabulary, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(MllmError, match=r"no process can be started that tries grammars: .*/nowhere/python"):
        GrammarProcesses("llguidance", vocabulary).try_form(Form("regex", "a"))


def test_importing_the_room_imports_no_backend_and_no_torch():
    code = (
        "import sys, mllm_compile.structured.grammars; "
        "print({'torch', 'llguidance', 'xgrammar', 'transformers', 'tvm_ffi'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
