"""`mllm-compile cache list | remove | prune | verify`: runtimes of this machine, and weights that it fetched."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mllm_compile.errors import (
    ArtifactError,
    CheckpointError,
    ConfigError,
    MllmError,
    NewFormatError,
    OldFormatError,
    OtherFormatError,
)
from mllm_compile.files.byte_sizes import format_bytes, parse_bytes
from mllm_compile.files.cache_folders import auto_cache_dir, bytecode_cache, compiler_cache
from mllm_compile.process.console import fitted, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mllm_compile.store.contents import Stored, StoredRuntime

DirOption = Annotated[
    Path | None, typer.Option("--dir", help="The cache folder (cache.dir of a config); by default the user's.")
]


_COLUMNS = ("runtime", "model", "dtype", "backend", "device", "size", "last used")
_DROPPED = ("backend", "device", "dtype", "last used")  # where there is no room, the first one first


def make_cache_app() -> typer.Typer:
    app = typer.Typer(help="List, check and remove compiled runtimes.")
    app.command("list")(list_command)
    app.command("remove")(remove_command)
    app.command("prune")(prune_command)
    app.command("verify")(verify_command)
    return app


def list_command(cache_dir: DirOption = None) -> None:
    """List the runtimes, and weights that came from another node of Ray, the last used first."""
    from mllm_compile.store.contents import stored_runtimes, stored_weights
    from mllm_compile.store.publish import folder_bytes, runtimes_folder

    folder = _folder(cache_dir)
    runtimes = stored_runtimes(folder)
    rows = [_row(runtime) for runtime in runtimes]
    print_table(sys.stdout, str(runtimes_folder(folder)), *fitted(sys.stdout, _COLUMNS, rows, "model", _DROPPED))
    for runtime in runtimes:
        if runtime.problem is not None:
            print(f"{runtime.folder.name} is {_state(runtime.problem)}: {runtime.problem}")
    count = f"{len(runtimes)} runtime{'s' * (len(runtimes) != 1)}"
    print(f"{count}, {format_bytes(sum(runtime.num_bytes for runtime in runtimes))}")
    for one in stored_weights(folder):
        size, used = format_bytes(one.num_bytes), _ago(one.last_used)
        print(f"weights from another node in {one.folder.parent.name}/: {one.folder.name}, {size}, last used {used}")
    compilers = compiler_cache(folder)
    print(f"kept by compilers in {compilers.name}/: {format_bytes(folder_bytes(compilers))}")
    bytecode = bytecode_cache(folder)
    if bytecode.is_dir():
        print(f"kept by Python in {bytecode.name}/: {format_bytes(folder_bytes(bytecode))}")


def _row(runtime: StoredRuntime) -> list[str]:
    """A row of _COLUMNS."""
    what = ["", "", ""]
    source = _source(runtime) or _state(runtime.problem)
    if runtime.manifest is not None:
        config, architecture = runtime.manifest.config, runtime.manifest.factors.get("GPU architecture", "")
        device = architecture if architecture.startswith("sm_") else str(config["runtime"]["device"])
        what = [str(config["model"]["dtype"]), str(config["compile"]["backend"]), device]
    return [runtime.folder.name, source, *what, format_bytes(runtime.num_bytes), _ago(runtime.last_used)]


def _source(runtime: StoredRuntime) -> str | None:
    """The model's, as its config named it; None of an unusable one."""
    return None if runtime.manifest is None else str(runtime.manifest.config["model"]["source"])


def _ago(moment: float) -> str:
    seconds = time.time() - moment
    if seconds >= 100 * 86400:
        return time.strftime("%Y-%m-%d", time.localtime(moment))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:,.0f} {unit} ago"
    return "now"


def remove_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="As `cache list` shows them, or how they begin.")],
    cache_dir: DirOption = None,
) -> None:
    """Remove runtimes, or fetched weights, by name."""
    from mllm_compile.store.contents import remove_stored, stored_runtimes, stored_weights

    folder = _folder(cache_dir)
    runtimes = stored_runtimes(folder)
    stored: list[Stored] = [*runtimes, *stored_weights(folder)]
    of_models: dict[str | None, list[str]] = {}
    for runtime in runtimes:
        of_models.setdefault(_source(runtime), []).append(runtime.folder.name)
    # All names first: one that is wrong removes nothing.
    for one in {name: _named(name, stored, of_models.get(name, []), folder) for name in names}.values():
        print(f"removed {one.folder.name}: {format_bytes(remove_stored(one.folder))}")


