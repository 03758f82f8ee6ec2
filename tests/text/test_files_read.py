"""The files that Transformers opens of a model's folder: each is one that is read here, or is excused by name."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import transformers
from transformers.utils import hub

import mllm_compile.model
from mllm_compile.config.folders.model_folder import CONFIG_FILE
from mllm_compile.media.files import PROCESSOR_FILES
from mllm_compile.text.generation_defaults import GENERATION_CONFIG_FILE
from mllm_compile.text.tokenizer_files import EXPORTED_FILES, NAMED_TEMPLATES, OLDER_FILES, tokenizer_files

FOLDER = Path(mllm_compile.model.__file__).parent / "tiny_vision"
READ = {*EXPORTED_FILES, *OLDER_FILES, *PROCESSOR_FILES, CONFIG_FILE, GENERATION_CONFIG_FILE}
# Of a codec of sound, which no model that is served has.
EXCUSED = {"audio_tokenizer_config.json"}
TEMPLATE = f"{NAMED_TEMPLATES}/tool_use.jinja"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    (folder / NAMED_TEMPLATES).mkdir()
    (folder / TEMPLATE).write_text("{{ tools }}")
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    """Names that Transformers looks for in the folder, there or not, and those that Python opens in it."""
    found: set[str] = set()
    cached_files, watching = hub.cached_files, [True]

    def noted(path_or_repo_id, filenames, **options):
        found.update(filenames)
        return cached_files(path_or_repo_id, filenames, **options)

    def heard(event: str, arguments: tuple) -> None:
        if watching and event == "open" and isinstance(arguments[0], str) and Path(arguments[0]).is_relative_to(folder):
            found.add(Path(arguments[0]).relative_to(folder).as_posix())

    monkeypatch.setattr(hub, "cached_files", noted)
    sys.addaudithook(heard)  # it stays; `watching` ends it
    yield found
    watching.clear()


@pytest.mark.parametrize(
    ("kind", "some"),
    [
        ("AutoTokenizer", {"tokenizer.json", "tokenizer_config.json", "added_tokens.json", TEMPLATE}),
        ("AutoConfig", {CONFIG_FILE}),
        ("GenerationConfig", {GENERATION_CONFIG_FILE}),
        ("AutoProcessor", {"preprocessor_config.json", "processor_config.json", "chat_template.json", TEMPLATE}),
    ],
)
def test_no_file_that_transformers_opens_is_unknown_here(folder, asked, kind, some):
    try:
        getattr(transformers, kind).from_pretrained(folder)
    except ImportError as error:  # of torchvision, when all files are read
        assert kind == "AutoProcessor" and "Torchvision" in str(error)
    assert some <= asked
    assert asked - EXCUSED <= READ | {TEMPLATE}


def test_a_named_template_is_a_file_of_the_tokenizer(folder):
    assert folder / TEMPLATE in tokenizer_files(folder)
