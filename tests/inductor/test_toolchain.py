"""The C++ compiler is looked for before a model is traced."""

from __future__ import annotations

import pytest

from mllm_compile.errors import CompileError
from mllm_compile.inductor import toolchain
from mllm_compile.process import cpp_compiler


@pytest.mark.parametrize("asked", [None, "no-such-compiler -O1"])
def test_a_machine_without_a_compiler_is_told_what_to_install(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(cpp_compiler, "SYSTEM_CXX", str(tmp_path / "g++"))
    monkeypatch.setenv("PATH", str(tmp_path))
    if asked is None:
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", asked)
    with pytest.raises(CompileError, match=r"no C\+\+ compiler here: .* apt-get install g\+\+"):
        toolchain.check_compiler()
    (tmp_path / (asked or "g++").split()[0]).touch(mode=0o755)
    toolchain.check_compiler()
