"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, with the status that clients act on."""

from __future__ import annotations

import re

import msgspec

from mllm_compile.errors import MllmError

# A quoted part may hold a client's own words; an apostrophe behind a letter is no quote.
_QUOTED = re.compile(r"""((?<!\w)'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`)""")
_IN_JSON = {
    "NoneType None": "null",
    "None": "null",
    "bool True": "true",
    "bool False": "false",
    "True": "true",
    "False": "false",
    "a dict": "an object",
    "dict": "object",
    "StructuredOutputsParams": "structured_outputs",
}
_PYTHON = re.compile(rf"\b(?:{'|'.join(_IN_JSON)})\b")
_FIELD = re.compile(r"[a-z_][\w.\[\]]*\Z")
_STATUS_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


UNSUPPORTED = "unsupported_endpoint"  # the code of an answer about a path that the served model has no use for
GENERATES = "this engine generates text, and only that. Use /v1/completions or /v1/chat/completions"


class ApiError(Exception):
    """An error that a client is told.

    Args:
        status: of HTTP.
        param: the field that is wrong.
        code: for programs.
        retry_after_s: when another try may do.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        self.message = _in_json_words(message)
        super().__init__(self.message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        if self.status in _STATUS_TYPES:
            return _STATUS_TYPES[self.status]
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [] if self.retry_after_s is None else [(b"retry-after", str(self.retry_after_s).encode())]


def _in_json_words(message: str) -> str:
    """A message with JSON's words in place of Python's, where it was written for both."""
    parts = _QUOTED.split(message)
    parts[::2] = [_PYTHON.sub(lambda found: _IN_JSON[found[0]], part) for part in parts[::2]]
    return "".join(parts)


def wrong_encoding(encoding: str) -> ApiError:
    """The body is compressed."""
    message = f"the body is encoded as {encoding}; expected JSON as it is. Send it without Content-Encoding"
    return ApiError(415, message, code="unsupported_encoding")


def openai_refusal(error: ApiError) -> bytes:
    """The body of an error response of OpenAI's interfaces."""
    return error.body


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The client's mistake; the field is the message's first word where it ends in a colon."""
    if param is None:
        first, colon, _ = message.partition(":")
        param = first if colon and _FIELD.match(first) else None
    return ApiError(400, message, param=param, code=code)


def timed_out(limit_s: float) -> ApiError:
    """The request has taken more than --request-timeout."""
    message = f"the request has taken more than {limit_s:g} s, the most that this server gives one"
    return ApiError(408, message, code="request_timeout")


def not_ready(message: str, code: str) -> ApiError:
    """The server cannot take a request now."""
    return ApiError(503, message, code=code, retry_after_s=5)


def of_kind(kind: str, message: str) -> ApiError:
    """The error of a request that the engine has refused or failed, by the name of its class."""
    if kind == "RequestError":
        return bad_request(message)
    if kind == "EngineDeadError":
        return not_ready(message, "engine_dead")
    if kind in ("TooManyFormsError", "TooManyImagesError"):
        return ApiError(429, message, code="queue_full", retry_after_s=5)
    if kind == "AdapterReplacedError":
        return ApiError(409, message, param="model", code="adapter_replaced", retry_after_s=1)
    if kind == "AdapterGoneError":
        return ApiError(410, message, param="model", code="adapter_gone")
    if kind in ("WeightUpdateError", "TransferError"):
        return ApiError(400, message, code="weight_update")
    if kind == "UpdateConflictError":
        return ApiError(409, message, code="update_conflict")
    if kind in ("EnginePausedError", "WeightsTornError"):
        return not_ready(message, "weights_torn" if kind == "WeightsTornError" else "paused")
    if kind == "ConfigError":  # what the request needs is not installed
        return bad_request(message, "structured_outputs", "unsupported_field")
    return ApiError(500, message, code="out_of_memory" if kind == "DeviceMemoryError" else "engine_error")


def of_error(error: MllmError, subject: str | None) -> ApiError:
    """The error of what was refused here; of the field `subject` where it names none."""
    shown = of_kind(type(error).__name__, str(error))
    if shown.param is None and shown.status == 400:
        shown.param = subject
    return shown
