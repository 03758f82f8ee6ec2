"""The command line: help, mistakes, and what the commands print. Compiling itself is shown in the tests of compile."""

from __future__ import annotations

import errno
import io
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mllm_compile.model
from mllm_compile import __main__ as entry
from mllm_compile.cli import run
from mllm_compile.config.schema import EngineConfig
from mllm_compile.engine.outputs import CompletionOutput, RequestOutput
from mllm_compile.errors import CompileError, RequestError
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from tests.adapters.folders import peft_fields, write_adapter

TINY = str(Path(mllm_compile.model.__file__).parent / "tiny")
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "model.yaml"
    path.write_text("model: {path: ./m}")
    return str(path)


def stand_in_compiler(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    monkeypatch.setitem(sys.modules, "mllm_compile.compiler.load_or_compile", SimpleNamespace(**functions))


@dataclass
class StandInEngine:
    """Streams fixed text; keeps what it was asked for."""

    default_params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.6, top_k=20))
    tokenizer: object | None = field(default_factory=lambda: SimpleNamespace(has_chat_template=True))
    refusal: RequestError | None = None
    starts: int = 0
    config: Any = None
    answered_by: str | None = None
    adapters: dict[str, Path] = field(default_factory=dict)
    asked: list[tuple[object, SamplingParams]] = field(default_factory=list)

    def __enter__(self) -> StandInEngine:
        self.starts += 1
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def load_adapter(self, name: str, folder: Path) -> None:
        self.adapters[name] = folder

    def stream(self, prompt: object, params: SamplingParams, adapter: str | None = None) -> Iterator[RequestOutput]:
        self.asked.append((prompt, params))
        self.answered_by = adapter
        if self.refusal is not None:
            raise self.refusal
        for text in ("to", "ken"):
            yield RequestOutput("r", None, [1], [CompletionOutput(0, text, [1])], finished=text == "ken")

    stream_chat = stream


@pytest.fixture
def engine(monkeypatch) -> StandInEngine:
    engine = StandInEngine()

    def make(config: object, reporter: object) -> StandInEngine:
        engine.config = config
        return engine

    monkeypatch.setitem(sys.modules, "mllm_compile.engine.engine", SimpleNamespace(Engine=make))
    return engine


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


