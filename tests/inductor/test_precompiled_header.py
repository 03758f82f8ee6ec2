"""The C++ header that the packages of a compile share: compiled once, waited for, and read as it is if that fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mllm_compile.inductor.patches import precompiled_header
from mllm_compile.inductor.toolchain import WRAPPER_OPTIONS
from mllm_compile.inductor.toolchain import system_compiler as with_system_compiler
from mllm_compile.process.cpp_compiler import SYSTEM_CXX
from tests.fresh_process import FreshProcess, fresh_process

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA's headers")]
HEADER = "torch/csrc/inductor/aoti_include/cpu.h"

IMPORTS = "import torch._inductor.codecache, torch._inductor.cpp_builder"
# A compiler process that shares its header. In place of g++: BUILD.
SHARES = """
import os, sys, time
from pathlib import Path
import torch._inductor.cpp_builder
from mllm_compile.inductor.patches import precompiled_header as shared_header

def build(self):
    BUILD

torch._inductor.cpp_builder.CppBuilder.build = build
folder = Path(FOLDER)
answers = os.dup(1)
os.dup2(2, 1)
shared_header.share_header(folder, "cpu")
assert shared_header.is_shared()
"""
# A fork of it that needs the header.
ASKS = """
if os.fork() == 0:
    path = Path(torch._inductor.codecache._precompile_header("HEADER", "g++ -O0", aot_mode=True, device_type="cpu"))
    assert path.read_text().splitlines()[0] == "#include <HEADER>"
    (folder / "asked").write_text(str(path.with_name(path.name + ".gch").exists()))
    os._exit(0)
os.wait(), os.wait()
"""


# Runs in a fork and a process group of its own, and returns when nobody has its output any more.
IN_A_GROUP = """
import os, signal
reads, writes = os.pipe()
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    os.dup2(writes, 1)
    os.close(reads), os.close(writes)
    try:
        exec(CODE, {})
        os._exit(0)
    finally:
        os._exit(1)
os.close(writes)
said = os.read(reads, 1000)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
try:
    os.killpg(child, signal.SIGKILL)
except ProcessLookupError:
    pass
print([said, code])
"""


@pytest.fixture(scope="module")
def compilers() -> Iterator[FreshProcess]:
    with fresh_process(IMPORTS) as process:
        yield process


@pytest.fixture
def run(compilers: FreshProcess, tmp_path: Path) -> Callable[[str], None]:
    """Runs a compiler process; its folder is the test's."""

    def run(code: str) -> None:
        code = code.replace("HEADER", HEADER).replace("FOLDER", repr(str(tmp_path)))
        said = compilers.run(IN_A_GROUP.replace("CODE", repr(code)))
        assert "[b'', 0]" in said.splitlines(), said  # beside what the fork that builds says of its errors

    return run


def test_packages_wait_for_what_is_being_compiled(run, tmp_path):
    run(SHARES.replace("BUILD", "time.sleep(0.5); Path(self.get_target_file_path()).touch()") + ASKS)
    assert (tmp_path / "asked").read_text() == "True"


@pytest.mark.parametrize("build", ["raise RuntimeError('no')", "os.kill(os.getpid(), 9)"])
def test_where_it_cannot_be_compiled_it_is_read_as_it_is(run, tmp_path, build):
    run(SHARES.replace("BUILD", build) + ASKS)
    assert (tmp_path / "asked").read_text() == "False"


def test_whoever_waits_for_the_compiler_process_does_not_wait_for_the_header(run):
    run(SHARES.replace("BUILD", "time.sleep(3600)"))


@pytest.mark.parametrize(
    ("device", "cores", "expected"), [("cuda:0", 16, True), ("cuda:0", 2, False), ("cpu", 16, False)]
)
def test_where_it_pays(monkeypatch, device, cores, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert precompiled_header.pays(device) is expected


@pytest.mark.skipif(not os.path.exists(SYSTEM_CXX), reason="asks g++")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_packages_are_compiled_with_it(tmp_path, device):
    import torch._inductor.config
    from torch._inductor import codecache
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import invalid_vec_isa

    included = codecache._get_cpp_wrapper_header(device, aot_mode=True)
    plain = codecache._precompile_header
    try:
        precompiled_header.share_header(tmp_path, f"{device}:0")
        header = codecache._precompile_header(included, "g++ -O0", aot_mode=True, device_type=device)
    finally:
        codecache._precompile_header = plain
    (tmp_path / "wrapper.cpp").write_text(f"#include <{included}>\n")
    with torch._inductor.config.patch(WRAPPER_OPTIONS), with_system_compiler():
        options = CppTorchDeviceOptions(
            compile_only=True,
            min_optimize=True,
            aot_mode=True,
            device_type=device,
            use_mmap_weights=False,
            use_mmap_weights_external=False,
            use_relative_path=False,
            vec_isa=invalid_vec_isa,
        )
        options.precompiled_header = header
        source = tmp_path / "wrapper.cpp"
        builder = CppBuilder("wrapper", str(source), output_dir=str(tmp_path), BuildOption=options)
        command = f"{builder.get_command_line()} -H"
    done = subprocess.run(command.split(), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"! {header}.gch" in done.stderr.splitlines(), "g++ marks what it takes by !, what it refuses by x"
