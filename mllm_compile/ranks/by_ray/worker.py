"""The actors' own side, on Ray's workers.

Classes are made in functions, so that Ray carries them along: a worker finds this project's modules only when it was
told where, and may have another version of them.
"""

from __future__ import annotations

from typing import Any


def rank_class() -> Any:
    """The class of an actor that is a rank."""

    class MllmRank:
        """A rank; its methods are called one after the other."""

        def look(self, folders: list[str], version: str) -> str:
            """Looks for modules where rank 0 does, and then where Ray does: this node's address.

            Raises:
                RuntimeError: this node has no mllm-compile, or another version.
            """
            import sys

            sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in folders)]
            try:
                from mllm_compile.version import __version__ as found
            except ImportError as error:
                raise RuntimeError(f"this node has no mllm-compile: {error}. Install it there") from None
            if found != version:
                raise RuntimeError(f"this node has mllm-compile {found}, and node 0 {version}. Install the same")
            import ray

            return str(ray.util.get_node_ip_address())

        def take_files(self, wanted: str, server: Any) -> list[str]:
            """The runtime and the folder of its weights on this node, fetched where they are not there."""
            from mllm_compile.ranks.by_ray.node_files import take_files

            return take_files(wanted, server)

        def follow_here(self, address: str) -> None:
            """Follows rank 0 on its own host.

            Args:
                address: its Unix socket.
            """
            import socket

            from mllm_compile.ranks.follower import serve

            connection = socket.socket(socket.AF_UNIX)
            connection.connect("\0" + address)
            serve(connection)

        def follow(self, orders: dict[str, Any], folders: list[str]) -> None:
            """Follows rank 0 on another host."""
            from mllm_compile.ranks.by_ray.far_rank import follow_from_afar

            follow_from_afar(orders, folders)

    return MllmRank


def file_server_class() -> Any:
    """The class of the actor that reads files of rank 0's host for the others."""

    class MllmFiles:
        """Reads listed files alone."""

        def __init__(self, paths: list[str]) -> None:
            self._paths = paths

        def read(self, file: int, offset: int, size: int) -> tuple[str, bytes]:
            """A part of a file, and its sha256.

            Args:
                file: its place in the list.
            """
            import hashlib

            with open(self._paths[file], "rb") as opened:
                opened.seek(offset)
                data = opened.read(size)
            return hashlib.sha256(data).hexdigest(), data

        def digest(self, file: int, offset: int, size: int) -> str:
            """The sha256 of a part of a file."""
            return str(self.read(file, offset, size)[0])

    return MllmFiles
