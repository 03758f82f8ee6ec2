"""`mllm-compile cache list | prune | verify`: the runtimes that were compiled on this machine."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

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
from mllm_compile.process.console import print_table

DirOption = Annotated[
    Path | None, typer.Option("--dir", help="The cache folder (cache.dir of a config); by default the user's.")
]


def make_cache_app() -> typer.Typer:
    app = typer.Typer(help="List, check and remove compiled runtimes.")
    app.command("list")(list_command)
    app.command("prune")(prune_command)
    app.command("verify")(verify_command)
    return app


def list_command(cache_dir: DirOption = None) -> None:
    """List the runtimes, the last used first."""
    from mllm_compile.store.contents import stored_runtimes
    from mllm_compile.store.publish import folder_bytes

    folder = _folder(cache_dir)
    runtimes = stored_runtimes(folder)
    rows = [
        (
            runtime.folder.name,
            str(runtime.manifest.config["model"]["source"]) if runtime.manifest else _state(runtime.problem),
            format_bytes(runtime.num_bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(runtime.last_used)),
        )
        for runtime in runtimes
    ]
    print_table(sys.stdout, f"{folder}", ("runtime", "model", "size", "last used"), rows)
    for runtime in runtimes:
        if runtime.problem is not None:
            print(f"{runtime.folder.name} is {_state(runtime.problem)}: {runtime.problem}")
    print(f"{len(runtimes)} runtimes, {format_bytes(sum(runtime.num_bytes for runtime in runtimes))}")
    compilers = compiler_cache(folder)
    print(f"kept by compilers in {compilers.name}/: {format_bytes(folder_bytes(compilers))}")
    bytecode = bytecode_cache(folder)
    if bytecode.is_dir():
        print(f"kept by Python in {bytecode.name}/: {format_bytes(folder_bytes(bytecode))}")


def prune_command(
    max_size: Annotated[
        str | None,
        typer.Option(help="Also remove the least recently used runtimes until this is left: 0, 500M, 20G."),
    ] = None,
    cache_dir: DirOption = None,
) -> None:
    """Remove unusable and old runtimes, what killed compiles left, and what compilers and Python keep.

    Unusable: as `cache list` says. Files that `cache verify` finds damaged are compiled again when they are asked for.
    What these keep makes a later compile or start faster, and is needed by no runtime. The former stays while something
    compiles.
    """
    limit = None if max_size is None else parse_bytes(max_size)

    from mllm_compile.store.contents import prune

    folder = _folder(cache_dir)
    pruned = prune(folder, limit)
    for runtime in pruned.runtimes:
        print(f"removed {runtime.folder.name}: {format_bytes(runtime.num_bytes)}")
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
    from mllm_compile.store.artifact import open_artifact
    from mllm_compile.store.contents import stored_runtimes

    num_bad, folder = 0, _folder(cache_dir)
    runtimes = stored_runtimes(folder)
    if not runtimes:
        print(f"no runtimes in {folder}")
    for runtime in runtimes:
        try:
            artifact = open_artifact(runtime.folder)
            if artifact.manifest.weights.is_packed:
                with artifact.trusted.naming_itself():
                    artifact.manifest.weights.hashed(artifact.trusted.pinned_path)
            print(f"{runtime.folder.name}: good")
        except (ArtifactError, CheckpointError) as error:
            num_bad += not isinstance(error, OtherFormatError)
            print(f"{runtime.folder.name}: {_state(error)}: {error}")
    if num_bad:
        raise typer.Exit(1)


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
