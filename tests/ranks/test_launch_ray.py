"""The start of a Ray actor before it follows, without Ray (with it: tests/e2e/test_ranks_by_ray.py)."""

from __future__ import annotations

import os
import socket
import sys

from mllm_compile.process import child_python
from mllm_compile.ranks import follower, launch_ray


def test_an_actor_finds_modules_as_rank_0_does_and_pythons_first(monkeypatch, tmp_path):
    """Ray's workers have Python's folders already; otherwise the caller's would come ahead of them."""
    standard, of_ray = os.path.dirname(os.__file__), str(tmp_path / "ray")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # as where the caller's script is there
    folders = child_python.module_folders()
    monkeypatch.setattr(sys, "path", [of_ray, standard])
    monkeypatch.setattr(follower, "serve", socket.socket.close)
    address = f"mllm-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + address)
        listener.listen(1)
        launch_ray._Follower().run(address, folders)

    assert sys.path == [*folders, of_ray]
    assert sys.path.index(standard) < sys.path.index(str(tmp_path))
