"""Stand-ins for the model and the tokenizer, so that the engine is tested in milliseconds and without torch."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from mllm_compile.engine.engine import Engine
from mllm_compile.engine.start.parts import EngineParts
from mllm_compile.runtime.schedule.config import SchedulerConfig
from mllm_compile.runtime.schedule.scheduled_batch import ScheduledBatch, TokenRuns
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.step.output import ScoreTable, StepOutput
from mllm_compile.text.chat_template import ChatTemplate
from tests.hang_guard import HANG_S

_TEMPLATE = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}{{ suffix | default('assistant=') }}"
EOS = 256
VOCAB_SIZE = 260

NextToken = Callable[[list[int]], int]


def hashed_token(token_ids: list[int]) -> int:
    """A lower-case letter or a space that depends on all tokens before it."""
    choice = zlib.crc32(np.array(token_ids, dtype=np.int32).tobytes()) % 27
    return 32 if choice == 26 else 97 + choice


def expected_tokens(prompt: Sequence[int], count: int, next_token: NextToken = hashed_token) -> list[int]:
    """The tokens that FakeStepRunner samples after a prompt."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def recite(text: str, end: int = EOS) -> NextToken:
    """A model that says `text` byte by byte after any prompt that ends in ':', and then `end`."""
    data = text.encode()

    def next_token(token_ids: list[int]) -> int:
        said = len(token_ids) - 1 - max(i for i, t in enumerate(token_ids) if t == ord(":"))
        return data[said] if said < len(data) else end

    return next_token


