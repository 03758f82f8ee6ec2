"""The deployment of Ray Serve with replicas on a CPU: prompts stick, and neither a killed server nor an update of the
runtime loses a request."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hang_guard import HANG_S, until
from tests.tiny_model import tiny_config

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Serving:
    """A config in a folder of its own, and Ray's proxy."""

    config: Path
    port: int

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def ask(self, prompt: str, **fields: Any) -> dict[str, Any]:
        body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}).encode()
        with urllib.request.urlopen(self.url("/v1/completions"), body, timeout=HANG_S) as answer:
            return json.load(answer)

    def deploy(self, **options: Any) -> None:
        from ray import serve

        from mllm_compile.serve_ray import Options, app

        serve.run(app(Options(model=str(self.config), num_cpus=0.5, **options)), route_prefix="/")

    def servers(self) -> set[int]:
        """Processes with a replica's server."""
        listed = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        begin = f"{sys.executable} -P -m mllm_compile serve {self.config} "
        return {int(line.split()[0]) for line in listed.splitlines() if line.split(None, 1)[1].startswith(begin)}

    @contextmanager
    def asked(self, clients: int) -> Iterator[list[int]]:
        """Has so many clients ask meanwhile; yields how many tokens each answer so far has. Raises what one has met."""
        is_over, answered = threading.Event(), list[int]()

        def keep_asking(number: int) -> None:
            while not is_over.is_set():
                answered.append(self.ask(f"Number {number} " * 20, max_tokens=40)["usage"]["completion_tokens"])

        with ThreadPoolExecutor(clients) as threads:
            asking = [threads.submit(keep_asking, number) for number in range(clients)]
            try:
                yield answered
            finally:
                is_over.set()
            for one in asking:
                one.result()


@pytest.fixture(scope="module")
def serving(eager_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    ray = pytest.importorskip("ray")
    from ray import serve

    config = tmp_path_factory.mktemp("served") / "tiny.yaml"
    write(config, eager_cache)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), before or ""])
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    try:
        serve.start(http_options={"port": port})
        yield Serving(config, port)
    finally:
        serve.shutdown()
        ray.shutdown()
        os.environ["PYTHONPATH"] = before or ""


def write(config: Path, cache: Path, **runtime: Any) -> None:
    sections = tiny_config(cache, compile={"backend": "eager"}, runtime=runtime)
    config.write_text(yaml.safe_dump(sections.model_dump(mode="json", exclude_unset=True)))


def test_prompts_stick_to_a_replica_and_a_killed_one_loses_no_whole_answer(serving):
    serving.deploy(min_replicas=2, max_replicas=2)
    for name in ("Alpha ", "Beta ", "Gamma ", "Delta "):
        usages = [serving.ask(name.ljust(8) * (66 + i))["usage"] for i in range(4)]
        assert all(one["prompt_tokens_details"]["cached_tokens"] for one in usages[1:]), "the first one's KV is found"
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(serving.ask, f"Word {i} " * 10, max_tokens=60) for i in range(40)]
        until(lambda: any(answer.done() for answer in answers))
        os.kill(min(serving.servers()), signal.SIGKILL)
        assert [answer.result()["usage"]["completion_tokens"] for answer in answers] == [60] * 40
    until(lambda: len(serving.servers()) >= 2, "another replica is there")


def test_an_update_of_the_runtime_replaces_replicas_without_a_lost_request(serving, eager_cache):
    serving.deploy(min_replicas=2, max_replicas=2)
    until(lambda: len(serving.servers()) == 2, "two replicas")
    old = serving.servers()
    with serving.asked(clients=4) as answered:
        until(lambda: len(answered) > 8, "requests are answered")
        write(serving.config, eager_cache, max_running_requests=7)
        serving.deploy(min_replicas=2, max_replicas=2)
        until(lambda: not serving.servers() & old, "the end of the old replicas")
        before = len(answered)
        until(lambda: len(answered) > before + 8, "the new ones answer")
    assert set(answered) == {40}


def test_streams_errors_and_other_paths_come_through_as_they_are(serving):
    serving.deploy()
    body = json.dumps({"prompt": "A", "max_tokens": 4, "stream": True}).encode()
    with urllib.request.urlopen(serving.url("/v1/completions"), body, timeout=HANG_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.read().endswith(b"data: [DONE]\n\n")
    with urllib.request.urlopen(serving.url("/v1/models"), timeout=HANG_S) as answer:
        assert json.load(answer)["data"]
    with pytest.raises(urllib.error.HTTPError) as told:
        serving.ask("A", max_tokens=-1)
    assert told.value.code == 400 and b"max_tokens" in told.value.read()
    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.urlopen(serving.url("/v1/completions"), b"no json", timeout=HANG_S)
    assert told.value.code == 400 and b"no JSON" in told.value.read()
    serving.ask("A", max_tokens=1, session_id="a%41")
    with urllib.request.urlopen(serving.url("/v1/sessions/a%2541"), timeout=HANG_S) as answer:
        assert json.load(answer)["id"] == "a%41"


def test_replicas_follow_the_load_to_two_and_back_without_a_lost_request(serving):
    serving.deploy(
        min_replicas=1,
        max_replicas=2,
        target_ongoing_requests=1,
        upscale_delay_s=0.0,
        downscale_delay_s=1.0,
    )
    until(lambda: len(serving.servers()) == 1, "one replica")
    with serving.asked(clients=6) as answered:
        until(lambda: len(serving.servers()) == 2, "a second replica under load")
        before = len(answered)
        until(lambda: len(answered) > before + 12, "answers of both")
    assert set(answered) == {40}
    until(lambda: len(serving.servers()) == 1, "one replica again, when nobody asks")
    assert serving.ask("A", max_tokens=3)["usage"]["completion_tokens"] == 3
