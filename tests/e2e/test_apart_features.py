"""The table of features in docs/apart.md says what two engines do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams, StructuredOutputsParams
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ConfigError, RequestError
from mllm_compile.kv_connectors.peers.meeting import VARIABLE
from mllm_compile.server.replicas.devices import devices_of
from tests.adapters.tiny_adapters import Adapters
from tests.server.harness import running
from tests.tiny_model import engine_of_pages
from tests.tiny_model import tiny_config as config_of
from tests.tiny_sounds import FRAMES, Sound, save_sound_model, sound_prompt
from tests.tiny_vision import image, media_prompt, save_vision_model, vision_engine_config

ROOT = Path(__file__).parents[2]
PROMPT = list(range(3, 120))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
DECODE = {"do_remote_decode": True}
PEERS = {"kv_connector": "PeerConnector", "kv_port": 0, "timeout_s": 30.0}
SECRET = {VARIABLE: "a secret of engines"}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET[VARIABLE])


def rows() -> dict[str, str]:
    """The table: a feature, and what it says of it."""
    table = (ROOT / "docs" / "apart.md").read_text().partition("## Features")[2]
    cells = [re.split(r"\s*\|\s*", line) for line in table.splitlines()]
    return {one[1]: one[2] for one in cells if len(one) == 4 and one[1] not in ("feature", "---")}


def runtime_of(role: str, **more: Any) -> dict[str, Any]:
    return {"kv_offloading_size": 0.02, "kv_transfer_config": PEERS | {"kv_role": role}, "max_model_len": 256} | more


@contextmanager
def pair(cache: Path, **sections: Any) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine of the embedded model."""
    runtime, more = sections.pop("runtime", {}), {"compile": {"backend": "eager"}} | sections
    with ExitStack() as opened:
        first, second = (
            opened.enter_context(engine_of_pages(config_of(cache, runtime=runtime_of(role, **runtime), **more), 60))
            for role in ("kv_producer", "kv_consumer")
        )
        yield first, second


def handed(engines: tuple[Engine, Engine], prompt: Any, params: SamplingParams, **how: Any) -> Any:
    """The decode engine's answer, behind the prefill engine's."""
    prefill, decode = engines
    told = prefill.generate([prompt], replace(params, max_tokens=1, kv_transfer_params=DECODE), **how)[0]
    assert told.error is None and told.kv_transfer_params is not None
    answer = decode.generate([prompt], replace(params, kv_transfer_params=told.kv_transfer_params), **how)[0]
    assert answer.error is None
    return answer


def alone(engine: Engine, prompt: Any, params: SamplingParams, **how: Any) -> Any:
    """The answer of an engine that computes it all."""
    engine.flush_prefix_cache()
    return engine.generate([prompt], params, **how)[0]


def test_every_row_of_the_table_has_a_verdict() -> None:
    assert len(rows()) > 10
    for feature, verdict in rows().items():
        assert verdict.split(":")[0] in ("works", "refused"), feature


def test_what_works_gives_the_tokens_of_one_engine(eager_cache: Path) -> None:
    """Grammars, log-probabilities, sessions and salts, over pages of another engine."""
    form = {"structured_outputs": StructuredOutputsParams(regex="[a-z]+"), "ignore_eos": False}
    with pair(eager_cache) as engines:
        for changes, how in (({"logprobs": 2}, {}), (form, {}), ({}, {"session": "one"})):
            params = replace(GREEDY, **changes)
            answer = handed(engines, PROMPT, params, **how)
            assert answer.num_disk_tokens > 100
            expected = alone(engines[0], PROMPT, params, **how)
            assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
            if changes.get("logprobs"):
                for ours, theirs in zip(answer.logprobs, expected.logprobs, strict=True):
                    assert {key: one.logprob for key, one in ours.items()} == pytest.approx(
                        {key: one.logprob for key, one in theirs.items()}, abs=1e-4
                    )
            engines[1].flush_prefix_cache()
        salted = {"prompt_token_ids": PROMPT, "cache_salt": "mine"}
        assert handed(engines, salted, GREEDY).num_disk_tokens > 100
        prefill, decode = engines
        engines[1].flush_prefix_cache()
        told = prefill.generate([salted], replace(GREEDY, max_tokens=1, kv_transfer_params=DECODE))[0]
        other = replace(GREEDY, kv_transfer_params=told.kv_transfer_params)
        assert decode.generate([salted | {"cache_salt": "yours"}], other)[0].num_cached_tokens == 0
        scored = decode.generate([salted], replace(other, prompt_logprobs=1))[0]
        assert scored.num_cached_tokens == 0 and scored.prompt_logprobs is not None  # it computes such prompts
        with pytest.raises(RequestError, match="prompt_logprobs: expected none beside"):
            prefill.generate(PROMPT, replace(GREEDY, prompt_logprobs=1, kv_transfer_params=DECODE))
        prefill.core.while_still(lambda requests: requests.drop_kv())  # as sleep does
        decode.flush_prefix_cache()
        kept = replace(GREEDY, kv_transfer_params=told.kv_transfer_params)
        assert decode.generate([salted], kept)[0].num_disk_tokens > 100