def _named(name: str, stored: Sequence[Stored], of_model: Sequence[str], folder: Path) -> Stored:
    """The one of this name, or the only one whose name begins with it.

    Args:
        of_model: the runtimes of the model that has this name.

    Raises:
        ConfigError: none, or several; with the names that may be meant.
    """
    exact = [one for one in stored if one.folder.name == name]
    found = exact or [one for one in stored if name and one.folder.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        which = ", ".join(one.folder.name for one in found)
        raise ConfigError(f"{name!r} begins several names in {folder}, {which}; give more of one")
    if of_model:
        raise ConfigError(
            f"{name!r} is a model; expected the name of a runtime. `mllm-compile cache remove {' '.join(of_model)}` "
            f"removes all that it has in {folder}"
        )
    names = [one.folder.name for one in stored]
    shown = f"it has {', '.join(names[:3])}{', …' * (len(names) > 3)}" if names else "it is empty"
    raise ConfigError(
        f"{folder} has no runtime and no fetched weights of a name that begins with {name!r}; {shown}. "
        "`mllm-compile cache list` shows the names"
    )


def prune_command(
    max_size: Annotated[
        str | None,
        typer.Option(
            help="Also remove the least recently used runtimes and fetched weights until this is left: 0, 500M, 20G."
        ),
    ] = None,
    cache_dir: DirOption = None,
) -> None:
    """Remove unusable and old runtimes, what killed compiles left, and what compilers and Python keep.

    Unusable: as `cache list` says. Files that `cache verify` finds damaged are compiled again when they are asked for.
    These caches make a later compile or start faster; no runtime needs them. The former stays while something compiles.
    """
    limit = None if max_size is None else parse_bytes(max_size)

    from mllm_compile.store.contents import prune

    folder = _folder(cache_dir)
    pruned = prune(folder, limit)
    for one in pruned.stored:
        print(f"removed {one.folder.name}: {format_bytes(one.num_bytes)}")
    if sum(pruned.leftovers):
        print(f"removed what killed compiles left: {format_bytes(sum(pruned.leftovers))}")
    if pruned.compiler_bytes is None:
        print(
            f"left {compiler_cache(folder)}: something compiles with it (or there are no locks on this file system: "
            "then remove it yourself while nothing compiles)"
        )
    elif pruned.compiler_bytes:
        print(f"removed what compilers kept: {format_bytes(pruned.compiler_bytes)}")
    if pruned.bytecode_bytes:
        print(f"removed what Python kept: {format_bytes(pruned.bytecode_bytes)}")
    print(f"freed {format_bytes(pruned.num_bytes)}")


def verify_command(cache_dir: DirOption = None) -> None:
    """Check every file of every runtime; exit code 1 when one is unusable, but not when another version wrote it."""
    from mllm_compile.store.contents import stored_runtimes

    num_bad, folder = 0, _folder(cache_dir)
    runtimes = stored_runtimes(folder)
    if not runtimes:
        print(f"no runtimes in {folder}")
    for runtime in runtimes:
        try:
            _verify(runtime.folder)
            print(f"{runtime.folder.name}: good")
        except (ArtifactError, CheckpointError) as error:
            num_bad += not isinstance(error, OtherFormatError)
            print(f"{runtime.folder.name}: {_state(error)}: {error}")
    if num_bad:
        raise typer.Exit(1)


def _verify(folder: Path) -> None:
    """Checks every file of a runtime, its draft model among them."""
    from mllm_compile.store.artifact import DRAFTER, open_artifact
    from mllm_compile.store.key import DRAFT_MODEL

    artifact = open_artifact(folder)
    if artifact.manifest.weights.is_packed:
        with artifact.trusted.naming_itself():
            artifact.manifest.weights.hashed(artifact.trusted.pinned_path)
    if DRAFT_MODEL in artifact.factors:
        _verify(folder / DRAFTER)


def _state(problem: MllmError | None) -> str:
    words: dict[type, str] = {OldFormatError: "old", NewFormatError: "newer"}
    return words.get(type(problem), "unusable")


def _folder(cache_dir: Path | None) -> Path:
    if cache_dir is None:
        folder, why = auto_cache_dir()
        if os.path.lexists(folder) and not os.path.isdir(folder):  # one that is not there yet is an empty cache
            raise ConfigError(
                f"the cache ({why}) is {folder}, which is no folder. Remove it, or give another by --dir."
            )
        return Path(folder)
    if not os.path.isdir(cache_dir):
        what = "is no folder" if os.path.exists(cache_dir) else "does not exist"
        raise ConfigError(f"--dir {cache_dir} {what}; give the folder that a config has as cache.dir")
    return cache_dir
