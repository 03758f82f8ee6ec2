"""`mllm-compile generate`: what it prints, and what it refuses before anything is loaded."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mllm_compile.cli import run
from mllm_compile.errors import RequestError
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from tests.adapters.folders import peft_fields, write_adapter
from tests.cli.stand_ins import CONFIGS, TINY


def test_a_prompt_from_a_closed_standard_input_is_refused(monkeypatch, config, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert run(["generate", config, "--prompt", "-"]) == 2
    assert "--prompt - reads standard input, which is closed" in capsys.readouterr().err


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
