"""Resolves a config to its target: the resolved config, its key, and the folder of that key's runtime.

Compiles nothing and opens no runtime.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mllm_compile.checkpoint.files import WeightFiles, data_identity, weight_files
from mllm_compile.compiler.draft_model import (
    as_parts,
    check_folders,
    draft_config,
    told_of_draft_model,
)
from mllm_compile.compiler.lent_weights import with_lender
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.config.folders.model_folder import ModelFolder, open_model_folder
from mllm_compile.config.folders.speculators import head_type
from mllm_compile.config.resolution.device import check_ranks, detect_device
from mllm_compile.config.resolution.resolve import METHOD_KEY, METHOD_WITHOUT_WEIGHTS, resolve
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ArtifactError, ConfigError, UnsupportedModelError
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.store.artifact import DRAFTER, MANIFEST, Artifact, read_manifest
from mllm_compile.store.key import DRAFT_MODEL, PACKED_WEIGHTS, key_factors, key_of
from mllm_compile.store.publish import runtimes_folder

_NO_OPTIONS = CompileOptions()


@dataclass(frozen=True)
class Target:
    """The runtime that a config asks for, and the folder where it is or would be.

    Attributes:
        drafter: its draft model's, in a folder of this one; None: it has none. It may have one itself, which drafts on.
    """

    config: ResolvedConfig
    model: ModelFolder
    weights: WeightFiles
    factors: Mapping[str, str]
    folder: Path
    drafter: Target | None = None

    @property
    def without_drafter(self) -> Target | None:
        """The same target, where a rule chose the draft model, and another rule does without; None: the config names
        it, or there is none."""
        if self.drafter is None or all(choice.key != METHOD_KEY for choice in self.config.choices):
            return None
        section = replace(self.config.speculative, method=METHOD_WITHOUT_WEIGHTS)
        return replace(self, config=self.config.model_copy(update={"speculative": section}), drafter=None)


def find_target(config: EngineConfig, options: CompileOptions = _NO_OPTIONS) -> Target:
    """Resolves a config and computes its key; compiles nothing.

    A runtime that holds the weights of this checkpoint serves it also where that is not asked for.
    """
    model = open_model_folder(config.model, config.cache.dir)
    if (kind := head_type(model.config)) is not None:
        raise UnsupportedModelError(
            f"model.path {config.model.path!r} is a head of kind {short_repr(kind)}, which drafts for a model. Set "
            "model.path to that model, and speculative.model to the head."
        )
    resolved = resolve(config, model, detect_device(config.runtime.device))
    _check_pass_names(resolved)
    check_ranks(resolved.runtime)
    weights = weight_files(model.path, model.weight_files)
    factors = key_factors(resolved, model, weights)
    packed = factors | {PACKED_WEIGHTS: data_identity(model.weight_files)}
    drafter = None
    if resolved.speculative.has_model:
        drafter = _find_drafter(resolved, model)
        resolved = _naming(resolved, drafter)
        factors, packed = factors | _draft_factor(drafter.factors), packed | _draft_factor(_packed_factors(drafter))
    # Absolute: compilers run in other folders, and look for a relative one in caches of their own. Not a link: what is
    # made takes a folder's place.
    output = None if options.output is None else Path(os.path.realpath(options.output))
    folder = output or _cached_folder(resolved, model, packed)
    if options.pack_weights or _is_of(folder, packed):
        return Target(resolved, model, weights, packed, folder, _placed(drafter, folder, is_packed=True))
    folder = output or _cached_folder(resolved, model, factors)
    return Target(resolved, model, weights, factors, folder, _placed(drafter, folder, is_packed=False))


def alike_target(config: EngineConfig, target: Target, options: CompileOptions = _NO_OPTIONS) -> Target:
    """The target of deterministic steps that are alike, where the model of `target` allows no others.

    It has the key and the folder of `target`: only a compile finds out which steps a model allows.
    """
    left_out = (*config.runtime.without, "any_rows")
    runtime = config.runtime.model_copy(update={"without": left_out})
    return _as_keyed(find_target(config.model_copy(update={"runtime": runtime}), options), target)


def has_alike_steps(target: Target, artifact: Artifact) -> bool:
    """True if the target's runtime was compiled for steps that are alike, and the target has others."""
    if not target.config.runtime.any_rows:
        return False
    return not artifact.manifest.resolved_config(artifact.folder).runtime.any_rows


