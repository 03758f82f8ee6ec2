"""Turns what the engine's thread collected into RequestOutputs; runs on the callers' threads.

`build_answer` makes the whole answer of a finished submission, StreamBuilder the pieces of a stream. They copy whatever
the engine goes on reading, so a caller may change its outputs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from mllm_compile.engine.core import end_errors
from mllm_compile.engine.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    VocabularyLogprobs,
    WeightVersion,
)
from mllm_compile.engine.sequences import Delta, Sequence, Submission, shown_token_ids
from mllm_compile.runtime.step.output import TokenScores
from mllm_compile.text.detokenizer import Decoder, Detokenizer, detokenize


def build_answer(submission: Submission, decoder: Decoder | None) -> RequestOutput:
    """The answer of a finished submission (refused and failed ones too).

    One whose text cannot be made has failed by that, and says so in `submission.failure`.
    """
    try:
        return _answer(submission, decoder)
    except Exception as error:  # a fault of any tokenizer
        submission.failure = end_errors.no_text(error)
        answer = _answer(submission, None)
        for completion in answer.outputs:
            completion.finish_reason, completion.stop_reason = "error", None
        return answer


def _answer(submission: Submission, decoder: Decoder | None) -> RequestOutput:
    scores = _ScoreReader(decoder)
    return RequestOutput(
        request_id=submission.request_id,
        prompt=submission.prompt,
        prompt_token_ids=submission.shown_token_ids,
        decoder_prompt_token_ids=submission.decoder_token_ids,
        outputs=[_completion(sequence, decoder, scores) for sequence in submission.sequences],
        finished=True,
        prompt_logprobs=_prompt_logprobs(submission, scores),
        num_cached_tokens=submission.sequences[0].request.num_cached_tokens,
        num_host_tokens=submission.sequences[0].request.host_tokens,
        num_disk_tokens=submission.sequences[0].request.disk_tokens,
        kv_transfer_params=_transfer(submission),
        metrics=_metrics(submission),
        error=None if submission.failure is None else str(submission.failure),
        adapter=submission.adapter,
    )


def _transfer(submission: Submission) -> dict[str, Any] | None:
    """From where another engine fetches the prompt, of the completion that ended first with it."""
    told = (sequence.request.kv_transfer for sequence in submission.sequences)
    return next((one.to_wire() for one in told if one is not None), None)


class StreamBuilder:
    """Makes the outputs of one stream; holds the detokenizers of its completions."""

    def __init__(self, submission: Submission, decoder: Decoder | None) -> None:
        self._submission = submission
        self._prompt_token_ids, self._decoder_token_ids = submission.shown_token_ids, submission.decoder_token_ids
        self._scores = _ScoreReader(decoder)
        self._is_first = True
        self._detokenizers = [
            Detokenizer(decoder, submission.prompt_token_ids, submission.params.skip_special_tokens)
            if decoder is not None and submission.params.detokenize
            else None
            for _ in submission.sequences
        ]

    def build(self, deltas: Seq[Delta], finished: bool) -> RequestOutput:
        """One output for the news so far.

        Args:
            deltas: news of any completions, in the order in which they came.
            finished: these are the last.

        Raises:
            MllmError: the tokenizer failed.
        """
        try:
            return self._build(deltas, finished)
        except Exception as error:  # a fault of any tokenizer
            raise end_errors.no_text(error) from None

    def _build(self, deltas: Seq[Delta], finished: bool) -> RequestOutput:
        submission = self._submission
        outputs: dict[int, CompletionOutput] = {}
        for delta in deltas:
            output = outputs.get(delta.index)
            if output is None:
                output = outputs[delta.index] = CompletionOutput(index=delta.index)
            self._add(output, delta)
        is_first, self._is_first = self._is_first, False
        return RequestOutput(
            request_id=submission.request_id,
            prompt=submission.prompt,
            prompt_token_ids=self._prompt_token_ids,
            decoder_prompt_token_ids=self._decoder_token_ids,
            outputs=[outputs[index] for index in sorted(outputs)],
            finished=finished,
            prompt_logprobs=_prompt_logprobs(submission, self._scores) if is_first else None,
            num_cached_tokens=submission.sequences[0].request.num_cached_tokens,
            num_host_tokens=submission.sequences[0].request.host_tokens,
            num_disk_tokens=submission.sequences[0].request.disk_tokens,
            kv_transfer_params=_transfer(submission) if finished else None,
            metrics=_metrics(submission) if finished else None,
            error=None if submission.failure is None else str(submission.failure),
            adapter=submission.adapter,
        )

    def _add(self, output: CompletionOutput, delta: Delta) -> None:
        output.token_ids += delta.token_ids
        output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.finish_reason is not None:
            output.routed_experts = self._submission.sequences[delta.index].request.routed_experts
            output.weight_versions = _versions(self._submission.sequences[delta.index])
        output.text += self._text(delta) if delta.text is None else delta.text
        if self._submission.params.logprobs is not None:
            output.logprobs = (output.logprobs or []) + [self._scores.as_dict(entry) for entry in delta.logprobs]
            new = sum(entry.logprob for entry in delta.logprobs)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + new
        if self._submission.params.has_sampling_mask:
            output.sampling_mask = (output.sampling_mask or []) + _masks(delta.logprobs)

    def _text(self, delta: Delta) -> str:
        detokenizer = self._detokenizers[delta.index]
        if detokenizer is None:
            return ""
        params = self._submission.params
        text = detokenizer.push(shown_token_ids(params, delta.token_ids, delta.finish_reason, delta.stop_reason))
        return text + detokenizer.flush() if delta.finish_reason is not None else text


class _ScoreReader:
    """Log-probability entries as users read them; remembers the texts of tokens."""

    def __init__(self, decoder: Decoder | None) -> None:
        self._decoder = decoder
        self._texts: dict[int, str] = {}

    def as_dict(self, scores: TokenScores) -> Mapping[int, Logprob]:
        """Logprobs by token id: the token itself, then the alternatives, best first."""
        if scores.of_all is not None:
            return VocabularyLogprobs(scores.of_all, self._text)
        entry = {scores.token_id: Logprob(scores.logprob, scores.rank, self._text(scores.token_id))}
        for rank, (token_id, logprob) in enumerate(scores.top, start=1):
            entry.setdefault(token_id, Logprob(logprob, rank, self._text(token_id)))
        return entry

    def _text(self, token_id: int) -> str | None:
        if self._decoder is None:
            return None
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._decoder.decode([token_id], skip_special_tokens=False)
        return text


def _versions(sequence: Sequence) -> list[WeightVersion] | None:
    """The spans of an ended completion; tokens behind a stop string are in none."""
    if sequence.versions is None:
        return None
    total = len(sequence.request.output_token_ids)
    starts = [min(start, total) for start, _ in sequence.versions]
    spans = zip(sequence.versions, starts, [*starts[1:], total], strict=True)
    return [WeightVersion(version, start, end) for (_, version), start, end in spans if start < end]


def _completion(sequence: Sequence, decoder: Decoder | None, scores: _ScoreReader) -> CompletionOutput:
    request = sequence.request
    params = request.params
    output = CompletionOutput(
        index=sequence.index,
        text=_text(sequence, decoder),
        token_ids=list(request.output_token_ids),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        weight_versions=_versions(sequence),
    )
    if params.logprobs is not None:
        output.logprobs = [scores.as_dict(entry) for entry in request.output_logprobs]
        output.cumulative_logprob = sum(entry.logprob for entry in request.output_logprobs)
    if params.has_sampling_mask:
        output.sampling_mask = _masks(request.output_logprobs)
    output.routed_experts = request.routed_experts
    return output


def _masks(scores: Seq[TokenScores]) -> list[np.ndarray]:
    return [one.kept for one in scores if one.kept is not None]


def _text(sequence: Sequence, decoder: Decoder | None) -> str:
    if sequence.has_stop_strings:
        return "".join(sequence.text_parts)
    request = sequence.request
    if decoder is None or not request.params.detokenize:
        return ""
    shown = shown_token_ids(request.params, request.output_token_ids, sequence.finish_reason, sequence.stop_reason)
    if not shown:  # a refused prompt may hold ids that no tokenizer decodes
        return ""
    return detokenize(decoder, request.prompt_token_ids, shown, request.params.skip_special_tokens)


def _prompt_logprobs(submission: Submission, scores: _ScoreReader) -> list[Mapping[int, Logprob] | None] | None:
    if submission.params.prompt_logprobs is None:
        return None
    # Nothing predicts the first token.
    return [None, *(scores.as_dict(entry) for entry in submission.sequences[0].request.prompt_logprobs)]


def _metrics(submission: Submission) -> RequestMetrics:
    requests = [sequence.request for sequence in submission.sequences]
    first = requests[0]
    arrival = first.arrival_time
    scheduled, first_token = first.scheduled_time, first.first_token_time
    last_token = max((r.last_token_time for r in requests if r.last_token_time is not None), default=None)
    num_tokens = sum(len(request.output_token_ids) for request in requests)
    total = _gap(arrival, last_token)
    return RequestMetrics(
        arrival_time=time.time() - (time.monotonic() - arrival),
        time_in_queue=_gap(arrival, scheduled),
        prefill_time=_gap(scheduled, first_token),
        decode_time=_gap(first_token, last_token),
        time_to_first_token=_gap(arrival, first_token),
        total_time=total,
        tokens_per_second=num_tokens / total if total else None,
        drafted_tokens=sum(request.num_drafted_tokens for request in requests),
        accepted_tokens=sum(request.num_accepted_tokens for request in requests),
    )


def _gap(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
