"""An engine over two nodes, each with folders of its own and without shared memory: its tokens are one rank's, and no
process is left where one of them is lost."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.errors import ConfigError, DeviceError, EngineDeadError
from mllm_compile.ranks import nodes
from mllm_compile.ranks.admission import WrongSecretError, admit
from tests.e2e.test_ranks import PROMPTS, tokens
from tests.hang_guard import HANG_S, until
from tests.tiny_model import tiny_config

SECRET = {"MLLM_NODES_SECRET": "a secret that both nodes have"}


@pytest.fixture(scope="module")
def caches(eager_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The cache of each node."""
    load_or_compile(config_of(eager_cache, nnodes=1))
    other = tmp_path_factory.mktemp("node") / "cache"
    shutil.copytree(eager_cache, other)
    return [eager_cache, other]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("mllm_compile.ranks.group.usable_cores", lambda: 1)  # both nodes have the same ones


def config_of(cache: Path, **runtime: Any) -> Any:
    settings = {"max_num_batched_tokens": 32, "pipeline_parallel_size": 2, "nnodes": 2} | runtime
    return tiny_config(cache, compile={"backend": "eager"}, runtime=settings)


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def node_1(
    cache: Path, port: int, of_compile: Any = None, secret: dict[str, str] = SECRET
) -> Iterator[subprocess.Popen[str]]:
    """The other node's command, with a process group of its own."""
    config = config_of(cache, nnodes=1).model_dump(mode="json", exclude_unset=True)
    config["compile"] |= of_compile or {}
    (cache / "node.yaml").write_text(yaml.safe_dump(config))
    options = ["--nnodes", "2", "--node-rank", "1", "--master-port", str(port)]
    command = [sys.executable, "-m", "mllm_compile", "serve", str(cache / "node.yaml"), *options]
    process = subprocess.Popen(
        command, env=os.environ | secret, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ranks_of(pid: int) -> list[int]:
    """The processes of a node's ranks."""
    children = [child for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    return [int(child) for child in children if b"ranks.follower" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_two_nodes_give_one_ranks_tokens_until_one_is_lost_which_is_told_by_name_and_by_both_commands(caches):
    port = free_port()
    with Engine(config_of(caches[0], pipeline_parallel_size=1, nnodes=1)) as alone:
        expected = tokens(alone)
    with node_1(caches[1], port) as other:
        engine = Engine(config_of(caches[0], master_port=port))
        try:
            assert tokens(engine) == expected
            drawn = SamplingParams(temperature=0.8, seed=7, max_tokens=6, ignore_eos=True, logprobs=2)
            assert all(output.error is None for output in engine.generate(PROMPTS, drawn))
            (rank,) = ranks_of(other.pid)
            os.kill(rank, signal.SIGSTOP)  # so no request can end before it
            endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
            streams = [engine.stream(prompt, endless) for prompt in PROMPTS]
            os.kill(rank, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDeadError, match=r"rank 1 on node 1 \(127\.0\.0\.1\) has ended"):
                    for _ in stream:
                        pass
            assert not engine.is_alive
        finally:
            engine.close()
        _, said = other.communicate(timeout=HANG_S)
        assert other.returncode != 0
        assert "rank 1 was ended by signal 9" in said


@pytest.mark.slow
def test_two_nodes_end_together(caches):
    port = free_port()
    with node_1(caches[1], port) as other:
        with Engine(config_of(caches[0], master_port=port)) as engine:
            tokens(engine)
        _, said = other.communicate(timeout=HANG_S)
        assert other.returncode == 0, said


@pytest.mark.slow
def test_the_ranks_of_a_node_end_with_node_0(caches, tmp_path):
    port = free_port()
    config = config_of(caches[0], nnodes=1).model_dump(mode="json", exclude_unset=True)
    (tmp_path / "node.yaml").write_text(yaml.safe_dump(config))
    options = ["--nnodes", "2", "--master-port", str(port), "--port", str(free_port())]
    command = [sys.executable, "-m", "mllm_compile", "serve", str(tmp_path / "node.yaml"), *options]
    with node_1(caches[1], port) as other:
        first = subprocess.Popen(command, env=os.environ | SECRET, start_new_session=True)
        try:
            for line in other.stderr or ():
                if "follow node 0" in line:
                    break
            os.killpg(first.pid, signal.SIGKILL)
            other.communicate(timeout=HANG_S)
        finally:
            first.kill()
            first.wait()


@pytest.mark.slow
def test_a_node_of_another_runtime_ends_both_starts_by_naming_what_differs(caches):
    port = free_port()
    with node_1(caches[1], port, {"disable_passes": ["pack_projections"]}) as other:
        with pytest.raises(DeviceError, match=r"node 1 runs something else than node 0: .* there and .* here"):
            Engine(config_of(caches[0], master_port=port))
        _, said = other.communicate(timeout=HANG_S)
        assert other.returncode != 0 and "node 1 runs something else than node 0" in said
        assert_nothing_is_left_of(other)


def assert_nothing_is_left_of(command: subprocess.Popen[str]) -> None:
    with pytest.raises(ProcessLookupError):
        os.killpg(command.pid, 0)


@pytest.mark.slow
def test_a_node_with_another_secret_is_told_and_leaves_nothing(caches):
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        with node_1(caches[1], port, secret={"MLLM_NODES_SECRET": "a secret that one node has"}) as other:
            connection, _ = listener.accept()
            with pytest.raises(WrongSecretError):
                admit(connection, SECRET["MLLM_NODES_SECRET"].encode())
            _, said = other.communicate(timeout=HANG_S)
            assert other.returncode != 0 and "node 0 has another MLLM_NODES_SECRET" in said
            assert_nothing_is_left_of(other)
            connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("why", ["is taken", "node 1 did not come"])
def test_a_node_0_that_cannot_begin_leaves_none_of_its_ranks(caches, monkeypatch, why):
    monkeypatch.setattr(nodes, "NODES_S", 1.0)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        if why != "is taken":
            listener.close()
        with pytest.raises(DeviceError, match=why):
            Engine(config_of(caches[0], master_port=port, tensor_parallel_size=2))
    until(lambda: not ranks_of(os.getpid()), "the end of its other rank")


@pytest.mark.parametrize(
    ("runtime", "why"),
    [
        ({"pipeline_parallel_size": 3}, "nnodes is 2 and runtime.pipeline_parallel_size 3; expected a multiple"),
        ({"distributed_executor_backend": "ray"}, "nodes start their own ranks"),
        ({"node_rank": 1}, "node 0 has the engine. Run mllm-compile serve"),
    ],
)
def test_nodes_that_cannot_be_are_refused(caches, runtime, why):
    with pytest.raises(ConfigError, match=why):
        Engine(config_of(caches[0], **runtime))


def test_a_node_beyond_their_number_is_refused(caches):
    with pytest.raises(ConfigError, match=r"nnodes is 2 and runtime\.node_rank 2; expected 0 to 1"):
        load_or_compile(config_of(caches[0], node_rank=2))