class ByteTokenizer:
    """Token ids are UTF-8 bytes; 256 and above are special."""

    special_token_ids = frozenset(range(EOS, VOCAB_SIZE))
    splits_special_tokens = False
    cleans_up_spaces = False
    byte_token_ids: Mapping[int, int] = MappingProxyType({})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, *, as_it_is: bool = False) -> str:
        parts: list[str] = []
        run: list[int] = []
        for token_id in token_ids:
            if token_id < EOS:
                run.append(token_id)
            elif not skip_special_tokens:
                parts += [bytes(run).decode(errors="replace"), f"<{token_id}>"]
                run = []
        return "".join([*parts, bytes(run).decode(errors="replace")])

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        return ChatTemplate({"default": _TEMPLATE}, {}).render(messages, **options)

    def encode_chat(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.encode(text)

    def shown_chat(self, text: str) -> str:
        return text


class StepFailed(RuntimeError):
    """A fake step's error."""


@dataclass
class FakeStepHandle:
    runner: FakeStepRunner
    step: int
    output: StepOutput

    def wait(self) -> StepOutput:
        if self.step >= self.runner.gate_from:
            self.runner.gate.wait()
        time.sleep(self.runner.delay_s)
        self.runner.waited.append(self.step)
        error = self.runner.fail_wait.pop(self.step, None)
        if error is not None:
            raise error
        return self.output


@dataclass
class FakeStepRunner:
    """Samples `next_token` of each row's tokens; like the real one it knows decode inputs only by slot.

    `fail_submit` and `fail_wait` map a step's number to what it raises. While `gate` is cleared, no step ends whose
    number is `gate_from` or more.
    """

    next_token: NextToken = hashed_token
    fail_submit: dict[int, Exception] = field(default_factory=dict)
    fail_wait: dict[int, Exception] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    gate_from: int = 0
    delay_s: float = 0.0  # of each step
    batches: list[ScheduledBatch] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    slots: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()

    def submit(self, batch: ScheduledBatch) -> FakeStepHandle:
        step = len(self.batches)
        self.batches.append(batch)
        error = self.fail_submit.pop(step, None)
        if error is not None:
            raise error
        for request in batch.admitted:
            self.slots[request.row] = request.all_token_ids.tolist()
        sampled = np.zeros(batch.num_requests, dtype=np.int64)
        drafts = _drafts_of(batch)
        runs: list[list[int]] = []
        for row, slot in enumerate(batch.rows.tolist()):
            runs.append([])
            if batch.sample_mask[row]:
                runs[row] = self._run(self.slots[slot], drafts.get(row, []))
                sampled[row] = runs[row][-1]
        return FakeStepHandle(self, step, step_output(batch, sampled, runs if batch.has_drafts else None))

    def _run(self, token_ids: list[int], draft: list[int]) -> list[int]:
        """The tokens that are accepted of a draft, and the one behind; they are appended."""
        first = len(token_ids)
        for drafted in [*draft, None]:
            token_ids.append(self.next_token(token_ids))
            if token_ids[-1] != drafted:
                break
        return token_ids[first:]


def _drafts_of(batch: ScheduledBatch) -> dict[int, list[int]]:
    """The drafts of a step by row."""
    if not batch.has_drafts:
        return {}
    parts = np.split(batch.verify_token_ids, np.cumsum(batch.num_new[: batch.num_decodes])[:-1])
    return {row: part[1:].tolist() for row, part in enumerate(parts)}


def step_output(batch: ScheduledBatch, token_ids: np.ndarray, runs: list[list[int]] | None = None) -> StepOutput:
    """With made-up scores where a request asks for them: log-probability -token, the rank is the token, K = 3."""
    score_rows = np.flatnonzero(batch.sample_mask)
    scored = token_ids[score_rows]
    token_runs = None
    if runs is not None:  # tokens that were not accepted have scores too
        counts = np.array([len(run) for run in runs])
        width = np.where(np.arange(len(runs)) < batch.num_decodes, batch.num_new, batch.sample_mask)
        padded = np.array([run + [7] * (int(width.max()) - len(run)) for run in runs])
        drafted = np.where(np.arange(len(runs)) < batch.num_decodes, batch.num_new - 1, 0)
        token_runs = TokenRuns(padded, counts, np.zeros(len(runs), dtype=bool), drafted)
        score_rows = np.repeat(np.arange(len(runs)), width)
        scored = np.concatenate([padded[row, :count] for row, count in enumerate(width.tolist())])
    prompt_rows, targets = [], []
    for row in np.flatnonzero(batch.prompt_logprob_rows).tolist():
        first = int(batch.prefix_lens[row]) + 1
        ids = batch.requests[row].prompt_token_ids[first : first + int(batch.num_new[row])]
        prompt_rows += [row] * len(ids)
        targets += ids
    return StepOutput(
        token_ids=token_ids,
        requests=batch.requests,
        scores=score_table(scored) if score_rows.size else None,
        score_rows=score_rows,
        prompt_scores=score_table(np.array(targets, dtype=np.int64)) if targets else None,
        prompt_rows=np.array(prompt_rows, dtype=np.int64),
        runs=token_runs,
    )


def score_table(token_ids: np.ndarray) -> ScoreTable:
    top = np.tile(np.array([7, 8, 9]), (token_ids.size, 1))
    return ScoreTable(token_ids, -token_ids.astype(np.float32), token_ids, top, -top.astype(np.float32))


def scheduler_config(**changes: Any) -> SchedulerConfig:
    """Small limits: 4 requests, 32 tokens a step, pages of 4 tokens."""
    limits: dict[str, Any] = {
        "max_running_requests": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 256,
        "page_size": 4,
        "num_pages": 129,
    }
    return SchedulerConfig(**(limits | changes))


# An answer that a test ends, at any speed: hundreds of seconds of steps.
ENDLESS = 1 << 17  # tokens
ROOM_FOR_ENDLESS = {"max_model_len": 2 * ENDLESS, "num_pages": ENDLESS}


def fake_engine(runner: FakeStepRunner | None = None, **changes: Any) -> Engine:
    """An Engine over fakes; `changes` are fields of EngineParts or of SchedulerConfig, and `speculation`."""
    parts_fields = EngineParts.__dataclass_fields__
    limits = {key: value for key, value in changes.items() if key not in parts_fields}
    speculation = limits.pop("speculation", None)
    parts: dict[str, Any] = {
        "scheduler": Scheduler(scheduler_config(**limits), speculation=speculation),
        "step_runner": runner or FakeStepRunner(),
        "tokenizer": ByteTokenizer(),
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": frozenset({EOS}),
    }
    parts |= {key: value for key, value in changes.items() if key in parts_fields}
    return Engine.from_parts(EngineParts(**parts))


def all_pages_are_back(engine: Engine) -> bool:
    """No request holds a page, and flushing the prefix cache frees the rest.

    Not at once: a step that was launched before the last request was known to have ended may still run.
    """
    deadline = time.monotonic() + HANG_S
    while True:
        engine.flush_prefix_cache()
        stats = engine.stats()
        are_back = (stats.running, stats.waiting, stats.kv_pages_used, stats.kv_pages_cached) == (0, 0, 0, 0)
        if are_back or time.monotonic() > deadline:
            return are_back
        time.sleep(0.01)
