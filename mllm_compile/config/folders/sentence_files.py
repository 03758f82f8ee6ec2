"""Reads sentence-transformers' files of an embedder's folder: its pooling, the layers behind it, and its prompts.

`modules.json` lists modules by path and type; types are compared by their last word. A module that is not served is
refused by its type, never left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.files.json_file import read_file, read_json_object
from mllm_compile.runtime.files.json_data import parse_json
from mllm_compile.runtime.pooling.facts import PoolingRule
from mllm_compile.runtime.short_repr import short_repr

MODULES = "modules.json"
_DENSE_WEIGHTS = "model.safetensors"
_SETTINGS = ("sentence_bert_config.json", "config_sentence_transformers.json")
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_WITHOUT_EFFECT = ("Dropout",)  # an embedder does not train
_RULES: dict[str, PoolingRule] = {
    "cls_token": "cls",
    "lasttoken": "last",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "cls": "cls",
    "mean": "mean",
    "max": "max",
}
_ACTIVATIONS = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
_MOST_MODULES = 16
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


@dataclass(frozen=True)
class Dense:
    """A linear behind the pooling: its file, whether it has a bias, and its activation."""

    path: Path
    has_bias: bool
    activation: str


@dataclass(frozen=True)
class SentenceFiles:
    """
    Attributes:
        rules: of the pooling; several are one after another; empty: each token has its own embedding.
        dense: linears behind it, in order.
        others: as PoolingFacts has them.
        paths: every file that was read.
    """

    rules: tuple[PoolingRule, ...]
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    pools_prompt: bool = True
    lower_case: bool = False
    max_length: int = 0
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"
    paths: tuple[Path, ...] = ()


def has_sentence_files(folder: Path) -> bool:
    return (folder / MODULES).exists()


def read_sentence_files(folder: Path) -> SentenceFiles | None:
    """Reads them; None: the folder has none.

    Raises:
        CheckpointError: one is damaged.
        UnsupportedModelError: a module is not served.
    """
    data = read_file(folder / MODULES, CheckpointError)
    if data is None:
        return None
    modules = _modules(folder / MODULES, data)
    kinds = [kind for kind, _ in modules]
    if sorted(kinds, key=_ORDER.index) != kinds or kinds[:1] != ["Transformer"] or kinds.count("Pooling") > 1:
        raise UnsupportedModelError(f"{folder / MODULES} has modules {', '.join(kinds)}; expected {', '.join(_ORDER)}")
    of_kind = {kind: folder / path / "config.json" for kind, path in modules}
    pooling = _object(of_kind["Pooling"]) if "Pooling" in of_kind else {}
    settings = _object(folder / _SETTINGS[0]), _object(folder / _SETTINGS[1])
    dense = tuple(_dense(folder / path) for kind, path in modules if kind == "Dense")
    return SentenceFiles(
        rules=_rules(of_kind["Pooling"], pooling) if "Pooling" in of_kind else (),
        dense=dense,
        normalize="Normalize" in kinds,
        pools_prompt=pooling.get("include_prompt", True) is not False,
        lower_case=settings[0].get("do_lower_case") is True,
        max_length=_length(folder / _SETTINGS[0], settings[0].get("max_seq_length")),
        **_prompts(folder / _SETTINGS[1], settings[1]),
        paths=(
            *(folder / name for name in (MODULES, *_SETTINGS)),
            *of_kind.values(),
            *(path for one in dense for path in (one.path, one.path.parent / "config.json")),
        ),
    )


def _modules(path: Path, data: bytes) -> list[tuple[str, str]]:
    """The last word of each module's type, and its folder."""
    try:
        listed = parse_json(data)
        found = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in listed]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} is no list of modules with type and path ({error}). Download it again."
        ) from None
    if len(found) > _MOST_MODULES:
        raise CheckpointError(f"{path} lists {len(found)} modules; expected at most {_MOST_MODULES}")
    kept = [(kind, where) for kind, where in found if kind not in _WITHOUT_EFFECT]
    for kind, where in kept:
        if kind not in _ORDER:
            raise UnsupportedModelError(
                f"{path} has a module of type {short_repr(kind)}, which is not served; served: {', '.join(_ORDER)}"
            )
        if PurePosixPath(where).is_absolute() or ".." in PurePosixPath(where).parts:
            raise CheckpointError(f"{path} names the folder {short_repr(where)}; expected one of the same folder")
    return kept


def _object(path: Path) -> Mapping[str, Any]:
    return read_json_object(path, CheckpointError) or {}


def _rules(path: Path, config: Mapping[str, Any]) -> tuple[PoolingRule, ...]:
    named = config.get("pooling_mode")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    names = names or [key.removeprefix("pooling_mode_") for key, value in config.items() if _is_mode(key) and value]
    unknown = [name for name in names if name not in _RULES]
    if not names or unknown:
        shown = short_repr(unknown[0]) if unknown else "no mode"
        raise UnsupportedModelError(f"{path} pools by {shown}; served: {', '.join(_RULES)}")
    order = list(_RULES)
    return tuple(_RULES[name] for name in sorted(names, key=order.index))


def _is_mode(key: str) -> bool:
    return key.startswith("pooling_mode_")


def _dense(folder: Path) -> Dense:
    config = _object(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{folder / 'config.json'} has the activation {short_repr(activation)}; served: {', '.join(_ACTIVATIONS)}"
        )
    path = folder / _DENSE_WEIGHTS
    if not path.exists():
        raise CheckpointError(
            f"{folder} holds no {_DENSE_WEIGHTS}, the weights of its linear. Download the model again."
        )
    return Dense(path, config.get("bias", True) is not False, _ACTIVATIONS[activation])


def _length(path: Path, value: Any) -> int:
    if value is None:
        return 0
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{path} has max_seq_length {short_repr(value)}; expected a number of tokens")
    return value


def _prompts(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    similarity = settings.get("similarity_fn_name") or "cosine"
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{path} has prompts {short_repr(prompts)}; expected texts by name")
    if default is not None and default not in prompts:
        raise CheckpointError(f"{path} has default_prompt_name {short_repr(default)}, which names no prompt")
    if similarity not in _SIMILARITIES:
        raise UnsupportedModelError(f"{path} compares by {short_repr(similarity)}; served: {', '.join(_SIMILARITIES)}")
    return {"prompts": dict(prompts), "default_prompt": default, "similarity": similarity}
