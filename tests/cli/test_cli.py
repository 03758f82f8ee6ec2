"""The command line itself: help, mistakes, interrupts and characters."""

from __future__ import annotations

import io
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest

from mllm_compile import __main__ as entry
from mllm_compile.cli import run
from mllm_compile.errors import CompileError
from tests.cli.stand_ins import CONFIGS, TINY, stand_in_compiler


def test_help_is_quick_because_nothing_heavy_is_imported():
    code = (
        "import sys; from mllm_compile.cli import run; code = run(['--help']);"
        "heavy = {'torch', 'transformers', 'numpy', 'jinja2', 'huggingface_hub'} & set(sys.modules);"
        "print('heavy:', sorted(heavy), code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: [] 0"


@pytest.mark.parametrize("args", [[], ["--help"], ["compile", "--help"], ["generate", "--help"], ["inspect", "--help"]])
def test_there_is_help_everywhere(args, capsys):
    assert run(args) == 0
    assert "Usage: mllm-compile" in capsys.readouterr().out


@pytest.mark.parametrize("group", ["bench", "cache"])
def test_a_group_alone_is_its_help_and_no_error(group, capsys):
    assert run([group]) == 0
    out, err = capsys.readouterr()
    assert f"Usage: mllm-compile {group}" in out
    assert err == ""


def test_the_version_is_told(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mllm-compile 0.")


def test_torch_is_told_of_cublaslt_before_it_is_imported_so_that_it_does_not_warn():
    code = (
        "import sys; sys.argv = ['mllm-compile', '--version']\nfrom mllm_compile.cli import main\n"
        "try: main()\nexcept SystemExit: assert 'torch' not in sys.modules\n"
        "import torch; print(torch.backends.cuda.preferred_blas_library())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1] == "_BlasBackend.Cublaslt", ran.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["none.yaml"], "none.yaml: there is no such file"),
        (["./none"], "./none: there is no such file or folder. Expected a hub id such as Qwen/Qwen3-0.6B, a model's"),
        (["bench", "latency", "./none"], "there is no such file or folder"),
        (["generate", "./none", "--prompt", "hi"], "there is no such file or folder"),
        (["inspect", "./none"], "there is no such file or folder"),
        (["serve", "none.gguf"], "none.gguf: there is no such file or folder"),
        (["explain", str(CONFIGS / "tinny.yaml")], f"(the nearest is {CONFIGS / 'tiny.yaml'})"),
        (["compile", TINY + "y"], f"there is no such file or folder (the nearest is {TINY}). Expected"),
        ([str(CONFIGS)], "this is a folder, but no model's (it holds no config.json) and no runtime's"),
        ([TINY, "-v", "-q"], "--verbose says more, --quiet nothing; give one of them"),
        (["genrate", "x"], "No such command 'genrate'. Did you mean 'generate'?"),
        (["run", "Qwen/Qwen3-0.6B"], "No such command 'run'"),
        (["generate", "x.yaml"], "Missing option '--prompt'"),
        (["generate", "x.yaml", "--prompt", "hi", "--max-tokens", "x"], "Invalid value for '--max-tokens'"),
        (["--wrong"], "No such option: --wrong"),
        (
            ["serve", TINY, "--max-model-len", "100"],
            "--max-model-len is no option, but runtime.max_model_len of the config: "
            "write {model: {path: …}, runtime: {max_model_len: …}} into a .yaml file, and give that as MODEL",
        ),
        (["serve", TINY, "--dtype=bfloat16"], "model.dtype of the config: write {model: {path: …, dtype: …}} into"),
        (
            ["serve", TINY, "--gpu-memory-utilization=0.8"],
            "is no option, but runtime.mem_fraction_static of the config",
        ),
        ([TINY, "--enforce-eager"], "write {model: {path: …}, cudagraph: {mode: none}} into"),
        (
            ["serve", TINY, "--tensor-parallel-size=2"],
            "--tensor-parallel-size is no option, but runtime.tensor_parallel_size of the config",
        ),
        (["serve", TINY, "--enable-expert-parallel"], "runtime: {expert_parallel_size: 2}} into a .yaml file"),
        (["serve", TINY, "--quantization", "awq"], "is no option, but model.quantization of the config"),
        (["inspect"], "Missing argument"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args, said, capsys):
    assert run(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mllm-compile: error: ")
    assert said in err
    assert err.count("\n") == 1


def test_an_error_of_the_project_is_one_line_and_a_traceback_when_debugging(monkeypatch, config, capsys):
    def fail(*_: object) -> None:
        raise CompileError("piece 3\n  cannot be built")

    stand_in_compiler(monkeypatch, load_or_compile=fail)
    assert run([config]) == 2
    assert capsys.readouterr().err == "mllm-compile: error: piece 3 cannot be built\n"
    monkeypatch.setenv("MLLM_COMPILE_DEBUG", "1")
    with pytest.raises(CompileError):
        run([config])


def test_an_error_of_ours_is_not_hidden(monkeypatch, config):
    stand_in_compiler(monkeypatch, load_or_compile=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run([config])


def test_an_interrupt_ends_with_one_line(monkeypatch, config, capsys):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    stand_in_compiler(monkeypatch, load_or_compile=interrupt)
    assert run([config]) == 130
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", "mllm-compile: interrupted")


def test_an_interrupt_while_the_command_line_is_imported_is_one_line_too(monkeypatch, capsys):
    def interrupt(name: str, *_: object) -> None:
        if name == "mllm_compile.cli":
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "mllm_compile.cli")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=interrupt), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "mllm-compile: interrupted\n"
    scripts = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"mllm-compile": f"{entry.__name__}:main"}, "what is installed begins there"


def test_a_character_that_the_terminal_cannot_show_ends_no_command(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert run(["--version"]) == 0
    print("3 µs", flush=True)
    assert written.getvalue().endswith(b"3 ?s\n")
