"""A user's mistakes end in one clear line, the right class of error and exit code 2; other requests go on.

Through the command line and the Engine, as a user meets them; the variants of each are in the tests of the module that
refuses it. A head dim or a group that FlashInfer cannot do needs no GPU to be refused, and is in
tests/runtime/attention/test_flashinfer_kernels.py.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.cli import run
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    DeviceMemoryError,
    MllmError,
    ModelNotFoundError,
    RequestError,
    UnsupportedModelError,
)
from mllm_compile.runtime.device import memory
from tests.fakes import all_pages_are_back
from tests.tiny_model import TINY, engine_of_pages, tiny_config

WEIGHTS = "model.safetensors"
GREEDY = SamplingParams(temperature=0, max_tokens=8)
# One request: 96 tokens by its own limit, 80 by the pages (the first is the dummy).
MAX_MODEL_LEN, NUM_PAGES, PAGE_SIZE = 96, 6, 16


# --- configs, models, devices: refused before anything runs ---------------------------------------------------------


def model_folder(folder: Path) -> Path:
    """A copy of the embedded model that may be damaged."""
    shutil.copytree(TINY, folder / "model", ignore=shutil.ignore_patterns("README.md"))
    return folder / "model"


def with_model(damage: Callable[[Path], object]) -> Callable[[Path], dict[str, Any]]:
    """A config of a copy of the embedded model with something done to it."""

    def make(folder: Path) -> dict[str, Any]:
        path = model_folder(folder)
        damage(path)
        return {"model": {"path": str(path)}}

    return make


def with_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], dict[str, Any]]:
    def damage(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file(tensors, path / WEIGHTS)

    return with_model(damage)


def with_config(**keys: Any) -> Callable[[Path], dict[str, Any]]:
    def damage(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | keys))

    return with_model(damage)


def keys_of(name: str, **keys: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {name: keys}


def truncate(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[: len(data) // 2])


def scramble_header(path: Path) -> None:
    data = bytearray((path / WEIGHTS).read_bytes())
    data[8:16] = b"\xff" * 8
    (path / WEIGHTS).write_bytes(data)


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"

MISTAKES = {
    "an unknown section": (keys_of("runtme", device="cpu"), ConfigError, "did you mean runtime"),
    "a mistyped key": (keys_of("runtime", max_model_length=64), ConfigError, r"did you mean runtime\.max_model_len"),
    "a value out of range": (keys_of("runtime", mem_fraction_static=1.5), ConfigError, "mem_fraction_static is 1.5"),
    "a value of another type": (keys_of("runtime", page_size="16"), ConfigError, "page_size is '16'"),
    "a pass that is none": (
        keys_of("compile", disable_passes=["pack_projection"]),
        ConfigError,
        "mean 'pack_projections'",
    ),
    "a missing folder": (keys_of("model", path="./none"), ModelNotFoundError, "there is no such folder"),
    "an endless path": (keys_of("model", path="./" + "x" * 5000), ModelNotFoundError, "cannot be looked at: File name"),
    "a path that is empty": (keys_of("cache", dir=""), ConfigError, r"cache\.dir is ''; expected a path"),
    "a path with a null byte": (keys_of("cache", dir="a\0b"), ConfigError, r"cache\.dir is .*; expected a path"),
    "a folder without a config": (
        with_model(lambda path: (path / "config.json").unlink()),
        ModelNotFoundError,
        r"holds no config\.json",
    ),
    "a folder without weights": (
        with_model(lambda path: (path / WEIGHTS).unlink()),
        CheckpointError,
        "holds no weights.*load_format: dummy",
    ),
    "a truncated weight file": (with_model(truncate), CheckpointError, "truncated or corrupt.*Download it again"),
    "a corrupt weight file": (with_model(scramble_header), CheckpointError, "truncated or corrupt"),
    "a missing tensor": (
        with_weights(lambda tensors: tensors.pop(Q_PROJ)),
        CheckpointError,
        rf"the checkpoint lacks '{Q_PROJ}'",
    ),
    "an unexpected tensor": (
        with_weights(lambda tensors: tensors.update({"model.extra": torch.zeros(2)})),
        CheckpointError,
        r"'model\.extra' has no place",
    ),
    "a tensor of another shape": (
        with_weights(lambda tensors: tensors.update({Q_PROJ: torch.zeros(3, 192)})),
        CheckpointError,
        rf"'{Q_PROJ}' has shape \[3, 192\]",
    ),
    "a weight in integers": (
        with_weights(lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.int8)})),
        CheckpointError,
        rf"'{Q_PROJ}' is int8, as quantised weights are; expected float32, float16 or bfloat16",
    ),
    "a checkpoint quantised in a way that is not read": (
        with_config(quantization_config={"quant_method": "gptq", "bits": 3}),
        CheckpointError,
        "quantised .*gptq.* bits: 3 is not read",
    ),
    "a model that reads images alone": (
        with_config(model_type="vit", architectures=["ViTModel"]),
        UnsupportedModelError,
        "'vit' models read pixel_values",
    ),
    "a model type that nobody knows": (with_config(model_type="no_such"), UnsupportedModelError, "no_such"),
    "a length that the model was not made for": (
        keys_of("runtime", max_model_len=4096),
        ConfigError,
        "made for at most 2048",
    ),
    "a GPU that is not there": (keys_of("runtime", device="cuda:99"), DeviceError, "runtime.device is 'cuda:99'"),
    "a cache folder below a file": (
        lambda folder: {"cache": {"dir": str(folder / "model.yaml" / "cache")}},
        ConfigError,
        r"cache\.dir .*/model\.yaml/cache cannot be written \(Not a directory\); set cache\.dir, or MLLM_COMP",
    ),
    "a hub that cannot be reached": (
        keys_of("model", path="Qwen/Qwen3-0.6B"),
        ModelNotFoundError,
        "hub cannot be reached.*Give a local folder that holds",
    ),
}


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line_and_exit_code_2(mistake, tmp_path, capsys):
    make, error, said = MISTAKES[mistake]
    sections = {
        "model": {"path": str(TINY)},
        "compile": {"backend": "eager"},
        "cache": {"dir": str(tmp_path / "cache")},
    }
    for name, keys in make(tmp_path).items():
        sections[name] = sections.get(name, {}) | keys
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(sections))

    with pytest.raises(error, match=said):
        load_or_compile(EngineConfig.from_yaml(path))
    assert_refused([str(path)], said, capsys)
    assert not list((tmp_path / "cache").rglob("manifest.json")), "nothing was compiled"


def assert_refused(command: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Progress may come before; the last line is the error, and there is no traceback."""
    assert run(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    *_, last = err.splitlines()
    assert last.startswith("mllm-compile: error: ")
    assert re.search(said, last)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"model": {"pth": "m"}}, r"did you mean model\.path"),
        (None, "the model is None; expected a hub id, a model's folder, a YAML file"),
    ],
)
def test_a_path_without_a_model_is_refused_by_the_engine_with_an_alternative(source, said):
    with pytest.raises(ConfigError, match=said):
        Engine(source)


