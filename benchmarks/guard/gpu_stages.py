"""The stages that a GPU times: decode steps, prompts and starts of Qwen3-0.6B's shape with random weights."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.guard.stage import Round, Stage, Tree

SHAPE = Path(__file__).parents[2] / "configs" / "shapes" / "qwen3-0.6b"
NEW_TOKENS, PROMPT_LEN = 65, 512
# Of the GPU's memory: two trees' engines, and one that starts, are on it at once.
_SHARE = 0.2

START = """
import sys
from mllm_compile import Engine, SamplingParams
with Engine(sys.argv[1]) as engine:
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0, detokenize=False)
    (output,) = engine.generate([[5] * 32], params, progress=False)
    assert len(output.token_ids) == 1
"""


def shape_config(tree: Tree) -> Path:
    """The config of the shape."""
    return tree.config(
        "shape",
        {
            "model": {"path": str(SHAPE), "load_format": "dummy", "dtype": "bfloat16"},
            "runtime": {"max_model_len": 4096, "enable_prefix_cache": False, "mem_fraction_static": _SHARE},
        },
    )


def shape_engine(tree: Tree) -> Any:
    """An engine of it, compiled."""
    from mllm_compile import Engine

    return tree.ending.enter_context(Engine(str(tree.once(shape_config)), log_interval_s=0.0))


def generate(tree: Tree, batch: int, prompt_len: int, new_tokens: int) -> Round:
    """One call of the engine's generate, from outside."""
    from mllm_compile import SamplingParams

    engine = tree.once(shape_engine)
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    prompts = [[(7 * index + place) % 10_000 for place in range(prompt_len)] for index in range(batch)]

    def run() -> None:
        outputs = engine.generate(prompts, params, progress=False)
        assert all(len(output.token_ids) == new_tokens for output in outputs)

    return Round(run, clock=time.perf_counter)


def warm_start(tree: Tree) -> Round:
    """A process from its first line to its first token, with everything compiled."""
    tree.once(shape_engine)

    def run() -> None:
        code = tree.python(START, str(tree.once(shape_config))).wait()
        assert code == 0, f"the process ended with code {code}; see its output"

    return Round(run, clock=time.perf_counter)


STAGES = (
    *(
        Stage(f"decode steps of {batch}", partial(generate, batch=batch, prompt_len=8, new_tokens=NEW_TOKENS), 12, 1.2)
        for batch in (1, 8, 64)
    ),
    *(
        Stage(f"prompts, {batch}", partial(generate, batch=batch, prompt_len=PROMPT_LEN, new_tokens=1), 20, 1.2)
        for batch in (1, 8, 64)
    ),
    Stage("start", warm_start, rounds=5, threshold=1.3),
)
