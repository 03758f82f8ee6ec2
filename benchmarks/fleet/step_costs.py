"""The time of a step by its work, from what the laboratory measured of Qwen3-8B's shape.

Decodes are interpolated between measured batches, after what their keys take at the measured rate of reads. A prompt
takes time for its tokens and for pairs of a token with one that it attends to, by least squares of measured prompts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mllm_compile.runtime.schedule.step_cost import StepLoad

RESULTS = Path(__file__).parents[2] / "docs" / "lab" / "results"
DECODES = RESULTS / "h200-qwen-8b-shape-mllm.json"
PROMPTS = RESULTS / "h100-qwen-8b-shape-long.json"  # of long prompts; both GPUs compute alike
KEY_BYTES = 36 * 2 * 8 * 128 * 2  # a token's keys and values of all layers, bfloat16


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of steps.

    Attributes:
        batches, base_ms: of a step of so many decodes, without their keys.
        key_ms: of a key that a decode reads.
        token_ms, pair_ms: of a prompt's token, and of a token with one that it attends to.
    """

    batches: tuple[int, ...]
    base_ms: tuple[float, ...]
    key_ms: float
    token_ms: float
    pair_ms: float

    @classmethod
    def measured(cls) -> StepCosts:
        """The costs in the laboratory's results."""
        decodes, prompts = _read(DECODES), _read(PROMPTS)
        key_ms = KEY_BYTES / decodes["ceilings"]["read_bytes_s"] * 1e3
        work = decodes["work"]["latency"]
        keys = work["input_len"] + work["output_len"] / 2
        tpots = {one["batch"]: one["median"] for one in decodes["runs"][0]["measurements"] if one["name"] == "tpot"}
        batches = tuple(sorted(tpots))
        base = tuple(tpots[batch] - batch * keys * key_ms for batch in batches)
        lengths, times = [], []
        for one in prompts["runs"][0]["measurements"]:
            if one["name"].startswith("prefill of ") and one["unit"] == "ms":
                lengths.append(float(one["name"].removeprefix("prefill of ")))
                times.append(one["median"])
        of, ms = np.array(lengths), np.array(times)
        work_of = np.stack([of, of * of / 2], axis=1) / ms[:, None]
        (token_ms, pair_ms), *_ = np.linalg.lstsq(work_of, np.ones_like(ms), rcond=None)
        return cls(batches, base, key_ms, float(token_ms), float(pair_ms))

    def decodes_ms(self, load: StepLoad, fold: int) -> float:
        """Milliseconds of the decodes of a step, each of whose tokens stands for `fold`."""
        if not load.num_decodes:
            return 0.0
        return float(np.interp(load.num_decodes, self.batches, self.base_ms)) + load.decode_keys * fold * self.key_ms

    def prompts_ms(self, load: StepLoad, fold: int) -> float:
        """Milliseconds of the prompts of a step, each of whose tokens stands for `fold`."""
        if not load.prompt_tokens:
            return 0.0
        tokens, pairs = load.prompt_tokens * fold, load.prompt_pairs * fold * fold
        return max(tokens * self.token_ms + pairs * self.pair_ms, self.base_ms[0])


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