def test_a_cache_folder_that_cannot_be_written_is_told_by_an_engine_too(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cache\.dir .*/file cannot be written \(Not a directory\)"):
        Engine(tiny_config(tmp_path / "file", compile={"backend": "eager"}))


def test_an_output_folder_that_cannot_be_written_is_told_by_its_option(tmp_path, capsys):
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(tiny_config(tmp_path, compile={"backend": "eager"}).model_dump(mode="json")))
    said = r"--output /.*/model\.yaml/out: /.*/model\.yaml is a file; expected a folder\. Give another path\."
    assert_refused([str(path), "--output", str(path / "out")], said, capsys)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", '{"version"', r"tokenizer\.json is no valid tokenizer"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json"),
        ("generation_config.json", '{"eos_token_id": -1}', "eos_token_id is -1; expected a token id"),
        ("generation_config.json", '{"do_sample": true, "top_p": 7}', r"generation_config\.json: top_p"),
    ],
)
def test_a_broken_text_file_is_told_by_its_place_before_anything_is_compiled(tmp_path, file, content, said):
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / file).write_text(content)
    config = tiny_config(tmp_path / "cache", compile={"backend": "eager"}, model={"path": str(tmp_path / "model")})
    with pytest.raises(MllmError, match=said) as raised:
        load_or_compile(config)
    assert str(tmp_path / "model") in str(raised.value)
    assert not list((tmp_path / "cache").glob("runtimes/*"))


def test_a_missing_config_file_is_told_with_its_name(capsys):
    assert_refused(["none.yaml"], "none.yaml: there is no such file; expected a YAML config", capsys)


def test_too_little_memory_says_what_is_needed_and_what_is_free(monkeypatch, eager_cache):
    monkeypatch.setattr(memory, "memory_bytes", lambda device: (1 << 20, 1 << 30))
    with pytest.raises(DeviceMemoryError, match=r"the weights need 0\.01 GiB; cpu has 0\.00 GiB free of 1\.00 GiB"):
        Engine(tiny_config(eager_cache, compile={"backend": "eager"}))


