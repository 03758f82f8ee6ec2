"""A process that is killed in the midst of its writes leaves files that the next one serves from."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from mllm_compile import SamplingParams
from tests.hang_guard import until
from tests.tiny_model import engine_of_pages, tiny_config

PROMPTS = [[first, *range(3, 100)] for first in range(8)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CHILD = """
import sys
from pathlib import Path
from tests.e2e.test_tier_kills import GREEDY, PROMPTS, served
with served(Path(sys.argv[1])) as engine:
    engine.generate(PROMPTS, GREEDY)
    print("answered", flush=True)
    while True:
        engine.generate([[9, *prompt] for prompt in PROMPTS], GREEDY)
        engine.flush_prefix_cache()
        engine.generate(PROMPTS, GREEDY)
"""


def served(folder: Path):
    runtime = {"kv_offloading_size": 0.05, "kv_offloading_disk_size": 0.1, "kv_offloading_min_gain": 0}
    runtime |= {"kv_offloading_disk_path": str(folder / "tier"), "max_model_len": 256}
    return engine_of_pages(tiny_config(folder / "cache", runtime=runtime, compile={"backend": "eager"}), 60)


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3])
def test_the_next_process_serves_from_the_files_of_one_that_was_killed(tmp_path: Path, delay_s: float) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "answered\n"
        until(lambda: any("-" in path.name for path in tmp_path.glob("tier/*/*/*")), "the first file")
        time.sleep(delay_s)
    finally:
        child.kill()
        child.wait()
    with served(tmp_path) as engine:
        answers = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
        names = [tier.name for tier in engine.stats().tiers]
        left = list(tmp_path.glob("tier/*/*/*.new"))
        engine.flush_prefix_cache()
        expected = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
    assert answers == expected
    assert names == ["host", "disk"], "the lock went with the process"
    assert not left
