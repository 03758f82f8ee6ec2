"""Serves a tiny random model of every causal-LM architecture of Transformers, or notes why it is refused.

    python -m tests.model.survey [ARCHITECTURE …] [--backends eager inductor gpu] [--write]
    python -m tests.model.survey --seen FILE … --write

Each is compiled on the CPU in float32 with its pieces as traced, served by a process that has not compiled it, and
compared with Transformers token by token (served_logits.py). Some (INDUCTOR) go through Inductor as well. Models that
fail in float32 are tried in bfloat16. Attention on a GPU is chosen as for one (gpu_choice.py). With --seen nothing is
tried: the page takes what GPU tests have noted (models_record.py).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

_CPU_SECONDS = 120  # for one architecture; none that works takes 20
_BATCH = 12  # architectures of one worker process: importing Transformers costs more than most of them
# Those that are compiled by Inductor too: what a dense model or one of experts may have, and all whose layers carry a
# state.
DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "glm4", "granite"),
    *("smollm3", "gpt2", "opt"),
)
OF_EXPERTS = (
    *("mixtral", "qwen3_moe", "dbrx", "jetmoe", "longcat_flash", "gpt_oss", "qwen2_moe", "olmoe", "phimoe"),
    *("granitemoe", "ernie4_5_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "dots1", "minimax_m2", "hunyuan_v1_moe"),
    *("afmoe", "aria_text", "flex_olmo"),
)
OF_STATES = (
    *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"),
    *("bailing_hybrid", "mamba2", "bamba", "granitemoehybrid", "falcon_h1", "zamba2", "nemotron_h", "mamba"),
    *("falcon_mamba", "jamba", "zamba", "lfm2", "lfm2_moe", "lfm3", "minimax", "recurrent_gemma", "zaya", "rwkv"),
    *("xlstm", "qwen4_exp_text"),
)
INDUCTOR = tuple(dict.fromkeys((*DENSE, *OF_EXPERTS, *OF_STATES)))


@dataclass(frozen=True)
class Outcome:
    """The result of one architecture.

    Attributes:
        architecture: Transformers' model_type.
        status: served | bfloat16 (served in that, while float32 fails) | refused | wrong (served, and not what
            Transformers gives: a bug of ours) | not tried (no tiny model of it could be made) | failed (an error that
            is no refusal: a bug of ours).
        remark: for a served one what its attention has, and its kinds of layers with a state, of `gpu` what attends
            there, else the reason, with bfloat16 that against float32.
        error: of log-probabilities, where it ran; in float32 the largest, in bfloat16 the median.
        attention_alone: the same as text, of a refused one whose layers are of several kinds, with full attention in
            all of them; None where that is not served either.
        backend: what made its pieces: eager | inductor; gpu: nothing ran, attention was chosen as for an H100.
    """

    architecture: str
    status: str
    remark: str
    error: float | None = None
    attention_alone: str | None = None
    backend: str = "eager"

    @property
    def job(self) -> str:
        return job(self.architecture, self.backend)


def job(architecture: str, backend: str) -> str:
    """A worker's input."""
    return f"{architecture}@{backend}"


BACKENDS = ("eager", "inductor", "gpu")


def every_job(architectures: Iterable[str], backends: Collection[str] = BACKENDS) -> list[str]:
    """Each architecture as traced and as for a GPU, and INDUCTOR's through Inductor as well."""
    known = list(architectures)
    of = {"eager": known, "inductor": [one for one in INDUCTOR if one in known], "gpu": known}
    return [job(one, backend) for backend in BACKENDS if backend in backends for one in of[backend]]


