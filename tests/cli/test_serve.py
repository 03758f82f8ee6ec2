"""`mllm-compile serve`: what is refused before anything starts."""

from __future__ import annotations

import os
import sys

import pytest

from mllm_compile.cli import run
from mllm_compile.errors import ConfigError
from mllm_compile.server.options import ServeOptions, seconds_of

TINY = "configs/tiny.yaml"
MEMORY = ("--kv-offloading-size", "0.1")
STRAY = '{"kv_connector": "examples.folder_store.FolderStory", "trust_local_code": true}'
ELSEWHERE = '{"kv_connector": "nowhere.at.all.Store", "trust_local_code": true}'
PEER = '{"kv_connector": "PeerConnector", "kv_role": "kv_both"}'


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no/such/model.yaml"], "no/such/model.yaml"),
        ([TINY, "--port", "70000"], "--port: expected a number from 0 to 65535, got 70000"),
        ([TINY, "--allowed-origin", "*"], "--allowed-origin: expected an origin as browsers send it"),
        ([TINY, "--allowed-origin", "https://a.example/"], "no path, each one by itself), got 'https://a.example/'"),
        ([TINY, "--max-queue", "0"], "--max-queue: expected at least 1"),
        ([TINY, "--sleep-after", "soon"], "--sleep-after: expected a time such as 90s, 5m or 2h, got 'soon'"),
        ([TINY, "--request-timeout", "0"], "--request-timeout: expected more than 0 s"),
        ([TINY, "--api-key", ""], "--api-key: expected printable ASCII characters"),
        ([TINY, "--api-key", "secret "], "the first and last of them no space"),
        ([TINY, "--served-model-name", "a\nb"], "--served-model-name: expected printable"),
        ([TINY, "--api-key-file", "/no/such/file"], "--api-key-file: /no/such/file cannot be read"),
        ([TINY, "--host", "no.such.host.invalid"], "cannot be listened at"),
        ([TINY, "--log", "xml"], "--log: expected text or json, got 'xml'"),
        ([TINY, "--quiet", "--verbose"], "give one of them"),
        ([TINY, "--nnodes", "2", "--sleep-after", "5m"], "--sleep-after: the other nodes would end with the engine"),
        ([f"a={TINY}", f"b={TINY}", "--nnodes", "2"], "nnodes is 2 for a: expected one model. Serve it by itself"),
        ([TINY, "--nnodes", "2"], "MLLM_NODES_SECRET has 0 characters"),
        ([TINY, "--kv-transfer-config", PEER], "kv_transfer_config is set, and runtime.kv_offloading_size is 0"),
        ([TINY, *MEMORY, "--kv-transfer-config", PEER], "MLLM_KV_SECRET has 0 characters"),
        (
            [TINY, *MEMORY, "--kv-transfer-config", '{"kv_connector": "NixlConnector"}'],
            "NixlConnector, without a module",
        ),
        ([TINY, *MEMORY, "--kv-transfer-config", ELSEWHERE], "names nowhere.at.all, and there is no package nowhere"),
        ([TINY, *MEMORY, "--kv-transfer-config", STRAY], "examples.folder_store has no class FolderStory"),
        (
            [TINY, *MEMORY, "--kv-transfer-config", '{"kv_role": "kv_sender"}'],
            "kv_role is 'kv_sender'; expected 'kv_both'",
        ),
        ([TINY, *MEMORY, "--kv-transfer-config", "{garbage"], "--kv-transfer-config is '{garbage'; expected a JSON"),
        ([TINY, "--nnodes", "2", "--node-rank", "1", "--check"], "nnodes is 2 and runtime.pipeline_parallel_size 1"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(capsys, monkeypatch, arguments, says):
    monkeypatch.delenv("MLLM_KV_SECRET", raising=False)
    monkeypatch.delenv("MLLM_NODES_SECRET", raising=False)
    assert run(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "listening" not in said


def test_ray_that_is_missing_is_told_before_anything_starts(capsys, monkeypatch, tmp_path):
    file = tmp_path / "ray.yaml"
    runtime = "{distributed_executor_backend: ray, tensor_parallel_size: 2}"
    file.write_text(f"model: {{path: {os.path.abspath('mllm_compile/model/tiny')}}}\nruntime: {runtime}\n")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["serve", str(file)]) == 2
    said = capsys.readouterr().err
    assert "Ray is not installed: pip install 'mllm-compile[ray]'" in said
    assert "listening" not in said


def test_a_check_on_a_further_node_runs_no_rank(monkeypatch):
    from mllm_compile.cli import serve
    from mllm_compile.ranks import node

    checked: list[str] = []
    monkeypatch.setattr(node, "run_node", lambda *_: pytest.fail("it was to be checked"))
    monkeypatch.setattr(serve, "_print_checks", lambda sources, reporter: checked.extend(sources))
    assert run(["serve", TINY, "--nnodes", "2", "--node-rank", "1", "--check"]) == 0
    assert checked == [""]


def test_keys_come_from_options_the_environment_and_a_file(monkeypatch, tmp_path):
    from mllm_compile.server import serve

    started: list[ServeOptions] = []
    monkeypatch.setattr(serve, "run_server", lambda options, **_: started.append(options))
    monkeypatch.setenv("MLLM_API_KEY", "of-environment")
    file = tmp_path / "keys"
    file.write_text("first\n\n second \n")
    assert run(["serve", TINY, "--api-key", "given", "--api-key-file", str(file), "--sleep-after", "5m"]) == 0
    assert started[0].api_keys == ("given", "of-environment", "first", "second")
    assert started[0].sleep_after_s == 300
    file.write_text("\n")
    assert run(["serve", TINY, "--api-key-file", str(file)]) == 2


def test_a_key_of_the_environment_that_is_empty_does_not_open_every_path(monkeypatch, capsys):
    monkeypatch.setenv("MLLM_API_KEY", " ")
    assert run(["serve", TINY]) == 2
    assert "MLLM_API_KEY is set, and empty" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("5m", 300), ("2h", 7200), (None, None)])
def test_times_have_units(text, seconds):
    assert seconds_of("--x", text) == seconds


@pytest.mark.parametrize("text", ["", "m", "x5", "5d"])
def test_a_malformed_time_is_refused(text):
    with pytest.raises(ConfigError, match="expected a time"):
        seconds_of("--x", text)