@pytest.mark.parametrize("command", [[], ["compile"]])
def test_compiling_ends_with_a_line_and_the_place_and_a_table_where_it_is_asked_for(
    monkeypatch, config, capsys, command
):
    runtime = SimpleNamespace(
        folder="/cache/r",
        was_cached=False,
        stages=[("trace", 1.5), ("passes", 0.25)],
        num_pieces=9,
        num_distinct_pieces=3,
    )
    stand_in_compiler(monkeypatch, load_or_compile=lambda config, reporter, options: runtime)
    assert run([*command, config]) == 0
    said = ["compiled in 1.8 s: 9 pieces, 3 of them distinct", "runtime: /cache/r"]
    assert capsys.readouterr().out.splitlines() == said
    assert run([*command, config, "-v"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compiled"
    assert [line.split() for line in lines[1:5]] == [
        ["stage", "seconds"],
        ["trace", "1.50"],
        ["passes", "0.25"],
        ["total", "1.75"],
    ]
    assert lines[5:] == said


def test_a_full_disk_is_one_line(monkeypatch, config, capsys):
    def fill(config, reporter, options):
        raise OSError(errno.ENOSPC, "No space left on device", "/mnt/r.json")

    stand_in_compiler(monkeypatch, load_or_compile=fill)
    assert run([config]) == 2
    assert "/mnt/r.json: No space left on device. Make room, or write to another place." in capsys.readouterr().err


def test_a_prompt_from_a_closed_standard_input_is_refused(monkeypatch, config, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert run(["generate", config, "--prompt", "-"]) == 2
    assert "--prompt - reads standard input, which is closed" in capsys.readouterr().err


@pytest.mark.parametrize("serves_same", [True, False])
def test_a_second_call_says_that_it_found_the_runtime_and_whether_its_folder_is_the_same(
    monkeypatch, config, capsys, serves_same
):
    runtime = SimpleNamespace(folder="/cache/r", was_cached=True, serves_same=serves_same)
    stand_in_compiler(monkeypatch, load_or_compile=lambda config, reporter, options: runtime)
    assert run([config]) == 0
    first, *more = capsys.readouterr().out.splitlines()
    assert first == "already compiled: /cache/r"
    assert bool(more) != serves_same and all("another config or checkpoint: see --output" in line for line in more)


def test_a_compile_takes_the_section_of_speculation(monkeypatch, config, capsys):
    asked = []
    found = SimpleNamespace(folder="/cache/r", was_cached=True, serves_same=True)
    stand_in_compiler(monkeypatch, load_or_compile=lambda config, reporter, options: asked.append(config) or found)
    assert run([config, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}']) == 0
    assert (asked[0].speculative.method, asked[0].speculative.num_speculative_tokens) == ("ngram", 2)
    assert run([config, "--speculative-config", "ngram"]) == 2
    assert "expected a JSON object" in capsys.readouterr().err


def test_a_page_and_a_folder_of_graphs_are_not_asked_for_at_once(config, tmp_path, capsys):
    assert run(["inspect", config, "--html", str(tmp_path / "p.html"), "--out", str(tmp_path)]) == 2
    assert "--html writes one page, --out a folder of graphs; give one of them" in capsys.readouterr().err


def test_inspecting_prints_the_passes_and_why_others_were_left_out(monkeypatch, config, capsys, tmp_path):
    def inspect_model(config, out_dir, reporter):
        with reporter.stage("trace"):
            report = SimpleNamespace(name="pack_linears", matches=4, nodes_before=90, nodes_after=70, ms=1.25)
            left_out = {"fuse_linears": "its kernels run elsewhere"}
            return SimpleNamespace(reports=[report], left_out=left_out, cut=["9 weights are cut"], pieces=[])

    monkeypatch.setitem(sys.modules, "mllm_compile.report.inspect", SimpleNamespace(inspect_model=inspect_model))
    assert run(["inspect", config, "--out", str(tmp_path / "graphs")]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[2].split() == ["pack_linears", "4", "90", "70", "1.2"]
    assert lines[3:5] == ["left out: fuse_linears: its kernels run elsewhere", "9 weights are cut"]
    assert lines[-1] == f"graphs: {tmp_path / 'graphs'}"
    assert err == ""
    assert run(["inspect", config, "--out", str(tmp_path / "graphs"), "-v"]) == 0
    assert capsys.readouterr().err.startswith("trace: ")


def test_generated_text_is_streamed_with_the_models_own_sampling(engine, config, capsys):
    assert run(["generate", config, "--prompt", "once", "--max-tokens", "9"]) == 0
    told = capsys.readouterr()
    assert told.out == "token\n"
    assert "--chat asks it as a user does" in told.err
    prompt, params = engine.asked[0]
    assert (prompt, params.max_tokens, params.temperature, params.top_k) == ("once", 9, 0.6, 20)


def test_sampling_on_the_command_line_wins(engine, config):
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 0, "seed": 7}
    words = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    assert run(["generate", config, "--prompt", "once", *words]) == 0
    params = engine.asked[0][1]
    assert {name: getattr(params, name) for name in options} == options


def test_an_adapter_is_loaded_from_its_folder_into_a_place_of_its_rank(engine, config, tmp_path):
    fields = peft_fields(["q_proj"], 4, rank_pattern={"k_proj": 32})
    folder = write_adapter(tmp_path / "sql", {}, fields)
    assert run(["generate", config, "--prompt", "x", "--adapter", f"sql={folder}"]) == 0
    assert (engine.adapters, engine.answered_by) == ({"sql": folder}, "sql")
    lora = engine.config.lora
    assert (lora.max_adapters, lora.max_rank, lora.dora) == (1, 32, False)
    write_adapter(folder, {}, fields | {"use_dora": True})
    assert run(["generate", config, "--prompt", "x", "--adapter", f"sql={folder}"]) == 0
    assert engine.config.lora.dora
    Path(config).write_text("model: {path: ./m}\nlora: {max_adapters: 3, adapters: {law: /law}}")
    assert run(["generate", config, "--prompt", "x", "--chat", "--adapter", "law"]) == 0
    assert (engine.adapters, engine.answered_by) == ({"sql": folder}, "law")
    assert engine.config.lora.max_adapters == 3


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ("sql", "--adapter: expected a name in lora.adapters (none), got 'sql'. Give NAME=PATH"),
        ("sql=", "--adapter: expected NAME=PATH, got 'sql='"),
        ("=/sql", "--adapter: expected an adapter's name"),
        ("sql=/no", "/no has no adapter_config.json; expected a folder as PEFT's"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused_before_anything_is_loaded(engine, config, capsys, adapter, said):
    assert run(["generate", config, "--prompt", "x", "--adapter", adapter]) == 2
    assert engine.starts == 0
    assert said in capsys.readouterr().err


def test_a_chat_prompt_is_a_users_message(engine, config, capsys):
    assert run(["generate", config, "--prompt", "hi", "--chat"]) == 0
    assert engine.asked[0][0] == [{"role": "user", "content": "hi"}]


def test_a_prompt_may_come_from_standard_input(engine, config, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(read=lambda: "two\nlines \n\n"))
    assert run(["generate", config, "--prompt", "-"]) == 0
    assert engine.asked[0][0] == "two\nlines \n", "the newline that ends a file or an echo is none of the text's"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_prompt_is_before_the_text_on_a_terminal_and_where_it_is_asked_for(engine, config, capsys, monkeypatch):
    command = ["generate", config, "--prompt", "once"]
    assert run(command) == 0
    assert capsys.readouterr().out == "token\n", "a file gets what was generated"
    assert run([*command, "--echo"]) == 0
    assert run([*command, "--echo", "--chat"]) == 0
    assert capsys.readouterr().out == "oncetoken\nonce\ntoken\n"
    monkeypatch.delenv("NO_COLOR", raising=False)
    for options, shown in (([], "\x1b[2monce\x1b[0mtoken\n"), (["--no-echo"], "token\n")):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        assert run([*command, *options]) == 0
        assert terminal.getvalue() == shown


def test_a_quiet_generation_prints_nothing_of_itself(engine, config, monkeypatch):
    for options, says in (([], True), (["--quiet"], False)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        assert run(["generate", config, "--prompt", "once", *options]) == 0
        assert bool(terminal.getvalue()) == says


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "gpt2", TINY])
def test_a_hub_id_or_a_folder_is_a_model_of_default_settings(monkeypatch, capsys, model):
    asked = []

    def load_or_compile(config, reporter, options):
        asked.append(config)
        return SimpleNamespace(folder="/cache/r", was_cached=True, serves_same=True)

    stand_in_compiler(monkeypatch, load_or_compile=load_or_compile)
    assert run([model]) == run(["compile", model]) == 0
    assert asked == [EngineConfig(model={"path": model})] * 2


def test_a_runtime_is_checked_and_not_compiled_again(monkeypatch, tmp_path, capsys):
    (tmp_path / "manifest.json").touch()
    runtime = SimpleNamespace(folder=tmp_path, was_cached=True, serves_same=True)
    stand_in_compiler(monkeypatch, open_runtime=lambda folder, reporter: runtime)
    assert run([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"already compiled: {tmp_path}\n"
    assert run([str(tmp_path), "--output", str(tmp_path / "other")]) == 2
    assert "take the model or config that it was compiled from" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        ["--max-tokens", "0"],
        ["--temperature", "nan"],
        ["--temperature", "-1"],
        ["--top-p", "0"],
        ["--top-k", "-2"],
        ["--seed", str(2**64)],
    ],
)
def test_sampling_values_that_cannot_be_are_refused_before_anything_is_loaded(engine, config, capsys, option):
    assert run(["generate", config, "--prompt", "x", *option]) == 2
    assert engine.asked == []
    assert option[0].strip("-").replace("-", "_") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "form"),
    [
        (["--json-schema", '{"type": "integer"}'], {"json": {"type": "integer"}}),
        (["--json-schema", "schema.json"], {"json": {"type": "string"}}),
        (["--json"], {"json_object": True}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--choice", "yes", "--choice", "no"], {"choice": ["yes", "no"]}),
        (["--grammar", 'root ::= "a"'], {"grammar": 'root ::= "a"'}),
        (["--grammar", 'start: "a"'], {"grammar": 'start: "a"'}),
        (["--grammar", "start.lark"], {"grammar": 'start: "b"\n'}),
    ],
)
def test_the_form_of_an_answer_is_given_as_text_or_as_a_file(engine, config, tmp_path, monkeypatch, option, form):
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text('{"type": "string"}')
    Path("start.lark").write_text('start: "b"\n')
    assert run(["generate", config, "--prompt", "once", *option]) == 0
    assert engine.asked[0][1].structured_outputs == StructuredOutputsParams(**form)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--json-schema", "none.json"], "'none.json' cannot be read"),
        (["--json-schema", "{"], "json: expected a JSON object"),
        (["--json", "--regex", "a"], "expected exactly one of json, regex"),
    ],
)
def test_a_form_that_cannot_be_is_refused_before_anything_is_loaded(engine, config, capsys, option, said):
    assert run(["generate", config, "--prompt", "x", *option]) == 2
    assert engine.asked == []
    assert said in capsys.readouterr().err


def test_an_empty_prompt_is_refused_before_anything_is_loaded(engine, config, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(read=lambda: ""))
    for prompt in ("", "-"):
        assert run(["generate", config, "--prompt", prompt]) == 2
        assert "the prompt is empty; expected at least one character" in capsys.readouterr().err
    assert (engine.starts, engine.asked) == (0, [])
    assert run(["generate", config, "--prompt", "", "--chat"]) == 0, "a template says more than the message"


def test_a_model_without_a_tokenizer_is_refused_before_it_is_compiled(engine, capsys):
    path = CONFIGS / "qwen-shape.yaml"
    assert run(["generate", str(path), "--prompt", "hi"]) == 2
    assert f"the model of {path} has no tokenizer, so it takes no text. Use `mllm-compile bench`" in (
        capsys.readouterr().err
    )
    assert engine.starts == 0


@pytest.mark.parametrize("command", [["generate", "--chat", "--prompt", "hi"], ["chat"]])
def test_a_chat_with_a_model_that_has_no_template_is_refused_before_it_is_compiled(engine, tmp_path, capsys, command):
    shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("chat_template.jinja"))
    assert run([command[0], str(tmp_path / "model"), *command[1:]]) == 2
    assert "the model has no chat template; pass the prompt as text" in capsys.readouterr().err
    assert engine.starts == 0


