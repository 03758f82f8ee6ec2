"""The parts of ranks by Ray that need no Ray (with it: tests/e2e/test_ranks_by_ray.py, test_ray_nodes.py)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mllm_compile.errors import ArtifactError, ConfigError, DeviceError
from mllm_compile.process import child_python
from mllm_compile.ranks import follower
from mllm_compile.ranks.by_ray import node_files
from mllm_compile.ranks.by_ray.launch import _check_over_nodes
from mllm_compile.ranks.by_ray.node_files import FileThere, Wanted, take_files
from mllm_compile.ranks.by_ray.placement import Placement, place
from mllm_compile.ranks.by_ray.worker import file_server_class, rank_class
from mllm_compile.store.contents import prune, stored_weights
from mllm_compile.version import __version__


class Group:
    """A placement group of a test's Ray."""

    def __init__(self, has_room: bool) -> None:
        self.has_room, self.is_removed = has_room, False

    def wait(self, within_s: float) -> bool:
        return self.has_room


class FakeRay:
    """A Ray of nodes with so many CPUs or GPUs, the first of them the driver's; it takes the first node with room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *sizes: int, kind: str = "CPU") -> None:
        self.kind = kind
        self.free = [{kind: float(size), "CPU": float(size), f"node:10.0.0.{n}": 1.0} for n, size in enumerate(sizes)]
        self.bundles: list[dict[str, float]] = []
        self.groups: list[Group] = []
        self._nodes: dict[int, str] = {}
        util = SimpleNamespace(
            placement_group=self._make, placement_group_table=self._table, remove_placement_group=self._remove
        )
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=util))
        monkeypatch.setitem(sys.modules, "ray.util", util)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "node-0")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": f"node-{n}", "Alive": True, "Resources": free} for n, free in enumerate(self.free)]

    def available_resources(self) -> dict[str, float]:
        return {self.kind: sum(node[self.kind] for node in self.free)}

    def _make(self, bundles: list[dict[str, float]], strategy: str, bundle_label_selector: list[Any]) -> Group:
        assert strategy == "PACK" and bundle_label_selector[0] == {"ray.io/node-id": "node-0"}
        self.bundles, self._nodes = bundles, {}
        left = [dict(free) for free in self.free]
        for number, bundle in enumerate(bundles):
            for place_, node in enumerate(left):
                if all(node.get(name, 0) >= value for name, value in bundle.items()):
                    self._nodes[number] = f"node-{place_}"
                    for name, value in bundle.items():
                        node[name] -= value
                    break
        self.groups.append(Group(len(self._nodes) == len(bundles)))
        return self.groups[-1]

    def _table(self, group: Group) -> dict[str, Any]:
        return {"bundles_to_node_id": self._nodes}

    def _remove(self, group: Group) -> None:
        group.is_removed = True


def test_a_stage_is_on_one_node_where_one_has_room_for_it(monkeypatch):
    ray, told = FakeRay(monkeypatch, 3, 3, kind="GPU"), []
    found = place(ray, 4, 2, True, told.append)  # rank by rank the second stage would be on both nodes
    assert found.nodes == ("node-0", "node-0", "node-1", "node-1") and found.bundles == (0, 0, 1, 1)
    assert [bundle["GPU"] for bundle in ray.bundles] == [2, 2] and found.num_local == 2
    assert not told


def test_stages_that_no_node_has_room_for_are_spread_with_a_warning(monkeypatch):
    ray, told = FakeRay(monkeypatch, 1, 3, kind="GPU"), []
    found = place(ray, 4, 2, True, told.append)
    assert found.nodes == ("node-0", "node-1", "node-1", "node-1") and found.node_numbers == (0, 1, 1, 1)
    assert "no node with room for 2 ranks: the sums of stage 0 cross the network" in told[0]


def test_on_a_cpu_rank_0_takes_nothing_but_its_place(monkeypatch):
    ray = FakeRay(monkeypatch, 1, 2)
    place(ray, 4, 2, False, lambda _: None)
    assert ray.bundles == [{"CPU": 1.0, "node:10.0.0.0": 0.001}, {"CPU": 2.0}]


def test_ranks_without_room_are_refused_and_nothing_stays_reserved(monkeypatch):
    ray = FakeRay(monkeypatch, 1, 1)
    with pytest.raises(DeviceError, match=r"no room for 8 ranks after 5 s: they take 7 CPUs beside the engine's, and"):
        place(ray, 8, 2, False, lambda _: None, within_s=5)
    assert ray.groups and all(group.is_removed for group in ray.groups)


def test_ranks_of_a_node_are_together_behind_rank_0s():
    group = Placement(None, ("a", "a", "c", "c", "b", "b"), (0, 0, 2, 2, 1, 1))
    assert group.node_numbers == (0, 0, 1, 1, 2, 2) and group.spread(2) == [] and group.spread(3) == [0, 1]


def test_an_actor_finds_modules_as_rank_0_does_and_pythons_first(monkeypatch, tmp_path):
    """Ray's workers have Python's folders already; otherwise the caller's would come ahead of them."""
    standard, of_ray = os.path.dirname(os.__file__), str(tmp_path / "ray")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # as where the caller's script is there
    folders = child_python.module_folders()
    monkeypatch.setattr(sys, "path", [of_ray, standard])
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=util))
    assert rank_class()().look(folders, __version__) == "10.0.0.7"

    assert sys.path == [*folders, of_ray]
    assert sys.path.index(standard) < sys.path.index(str(tmp_path))


