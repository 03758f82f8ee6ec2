"""Agents' calls find what an LRU of as many tokens as the KV cache and the host's memory have together would find."""

from __future__ import annotations

from pathlib import Path

from benchmarks.server.agent_trace import PRESETS, Generator, in_time, prompts_of
from benchmarks.steps.agents_speed import ids_of, lru_share
from mllm_compile import Engine, SamplingParams
from tests.tiny_model import engine_of_pages, tiny_config

PAGE, CACHE_PAGES, HOST_PAGES = 2, 240, 400  # a call's last page is computed: of larger ones that is much
SESSIONS, CALLS = 10, 130
VOCABULARY = 200


def served(cache: Path, gib: float) -> Engine:
    runtime = {"kv_offloading_size": gib, "kv_offloading_min_gain": 0, "page_size": PAGE}
    config = tiny_config(cache, runtime=runtime, compile={"backend": "eager"})
    return engine_of_pages(config, CACHE_PAGES + 1)


def test_agents_find_what_an_lru_of_cache_and_memory_together_has(eager_cache: Path) -> None:
    calls = Generator(PRESETS["agentx"], 1, scale=0.0012, pace=0.05, longest_pause_s=60.0).sessions(SESSIONS)
    order = in_time(calls, SESSIONS, prefill_rate=30_000.0, decode_ms=10.0)[:CALLS]
    prompts = {call["id"]: prompt for call, prompt in prompts_of(calls)}
    with served(eager_cache, 0.01) as engine:
        gib = 0.01 / engine.stats().tiers[0].capacity * HOST_PAGES
    found = total = 0
    said: dict[int, list[int]] = {}
    with served(eager_cache, gib) as engine:
        for call in order:
            messages = [said.get(seed, ids_of(seed, count, VOCABULARY)) for _, count, seed in prompts[call["id"]]]
            ids = [token for message in messages for token in message]
            params = SamplingParams(temperature=0.0, max_tokens=call["out_tokens"], ignore_eos=True)
            (output,) = engine.generate([ids], params, progress=False)
            assert output.error is None
            said[call["reply_seed"]] = output.token_ids
            found, total = found + (output.num_cached_tokens or 0), total + len(ids)
        (host,) = engine.stats().tiers
    assert host.evictions > 0
    without, of_host, of_both = (
        lru_share(calls, [call["id"] for call in order], PAGE * pages)
        for pages in (CACHE_PAGES, host.capacity, CACHE_PAGES + host.capacity)
    )
    assert without < of_host - 0.1, "the memory is to matter"
    assert of_host < 0.98 * of_both, "both together are to matter"
    assert found / total >= 0.97 * of_both, f"{found / total:.4f} of the tokens, an LRU {of_both:.4f}"
