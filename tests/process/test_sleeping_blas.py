"""The variable that numpy's OpenBLAS reads is there while it is imported, and never a caller's own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mllm_compile.process.no_gc import imports_unseen
from mllm_compile.process.sleeping_blas import VARIABLE, sleeping_blas

# What C code sees, as OpenBLAS does; os.environ is Python's own copy.
_SEEN = f"""
import ctypes, sys
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
def seen():
    return getenv(b"{VARIABLE}")
"""


def lines_of(program: str, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | variables
    done = subprocess.run(
        [sys.executable, "-c", _SEEN + program], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_an_engine_imports_numpy_with_it():
    program = """
class Numpy:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            print(seen())
sys.meta_path.insert(0, Numpy())
from mllm_compile import Engine
print(seen())
"""
    assert lines_of(program) == ["b'4'", "None"]
    assert lines_of(program, **{VARIABLE: "20"}) == ["b'20'", "b'20'"]


def test_it_is_gone_after_an_error(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    with pytest.raises(ImportError), sleeping_blas():
        assert os.environ[VARIABLE]
        raise ImportError
    assert VARIABLE not in os.environ


def test_it_is_not_set_where_numpy_is_there(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "numpy", os)
    with imports_unseen():
        assert VARIABLE not in os.environ