def test_a_node_with_another_version_is_named(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(RuntimeError, match=rf"this node has mllm-compile {__version__}, and node 0 0\.0\.9\. Install"):
        rank_class()().look([], "0.0.9")


def test_an_actor_on_rank_0s_host_follows_over_its_socket(monkeypatch):
    monkeypatch.setattr(follower, "serve", socket.socket.close)
    address = f"mllm-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + address)
        listener.listen(1)
        rank_class()().follow_here(address)
        listener.accept()[0].close()


class Server:
    """The file server, called without Ray."""

    def __init__(self, paths: list[str]) -> None:
        files = self.files = file_server_class()(paths)
        self.calls: list[str] = []
        self.read, self.digest = self._remote("read", files.read), self._remote("digest", files.digest)

    def _remote(self, name: str, method: Any) -> Any:
        def remote(*arguments: Any) -> Any:
            self.calls.append(name)
            return method(*arguments)

        return SimpleNamespace(remote=remote)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Wanted, list[str], Path]:
    """Files of rank 0's host, and this node's cache."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda answer, timeout: answer))
    monkeypatch.setattr(node_files, "_PART_BYTES", 7)
    cache = tmp_path / "cache"
    monkeypatch.setenv("MLLM_COMPILE_CACHE", str(cache))
    runtime, weights = tmp_path / "head" / "runtimes" / "key", tmp_path / "head" / "model"
    (runtime / "pieces").mkdir(parents=True)
    weights.mkdir()
    manifest = json.dumps({"format": 1, "factors": {}}).encode()
    (runtime / "manifest.json").write_bytes(manifest)
    (runtime / "pieces" / "a.py").write_bytes(b"pass  # of several parts")
    (weights / "model.safetensors").write_bytes(os.urandom(50))
    files = [node_files._files(str(root), names) for root, names in ((runtime, ["manifest.json", "pieces/a.py"]),)]
    of_weights = node_files._files(str(weights), ["model.safetensors"])
    told = Wanted(str(runtime), hashlib.sha256(manifest).hexdigest(), files[0], str(weights), of_weights)
    paths = [str(runtime / file.name) for file in files[0]] + [str(weights / "model.safetensors")]
    return told, paths, cache


def elsewhere(told: Wanted) -> Wanted:
    """The same, where rank 0's paths are not on this node."""
    return replace(told, folder="/not/here/runtimes/key", weights_root="/not/here/model")


def test_files_at_rank_0s_paths_are_taken_as_they_are(there):
    told, paths, _ = there
    server = Server(paths)
    assert take_files(told.to_json(), server) == [told.folder, told.weights_root] and not server.calls


def test_weights_of_another_time_of_change_are_compared_and_not_fetched(there):
    told, paths, _ = there
    os.utime(paths[-1], ns=(1, 1))
    server = Server(paths)
    assert take_files(told.to_json(), server) == [told.folder, told.weights_root] and set(server.calls) == {"digest"}


def test_weights_of_another_content_at_rank_0s_path_are_fetched(there, tmp_path):
    told, paths, cache = there
    kept = tmp_path / "kept"
    kept.write_bytes(Path(paths[-1]).read_bytes())
    Path(paths[-1]).write_bytes(os.urandom(50))  # as this node has it
    _, root = take_files(told.to_json(), Server([*paths[:-1], str(kept)]))
    assert Path(root).parent == cache / "checkpoints"
    assert (Path(root) / "model.safetensors").read_bytes() == kept.read_bytes()


def test_what_is_not_there_is_fetched_once(there):
    told, paths, cache = there
    server = Server(paths)
    folder, root = take_files(elsewhere(told).to_json(), server)
    assert Path(folder) == cache / "runtimes" / "key"
    assert (Path(folder) / "pieces" / "a.py").read_bytes() == Path(paths[1]).read_bytes()
    assert (Path(root) / "model.safetensors").read_bytes() == Path(paths[2]).read_bytes()
    assert server.calls and set(server.calls) == {"read"}
    assert [one.folder for one in stored_weights(cache)] == [Path(root)], "`cache prune` knows it"
    server.calls.clear()
    os.utime(root, (1, 1))
    assert take_files(elsewhere(told).to_json(), server) == [folder, root] and not server.calls
    assert os.stat(root).st_mtime > 1, "the least recently used goes first"


