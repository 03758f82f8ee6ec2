"""A process that only starts an engine and makes one token: `python -m mllm_compile.bench.measure.first_tokens JOB
RESULT`."""

import time

_FIRST_LINE = time.perf_counter()

import json  # noqa: E402 - the clock starts before anything is imported
import sys  # noqa: E402
from pathlib import Path  # noqa: E402


def main(job_path: str, result_path: str) -> int:
    """Writes {"ready": seconds until the engine was open, "first token": until its first token, …} to the result."""
    from mllm_compile.bench.adapters import open_engine
    from mllm_compile.bench.measure.setting import Setting
    from mllm_compile.bench.measure.workloads import START_PROMPT_LEN, Call, random_prompts
    from mllm_compile.errors import MllmError

    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    setting = Setting(**job["setting"])
    result: dict[str, object]
    try:
        engine = open_engine(job["engine"], setting)
        ready = time.perf_counter() - _FIRST_LINE
        engine.generate(Call(prompts=random_prompts(1, START_PROMPT_LEN, setting.vocab_size, seed=0), max_tokens=[1]))
        first_token = time.perf_counter() - _FIRST_LINE
        result = {
            "ready": ready,
            "first token": first_token,
            "parts": dict(engine.start_parts),
            "version": engine.version,
            "settings": engine.settings,
        }
        engine.close()
    except MllmError as error:
        result = {"error": str(error)}
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    return 2 if "error" in result else 0


if __name__ == "__main__":
    from mllm_compile.process.interruption import ended_by_sigterm

    with ended_by_sigterm():
        code = main(*sys.argv[1:])
    sys.exit(code)
