"""Finds a model of the Hugging Face hub: fetches the files that are read of it, or takes them from the hub's cache.

Without a network a snapshot in the cache may lack files that its listing names. Those that nobody reads are not asked
for; those that are read are named.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from mllm_compile.config.folders.hub_gguf import chosen_files
from mllm_compile.config.names import nearest_path, repository_and_tag
from mllm_compile.config.schema import ModelConfig
from mllm_compile.errors import CheckpointError, ModelNotFoundError
from mllm_compile.files.json_file import read_json_object
from mllm_compile.media.files import PROCESSOR_FILES
from mllm_compile.runtime.weights.file_names import GGUF_SUFFIX
from mllm_compile.text.generation_defaults import GENERATION_CONFIG_FILE
from mllm_compile.text.tokenizer_files import EXPORTED_FILES, NAMED_TEMPLATES, OLDER_FILES, TOKENIZER_FILE

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
SPEECH_FOLDER = "speech-lora"  # Phi-4-multimodal's adapter, which computes prompts with sounds

_TEXT_FILES = ("*.json", "*.jinja", "tokenizer*", "*.model", "*.tiktoken", "*.txt")
_CODE_FILES = "*.py"
_NAMED_TEMPLATES = f"{NAMED_TEMPLATES}/*.jinja"
_SPEECH_FILES = tuple(f"{SPEECH_FOLDER}/{name}" for name in ("adapter_config.json", "adapter_model.safetensors"))
_MOST_NAMES = 5  # of an error


def download(model: ModelConfig) -> Path:
    """The snapshot of a hub id in the hub's cache, with the files that are read; or a GGUF file in it, its first part.

    Raises:
        ModelNotFoundError: there is no such model, it may not be fetched, or a file that is read is not there.
    """
    from huggingface_hub import errors, snapshot_download

    repository, tag = repository_and_tag(model.path)
    patterns, of_folders = list(_TEXT_FILES), [_NAMED_TEMPLATES]
    if model.load_format != "dummy" and tag is None:
        patterns.append("*.safetensors")
        of_folders += _SPEECH_FILES
    if model.trust_remote_code:
        patterns.append(_CODE_FILES)
    name = f"model.path {model.path!r}"
    try:
        with _download_bars_on_terminals_only():
            # Sub-folders hold other formats of the same weights (original/, onnx/, gguf/).
            folder = snapshot_download(
                repository, revision=model.revision, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]
            )
            # The sub-folders that are read; of the same commit, which the snapshot's folder is named after.
            snapshot_download(repository, revision=Path(folder).name, allow_patterns=of_folders)
            if _may_be_gguf(model, Path(folder)):
                return _downloaded_gguf(model, Path(folder))
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{name} is neither a folder nor a hub id: {error}") from None
    except errors.GatedRepoError:
        raise ModelNotFoundError(
            f"{name}: the hub asks to accept the model's terms first. Accept them on "
            f"https://huggingface.co/{repository} and log in with `hf auth login`, or set model.path to a local folder."
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFoundError(
            f"{name} has no revision {model.revision!r}. Remove model.revision, or give a branch, tag or commit."
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"{name}: there is no such folder{nearest_path(model.path)}, and no such repository on the hub (or it is "
            f"private and you are not logged in: `hf auth login`). Give a local folder, or correct the hub id."
        ) from None
    except (
        errors.LocalEntryNotFoundError,
        errors.HTTPError,
        ConnectionError,
        TimeoutError,
    ) as error:  # HTTP's: a proxy's
        if (snapshot := _cached_snapshot(model)) is not None:
            return _with_what_is_read(model, snapshot)
        reason = str(error.__cause__ or error).split("\n", 1)[0]
        raise ModelNotFoundError(
            f"{name}: there is no such folder{nearest_path(model.path)}, and the Hugging Face hub cannot be reached "
            f"({reason}). Give a local folder that holds {CONFIG_FILE}, the tokenizer and the safetensors files (made "
            f"elsewhere with `hf download {repository} --local-dir FOLDER`)."
        ) from None
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        raise ModelNotFoundError(
            f"{name} cannot be stored in the hub's cache ({error.strerror or error}{place}). Make room there, or set "
            "HF_HOME to a folder that can be written to."
        ) from None
    return Path(folder)


def _may_be_gguf(model: ModelConfig, folder: Path) -> bool:
    """True if a GGUF file is named, or the folder lacks files of another format."""
    if repository_and_tag(model.path)[1] is not None:
        return True
    has_weights = (folder / WEIGHTS_FILE).exists() or (folder / WEIGHTS_INDEX_FILE).exists()
    return not has_weights and (model.load_format != "dummy" or not (folder / CONFIG_FILE).exists())


def _downloaded_gguf(model: ModelConfig, folder: Path) -> Path:
    """The first part of the GGUF model that is meant, all parts fetched; `folder`, where the repository has none."""
    from huggingface_hub import HfApi, snapshot_download

    repository, tag = repository_and_tag(model.path)
    files = chosen_files(HfApi().list_repo_files(repository, revision=folder.name), tag, model.path)
    if files:
        snapshot_download(repository, revision=folder.name, allow_patterns=[escape(name) for name in files])
    return folder / files[0] if files else folder


def _cached_snapshot(model: ModelConfig) -> Path | None:
    """The model's snapshot in the hub's cache, complete or not; or None."""
    from huggingface_hub import errors, snapshot_download

    try:
        repository, _ = repository_and_tag(model.path)
        return Path(snapshot_download(repository, revision=model.revision, allow_patterns=[], local_files_only=True))
    except errors.LocalEntryNotFoundError:
        return None


def _with_what_is_read(model: ModelConfig, snapshot: Path) -> Path:
    """The snapshot, which lacks files of its listing, if none of those is read; or its GGUF file that is meant."""
    if _may_be_gguf(model, snapshot):
        there = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob(f"*{GGUF_SUFFIX}")]
        if files := chosen_files(there, repository_and_tag(model.path)[1], model.path):
            return snapshot / files[0]
    missing = [*_missing_texts(model, snapshot), *_missing_weights(model, snapshot)]
    if not missing:
        return snapshot
    shown = " and ".join(repr(name) for name in missing[:_MOST_NAMES])
    more = f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
    raise ModelNotFoundError(
        f"model.path {model.path!r}: the hub's cache has it, but lacks {shown}{more}, and the Hugging Face hub cannot "
        f"be reached. Fetch the rest where there is a network (`hf download {model.path}`), or set model.path to a "
        f"local folder. The cache's is {snapshot}."
    )


def _missing_texts(model: ModelConfig, snapshot: Path) -> list[str]:
    names = [CONFIG_FILE, GENERATION_CONFIG_FILE, *EXPORTED_FILES, *PROCESSOR_FILES, _NAMED_TEMPLATES]
    has_own = (snapshot / TOKENIZER_FILE).exists() or _is_listed(model, TOKENIZER_FILE)
    has_older = any((snapshot / name).exists() for name in OLDER_FILES)
    if not has_own and not has_older:
        names += OLDER_FILES
    if model.trust_remote_code:
        names.append(_CODE_FILES)
    return [name for name in names if not (snapshot / name).exists() and _is_listed(model, name)]


def _missing_weights(model: ModelConfig, snapshot: Path) -> list[str]:
    if model.load_format == "dummy":
        return []
    speech = [name for name in _SPEECH_FILES if not (snapshot / name).exists() and _is_listed(model, name)]
    index = read_json_object(snapshot / WEIGHTS_INDEX_FILE, CheckpointError) or {}
    shards = index.get("weight_map")
    if isinstance(shards, dict):  # what else it may be, is said where it is read
        return [*sorted({str(name) for name in shards.values() if not (snapshot / str(name)).exists()}), *speech]
    if (snapshot / WEIGHTS_FILE).exists():
        return speech
    return [name for name in (WEIGHTS_INDEX_FILE, WEIGHTS_FILE) if _is_listed(model, name)]


def _is_listed(model: ModelConfig, pattern: str) -> bool:
    """True if the cached listing names a file of this pattern that the snapshot lacks."""
    from huggingface_hub import errors, snapshot_download

    try:
        repository, _ = repository_and_tag(model.path)
        snapshot_download(repository, revision=model.revision, allow_patterns=[pattern], local_files_only=True)
    except errors.LocalEntryNotFoundError:
        return True
    return False


@contextmanager
def _download_bars_on_terminals_only() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
