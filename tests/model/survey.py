"""Serves a tiny random model of every causal-LM architecture of Transformers, or notes why it is refused.

    python -m tests.model.survey [ARCHITECTURE …] [--write docs/models.md]

Each is compiled and served in float32 on the CPU and compared with Transformers token by token (served_logits.py).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# On log-probabilities, in float32. Transformers' own eager forward is up to 1e-4 from its forward in float64 (Gemma 4,
# whose attention logits are not scaled).
TOLERANCE = 3e-4
_CPU_SECONDS = 90  # for one architecture; none that works takes 20
_BATCH = 12  # architectures of one worker process: importing Transformers costs more than most of them


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture.

    Attributes:
        architecture: Transformers' model_type.
        status: served | refused | wrong (served, and not what Transformers gives: a bug of ours) | not tried (no tiny
            model of it could be made) | failed (an error that is no refusal: a bug of ours).
        remark: for a served one what its attention has, else the reason.
        worst_error: max |Δ log-probability|, where it ran.
        attention_alone: the same of a refused one whose layers are of several kinds, with full attention in all of
            them; None where that is refused too.
    """

    architecture: str
    status: str
    remark: str
    worst_error: float | None = None
    attention_alone: float | None = None


def try_architecture(architecture: str) -> Outcome:
    """Makes, compiles, serves and compares a tiny model; where it is refused, also one of full attention alone."""
    from tests.model.tiny_configs import LAYERS, tiny_config

    outcome = _try_model(architecture, lambda: tiny_config(architecture))
    if outcome.status != "refused" or not _kinds_of_layers(architecture) - {"full_attention"}:
        return outcome
    alone = _try_model(architecture, lambda: tiny_config(architecture, layer_types=["full_attention"] * LAYERS))
    if alone.status in ("wrong", "failed"):
        return replace(alone, remark=f"with full attention alone: {alone.remark}")
    return replace(outcome, attention_alone=alone.worst_error)


def _kinds_of_layers(architecture: str) -> set[str]:
    from tests.model.tiny_configs import tiny_config

    return set(getattr(tiny_config(architecture), "layer_types", None) or ())


def _try_model(architecture: str, make_config: Callable[[], Any]) -> Outcome:
    import torch

    from mllm_compile.errors import MllmError
    from mllm_compile.model.refusals import first_line
    from tests.model.served_logits import compare_served_logits
    from tests.model.tiny_configs import save_tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        try:
            model = save_tiny_model(make_config(), folder)
            with torch.no_grad():
                model(input_ids=torch.arange(3)[None], use_cache=False)
        except Exception as error:
            return Outcome(architecture, "not tried", first_line(error))
        try:
            comparison = compare_served_logits(folder, Path(scratch, "cache"))
        except MllmError as error:
            return Outcome(architecture, "refused", str(error))
        except Exception as error:
            return Outcome(architecture, "failed", f"{type(error).__name__}: {first_line(error)}")
    status = "served" if comparison.worst_error <= TOLERANCE else "wrong"
    return Outcome(architecture, status, _describe(comparison.layers), comparison.worst_error)


def survey(architectures: Iterable[str]) -> Iterator[Outcome]:
    """All of `architectures`, in worker processes, so that none can take the others with it."""
    waiting = list(architectures)
    while waiting:
        batch, waiting = waiting[:_BATCH], waiting[_BATCH:]
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.model.survey", "--worker", *batch],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        assert worker.stdout is not None, "it was asked for"
        for line in worker.stdout:
            if line.startswith("{"):
                outcome = Outcome(**json.loads(line))
                batch.remove(outcome.architecture)
                yield outcome
        if worker.wait() and batch:
            died = batch.pop(0)
            yield Outcome(died, "refused" if worker.returncode == -signal.SIGPROF else "failed", _death(worker))
            waiting = batch + waiting


def _death(worker: subprocess.Popen[str]) -> str:
    if worker.returncode == -signal.SIGPROF:
        return f"tracing it takes more than {_CPU_SECONDS} s"
    return f"the process ended with {worker.returncode}"


def _describe(layers: Iterable) -> str:
    """`window 8 on 2 of 4, soft cap 50, sinks`, or `full`."""
    layers = list(layers)
    parts = []
    windowed = [layer.window_left + 1 for layer in layers if layer.window_left >= 0]
    if windowed:
        parts.append(f"window {windowed[0]} on {len(windowed)} of {len(layers)}")
    caps = {layer.logits_soft_cap for layer in layers} - {0.0}
    if caps:
        parts.append(f"soft cap {max(caps):g}")
    if any(layer.sinks for layer in layers):
        parts.append("sinks")
    if any(layer.head_dim != layer.v_head_dim for layer in layers):
        parts.append("values of another width")
    if len({(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}) > 1:
        parts.append("heads differ by layer")
    return ", ".join(parts) or "full"


def _work(architectures: list[str]) -> None:
    for architecture in architectures:
        signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
        outcome = try_architecture(architecture)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(asdict(outcome)), flush=True)


def main() -> int:
    from tests.model.models_page import render_models_page
    from tests.model.tiny_configs import causal_lm_types

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="Transformers' model_type; all of them if none is given")
    parser.add_argument("--write", type=Path, help="write the page of results to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(arguments.architectures)
        return 0
    outcomes = []
    for outcome in survey(arguments.architectures or causal_lm_types()):
        error = "" if outcome.worst_error is None else f"{outcome.worst_error:.1e}"
        print(f"{outcome.architecture:28} {outcome.status:10} {error:8} {outcome.remark[:150]}", flush=True)
        outcomes.append(outcome)
    if arguments.write:
        arguments.write.write_text(render_models_page(outcomes), encoding="utf-8")
    return int(any(outcome.status in ("wrong", "failed") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
