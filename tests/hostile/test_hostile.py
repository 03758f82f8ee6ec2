"""Hostile requests, checkpoints, tokenizers, chats and runtimes: each is served or refused in one line, and then a
plain request gets its right tokens.

Other cases with every commit (seeds.py); a failure says how to repeat it. 1,000 in all always run, 20,000 are slow.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.config.folders.model_folder import open_model_folder
from mllm_compile.config.schema import ModelConfig
from mllm_compile.errors import MllmError
from mllm_compile.files.sealed_json import write_sealed
from mllm_compile.runtime.weights.header import read_header
from mllm_compile.store.artifact import MANIFEST, PROGRAM, open_artifact
from mllm_compile.text.chat_template import ChatTemplate
from mllm_compile.text.generation_defaults import default_params, load_generation_defaults
from mllm_compile.text.tokenizer import load_tokenizer
from tests.hostile.chats import conversations, options, template
from tests.hostile.makers import damaged_bytes, damaged_json, damaged_text, maybe_damaged, parameters, prompt
from tests.hostile.seeds import cases, repeat_with
from tests.tiny_model import TINY, tiny_config

PROBE = "The for statement is used to"
GREEDY = SamplingParams(temperature=0, max_tokens=2)
COUNTS = {"requests": 500, "checkpoints": 150, "tokenizers": 50, "chats": 200, "runtimes": 100}
SLOW_FACTOR = 20
COUNTS_ON_PAGE = re.compile(r"^\| (\w+) \| (\d+) \| ([\d,]+) \|", re.MULTILINE)


@pytest.fixture(scope="module")
def engine(eager_cache: Path) -> Iterator[Engine]:
    config = tiny_config(eager_cache, compile={"backend": "eager"}, runtime={"max_model_len": 64})
    with Engine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def probe(engine: Engine) -> Callable[[], None]:
    """Raises where a plain request does not get the tokens that it got first."""

    def tokens() -> list[int]:
        return engine.generate(PROBE, GREEDY)[0].outputs[0].token_ids

    expected = tokens()
    assert len(expected) == 2

    def check() -> None:
        assert tokens() == expected

    return check


def check_said(error: str) -> None:
    assert "\n" not in error.strip()
    assert len(error) < 4000, "a message is for a person"
    assert "process ended" not in error, "by its limits, or not at all"
    error.encode()  # else no log takes it


def survive_one(attack: Callable[[], object]) -> None:
    try:
        attack()
    except MllmError as error:
        check_said(str(error))


def survive(kind: str, count: int, attack: Callable[[random.Random], object], probe: Callable[[], None]) -> None:
    """Runs every case: what it raises is an MllmError of one line, and the probe gets its tokens after it."""
    for number, chance in cases(kind, count):
        try:
            survive_one(lambda: attack(chance))  # noqa: B023 - called at once
            probe()
        except BaseException as error:
            error.add_note(repeat_with(kind, number))
            raise


@pytest.fixture(params=[1, pytest.param(SLOW_FACTOR, marks=pytest.mark.slow)], ids=["some", "many"])
def factor(request: pytest.FixtureRequest) -> int:
    return request.param


def test_the_page_has_the_counts():
    page = (Path(__file__).parents[2] / "docs" / "lab" / "hostile.md").read_text()
    rows = {kind: (int(some), int(many.replace(",", ""))) for kind, some, many in COUNTS_ON_PAGE.findall(page)}
    assert rows == {kind: (count, count * SLOW_FACTOR) for kind, count in COUNTS.items()}
    assert sum(COUNTS.values()) == 1000


def test_requests(engine, probe, factor):
    def attack(chance: random.Random) -> None:
        params = SamplingParams(**parameters(chance))
        for output in engine.generate(prompt(chance), params, progress=False):
            check_said(output.error or "")

    survive("requests", COUNTS["requests"] * factor, attack, probe)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(TINY, tmp_path / "model")
    return tmp_path / "model"


def test_checkpoints(model, probe, factor):
    """Files that are read of a model's folder before Transformers builds it."""
    config = json.loads((model / "config.json").read_text())
    generation = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_new_tokens": 5, "eos_token_id": [0, 1]}
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    index = {"weight_map": dict.fromkeys(header, "model.safetensors")}

    def attack(chance: random.Random) -> None:
        (model / "config.json").write_bytes(damaged_text(chance, config))
        (model / "generation_config.json").write_bytes(damaged_text(chance, generation))
        (model / "model.safetensors.index.json").write_bytes(damaged_text(chance, index))
        damaged = damaged_text(chance, header)
        weights.write_bytes(struct.pack("<Q", len(damaged)) + damaged + bytes(1000))
        for read in (
            lambda: read_header(weights),
            lambda: default_params(load_generation_defaults(model), model),
            lambda: open_model_folder(ModelConfig(path=str(model))).checkpoint_dtype(),
        ):
            survive_one(read)

    survive("checkpoints", COUNTS["checkpoints"] * factor, attack, probe)


