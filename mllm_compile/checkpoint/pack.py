"""Writes the weights once more in the program's own layout and dtype, so that loading is reading straight through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mllm_compile.checkpoint.files import WeightFiles, weight_files
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.files.save_tensors import save_tensors
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.weights.loader import allocate_weights, fill_random, load_weights
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec
from mllm_compile.runtime.weights.sums import weight_sums

_MAX_FILE_BYTES = 4 << 30


def pack_weights(
    config: ResolvedConfig, ranks: Sequence[Sequence[WeightSpec]], checkpoint: Path, folder: Path, reporter: Reporter
) -> tuple[tuple[tuple[WeightSpec, ...], ...], WeightFiles]:
    """Writes `folder`/packed-00001.safetensors and so on; one file's worth of weights is in memory at a time.

    Each weight's sum goes into its spec, for every start; each file's sha256 into its facts, for verify.

    Args:
        ranks: the weights of each rank; every one gets files of its own.

    Returns:
        Of each rank the specs that read from there (files relative to the folder's parent), and the files' facts.

    Raises:
        CheckpointError: as load_weights.
        OSError: as save_tensors.
    """
    folder.mkdir()
    root = folder.parent
    packed: list[list[WeightSpec]] = [[] for _ in ranks]
    paths: list[Path] = []
    with reporter.stage("pack weights", total=sum(spec.num_bytes for specs in ranks for spec in specs)) as stage:
        for rank, group in [(rank, group) for rank, specs in enumerate(ranks) for group in _groups(specs)]:
            weights = allocate_weights(group, "cpu")
            if config.model.load_format == "dummy":
                fill_random(group, weights, config.runtime.seed)
            else:
                load_weights(group, weights, checkpoint)
            path = folder / f"packed-{len(paths) + 1:05d}.safetensors"
            save_tensors(weights, path)
            paths.append(path)
            name = path.relative_to(root).as_posix()
            sums = weight_sums(weights)
            packed[rank] += [
                replace(spec, parts=(WeightPart(spec.name, name, 0, spec.shape),), byte_sum=sums[spec.name])
                for spec in group
            ]
            stage.advance(sum(spec.num_bytes for spec in group))
    files = weight_files(root, paths, is_packed=True)
    with reporter.stage("hash weights", total=sum(facts.num_bytes for facts in files.files.values())) as stage:
        return tuple(map(tuple, packed)), files.hashed(root, stage.advance)


def _groups(specs: Sequence[WeightSpec]) -> list[list[WeightSpec]]:
    groups: list[list[WeightSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.num_bytes > _MAX_FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.num_bytes
    return groups
