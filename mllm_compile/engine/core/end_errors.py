"""The errors that callers get when an engine fails: what happened, and what to do then."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING

from mllm_compile.errors import EngineDeadError, MllmError, RequestError

if TYPE_CHECKING:
    from mllm_compile.runtime.schedule.request import Request

_RESTART = "Close this engine and make a new one."


def closed() -> EngineDeadError:
    """The error for requests after the end."""
    return EngineDeadError("the engine is closed. Make a new one.")


def forked() -> EngineDeadError:
    """The error for the child of a fork."""
    return EngineDeadError(
        f"this engine's thread is in process {os.getppid()}; this process is a fork of it. Make an Engine here; where "
        "the other one uses a GPU, start this process by spawn, not by fork."
    )


def stopped_unseen() -> EngineDeadError:
    """The error of a thread that ended and could not say why; made ahead, for when nothing more can be made."""
    return EngineDeadError(f"the engine's thread ended, and its reason could not be told. {_RESTART}")


def stopped(fault: BaseException) -> EngineDeadError:
    """The error for a fault of the engine itself, or an exception that was thrown into its thread."""
    error = EngineDeadError(f"the engine met an internal error and stopped: {_describe(fault)}. {_RESTART}")
    error.__cause__ = fault
    return error


def device_lost(work: str, error: Exception, fault: Exception) -> EngineDeadError:
    """The error for a step of `work` that failed by `error`, after which the device does not answer by `fault`."""
    return EngineDeadError(
        f"a step of {work} failed: {_describe(error)}; the device cannot be used any more: {_describe(fault)}. "
        f"{_RESTART}"
    )


def lost_while_idle(fault: MllmError) -> EngineDeadError:
    """The error for a fault that was found while no step ran."""
    return EngineDeadError(f"the engine stopped while it had nothing to do: {_describe(fault)}. {_RESTART}")


def step_failed(work: str, error: Exception) -> MllmError:
    """The error for a step of `work` that failed while the engine goes on."""
    if isinstance(error, MllmError):  # such as DeviceMemoryError: it says all by itself
        return error
    failure = MllmError(f"a step of {work} failed: {_describe(error)}. The engine goes on.")
    failure.__cause__ = error
    return failure


def no_token(request: Request) -> MllmError:
    """The error for a request without a next token: its logits hold NaN or inf, or it forbids all tokens."""
    if request.grammar_fault is not None:
        return RequestError(f"structured_outputs: {request.grammar_fault}")
    where = "prompt" if not request.output_token_ids else f"output after {len(request.output_token_ids)} tokens"
    if request.forbids_all:
        restrictions = ("allowed_token_ids", "bad_words", "min_tokens", "structured_outputs")
        given = ", ".join(name for name in restrictions if getattr(request.params, name))
        return RequestError(f"{given}: all tokens are forbidden at the end of the {where}. Allow more of them.")
    return MllmError(
        f"the model's logits at the end of the {where} hold NaN or inf, so there is no next token. Other requests go "
        "on. Check that the checkpoint is whole, and try model.dtype: float32: float16 overflows where bfloat16 and "
        "float32 do not."
    )


def too_many_kept(request: Request, most: int) -> RequestError:
    """The error for a request whose filters keep too many tokens to return them."""
    return RequestError(
        f"return_sampling_mask: expected up to {most:,} kept tokens in an answer, got {request.num_kept:,} after "
        f"{len(request.output_token_ids)} tokens. Set top_k, or lower max_tokens."
    )


def no_text(error: Exception) -> MllmError:
    """The error for a fault of the tokenizer."""
    if isinstance(error, MllmError):
        return error
    return MllmError(f"the tokens could not be turned into text: {_describe(error)}")


def drop_locals(error: BaseException | None) -> None:
    """Lets go of what the frames of an error hold, or the step's tensors would stay on the device with them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