@pytest.mark.slow
def test_drafts_work_behind_pages_of_another_engine(eager_cache: Path) -> None:
    with pair(eager_cache, speculative={"method": "ngram", "num_speculative_tokens": 2}) as engines:
        answer = handed(engines, PROMPT, GREEDY)
        assert answer.num_disk_tokens > 100
        assert answer.token_ids == alone(engines[0], PROMPT, GREEDY).token_ids


@pytest.mark.slow
def test_an_adapters_pages_are_its_own(eager_cache: Path, tmp_path: Path) -> None:
    adapters = Adapters(tmp_path)
    names = {name: str(adapters.folder / name) for name in ("all", "some")}
    with ExitStack() as opened:
        engines = tuple(
            opened.enter_context(
                Engine(adapters.config(eager_cache, lora={"adapters": names}, runtime=runtime_of(role)))
            )
            for role in ("kv_producer", "kv_consumer")
        )
        for name in (None, "all", "some"):
            answer = handed(engines, PROMPT[:40], GREEDY, adapter=name)  # type: ignore[arg-type]
            assert answer.num_disk_tokens > 0
            assert answer.token_ids == adapters.expected(PROMPT[:40], name, 6)


def image_prompt(seed: int) -> Any:
    return media_prompt([3, 4, 5, 6, 7], image(seed, (1, 4, 4)), [8, 9] * 12)


def heard_prompt(seed: int) -> Any:
    return sound_prompt("qwen2_audio", [3, 4, 5, 6, 7], Sound(seed, 2 * FRAMES), [8, 9] * 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "kind", "prompt_of"),
    [(save_vision_model, "qwen2_5_vl", image_prompt), (save_sound_model, "qwen2_audio", heard_prompt)],
    ids=["images", "sounds"],
)
def test_an_images_pages_are_its_own(
    save: Callable[[str, Path], Any], kind: str, prompt_of: Callable[[int], Any], tmp_path: Path
) -> None:
    """And a sound's."""
    save(kind, tmp_path / "model")
    with ExitStack() as opened:
        engines = tuple(
            opened.enter_context(
                Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache", **runtime_of(role)))
            )
            for role in ("kv_producer", "kv_consumer")
        )
        for seed in (1, 2):
            prompt = prompt_of(seed)
            answer = handed(engines, prompt, GREEDY)  # type: ignore[arg-type]
            assert answer.num_disk_tokens > 0
            assert answer.token_ids == alone(engines[0], prompt, GREEDY).token_ids


