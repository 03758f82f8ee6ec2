"""Resolves `model.path` to a local folder whose files can be served: config.json, weights, how they are stored.

hub.py fetches hub ids. config.json is read as plain JSON; the tracer interprets it.
Transformers is imported only by `check_remote_code`, for the few folders that bring Python code.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mllm_compile.config.folders.hub import CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX_FILE, download
from mllm_compile.config.folders.other_formats import told_of_file, told_of_folder
from mllm_compile.config.folders.quantisation import Scheme, read_scheme, scheme_of_random
from mllm_compile.config.folders.speculators import LAYER_CONFIG_KEY
from mllm_compile.config.names import is_hub_id, nearest_path
from mllm_compile.config.schema import ModelConfig
from mllm_compile.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from mllm_compile.files.json_file import read_json_object
from mllm_compile.files.served_part import served_part
from mllm_compile.files.user_path import user_path
from mllm_compile.gguf.folder import GgufModel, open_gguf
from mllm_compile.gguf.parts import gguf_parts
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.weights.file_names import is_gguf, name_from

_log = logging.getLogger("mllm_compile.config")
_FLOAT_DTYPES = ("float32", "float16", "bfloat16")
_MAX_FILES = 10_000  # of a checkpoint; the largest known have some hundreds
_MAX_NAME_BYTES = 255  # of a file, on the usual file systems
_MAX_LAYERS = 1000  # the deepest known has 126
_NUM_LAYERS = re.compile(r"(num|n)_([a-z]+_)*(layers?|blocks)|(en|de)coder_layers")


@dataclass(frozen=True)
class ModelFolder:
    """A checked local folder.

    Attributes:
        path: absolute; for a hub id a snapshot in huggingface_hub's cache.
        config: config.json, or its section of the part that is served (served_part.py).
        weight_files: absolute paths of the safetensors files, sorted; empty for dummy weights.
        scheme: how its weights may be quantised; None for plain ones. Of dummy weights experts' alone are.
        weight_map: tensor name → the file's name, as the index of several files says; empty without an index.
        lender: of a head whose files lack embeddings or head, the model whose ones it takes.
    """

    path: Path
    config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    scheme: Scheme | None = None
    weight_map: Mapping[str, str] = field(default_factory=dict)
    lender: ModelFolder | None = None

    @property
    def weight_names(self) -> list[str]:
        """The paths of the weight files, from the folder."""
        return [name_from(self.path, path) for path in self.weight_files]

    @property
    def files_read(self) -> tuple[Path, ...]:
        """The weight files, and the lender's."""
        return (*self.weight_files, *(() if self.lender is None else self.lender.weight_files))

    def text_config_value(self, *names: str) -> Any:
        """The first of `names` that config.json sets, in the section of the text model, or of a head's layers, where it
        has one; else None."""
        nested = self.config.get("text_config", self.config.get(LAYER_CONFIG_KEY))
        for section in (nested if isinstance(nested, dict) else {}, self.config):
            for name in names:
                if section.get(name) is not None:
                    return section[name]
        return None

    def checkpoint_dtype(self) -> str | None:
        """float32 | float16 | bfloat16: what config.json says, else the first such tensor's; None where neither says.

        Raises:
            CheckpointError: the first weight file is no safetensors file.
        """
        named = str(self.text_config_value("dtype", "torch_dtype")).removeprefix("torch.")
        if named in _FLOAT_DTYPES:
            return named
        return _first_float_dtype(self.weight_files[0]) if self.weight_files else None


def open_model_folder(model: ModelConfig, cache_dir: str = "auto") -> ModelFolder:
    """Finds (or downloads) the model's folder and checks that it can be served from.

    Args:
        cache_dir: `cache.dir` of the config, where the folder of a GGUF file is made.

    Raises:
        ModelNotFoundError: no such folder, no such repository, a hub that cannot be reached, no config.json.
        CheckpointError: no weights, a missing shard, a format other than safetensors, quantised weights of a kind that
            is not read.
        UnsupportedModelError: more layers than any model has.
    """
    with_weights = model.load_format != "dummy"
    path = locate_model_folder(model)
    if (parts := _gguf_parts(path)) is not None:
        return _gguf_model(open_gguf(parts, cache_dir), with_weights)
    config = _read_config(path)
    if not with_weights:
        return ModelFolder(path, config, (), scheme_of_random(path, config))
    weight_map = _read_weight_map(path / WEIGHTS_INDEX_FILE)
    return ModelFolder(path, config, _find_weight_files(path, weight_map), read_scheme(path, config), weight_map)


def locate_model_folder(model: ModelConfig) -> Path:
    """The local folder of a path or a hub id; downloads missing files.

    Raises:
        ModelNotFoundError: with what to put in model.path instead.
    """
    text = model.path
    folder = user_path(text)
    try:
        is_folder = folder.is_dir()
    except OSError as error:
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise ModelNotFoundError(
            f"model.path {shown!r} cannot be looked at: {error.strerror}. Give a local folder or a hub id."
        ) from None
    if is_folder or (is_gguf(folder) and folder.is_file()):
        if model.revision is not None:
            raise ModelNotFoundError(
                f"model.revision is {model.revision!r}, but model.path {text!r} is a local folder, which has no "
                f"revisions. Remove model.revision."
            )
        return folder.absolute()
    if (said := told_of_file(folder)) is not None:
        raise ModelNotFoundError(f"model.path {text!r} {said}")
    if folder.exists():
        raise ModelNotFoundError(
            f"model.path {text!r} is a file; expected the folder that holds {CONFIG_FILE} and the weights."
        )
    if not is_hub_id(text):
        raise ModelNotFoundError(
            f"model.path {text!r}: there is no such folder{nearest_path(text)}. Give the folder that holds "
            f"{CONFIG_FILE} and the weights (a relative path is taken from the YAML's own folder), or a hub id such as "
            f"Qwen/Qwen3-0.6B."
        )
    return download(model)


