"""The cached runtime on disk: a folder that is complete or absent, and is checked before anything in it is executed.

    manifest.json          format, key and its factors, config, model sizes, sha256 and size of every other file
    program.json           steps, layers, and where each weight of each rank comes from
    names.json             names of tensors that updates of weights may use
    constants.safetensors  buffers that no checkpoint holds
    pieces/                one file for each distinct piece: <hash>.pt2 to run, <hash>.py to read (or to run: eager)
    kernels/               FlashInfer's kernels that the model's layers need; absent where none do
    binaries/              kernels of its own: in CUDA C++ (program.every_cuda_kernel), and libraries of C++ for the CPU
                           (every_library); absent where it has none
    tokenizer/             tokenizer.json and what belongs to it; absent where the model folder has none
    graphs/                the graph after each pass, as text
    config.json, …         the model's own, for people who read the folder
    weights/               with --pack-weights: the weights in the program's own layout, as safetensors
    drafter/               the runtime of a draft model, checked by its own manifest
    measured/              measurements of devices, one sealed file each (store/measurements.py); added while serving

No pickle anywhere. store/publish.py knows where folders are and how they get there whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mllm_compile.checkpoint.files import WeightFiles
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import ArtifactError, NewFormatError, OldFormatError
from mllm_compile.files.save_tensors import save_tensors
from mllm_compile.files.sealed_json import unseal, write_sealed
from mllm_compile.files.trusted_folder import FileFacts, TrustedFolder
from mllm_compile.process.no_gc import gc_paused
from mllm_compile.runtime.files.json_data import from_json, parse_json
from mllm_compile.runtime.files.regular_file import read_regular
from mllm_compile.runtime.program.pieces import PieceSuffix
from mllm_compile.runtime.program.spec import ModelSizes, Program
from mllm_compile.runtime.quantised.scheme import OFFSETS, SCALES, VALUES, ZEROS
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.updates.names import TensorNames
from mllm_compile.runtime.weights.consistency import check_quantised
from mllm_compile.runtime.weights.spec import WeightSpec
from mllm_compile.runtime.weights.table import weights_from_json, weights_to_json
from mllm_compile.store.key import FORMAT_VERSION
from mllm_compile.store.measurements import MEASURED

MANIFEST = "manifest.json"
PROGRAM = "program.json"
NAMES = "names.json"
CONSTANTS = "constants.safetensors"
PIECES = "pieces"
KERNELS = "kernels"
BINARIES = "binaries"
TOKENIZER = "tokenizer"
GRAPHS = "graphs"
WEIGHTS = "weights"
DRAFTER = "drafter"
# Weights are gigabytes: each has a sum in program.json, which is compared when it has been read (sums.py).
_UNHASHED_FOLDERS = (WEIGHTS + "/", MEASURED + "/", DRAFTER + "/")
MAX_MANIFEST_BYTES = 4 << 20


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    Attributes:
        factors: the key's factors by name.
        config: the config that it was compiled from, resolved; an engine that is given the folder serves with it.
        sizes: the model's figures.
        piece_suffix: the suffix of a piece's file that runs.
        weights: the files that weights are read from.
        about: how it came about, for people: stages, passes, device, time.
        files: every file of the folder that is hashed.
    """

    factors: Mapping[str, str]
    config: Mapping[str, Any]
    sizes: ModelSizes
    piece_suffix: PieceSuffix
    weights: WeightFiles
    about: Mapping[str, Any]
    files: Mapping[str, FileFacts]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT_VERSION, **asdict(self)}

    def resolved_config(self, folder: Path) -> ResolvedConfig:
        """`config`, validated; `folder` is for the message.

        Raises:
            ArtifactError: this version writes no such config.
        """
        try:
            return ResolvedConfig.model_validate(self.config)
        except ValueError as error:
            raise ArtifactError(f"{folder}: its config is not one that this version writes ({error})") from None


