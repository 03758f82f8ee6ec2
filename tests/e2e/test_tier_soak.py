"""720 requests in sessions, over engines that are killed, with damaged files and little memory: tokens of a plain one.

Each engine inherits the memory of the one before and its files. The parent kills it in the midst of a batch, changes
bytes of some files, cuts others, and starts the next.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from benchmarks.server.agent_trace import PRESETS, Generator
from mllm_compile import Engine, SamplingParams
from mllm_compile.server.kept_memory import KeptMemory
from tests.benchmarks.test_mistakes import run
from tests.e2e.test_tiers import MOST, turns_of
from tests.tiny_model import engine_of_pages, tiny_config

REQUESTS, ENGINES, AT_ONCE = 720, 8, 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CHILD = """
import json, sys
from pathlib import Path
from tests.e2e.test_tier_soak import AT_ONCE, GREEDY, served
prompts = json.load(sys.stdin)
with served(Path(sys.argv[1]), 40, sys.argv[2]) as engine:
    for start in range(0, len(prompts), AT_ONCE):
        outputs = engine.generate(prompts[start : start + AT_ONCE], GREEDY)
        tiers = [tier.hit_tokens for tier in engine.stats().tiers]
        print(json.dumps([[output.token_ids for output in outputs], tiers]), flush=True)
"""


def served(folder: Path, num_pages: int | None, policy: str | None = None) -> Engine:
    runtime: dict[str, object] = {"max_model_len": MOST, "max_num_batched_tokens": 32, "page_size": 4}
    runtime |= {"max_running_requests": 4}
    if policy is not None:
        runtime |= {"kv_offloading_size": 0.001, "kv_offloading_min_gain": 0, "kv_offloading_disk_size": 0.004}
        runtime |= {"kv_offloading_disk_path": str(folder / "tier"), "kv_offloading_write_policy": policy}
    return engine_of_pages(tiny_config(folder / "cache", runtime=runtime, compile={"backend": "eager"}), num_pages)


def damage(folder: Path, chance: Random) -> int:
    """Changes or cuts one file in six; how many."""
    files = [path for path in sorted(folder.glob("tier/*/*/*")) if "-" in path.name]
    chosen = chance.sample(files, len(files) // 6)
    for path in chosen:
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data if chance.random() < 0.7 else data[: len(data) // 2])
    return len(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_soak_with_kills_and_damaged_files_gives_the_tokens_of_a_plain_engine(tmp_path: Path, policy: str) -> None:
    chance = Random(9)
    prompts = turns_of(chance, REQUESTS, num_beginnings=12)
    with served(tmp_path, None) as plain:
        expected = [output.token_ids for output in plain.generate(prompts, GREEDY)]
    memory, answers, damaged = KeptMemory(), list[list[int]](), 0
    hits = [0, 0]
    for number in range(ENGINES):
        command = [sys.executable, "-c", CHILD, str(tmp_path), policy]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[memory.descriptor],
            env=os.environ | memory.environment(memory.descriptor),
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            json.dump(prompts[len(answers) :], child.stdin)
            child.stdin.close()
            is_last = number == ENGINES - 1
            of_engine = REQUESTS if is_last else REQUESTS // ENGINES // AT_ONCE
            of_tiers = [0, 0]
            for line in child.stdout:
                found, of_tiers = json.loads(line)
                answers += found
                of_engine -= 1
                if not of_engine:
                    break
            hits = [before + now for before, now in zip(hits, of_tiers, strict=True)]
        finally:
            child.kill()
            child.wait()
        damaged += damage(tmp_path, chance)
    memory.close()
    assert len(answers) == REQUESTS
    assert answers == expected
    assert damaged > 10
    assert all(hits), hits


@pytest.mark.slow
def test_agents_lose_no_call_behind_a_server_whose_engine_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script, for as long as three kills take; a slow machine has fewer."""
    path, trace = tmp_path / "tiny.yaml", tmp_path / "trace"
    config = tiny_config(tmp_path / "cache", runtime={"max_model_len": MOST}, compile={"backend": "eager"})
    path.write_text(config.model_dump_json(exclude_defaults=True))
    calls = Generator(PRESETS["agentx"], 1, scale=0.005, pace=0.025, longest_pause_s=30.0).sessions(24)
    trace.write_text("".join(f"{json.dumps(call)}\n" for call in calls))
    options = ["--seconds", "40", "--kill-every", "8", "--total-tokens", "2048", "--host-gib", "0.03"]
    with pytest.raises(SystemExit) as ended:
        run("server.tier_soak", monkeypatch, str(path), str(trace), *options)
    said = capsys.readouterr().out
    assert re.search(r"\b[1-9]\d* kills, \d+ files changed", said), said
    assert ended.value.code == 0, said
