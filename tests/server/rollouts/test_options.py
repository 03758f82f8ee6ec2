"""The options of rollouts: what a server with them refuses, and what one without them says."""

from __future__ import annotations

import pytest

from mllm_compile.errors import ConfigError
from mllm_compile.server.app import OPEN_PATHS, paths_of
from mllm_compile.server.options import ServeOptions
from tests.server.harness import fake_server

RL = {"model": "m", "enable_rl": True}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**RL, "host": "0.0.0.0"}, "--enable-rl: expected an API key beside it"),
        ({**RL, "sleep_after_s": 5.0}, "--enable-rl: an engine that sleeps forgets its weights"),
        ({"model": "m", "runtime": {"enable_sleep_mode": True}}, "--enable-sleep-mode: expected --enable-rl beside it"),
        ({"model": "m", "rl_hosts": ("a",)}, "--rl-host, --rl-folder: expected --enable-rl"),
        ({"model": "m", "rl_folders": ("/a",)}, "--rl-host, --rl-folder: expected --enable-rl"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        ServeOptions(**given)


def test_a_key_or_a_socket_lets_others_in():
    assert ServeOptions(**RL, host="0.0.0.0", api_keys=("k",)).enable_rl
    assert ServeOptions(**RL, uds="/tmp/socket").enable_rl


def test_every_path_of_rollouts_needs_the_key():
    paths = set(paths_of(ServeOptions(**RL))) - set(paths_of(ServeOptions(model="m")))
    assert len(paths) > 30
    with fake_server({"enable_rl": True, "api_keys": ["k"]}) as server:
        for method, path in paths:
            assert path not in OPEN_PATHS
            answer = server.ask(method, path, {} if method == "POST" else None)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), path


def test_without_them_the_paths_of_sleep_say_how_an_engine_sleeps():
    with fake_server({}) as server:
        answer = server.post("/sleep?level=1", None)
    assert answer.error["code"] == "unsupported_endpoint"
    assert "--enable-rl --enable-sleep-mode" in answer.error["message"]