@pytest.mark.parametrize(
    ("runtime", "why"),
    [
        ({"kv_offloading_disk_path": "/tmp/kv", "kv_offloading_disk_size": 1.0}, "one is behind the host's memory"),
        ({"kv_offloading_memory_file": "/dev/shm/x"}, "memory_file is /dev/shm/x, and runtime.kv_transfer_config"),
        ({"kv_offloading_write_policy": "write_back"}, "write_policy is write_back, and runtime.kv_transfer_config"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2 excludes"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size excludes"),
        ({"expert_parallel_size": 2}, "expert_parallel_size excludes"),
        ({"routed_experts": True}, "routed_experts excludes"),
        ({"kv_offloading_size": 0.0}, "kv_transfer_config is set, and runtime.kv_offloading_size is 0"),
        ({"skip_compiled": True}, "kv_transfer_config and runtime.skip_compiled"),
        ({"kv_transfer_config": {"kv_role": "kv_producer"}}, "kv_role is kv_producer, and kv_connector is not set"),
        ({"kv_transfer_config": PEERS | {"kv_connector_extra_config": {"host": 1}}}, "has no such option. Known"),
        ({"kv_transfer_config": PEERS | {"kv_connector_extra_config": {"hosts": "a"}}}, "a list of names"),
        ({"kv_transfer_config": PEERS | {"kv_connector_extra_config": {"hold_s": -1}}}, "from 0 to 86400"),
        ({"kv_transfer_config": PEERS | {"kv_connector_extra_config": {"hosts": ["10.0.0.0/33"]}}}, "a network such"),
        ({"kv_transfer_config": PEERS | {"kv_connector_extra_config": {"transport": "ucx"}}}, "one of auto, nixl"),
        ({"kv_transfer_config": PEERS | {"kv_ip": ""}}, "an address of this host"),
        ({"kv_transfer_config": PEERS | {"kv_ip": "höst"}}, "an address of this host, got 'höst'"),
        ({"kv_transfer_config": PEERS | {"kv_ip": "0.0.0.0"}}, "the one address .* got 0.0.0.0, which is any"),
        ({"kv_transfer_config": PEERS | {"kv_ip": "::"}}, "the one address .* got ::, which is any"),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "Give PeerConnector for other engines"),
    ],
)
def test_what_is_refused_is_refused_by_name(eager_cache: Path, runtime: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        engine_of_pages(config_of(eager_cache, runtime=runtime_of("kv_both", **runtime)), 40)


def test_replicas_need_a_port_each(eager_cache: Path) -> None:
    for port, role, is_refused in ((14579, "kv_both", True), (0, "kv_both", False), (14579, "kv_consumer", False)):
        asked = {"kv_transfer_config": PEERS | {"kv_port": port, "kv_role": role}}
        config = config_of(eager_cache, runtime=runtime_of("kv_both", **asked))
        if is_refused:
            with pytest.raises(ConfigError, match=r"--replicas 2: .*kv_port is 14579.* Set it to 0"):
                devices_of(2, config)
        else:
            assert devices_of(2, config) == (None, None)


def test_a_missing_secret_is_named(eager_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=f"{VARIABLE} has 0 characters"), pair(eager_cache):
        pass


def server_of(config: EngineConfig, role: str, folder: Path) -> Any:
    path = folder / f"{role}.yaml"
    path.write_text(config.model_dump_json(exclude_defaults=True))
    transfer = json.dumps(PEERS | {"kv_role": role})
    command = [sys.executable, "-m", "mllm_compile", "serve", str(path), "--port", "0"]
    command += ["--kv-offloading-size", "0.02", "--kv-transfer-config", transfer]
    return running(command, folder / f"{role}.log", SECRET)


@pytest.mark.slow
def test_a_proxy_before_two_servers_gives_one_servers_answers_also_when_either_is_lost(
    eager_cache: Path, tmp_path: Path
) -> None:
    config = config_of(eager_cache, compile={"backend": "eager"})
    asked = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with server_of(config, "kv_producer", tmp_path) as prefill, server_of(config, "kv_consumer", tmp_path) as decode:
        expected = prefill.complete(**asked).json["choices"][0]["token_ids"]
        ends = ["--prefill", f"127.0.0.1:{prefill.port}", "--decode", f"127.0.0.1:{decode.port}", "--port", "0"]
        command = [sys.executable, str(ROOT / "examples" / "apart_proxy.py"), *ends]
        proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert proxy.stdout is not None
            decode_port, decode.port = decode.port, int(proxy.stdout.readline().rpartition(":")[2])
            answer = decode.complete(**asked).json
            assert answer["choices"][0]["token_ids"] == expected
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]["storage"] > 100
            streamed = decode.complete(**asked | {"prompt": [9, *PROMPT], "stream": True}).events
            whole = prefill.complete(**asked | {"prompt": [9, *PROMPT]}).json["choices"][0]["token_ids"]
            tokens = [one for event in streamed if event for choice in event["choices"] for one in choice["token_ids"]]
            assert tokens == whole and streamed[-1] is None
            for changes, why in (
                ({"stream": True}, "stream: expected false"),
                ({"prompt": [PROMPT, PROMPT]}, "expected one prompt"),
                ({"kv_transfer_params": {"do_remote_decode": 1}}, "expected true or false"),
                ({"kv_transfer_params": {"do_remote_prefill": True}}, "remote_engine_id: expected it"),
            ):
                refused = prefill.complete(**asked | {"kv_transfer_params": DECODE} | changes)
                assert refused.status == 400 and why in refused.error["message"]
            prefill.process.kill()
            prefill.process.wait()
            answer = decode.complete(**asked | {"prompt": [8, *PROMPT]}).json
            assert len(answer["choices"][0]["token_ids"]) == 8
            decode.port = decode_port
            again = decode.complete(**asked | {"prompt": [8, *PROMPT]}).json["choices"][0]["token_ids"]
            assert answer["choices"][0]["token_ids"] == again
        finally:
            proxy.kill()
            proxy.wait()