def test_too_little_memory_for_one_request_says_what_to_lower(monkeypatch, eager_cache):
    monkeypatch.setattr(memory, "_host_memory_bytes", lambda: (1 << 20, 1 << 30))
    monkeypatch.setattr(memory, "check_weights_fit", lambda *_: None)
    monkeypatch.setattr("mllm_compile.runtime.model_runner.check_weights_fit", lambda *_: None)
    with pytest.raises(DeviceMemoryError, match=r"one request of 512 tokens needs .* Lower runtime\.max_model_len"):
        Engine(tiny_config(eager_cache, compile={"backend": "eager"}))


# --- requests: one is refused, the others go on ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(eager_cache: Path) -> Iterator[Engine]:
    """Room for MAX_MODEL_LEN tokens by the model, for fewer by the pages."""
    config = tiny_config(
        eager_cache,
        compile={"backend": "eager"},
        runtime={"max_model_len": MAX_MODEL_LEN, "page_size": PAGE_SIZE},
    )
    with engine_of_pages(config, NUM_PAGES) as engine:
        yield engine
        assert all_pages_are_back(engine)


BAD_PROMPTS = {
    "longer than the model takes": ([5] * MAX_MODEL_LEN, f"{MAX_MODEL_LEN}"),
    "longer than the cache can ever hold": ([5] * (MAX_MODEL_LEN - 8), "page"),
    "an empty text": ("", "empty"),
    "no tokens": ([], "empty"),
    "a token id out of the vocabulary": ([5, 3072], "expected ids from 0 to 3071"),
    "a negative token id": ([-1], "expected ids from 0 to 3071"),
    "no text and no ids": (3.5, "a text or a list of token ids"),
    "half a character": ("a\ud800", "no valid Unicode text"),
}


@pytest.mark.parametrize("mistake", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_the_others_are_answered(engine, mistake):
    bad, said = BAD_PROMPTS[mistake]
    good = ["Return a new list", "The for statement"]
    alone = [engine.generate(prompt, GREEDY)[0].token_ids for prompt in good]
    first, refused, last = engine.generate([good[0], bad, good[1]], GREEDY)
    assert [first.token_ids, last.token_ids] == alone
    assert (refused.finish_reason, refused.token_ids) == ("error", [])
    assert said in refused.error


@pytest.mark.parametrize("mistake", [m for m in BAD_PROMPTS if m not in ("no tokens", "no text and no ids")])
def test_a_single_bad_prompt_raises(engine, mistake):
    bad, said = BAD_PROMPTS[mistake]
    with pytest.raises(RequestError, match=said):
        engine.generate(bad, GREEDY)


def test_a_chat_with_half_a_character_is_refused_and_the_others_are_answered(engine):
    chats = [[{"role": "user", "content": text}] for text in ("Return a new list", "a\ud800")]
    alone = engine.chat(chats[0], GREEDY)[0]
    answered, refused = engine.chat(chats, GREEDY)
    assert answered.token_ids == alone.token_ids
    assert refused.finish_reason == "error" and "no valid Unicode text" in refused.error


def test_a_top_k_larger_than_any_vocabulary_is_served_beside_others(engine):
    alone = engine.generate("Return a new list", GREEDY)[0].token_ids
    other, large = engine.generate(["Return a new list"] * 2, [GREEDY, SamplingParams(seed=1, top_k=2**63)])
    assert other.token_ids == alone
    assert large.finish_reason in ("length", "stop") and large.error is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_tokens": 0}, "max_tokens: expected an integer of at least 1"),
        ({"max_tokens": -3}, "max_tokens: expected an integer of at least 1"),
        ({"temperature": float("nan")}, "temperature: expected a number from 0 to 100"),
        ({"temperature": -1.0}, "temperature: expected a number from 0 to 100"),
        ({"stop_token_ids": [3072]}, "stop_token_ids: expected token ids under 3072"),
    ],
)
def test_a_bad_sampling_value_is_refused_by_name(engine, values, said):
    with pytest.raises(RequestError, match=said):
        engine.generate("Return", SamplingParams(**values))
    assert engine.generate("Return", GREEDY)[0].finish_reason is not None, "the engine goes on"


@pytest.mark.parametrize("option", [["--max-tokens", "0"], ["--max-tokens", "-3"], ["--temperature", "nan"]])
def test_a_bad_sampling_option_is_refused_before_the_model_is_loaded(eager_cache, tmp_path, capsys, option):
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(tiny_config(eager_cache, compile={"backend": "eager"}).model_dump(mode="json")))
    command = ["generate", str(path), "--prompt", "x", *option]
    assert_refused(command, option[0].strip("-").replace("-", "_"), capsys)


def test_a_prompt_that_does_not_fit_is_one_line_on_the_command_line(eager_cache, tmp_path, capsys):
    config = tiny_config(eager_cache, compile={"backend": "eager"}, runtime={"max_model_len": 16})
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert_refused(["generate", str(path), "--prompt", "word " * 40], "16", capsys)