class Trier:
    """Makes, compiles, serves and compares tiny models; what compilers keep and the serving process are shared."""

    def __init__(self) -> None:
        from tests.model.logits_server import LogitsServer

        self._scratch = tempfile.TemporaryDirectory()
        self._server = LogitsServer()

    def close(self) -> None:
        self._server.close()
        self._scratch.cleanup()

    def attempt(self, one_job: str) -> Outcome:
        """Where a model is refused for its layers, also one of full attention alone."""
        from tests.model.tiny_configs import LAYERS, tiny_config

        architecture, _, backend = one_job.partition("@")
        if backend == "gpu":
            return _choose_attention(architecture)
        outcome = self._try_model(architecture, lambda: tiny_config(architecture), backend)
        if outcome.status != "refused" or not _kinds_of_layers(architecture) - {"full_attention"}:
            return outcome
        full = ["full_attention"] * LAYERS
        alone = self._try_model(architecture, lambda: tiny_config(architecture, layer_types=full), backend)
        if alone.status == "wrong":
            return replace(alone, remark=f"with full attention alone: {alone.remark}")
        in_bfloat16 = {"served": "", "bfloat16": " in bfloat16"}
        if alone.status not in in_bfloat16:
            return outcome
        return replace(outcome, attention_alone=f"{alone.error:.1e}{in_bfloat16[alone.status]}")

    def _try_model(self, architecture: str, make_config: Callable[[], Any], backend: str) -> Outcome:
        import torch

        from mllm_compile.model.refusals import first_line
        from tests.model.tiny_configs import save_tiny_model

        with tempfile.TemporaryDirectory(dir=self._scratch.name) as scratch:
            folder = Path(scratch, "model")
            try:
                model = save_tiny_model(make_config(), folder)
                with torch.no_grad():
                    model(input_ids=torch.arange(3)[None], use_cache=False)
            except Exception as error:
                return Outcome(architecture, "not tried", first_line(error), backend=backend)
            outcome = self._serve(architecture, folder, "float32", backend)
            if outcome.status == "failed":
                in_bfloat16 = self._serve(architecture, folder, "bfloat16", backend)
                if in_bfloat16.status == "served":
                    return replace(outcome, status="bfloat16", error=in_bfloat16.error)
                if in_bfloat16.remark != outcome.remark:
                    error = "" if in_bfloat16.error is None else f" (error {in_bfloat16.error:.1e})"
                    remark = f"{outcome.remark}; in bfloat16 {in_bfloat16.status}{error}: {in_bfloat16.remark}"
                    return replace(outcome, remark=remark)
            return outcome

    def _serve(self, architecture: str, folder: Path, dtype: str, backend: str) -> Outcome:
        from mllm_compile.errors import UnsupportedModelError
        from mllm_compile.model.refusals import first_line
        from tests.model.served_logits import compare_served_logits

        try:
            found = compare_served_logits(
                folder, folder.parent, Path(self._scratch.name, "cache"), self._server, dtype, backend
            )
        except UnsupportedModelError as error:
            return Outcome(architecture, "refused", str(error), backend=backend)
        except Exception as error:
            return Outcome(architecture, "failed", f"{type(error).__name__}: {first_line(error)}", backend=backend)
        status = "served" if found.error <= found.limit else "wrong"
        return Outcome(architecture, status, _describe(found.layers, found.states), found.error, backend=backend)


def _choose_attention(architecture: str) -> Outcome:
    from mllm_compile.errors import UnsupportedModelError
    from mllm_compile.model.refusals import first_line
    from tests.model.gpu_choice import attends_by

    try:
        return Outcome(architecture, "served", attends_by(architecture), backend="gpu")
    except UnsupportedModelError as error:
        return Outcome(architecture, "refused", str(error), backend="gpu")
    except Exception as error:
        return Outcome(architecture, "not tried", first_line(error), backend="gpu")


def _kinds_of_layers(architecture: str) -> set[str]:
    from tests.model.tiny_configs import tiny_config

    return set(getattr(tiny_config(architecture), "layer_types", None) or ())