@dataclass(frozen=True)
class Artifact:
    """An opened runtime folder: every file that the manifest names has the hash that it says.

    Attributes:
        folder: where it is.
        manifest: the content of manifest.json.
        program: the steps.
        weights: where each weight comes from; with several ranks the first's.
        further_weights: the other ranks'.
        constants: names of the program's weights that are in constants.safetensors.
        pieces: the file that runs, by piece; its bytes, as they were checked.
        binaries: of program.every_cuda_kernel() and every_library() by name, as they were checked.
        constants_data: constants.safetensors, as it was checked.
        texts: texts by name, as they were checked: the files in tokenizer/ and graphs/, pieces' sources, and the
            model's own config files, and names.json.
        trusted: the handle that everything was read through.
    """

    folder: Path
    manifest: Manifest
    program: Program
    weights: tuple[WeightSpec, ...]
    constants: tuple[str, ...]
    pieces: Mapping[str, bytes]
    binaries: Mapping[str, bytes]
    constants_data: bytes
    texts: Mapping[str, bytes]
    trusted: TrustedFolder
    further_weights: tuple[tuple[WeightSpec, ...], ...] = ()

    def weights_of(self, rank: int) -> tuple[WeightSpec, ...]:
        """Where each weight of a rank comes from."""
        return (self.weights, *self.further_weights)[rank]

    def tensor_names(self) -> TensorNames:
        """The names that updates may use, read anew: few engines are updated.

        Raises:
            ArtifactError: they are not what this version writes.
        """
        try:
            with gc_paused():
                return TensorNames.from_bytes(self.texts[NAMES])
        except (KeyError, ValueError) as error:
            raise ArtifactError(
                f"{self.folder / NAMES} is not what this version writes ({error}); compile the model again"
            ) from error

    @property
    def factors(self) -> Mapping[str, str]:
        return self.manifest.factors

    @property
    def sizes(self) -> ModelSizes:
        return self.manifest.sizes

    @property
    def kernels_folder(self) -> Path | None:
        """The folder by its handle, not its name: what is loaded from it later is of the folder that was checked."""
        has_kernels = any(name.startswith(KERNELS + "/") for name in self.manifest.files)
        return self.trusted.pinned_path / KERNELS if has_kernels else None

    def weights_root(self, checkpoint: Path) -> Path:
        """The folder that weights are read from: `checkpoint`, or the runtime by its handle where they are packed."""
        return self.trusted.pinned_path if self.manifest.weights.is_packed else checkpoint

    @property
    def measured_folder(self) -> Path:
        """The folder by its handle, like kernels_folder."""
        return self.trusted.pinned_path / MEASURED


def write_program(
    folder: Path,
    program: Program,
    weights: tuple[tuple[WeightSpec, ...], ...],
    constants: Mapping[str, torch.Tensor],
    names: TensorNames,
) -> None:
    """Writes program.json, names.json and constants.safetensors; `weights` has each rank's.

    Raises:
        OSError: as save_tensors.
    """
    data = {
        "program": program.to_json(),
        "weights": [weights_to_json(of_rank) for of_rank in weights],
        "constants": sorted(constants),
    }
    (folder / PROGRAM).write_text(json.dumps(data, indent=1), encoding="utf-8")
    (folder / NAMES).write_bytes(names.to_bytes())
    save_tensors({name: value.contiguous() for name, value in constants.items()}, folder / CONSTANTS)


def hash_files(folder: Path) -> dict[str, FileFacts]:
    """The facts of every file that a manifest hashes."""
    facts = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST and not name.startswith(_UNHASHED_FOLDERS):
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            facts[name] = FileFacts(digest, path.stat().st_size)
    return facts


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes manifest.json, last of all. Also where one is: the write is atomic."""
    write_sealed(folder / MANIFEST, manifest.to_json())


def set_modes(folder: Path) -> None:
    """Lets all read the folder, and only its owner write to it, whatever the umask."""
    for path in folder.rglob("*"):
        os.chmod(path, 0o755 if path.is_dir() else 0o644)


def is_runtime(folder: Path) -> bool:
    """True if a compile made it, whole or damaged: many a folder of something else has a manifest.json."""
    path, manifest = folder / MANIFEST, None
    with contextlib.suppress(OSError, ValueError):
        manifest = parse_json(read_regular(path, MAX_MANIFEST_BYTES))
    is_ours = isinstance(manifest, dict) and manifest.keys() >= {"format", "factors"}
    return is_ours or ((folder / PROGRAM).is_file() and (folder / PIECES).is_dir())


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone, its seal checked but no other file: for lists and comparisons.

    Raises:
        ArtifactError: as open_artifact.
        OtherFormatError: as open_artifact.
    """
    return _read_manifest(TrustedFolder(folder))


