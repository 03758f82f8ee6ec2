"""vLLM behind agents' calls, with and without its own offload to the host's memory."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Coroutine
from importlib.util import find_spec
from typing import Any, TypeVar

from benchmarks.script import mistake
from mllm_compile.bench.measure.setting import Setting

_BLOCK = 16  # tokens, its default

Result = TypeVar("Result")


def need_vllm() -> None:
    """Ends the process where vLLM is not installed."""
    if find_spec("vllm") is None:
        mistake("--engines names vllm, which is not installed: pip install vllm")


class VllmAnswers:
    """An AsyncLLM whose calls come from many threads; its event loop is another one's.

    Args:
        setting: the model's, with max_model_len.
        total_tokens: of its KV cache.
        host_gib: of the host's memory; 0: none.
    """

    def __init__(self, setting: Setting, total_tokens: int, host_gib: float) -> None:
        os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")  # a fork of torch's threads stands still
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from mllm_compile.bench.adapters.vllm_engine import settings_of

        changes: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks_override": total_tokens // _BLOCK}
        if host_gib:
            changes["kv_offloading_size"] = host_gib
        arguments = AsyncEngineArgs(
            model=setting.model_folder, disable_log_stats=True, **settings_of(setting) | changes
        )
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

        async def make() -> Any:  # it has tasks of that loop
            return AsyncLLM.from_engine_args(arguments)

        self._engine = self._wait(make())

    def answer(self, prompt: list[int], max_tokens: int) -> tuple[int, list[int]]:
        """See Replay; waits, in any thread."""
        return self._wait(self._answer(prompt, max_tokens))

    def close(self) -> None:
        """Ends its processes."""
        self._engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _answer(self, prompt: list[int], max_tokens: int) -> tuple[int, list[int]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        cached, token_ids = 0, list[int]()
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params, str(next(self._ids))):
            cached, token_ids = output.num_cached_tokens or 0, list(output.outputs[0].token_ids)
        return cached, token_ids