def survey(jobs: Iterable[str]) -> Iterator[Outcome]:
    """All of `jobs`, in worker processes, so that none can take the others with it."""
    waiting = list(jobs)
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
                batch.remove(outcome.job)
                yield outcome
        if worker.wait() and batch:
            architecture, _, backend = batch.pop(0).partition("@")
            status = "refused" if worker.returncode == -signal.SIGPROF else "failed"
            yield Outcome(architecture, status, _death(worker), backend=backend)
            waiting = batch + waiting


def _death(worker: subprocess.Popen[str]) -> str:
    if worker.returncode == -signal.SIGPROF:
        return f"tracing it takes more than {_CPU_SECONDS} s"
    return f"the process ended with {worker.returncode}"


def _describe(layers: Iterable, states: Iterable) -> str:
    """`window 8 on 2 of 4, soft cap 50, sinks`, or `full`; and the kinds of its layers with a state."""
    layers = list(layers)
    with_state = " + ".join(sorted({layer.kind.name for layer in states}))
    if not layers:
        return f"none; {with_state}"
    attention = _describe_attention(layers)
    return f"{attention}; {with_state}" if with_state else attention


def _describe_attention(layers: list) -> str:
    parts = []
    windowed = [layer.window_left + 1 for layer in layers if layer.window_left >= 0]
    if windowed:
        parts.append(f"window {windowed[0]} on {len(windowed)} of {len(layers)}")
    caps = {layer.logits_soft_cap for layer in layers} - {0.0}
    if caps:
        parts.append(f"soft cap {max(caps):g}")
    if any(layer.sinks for layer in layers):
        parts.append("sinks")
    if any(layer.alibi_slopes for layer in layers):
        parts.append("ALiBi")
    chunked = [layer.chunk for layer in layers if layer.chunk]
    if chunked:
        parts.append(f"chunks of {chunked[0]} on {len(chunked)} of {len(layers)}")
    if any(layer.head_dim != layer.v_head_dim for layer in layers):
        parts.append("values of another width")
    if len({(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}) > 1:
        parts.append("heads differ by layer")
    return ", ".join(parts) or "full"


def _work(jobs: list[str]) -> None:
    with closing(Trier()) as trier:
        for one in jobs:
            signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
            outcome = trier.attempt(one)
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(asdict(outcome)), flush=True)


def main() -> int:
    from tests.model.models_page import SUMMARY, TABLES, render_models_page, render_summary
    from tests.model.models_record import Record
    from tests.model.tiny_configs import causal_lm_types

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="Transformers' model_type; all of them if none is given")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="what to try of each")
    parser.add_argument("--write", action="store_true", help="bring the pages and their record up to date")
    parser.add_argument("--seen", type=Path, nargs="+", default=[], help="files that GPU tests have written")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(arguments.architectures)
        return 0
    if arguments.seen and (arguments.architectures or not arguments.write):
        parser.error("--seen goes with --write, and with no architectures")
    outcomes = []
    wanted = [] if arguments.seen else arguments.architectures or causal_lm_types()
    for outcome in survey(every_job(wanted, arguments.backends)):
        error = "" if outcome.error is None else f"{outcome.error:.1e}"
        line = f"{outcome.architecture:28} {outcome.backend:8} {outcome.status:10} {error:8} {outcome.remark[:150]}"
        print(line, flush=True)
        outcomes.append(outcome)
    if arguments.write:
        record = Record.read(TABLES)
        if arguments.seen:
            lines = [line for path in arguments.seen for line in path.read_text(encoding="utf-8").splitlines()]
            record = record.with_seen(lines)
        elif arguments.architectures or set(arguments.backends) != set(BACKENDS):
            record = record.with_outcomes(outcomes)
        else:
            record = Record.of_here(outcomes, record.on_gpu)
        record.write(TABLES)
        TABLES.write_text(render_models_page(record), encoding="utf-8")
        SUMMARY.write_text(render_summary(record), encoding="utf-8")
    return int(any(outcome.status == "wrong" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
