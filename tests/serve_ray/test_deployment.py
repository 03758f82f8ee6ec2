"""The deployment of Ray Serve with replicas on a CPU: prompts stick, and neither a killed server nor an update of the
runtime loses a request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hang_guard import HANG_S, until
from tests.tiny_model import tiny_config

pytestmark = pytest.mark.slow
PORT = 8437
ROOT = Path(__file__).parents[2]


def ask(prompt: str, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", body)
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        return json.load(answer)


def servers(config: Path) -> set[int]:
    """Processes with a replica's server."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    begin = f"{sys.executable} -P -m mllm_compile serve {config} "
    return {int(line.split()[0]) for line in listed.splitlines() if line.split(None, 1)[1].startswith(begin)}


@pytest.fixture(scope="module")
def serving(eager_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A config in a folder of its own, on a Ray with Serve."""
    ray = pytest.importorskip("ray")
    from ray import serve

    config = tmp_path_factory.mktemp("served") / "tiny.yaml"
    write(config, eager_cache)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), before or ""])
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    try:
        serve.start(http_options={"port": PORT})
        yield config
    finally:
        serve.shutdown()
        ray.shutdown()
        os.environ["PYTHONPATH"] = before or ""


def write(config: Path, cache: Path, **runtime: Any) -> None:
    sections = tiny_config(cache, compile={"backend": "eager"}, runtime=runtime)
    config.write_text(yaml.safe_dump(sections.model_dump(mode="json", exclude_unset=True)))


def deploy(config: Path, **options: Any) -> None:
    from ray import serve

    from mllm_compile.serve_ray import Options, app

    serve.run(app(Options(model=str(config), num_cpus=0.5, **options)), route_prefix="/")


def test_prompts_stick_to_a_replica_and_a_killed_one_loses_no_whole_answer(serving):
    deploy(serving, min_replicas=2, max_replicas=2)
    for name in ("Alpha ", "Beta ", "Gamma ", "Delta "):
        usages = [ask(name.ljust(8) * 66 + str(i))["usage"] for i in range(4)]
        assert all(one["prompt_tokens_details"]["cached_tokens"] for one in usages[1:]), "the first one's KV is found"
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(ask, f"Word {i} " * 10, max_tokens=60) for i in range(40)]
        until(lambda: any(answer.done() for answer in answers))
        os.kill(min(servers(serving)), signal.SIGKILL)
        assert [answer.result()["usage"]["completion_tokens"] for answer in answers] == [60] * 40
    until(lambda: len(servers(serving)) >= 2, "another replica is there")


def test_an_update_of_the_runtime_replaces_replicas_without_a_lost_request(serving, eager_cache):
    deploy(serving, min_replicas=2, max_replicas=2)
    until(lambda: len(servers(serving)) == 2, "two replicas")
    old, is_over, answered = servers(serving), threading.Event(), list[int]()

    def keep_asking(number: int) -> None:
        while not is_over.is_set():
            answered.append(ask(f"Number {number} " * 20, max_tokens=40)["usage"]["completion_tokens"])

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(keep_asking, number) for number in range(4)]
        try:
            until(lambda: len(answered) > 8, "requests are answered")
            write(serving, eager_cache, max_running_requests=7)
            deploy(serving, min_replicas=2, max_replicas=2)
            until(lambda: not servers(serving) & old, "the end of the old replicas")
            before = len(answered)
            until(lambda: len(answered) > before + 8, "the new ones answer")
        finally:
            is_over.set()
        for one in asking:
            one.result()  # raises what a request has met
    assert set(answered) == {40}


def test_streams_errors_and_other_paths_come_through_as_they_are(serving):
    deploy(serving)
    body = json.dumps({"prompt": "A", "max_tokens": 4, "stream": True}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/completions", body, timeout=HANG_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.read().endswith(b"data: [DONE]\n\n")
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models", timeout=HANG_S) as answer:
        assert json.load(answer)["data"]
    with pytest.raises(urllib.error.HTTPError) as told:
        ask("A", max_tokens=-1)
    assert told.value.code == 400 and b"max_tokens" in told.value.read()
    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/completions", b"no json", timeout=HANG_S)
    assert told.value.code == 400 and b"no JSON" in told.value.read()
    ask("A", max_tokens=1, session_id="a%41")
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/sessions/a%2541", timeout=HANG_S) as answer:
        assert json.load(answer)["id"] == "a%41"


def test_replicas_follow_the_load_to_two_and_back_without_a_lost_request(serving):
    deploy(
        serving,
        min_replicas=1,
        max_replicas=2,
        target_ongoing_requests=1,
        upscale_delay_s=0.0,
        downscale_delay_s=1.0,
    )
    until(lambda: len(servers(serving)) == 1, "one replica")
    is_over, answered = threading.Event(), list[int]()

    def keep_asking(number: int) -> None:
        while not is_over.is_set():
            answered.append(ask(f"Number {number} " * 20, max_tokens=40)["usage"]["completion_tokens"])

    with ThreadPoolExecutor(6) as threads:
        asking = [threads.submit(keep_asking, number) for number in range(6)]
        try:
            until(lambda: len(servers(serving)) == 2, "a second replica under load")
            before = len(answered)
            until(lambda: len(answered) > before + 12, "answers of both")
        finally:
            is_over.set()
        for one in asking:
            one.result()  # raises what a request has met
    assert set(answered) == {40}
    until(lambda: len(servers(serving)) == 1, "one replica again, when nobody asks")
    assert ask("A", max_tokens=3)["usage"]["completion_tokens"] == 3
