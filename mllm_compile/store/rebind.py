"""Finds the config and checkpoint that a runtime's folder serves when it is opened by itself, and whether the
weights' data is what it was.

Checkpoints of one shape share a runtime that holds no weights: a config brings its own. The folder stores a
config, a checkpoint's folder and the hashes of its data for one of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mllm_compile.checkpoint.files import WeightFiles
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import CheckpointError
from mllm_compile.files.writable_place import Place
from mllm_compile.process.timeline import Timeline
from mllm_compile.store.artifact import Artifact, Manifest, write_manifest


def serves(manifest: Manifest, config: ResolvedConfig, weights: WeightFiles) -> bool:
    """True if its folder by itself is this config with the checkpoint of these files."""
    return manifest == _told(manifest, config, weights)


def serving(artifact: Artifact, config: ResolvedConfig, weights: WeightFiles, place: Place) -> Artifact:
    """The artifact of a folder that was asked for: by itself it serves what was asked for last."""
    manifest = _told(artifact.manifest, config, weights)
    return artifact if manifest == artifact.manifest else _written(artifact, manifest, place)


def verified(artifact: Artifact, files: WeightFiles, checkpoint: Path, place: Place, timeline: Timeline) -> Artifact:
    """Hashes the weights' data: stores the hash of this checkpoint the first time, compares it later.

    Raises:
        CheckpointError: it has changed, or differs from the checkpoint whose data is remembered.
    """
    weights = artifact.manifest.weights
    root = artifact.weights_root(checkpoint)
    is_other = _is_other(weights, files)
    if is_other and not weights.are_hashed:
        weights, is_other = files, False
    total = sum(facts.num_bytes for facts in weights.files.values())
    with timeline.stage("verify weights", total=total) as stage:
        try:
            with artifact.trusted.naming_itself():
                hashed = weights.hashed(root, stage.advance)
        except CheckpointError as error:
            raise (_other_checkpoint(artifact, root) if is_other else error) from None
    if weights.are_hashed:
        return artifact
    return _written(artifact, replace(artifact.manifest, weights=hashed), place)


def _told(manifest: Manifest, config: ResolvedConfig, files: WeightFiles) -> Manifest:
    """The manifest of the same runtime, of this config and checkpoint."""
    weights = files if _is_other(manifest.weights, files) else manifest.weights
    return replace(manifest, config=config.model_dump(mode="json"), weights=weights)


def _is_other(weights: WeightFiles, files: WeightFiles) -> bool:
    return not weights.is_packed and weights.folder != files.folder


def _written(artifact: Artifact, manifest: Manifest, place: Place) -> Artifact:
    with place.writing():
        write_manifest(artifact.folder, manifest)
    return replace(artifact, manifest=manifest)


def _other_checkpoint(artifact: Artifact, root: Path) -> CheckpointError:
    remembered = artifact.manifest.weights.folder
    return CheckpointError(
        f"{root}: its data differs from {remembered}, which {artifact.folder} remembers. If it is another "
        "checkpoint, give it a runtime of its own by --output; if it is the same one, download it again."
    )