def test_tokenizers(model, probe, factor):
    whole = json.loads((model / "tokenizer.json").read_text())
    as_text = {name: json.dumps(value) for name, value in whole.items()}
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": [{"name": "a", "template": "b"}]}

    def attack(chance: random.Random) -> None:
        name = chance.choice(list(whole))
        damaged = as_text | {name: json.dumps(damaged_json(chance, whole[name]))}
        text = "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in damaged.items()) + "}"
        (model / "tokenizer.json").write_bytes(maybe_damaged(chance, text.encode()))
        (model / "tokenizer_config.json").write_bytes(damaged_text(chance, settings))
        tokenizer = load_tokenizer(model)
        if tokenizer is not None:
            survive_one(lambda: tokenizer.decode(tokenizer.encode("def f(x): return x")))
            survive_one(lambda: tokenizer.decode([0, 5, 10**6]))

    survive("tokenizers", COUNTS["tokenizers"] * factor, attack, probe)


def test_chats(engine, probe, factor, monkeypatch):
    """Half of them with the model's own template, whose process serves on; half with a template of their own."""
    params = SamplingParams(temperature=0, max_tokens=2, detokenize=False)

    def answer() -> list[int]:
        return engine.chat([{"role": "user", "content": "What is a loop?"}], GREEDY)[0].outputs[0].token_ids

    expected = answer()
    assert len(expected) == 2

    def attack(chance: random.Random) -> None:
        with monkeypatch.context() as patch:
            if chance.random() < 0.5:
                sources = {"default": template(chance), "tool_use": template(chance)}
                patch.setattr(engine.tokenizer, "_chat_template", ChatTemplate(sources, {"bos_token": "<s>"}))
            for output in engine.chat(conversations(chance), params, progress=False, **options(chance)):
                check_said(output.error or "")

    def probes() -> None:
        probe()
        assert answer() == expected

    survive("chats", COUNTS["chats"] * factor, attack, probes)


def test_runtimes(eager_folder, tmp_path, probe, factor):
    """Damaged files, and JSON that somebody changed and sealed again."""
    runtime = tmp_path / "runtime"
    shutil.copytree(eager_folder, runtime)
    manifest = json.loads((runtime / MANIFEST).read_text())
    del manifest["sha256"]
    program = json.loads((runtime / PROGRAM).read_text())
    files = sorted(path for path in runtime.rglob("*") if path.is_file())
    bytes_of = {path: path.read_bytes() for path in files}

    def seal_program(content: Any) -> None:
        data = json.dumps(content).encode()
        (runtime / PROGRAM).write_bytes(data)
        facts = {PROGRAM: {"sha256": hashlib.sha256(data).hexdigest(), "num_bytes": len(data)}}
        write_sealed(runtime / MANIFEST, manifest | {"files": manifest["files"] | facts})

    def attack(chance: random.Random) -> None:
        kind = chance.randrange(3)
        path = chance.choice(files)
        try:
            if kind == 0:
                path.write_bytes(damaged_bytes(chance, bytes_of[path]))
            elif kind == 1:
                write_sealed(runtime / MANIFEST, damaged_json(chance, manifest))
            else:
                seal_program(damaged_json(chance, program))
            open_artifact(runtime)
        finally:
            for changed in {path, runtime / MANIFEST, runtime / PROGRAM}:
                changed.write_bytes(bytes_of[changed])

    survive("runtimes", COUNTS["runtimes"] * factor, attack, probe)