def open_artifact(folder: Path) -> Artifact:
    """Checks a runtime folder and reads its program and pieces.

    Raises:
        ArtifactError: it is incomplete, changed, foreign, writable by others, or of another format.
        OtherFormatError: an older or a newer version wrote it.
    """
    trusted = TrustedFolder(folder)
    manifest = _read_manifest(trusted)
    _check_listing(trusted, set(manifest.files) | {MANIFEST} | manifest.weights.packed_names)
    used = {PROGRAM: b"", CONSTANTS: b""}
    pieces, binaries, texts = {}, {}, {}
    for name, facts in manifest.files.items():
        data = trusted.read(name, facts)
        if name in used:
            used[name] = data
        elif name.startswith(PIECES + "/") and name.endswith(manifest.piece_suffix):
            pieces[name.removeprefix(PIECES + "/").removesuffix(manifest.piece_suffix)] = data
        elif name.startswith(BINARIES + "/"):
            binaries[Path(name).stem] = data
        elif not name.startswith(KERNELS + "/"):
            texts[name] = data
    try:
        with gc_paused():  # a mixture of experts has tens of thousands of places of weights
            content = parse_json(used[PROGRAM])
            program = Program.from_json(content["program"])
            weights, *further_weights = map(weights_from_json, from_json(tuple[Any, ...], content["weights"]))
            for of_rank in (weights, *further_weights):
                check_quantised(of_rank)
                _check_roles(program, of_rank)
        return Artifact(
            folder=folder,
            manifest=manifest,
            program=program,
            weights=weights,
            further_weights=tuple(further_weights),
            constants=from_json(tuple[str, ...], content["constants"]),
            pieces={piece: pieces[piece] for piece in program.every_piece_id()},
            binaries=binaries,
            constants_data=used[CONSTANTS],
            texts=texts,
            trusted=trusted,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            f"{folder} is not a runtime that this version writes ({error}); compile the model again"
        ) from error


def _check_roles(program: Program, weights: Sequence[WeightSpec]) -> None:
    """Raises ValueError if what the program says of quantised weights is not what they are."""
    specs = {spec.name: spec for spec in weights}
    for name, one in ((name, one) for each in program.every for name, one in each.quantised_weights.items()):
        for tensor, roles in ((name, (VALUES,)), (one.scales, (SCALES,)), (one.zeros, (ZEROS, OFFSETS))):
            parts = specs[tensor].parts if tensor is not None else ()
            if any(part.kept is not None and part.kept.role not in roles for part in parts):
                raise ValueError(f"{short_repr(tensor)} is not the weight of {roles[0]} of {short_repr(name)}")
        wanted = {part.kept.scheme.shape(VALUES, one.outputs, one.inputs) for part in specs[name].parts if part.kept}
        if wanted - {specs[name].shape[-2:]}:
            raise ValueError(
                f"{short_repr(name)} is {short_repr(specs[name].shape)}, of {one.outputs} outputs, {one.inputs} inputs"
            )


def _read_manifest(trusted: TrustedFolder) -> Manifest:
    path = trusted.path / MANIFEST
    data = trusted.read(MANIFEST, max_bytes=MAX_MANIFEST_BYTES)
    written_format = _format_of(data)
    if written_format != FORMAT_VERSION:
        error_class = ArtifactError
        # Without a seal that holds, the number itself may be what was damaged.
        if isinstance(written_format, int) and _is_sealed(data, path):
            error_class = OldFormatError if written_format < FORMAT_VERSION else NewFormatError
        raise error_class(
            f"{trusted.path} has format {short_repr(written_format)}, this version reads {FORMAT_VERSION}; "
            f"{'upgrade mllm_compile, or ' if error_class is NewFormatError else ''}compile the model again"
        )
    try:
        body = unseal(data, path)
        del body["format"]
        return from_json(Manifest, body)
    except ValueError as error:
        raise ArtifactError(f"{path} is not what this version writes ({error}); compile the model again") from error


def _format_of(data: bytes) -> Any:
    """Reads the format before the seal, which other formats may not have."""
    try:
        content = parse_json(data)
    except ValueError:
        return FORMAT_VERSION  # damaged: unsealing says so
    return content.get("format") if isinstance(content, dict) else None


def _is_sealed(data: bytes, path: Path) -> bool:
    try:
        unseal(data, path)
    except ArtifactError:
        return False
    return True


def _check_listing(trusted: TrustedFolder, expected: set[str]) -> None:
    # A process that was killed while it wrote one of these leaves a file that is never read.
    ignored = (MEASURED + "/", DRAFTER + "/", f".{MANIFEST}.")
    present = {name for name in trusted.list_files() if not name.startswith(ignored)}
    if present != expected:
        odd = sorted(present ^ expected)[0]
        raise ArtifactError(
            f"{trusted.path}: {odd} is {'unknown to' if odd in present else 'missing, though named in'} the manifest; "
            "compile the model again"
        )