def test_images_for_a_model_of_text_are_refused_before_it_is_compiled(engine, tmp_path, capsys, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    image = str(CONFIGS.parent / "examples" / "shapes.png")
    for model in (TINY, str(tmp_path / "model.gguf")):
        assert run(["generate", model, "--prompt", "hi", "--image", image]) == 2
        assert f"{model} takes text alone: its folder has no processor of images" in capsys.readouterr().err
    assert engine.starts == 0


@pytest.mark.parametrize(
    ("libraries", "options", "extra"),
    [
        (["llguidance", "xgrammar"], ["--json"], "mllm-compile[structured]"),
        (["PIL"], ["--image", "examples/shapes.png"], "mllm-compile[images]"),
    ],
)
def test_an_extra_that_is_not_installed_is_named_before_anything_is_compiled(
    engine, config, capsys, monkeypatch, libraries, options, extra
):
    for library in libraries:
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.chdir(CONFIGS.parent)
    assert run(["generate", config, "--prompt", "hi", *options]) == 2
    assert f"pip install '{extra}'" in capsys.readouterr().err
    assert engine.starts == 0


@pytest.mark.parametrize("tokenizer", ["tokenizer.json", "vocab.txt"])
def test_a_model_with_a_tokenizer_of_any_format_is_served(engine, config, tmp_path, tokenizer):
    (tmp_path / "m").mkdir()
    for name in ("config.json", tokenizer):
        (tmp_path / "m" / name).touch()
    assert run(["generate", config, "--prompt", "hi"]) == 0


def test_a_runtime_without_a_tokenizer_says_what_to_use_instead(engine, tmp_path, capsys):
    engine.tokenizer = None
    (tmp_path / "manifest.json").touch()
    assert run(["generate", str(tmp_path), "--prompt", "hi"]) == 2
    assert f"the model of {tmp_path} has no tokenizer" in capsys.readouterr().err
    assert engine.asked == []


def test_a_refused_prompt_is_a_mistake(engine, config, capsys):
    engine.refusal = RequestError("the prompt has 9000 tokens")
    assert run(["generate", config, "--prompt", "x"]) == 2
    assert "the prompt has 9000 tokens" in capsys.readouterr().err


def test_a_character_that_the_terminal_cannot_show_ends_no_command(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert run(["--version"]) == 0
    print("3 µs", flush=True)
    assert written.getvalue().endswith(b"3 ?s\n")


def test_an_image_that_cannot_be_read_is_told_before_anything_is_loaded(capsys, tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    told = {
        tmp_path / "none.png": "No such file",
        tmp_path / "empty.png": "the image is empty",
        tmp_path: "Is a directory",
        "/dev/null": "is no regular file",
        "ftp://a.example/b.png": "is an address of a kind that is never fetched",
    }
    for path, said in told.items():
        assert run(["generate", "configs/tiny.yaml", "--prompt", "a", "--image", str(path)]) == 2
        err = capsys.readouterr().err
        assert err.count("--image") == 1 and said in err and "Traceback" not in err
