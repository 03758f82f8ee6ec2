"""An engine over two nodes that share neither a network nor memory, behind a link of 20 ms: its tokens are one rank's,
and where the link is cut every request is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mllm_compile import Engine
from mllm_compile.compiler.load_or_compile import load_or_compile
from tests.e2e.test_ranks import tokens
from tests.e2e.two_networks import ADDRESSES, TwoNetworks, are_permitted
from tests.hang_guard import HANG_S
from tests.tiny_model import tiny_config

pytestmark = pytest.mark.slow
DELAY_S = 0.02
TWO_BY_TWO = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
TOKENS = """
import json, sys
from mllm_compile import Engine
from tests.e2e.test_ranks import tokens
with Engine(sys.argv[1]) as engine:
    print(json.dumps(tokens(engine)))
"""
ENDLESS = """
import sys
from mllm_compile import Engine, SamplingParams
from mllm_compile.errors import EngineDeadError
engine = Engine(sys.argv[1])
try:
    for _ in engine.stream("A", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)):
        print("a token", flush=True)
except EngineDeadError as error:
    print("lost:", error)
engine.close()
"""


def config_of(cache: Path, **runtime: Any) -> Any:
    return tiny_config(cache, compile={"backend": "eager"}, runtime={"max_num_batched_tokens": 32} | runtime)


@pytest.fixture(scope="module", autouse=True)
def permitted() -> None:
    if not are_permitted():
        pytest.skip("network namespaces are not permitted")


@pytest.fixture(scope="module")
def commands(eager_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The commands of both nodes, each with a cache of its own; node 0's has no program yet."""
    load_or_compile(config_of(eager_cache, **TWO_BY_TWO))
    other = tmp_path_factory.mktemp("node") / "cache"
    shutil.copytree(eager_cache, other)
    files = []
    for cache, nodes in ((eager_cache, {"nnodes": 2, "master_addr": ADDRESSES[0]}), (other, {})):
        config = config_of(cache, **TWO_BY_TWO, **nodes).model_dump(mode="json", exclude_unset=True)
        files.append(cache / "apart.yaml")
        files[-1].write_text(yaml.safe_dump(config))
    options = ["--nnodes", "2", "--node-rank", "1", "--master-addr", ADDRESSES[0]]
    return [
        [sys.executable, "-c", "", str(files[0])],
        [sys.executable, "-m", "mllm_compile", "serve", str(files[1]), *options],
    ]


@pytest.fixture
def networks() -> Iterator[TwoNetworks]:
    made = TwoNetworks(DELAY_S)
    yield made
    made.close()


def started(networks: TwoNetworks, commands: list[list[str]], program: str) -> list[subprocess.Popen[str]]:
    """Both nodes; node 0 runs a program with its config."""
    first = [program if word == "" else word for word in commands[0]]
    environment = os.environ | {"MLLM_NODES_SECRET": "a secret that both nodes have"}
    return networks.start([first, commands[1]], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_two_by_two_ranks_over_a_slow_link_give_one_ranks_tokens(eager_cache, commands, networks):
    with Engine(config_of(eager_cache)) as alone:
        expected = tokens(alone)
    first, second = started(networks, commands, TOKENS)
    said, errors = first.communicate(timeout=HANG_S)
    assert first.returncode == 0, errors
    assert json.loads(said) == expected
    _, errors = second.communicate(timeout=HANG_S)
    assert second.returncode == 0, errors
    assert networks.num_packets > 100, "nothing else joins them"


def test_a_link_that_is_cut_ends_requests_with_the_lost_rank_and_both_nodes(commands, networks):
    first, second = started(networks, commands, ENDLESS)
    assert first.stdout is not None and first.stdout.readline() == "a token\n"
    networks.cut()
    said, errors = first.communicate(timeout=HANG_S)
    assert said.splitlines()[-1].startswith("lost: ") and "on node 1 (10.77.0.2)" in said, (said, errors)
    second.communicate(timeout=HANG_S)
    assert second.returncode != 0
