"""The files of a model's folder that make its tokenizer and its chat templates: those that Transformers reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mllm_compile.errors import CheckpointError
from mllm_compile.files.json_file import FileReader, FolderReader, json_object
from mllm_compile.runtime.short_repr import short_repr

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATE_JSON_FILE = "chat_template.json"
NAMED_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja

EXPORTED_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    ADDED_TOKENS_FILE,
    CHAT_TEMPLATE_FILE,
    CHAT_TEMPLATE_JSON_FILE,
)
# Any of these says that the folder has a tokenizer, in a format that Transformers can convert.
OLDER_FILES = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "tekken.json"),
    *("vocab.json", "vocab.txt"),
)
# Read with an older format by Transformers' converters.
_COMPANION_FILES = ("merges.txt",)
_JINJA = ".jinja"
_MOST_TEMPLATES = 64  # of a folder; the most known have three


def tokenizer_files(model_folder: Path) -> list[Path]:
    """The files of a model folder that its tokenizer is made of."""
    names = (*EXPORTED_FILES, *OLDER_FILES, *_COMPANION_FILES)
    found = [model_folder / name for name in names if (model_folder / name).exists()]
    return found + [model_folder / name for name in _template_names(model_folder, _reader(model_folder)).values()]


def exported_files(model_folder: Path) -> Iterator[tuple[str, bytes]]:
    """The name and content of each file that a tokenizer is loaded from.

    Raises:
        CheckpointError: one cannot be read.
    """
    read = _reader(model_folder)
    for name in (*EXPORTED_FILES, *_template_names(model_folder, read).values()):
        if (data := read(name)) is not None:
            yield name, data


def has_tokenizer(model_folder: Path) -> bool:
    """True if a model folder holds a tokenizer, of any format that `export_tokenizer` takes."""
    return any((model_folder / name).exists() for name in (TOKENIZER_FILE, *OLDER_FILES))


def surely_has_no_chat_template(model_folder: Path) -> bool:
    """True if a model folder has a tokenizer that needs no conversion, and no chat template.

    Raises:
        CheckpointError: a file that may hold one is damaged.
    """
    has_own = (model_folder / TOKENIZER_FILE).exists()
    return has_own and not chat_templates(model_folder, _reader(model_folder))


def read_json(name: str, folder: Path, read: FileReader) -> dict[str, Any]:
    """The object in a JSON file, {} where there is no such file.

    Raises:
        CheckpointError: it is damaged.
    """
    content = read(name)
    return {} if content is None else json_object(content, folder / name, CheckpointError)


def chat_templates(folder: Path, read: FileReader) -> dict[str, str]:
    """Templates by name. Those in files of their own win over `chat_template` in JSON: a text, or a list of named ones.

    Raises:
        CheckpointError: a file is damaged.
    """
    own = {"default": CHAT_TEMPLATE_FILE} | _template_names(folder, read)
    texts = {name: _text(data, folder / file) for name, file in own.items() if (data := read(file)) is not None}
    return texts if "default" in texts else _templates_in_json(folder, read) | texts


def _template_names(folder: Path, read: FileReader) -> dict[str, str]:
    """Name → file of the templates in a folder of their own."""
    files = [name for name in read.names_in(NAMED_TEMPLATES) if name.endswith(_JINJA)]
    if len(files) > _MOST_TEMPLATES:
        raise CheckpointError(
            f"{folder / NAMED_TEMPLATES} has {len(files)} templates; expected at most {_MOST_TEMPLATES}"
        )
    return {name.removesuffix(_JINJA): f"{NAMED_TEMPLATES}/{name}" for name in files}


def _text(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is no UTF-8 text ({error}). Save it as one, or download it again.") from None


def _templates_in_json(folder: Path, read: FileReader) -> dict[str, str]:
    places = (CHAT_TEMPLATE_JSON_FILE, TOKENIZER_CONFIG_FILE)
    template = next(filter(None, (read_json(name, folder, read).get("chat_template") for name in places)), None)
    if isinstance(template, list):
        if not all(isinstance(entry, dict) and _names_a_template(entry) for entry in template):
            raise CheckpointError(
                f"{folder}: chat_template is a list whose entries are not all {{'name': …, 'template': …}}. Correct it "
                f"in {TOKENIZER_CONFIG_FILE}, or download that again."
            )
        return {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):  # as chat_template.json may have it
        if not all(isinstance(source, str) for source in template.values()):
            raise CheckpointError(f"{folder}: expected texts in the dict chat_template, got {short_repr(template)}.")
        return template
    return {"default": template} if isinstance(template, str) else {}


def _names_a_template(entry: Mapping[str, Any]) -> bool:
    return isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def _reader(folder: Path) -> FolderReader:
    return FolderReader(folder, CheckpointError)