def test_a_runtime_that_was_compiled_on_the_node_is_left_for_rank_0_to_compare(there):
    told, paths, cache = there
    own = cache / "runtimes" / "key"
    own.mkdir(parents=True)
    (own / "manifest.json").write_text(json.dumps({"format": 1, "factors": {}, "other": 1}))
    assert take_files(elsewhere(told).to_json(), Server(paths))[0] == str(own)


@pytest.mark.parametrize("of", ["runtimes", "checkpoints"])
def test_files_that_come_damaged_are_refused_and_leave_nothing(there, of, monkeypatch):
    told, paths, cache = there
    told = elsewhere(told) if of == "runtimes" else replace(told, weights_root="/not/here/model")
    server = Server(paths)
    server.read = SimpleNamespace(remote=lambda file, offset, size: (hashlib.sha256(b"").hexdigest(), bytes(size)))
    with pytest.raises(ArtifactError, match=r"(manifest\.json|model\.safetensors) came damaged from node 0"):
        take_files(told.to_json(), server)
    assert list((cache / of).iterdir()) == []


def test_weights_that_another_start_has_fetched_meanwhile_are_taken(there):
    told, paths, cache = there
    server, moved = Server(paths), elsewhere(told)
    first = Path(take_files(moved.to_json(), server)[1])
    hidden = first.rename(cache / "hidden")

    def read(file: int, offset: int, size: int) -> tuple[str, bytes]:
        if not first.exists():
            hidden.rename(first)
        return server.files.read(file, offset, size)

    server.read = SimpleNamespace(remote=read)
    assert take_files(moved.to_json(), server)[1] == str(first)
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_node_0_that_sends_nothing_is_told_and_not_blamed_on_the_cache(there, monkeypatch):
    told, paths, cache = there

    class GetTimeoutError(TimeoutError):
        """As Ray's."""

    def get(answer: Any, timeout: float) -> Any:
        raise GetTimeoutError("Get timed out")

    exceptions = SimpleNamespace(GetTimeoutError=GetTimeoutError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, exceptions=exceptions))
    moved = replace(told, weights_root="/not/here/model")
    with pytest.raises(TimeoutError, match=r"node 0 did not send a part of model\.safetensors within 60 s"):
        take_files(moved.to_json(), Server(paths))
    assert list((cache / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("of", ["runtimes", "checkpoints"])
def test_what_a_killed_fetch_left_goes_with_the_next_one_or_a_prune(there, of):
    told, paths, cache = there
    left = cache / of / ".key.1234.part"
    for remove in (lambda: take_files(elsewhere(told).to_json(), Server(paths)), lambda: prune(cache)):
        left.mkdir(parents=True, mode=0o700)
        (left / "model.safetensors").write_bytes(bytes(1000))
        remove()
        assert not left.exists()


def test_a_disk_that_fills_up_on_a_node_is_told_with_its_room(there, monkeypatch):
    told, paths, cache = there

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(node_files, "_fetch", full)
    with pytest.raises(ConfigError, match=rf"cache\.dir {cache} cannot be written: .*MiB free.*; make room"):
        take_files(replace(told, weights_root="/not/here/model").to_json(), Server(paths))
    assert list((cache / "checkpoints").iterdir()) == []


def test_a_name_that_leads_out_of_its_folder_is_refused(there):
    told, paths, cache = there
    away = FileThere("../../away", told.weights[0].size, 0)
    with pytest.raises(ArtifactError, match="no name of a file below its folder"):
        take_files(replace(elsewhere(told), weights=(away,)).to_json(), Server(paths))
    assert not (cache / "away").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("expert_parallel_size", 2), ("kv_offloading_size", 1.0), ("enable_dbo", True), ("max_adapters", 1)],
)
def test_features_of_one_host_are_refused_over_several_nodes(key, value):
    runtime = {"expert_parallel_size": 1, "kv_offloading_size": 0.0, "enable_dbo": False} | {key: value}
    lora = SimpleNamespace(max_adapters=runtime.pop("max_adapters", 0), of_sounds="")
    compiled: Any = SimpleNamespace(config=SimpleNamespace(runtime=SimpleNamespace(**runtime), lora=lora))
    with pytest.raises(
        ConfigError, match=rf"{key} is set, which is for ranks of one node, and Ray has placed them on 2"
    ):
        _check_over_nodes(compiled, 2)
    lora.of_sounds = "sounds"  # nobody wrote a section lora
    with pytest.raises(ConfigError, match="the model brings an adapter for its sounds, and adapters are for ranks of"):
        _check_over_nodes(compiled, 2)