def _gguf_parts(path: Path) -> tuple[Path, ...] | None:
    """The GGUF files that are meant; safetensors in the same folder win."""
    parts = gguf_parts(path)
    if parts is None or is_gguf(path) or not (path / CONFIG_FILE).exists():
        return parts
    if (path / WEIGHTS_FILE).exists() or (path / WEIGHTS_INDEX_FILE).exists():
        _log.info("%s holds safetensors and GGUF: the former are read", path)
        return None
    return parts


def _gguf_model(model: GgufModel, with_weights: bool) -> ModelFolder:
    config = _read_config(model.folder)
    if not with_weights:
        return ModelFolder(model.folder, config, ())
    names = " and ".join(model.types)
    formats = tuple(f"gguf {one.lower()}" for one in model.types)
    scheme = Scheme(f"gguf {names}", formats, kinds=("int4", "int8"), is_for_cpus=True) if names else None
    return ModelFolder(model.folder, config, model.files, scheme)


def check_remote_code(folder: ModelFolder, trust_remote_code: bool) -> None:
    """Refuses a model that needs its own Python code when that was not allowed; called before the model is built.

    A folder may bring code (`auto_map`) for a model that Transformers knows by itself: that needs no permission.

    Raises:
        UnsupportedModelError: the code is needed and model.trust_remote_code is false.
    """
    if "auto_map" not in folder.config or trust_remote_code:
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = folder.config.get("model_type")
    if model_type not in CONFIG_MAPPING_NAMES:
        raise UnsupportedModelError(
            f"{folder.path}: the model type {model_type!r} is not one of Transformers' own; it runs Python code that "
            f"comes with the model (auto_map in {CONFIG_FILE}). Read that code; if you trust it, set "
            f"model.trust_remote_code: true."
        )


def _refuse_endless(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuses too many layers: Transformers would build any number of them, for hours or until memory ends."""
    sections = [config]
    while sections:
        for name, value in sections.pop().items():
            if isinstance(value, dict):
                sections.append(value)
            if _NUM_LAYERS.fullmatch(name) and type(value) is int and value > _MAX_LAYERS:
                raise UnsupportedModelError(
                    f"{folder / CONFIG_FILE}: {name} is {value}; expected at most {_MAX_LAYERS}. Is the file damaged?"
                )


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json_object(folder / CONFIG_FILE, ModelNotFoundError)
    if config is None:
        if (said := told_of_folder(folder)) is not None:
            raise ModelNotFoundError(f"{folder} {said}")
        raise ModelNotFoundError(
            f"{folder} holds no {CONFIG_FILE}; expected a model folder in Hugging Face's format. Set model.path to "
            f"the folder that `save_pretrained` or `hf download` wrote."
        )
    _refuse_endless(folder, config)
    return served_part(config)


def _find_weight_files(folder: Path, weight_map: Mapping[str, str]) -> tuple[Path, ...]:
    if weight_map:
        names = sorted(set(weight_map.values()))
        if missing := [name for name in names if not (folder / name).exists()]:
            raise CheckpointError(
                f"{folder}: {len(missing)} of {len(names)} weight files are missing, first {missing[0]!r} (named in "
                f"{WEIGHTS_INDEX_FILE}). Download the model again."
            )
        return tuple(folder / name for name in names)
    if (folder / WEIGHTS_FILE).exists():
        return (folder / WEIGHTS_FILE,)
    raise CheckpointError(_no_weights_message(folder))


def _no_weights_message(folder: Path) -> str:
    wanted = f"expected {WEIGHTS_FILE}, or {WEIGHTS_INDEX_FILE} and its files"
    if (said := told_of_folder(folder)) is not None:
        return f"{folder} {said} {wanted.capitalize()}."
    return (
        f"{folder} holds no weights; {wanted}. Download them, or set model.load_format: dummy for random weights of "
        f"the same shapes."
    )


def _read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor by the index; empty where there is no index."""
    content = read_json_object(index, CheckpointError)
    if content is None:
        return {}
    weight_map = content.get("weight_map")
    if (
        not weight_map
        or not isinstance(weight_map, dict)
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise CheckpointError(f"{index} holds no map of weight names to files. Download it again.")
    names = sorted(set(weight_map.values()))
    if len(names) > _MAX_FILES:
        raise CheckpointError(
            f"{index} names {len(names):,} files; expected at most {_MAX_FILES:,}. Download it again."
        )
    for name in names:
        # The folder's owner decides what is read, not a name in a downloaded file.
        if os.path.basename(name) != name or len(name.encode(errors="replace")) > _MAX_NAME_BYTES:
            raise CheckpointError(f"{index} names {short_repr(name)}; expected a file of the same folder.")
    return weight_map


def _first_float_dtype(path: Path) -> str | None:
    from mllm_compile.runtime.weights.header import read_header

    dtypes = (str(entry.dtype).removeprefix("torch.") for entry in read_header(path).tensors.values())
    return next((dtype for dtype in dtypes if dtype in _FLOAT_DTYPES), None)
