"""Refusals ahead of a compile of minutes: what a command needs and a folder or the installation lacks."""

from __future__ import annotations

from pathlib import Path

from mllm_compile.config.folders.hub import CONFIG_FILE
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import RequestError
from mllm_compile.files.user_path import user_path
from mllm_compile.gguf.parts import gguf_parts
from mllm_compile.media.files import PROCESSOR_FILES
from mllm_compile.process.no_gc import imports_unseen
from mllm_compile.runtime.weights.file_names import is_gguf
from mllm_compile.text.tokenizer import no_chat_template
from mllm_compile.text.tokenizer_files import has_tokenizer, surely_has_no_chat_template


def check_takes_text(source: EngineConfig | Path, model: str, *, as_chat: bool) -> None:
    """Downloads nothing: of a hub's model, and of a runtime, the engine says it.

    Args:
        model: as the user named it.
        as_chat: the text goes through the chat template.

    Raises:
        RequestError: a local folder or GGUF file has no tokenizer, or no chat template.
        CheckpointError, ModelNotFoundError, UnsupportedModelError: as open_gguf and gguf_parts.
    """
    if isinstance(source, Path):
        return
    folder = user_path(source.model.path)
    if folder.exists() and not (folder / CONFIG_FILE).is_file() and (parts := gguf_parts(folder)) is not None:
        with imports_unseen():  # it imports torch
            from mllm_compile.gguf.folder import open_gguf

        folder = open_gguf(parts, source.cache.dir).folder
    if not (folder / CONFIG_FILE).is_file():
        return
    if not has_tokenizer(folder):
        raise no_tokenizer(model)
    if as_chat and surely_has_no_chat_template(folder):
        raise no_chat_template()


def check_takes_images(source: EngineConfig | Path, model: str) -> None:
    """Downloads nothing, as check_takes_text does.

    Raises:
        RequestError: a GGUF file, or a local folder without a processor of images.
    """
    from mllm_compile.media.preprocessor import takes_text_alone

    if isinstance(source, Path):
        return
    path = user_path(source.model.path)
    is_model = is_gguf(path) or (path / CONFIG_FILE).is_file()
    if is_model and not any((path / name).is_file() for name in PROCESSOR_FILES):
        raise takes_text_alone(model)


def no_tokenizer(model: str) -> RequestError:
    return RequestError(
        f"the model of {model} has no tokenizer, so it takes no text. Use `mllm-compile bench`, or Engine.generate "
        "with token ids."
    )


def check_takes_forms(source: EngineConfig | Path) -> None:
    """
    Raises:
        ConfigError: no library is installed that a form of the answer takes.
    """
    from mllm_compile.config.resolution.resolve import STRUCTURE_BACKENDS
    from mllm_compile.structured.backend import check_installed

    if isinstance(source, EngineConfig):
        asked = source.structured_outputs.backend
        check_installed(STRUCTURE_BACKENDS if asked == "auto" else (asked,))