def alike_steps(config: ResolvedConfig) -> str:
    """The line about deterministic steps that are alike, where the key asks for others."""
    return f"deterministic steps are alike, {config.runtime.max_num_batched_tokens} tokens each"


def _as_keyed(target: Target, like: Target) -> Target:
    drafter = target.drafter
    if drafter is not None and like.drafter is not None:
        drafter = _as_keyed(drafter, like.drafter)
    return replace(target, factors=like.factors, folder=like.folder, drafter=drafter)


def _find_drafter(config: ResolvedConfig, model: ModelFolder) -> Target:
    """The draft model's target, its folder yet to be set.

    Raises:
        MllmError: of the kind that says why it cannot draft for the model.
    """
    with told_of_draft_model(config):
        asked = draft_config(config)
        drafter = open_model_folder(asked.model, asked.cache.dir)
        check_folders(config, model, drafter)
        drafter = with_lender(drafter, model)
        parts = as_parts(config, resolve(asked, drafter, detect_device(config.runtime.device)), model)
    weights = weight_files(drafter.path, drafter.files_read)
    first, *further = [Target(part, drafter, weights, key_factors(part, drafter, weights), Path()) for part in parts]
    return _followed_by(first, further)


def _followed_by(drafter: Target, further: Sequence[Target]) -> Target:
    """A drafter with those that draft on from it, one after another."""
    if not further:
        return drafter
    following = _followed_by(further[0], further[1:])
    return replace(drafter, factors={**drafter.factors, **_draft_factor(following.factors)}, drafter=following)


def _placed(drafter: Target | None, folder: Path, is_packed: bool) -> Target | None:
    """A drafter of the runtime in `folder`, with the folder that it gets there; packed where the runtime is."""
    if drafter is None:
        return None
    own = folder / DRAFTER
    factors = _packed_factors(drafter) if is_packed else drafter.factors
    return replace(drafter, factors=factors, folder=own, drafter=_placed(drafter.drafter, own, is_packed))


def _naming(config: ResolvedConfig, drafter: Target) -> ResolvedConfig:
    """The config with the folder that its draft model was found in."""
    if config.speculative.model is None:
        return config
    return config.model_copy(update={"speculative": replace(config.speculative, model=str(drafter.model.path))})


def _packed_factors(drafter: Target) -> dict[str, str]:
    further = {} if drafter.drafter is None else _draft_factor(_packed_factors(drafter.drafter))
    return {**drafter.factors, PACKED_WEIGHTS: data_identity(drafter.model.files_read), **further}


def _draft_factor(factors: Mapping[str, str]) -> dict[str, str]:
    return {DRAFT_MODEL: key_of(factors)}


def _is_of(folder: Path, factors: Mapping[str, str]) -> bool:
    """True if `folder` has a runtime compiled for these factors, as far as its manifest can be read."""
    try:
        return os.path.exists(folder / MANIFEST) and read_manifest(folder).factors == factors
    except ArtifactError:  # opening it says why
        return False


def _cached_folder(config: ResolvedConfig, model: ModelFolder, factors: Mapping[str, str]) -> Path:
    """The cache's folder for the key: a readable name, then the key. The name is the model's type, never its place."""
    kind = str(model.config.get("model_type", "model"))
    slug = "".join(c if c.isalnum() or c in "-_" else "-" for c in kind)
    return runtimes_folder(config.cache.dir) / f"{slug}-{key_of(factors)}"


def _check_pass_names(config: ResolvedConfig) -> None:
    if not config.compile.disable_passes:
        return
    from difflib import get_close_matches

    from mllm_compile.passes.pipeline import optional_pass_names

    known = optional_pass_names()
    for name in config.compile.disable_passes:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"compile.disable_passes: {name!r} is not a pass that can be left out; these can: {', '.join(known)}."
                f"{hint}"
            )
