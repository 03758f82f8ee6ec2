"""The fields of requests: which there are, and the SamplingParams that they make.

A request's field works, or is refused with 400 by its name (foreign_fields.py), or (a name that nobody here knows) is
named in the response header x-mllm-ignored. SamplingParams alone knows the meaning of sampling fields: values are
handed over unchanged, and so are its messages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from mllm_compile.errors import RequestError
from mllm_compile.runtime.sampling.params import MAX_LOGPROBS, SamplingParams
from mllm_compile.server.api.errors import ApiError, bad_request, of_error, wrong_encoding
from mllm_compile.server.api.foreign_fields import FOREIGN, RENAMED, ForeignFields
from mllm_compile.structured.request_dicts import FIELDS as FORM_FIELDS
from mllm_compile.structured.request_dicts import structured_outputs_of

_MOST_MEMBERS = 1000  # of a body
_MOST_PARTS = 1 << 16  # messages of a chat, and parts of their contents
MOST_COMPLETIONS = 4096  # of one request, over all its prompts
_COMPLETION_TOKENS = 16  # of /v1/completions without max_tokens, as OpenAI and vLLM have it
_LONGEST_ID = 128
# Fields of SamplingParams that a request has under the same name.
_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "skip_special_tokens", "prompt_logprobs", "logprobs_mode", "kv_transfer_params",
)  # fmt: skip
# Values that ask for nothing, of fields that another path has; beside the empty ones, and SamplingParams' defaults.
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "include_reasoning": (True,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("none", "auto"),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI's padding of chunks, which changes no answer


class GenerateFields(msgspec.Struct, kw_only=True):
    """The fields that all endpoints take that generate. `Any`: SamplingParams checks it."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None  # tokens of a chunk
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    best_of: int | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    seed: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    include_stop_str_in_output: Any = None
    ignore_eos: Any = None
    min_tokens: Any = None
    skip_special_tokens: Any = None
    prompt_logprobs: Any = None
    logprobs_mode: Any = None
    kv_transfer_params: Any = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    priority: Any = None
    request_id: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # The form of the answer, under one of these names; structured/request_dicts.py reads them.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None

    path: ClassVar[str]
    subject: ClassVar[str]  # the field with the prompt
    form_name: ClassVar[str | None] = None  # of the form, where a client has given it another name than those above

    @property
    def form_field(self) -> str | None:
        """The name under which a client says the form of the answer; None: it does not."""
        asked = next((name for name in FORM_FIELDS if getattr(self, name) is not None), None)
        return asked and (self.form_name or asked)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> Any:
        """The most tokens of an answer; None: as many as the context leaves."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionFields(GenerateFields, kw_only=True):
    """The fields of /v1/completions."""

    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None
    decoder_prompt: Any = None  # of an encoder-decoder, whose encoder reads the prompt
    target_language: Any = None

    path: ClassVar[str] = "/v1/completions"
    subject: ClassVar[str] = "prompt"

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def most_tokens(self) -> Any:
        most = super().most_tokens
        return _COMPLETION_TOKENS if most is None else most


class ChatFields(GenerateFields, kw_only=True):
    """The fields of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    input_ids: list[int] | None = None  # in the place of what the template would make of the messages
    echo: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    path: ClassVar[str] = "/v1/chat/completions"
    subject: ClassVar[str] = "messages"

    def may_reason(self) -> bool:
        """False where the client has switched thinking off, by a name that templates have for it."""
        options = {"reasoning_effort": self.reasoning_effort, **(self.chat_template_kwargs or {})}
        is_off = options.get("enable_thinking") is False or options.get("thinking") is False
        return not is_off and options["reasoning_effort"] != "none"

    @property
    def num_logprobs(self) -> int | None:
        if not self.logprobs:
            return None
        return self.top_logprobs or 0


_KINDS = (ChatFields, CompletionFields)
_NAMES = frozenset(name for kind in _KINDS for name in kind.__struct_fields__)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])

F = TypeVar("F", bound=msgspec.Struct)
_GZIP = b"\x1f\x8b"
_LACKING = "Object missing required field `"  # as msgspec says it


def read_fields(kind: type[F], body: bytes, foreign: ForeignFields = FOREIGN) -> tuple[F, list[str]]:
    """A request's fields, and the names in it that are unknown.

    Raises:
        ApiError: it is no JSON object, a field is of another type, or one that is refused.
    """
    whole = members_of(body)
    path: str | None = getattr(kind, "path", None)
    own = _names_of(kind)
    others = frozenset[str]() if path is None else _NAMES
    given = {  # what no answer depends on may be of any size, and is not parsed
        name: _value(name, text)
        for name, text in whole.items()
        if name in own or name in others or (name in foreign and not foreign[name].is_taken)
    }
    for name, ours in RENAMED.items():
        if given.get(name) is not None and given.setdefault(ours, given[name]) != given[name]:
            raise bad_request(f"{name}: expected {ours} alone, which it is another name of", name)
    try:
        fields = msgspec.convert(given, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise wrong_type(error) from None
    for name in given.keys() - own:
        value = given[name]
        if name in foreign:
            if not foreign[name].takes(value):
                raise bad_request(f"{name}: {foreign[name].why}.", name, "unsupported_field")
        elif not _asks_for_nothing(name, value):
            paths = " or ".join(one.path for one in _KINDS if name in one.__struct_fields__)
            raise bad_request(f"{name}: {path} has no such field. Use {paths}", name, "unsupported_field")
    return fields, [name for name in whole if name not in given and name not in foreign]


@functools.cache
def _names_of(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset((*kind.__struct_fields__, *RENAMED))


def _asks_for_nothing(name: str, value: Any) -> bool:
    return not value or value in _NOTHING.get(name, ()) or value == getattr(SamplingParams, name, None)


def members_of(body: bytes) -> dict[str, msgspec.Raw]:
    """Name → JSON of the members of a body, which are not parsed.

    Raises:
        ApiError: it is no JSON object.
    """
    if body.startswith(_GZIP):
        raise wrong_encoding("gzip")
    try:
        members = _MEMBERS.decode(body)
    except msgspec.ValidationError as error:
        other = str(error).rpartition("got ")[2].strip("`")
        raise bad_request(f"the body is JSON, but of type {other}; expected an object") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is no JSON: {error}") from None
    if len(members) > _MOST_MEMBERS:
        raise bad_request(f"the body has {len(members)} fields; expected at most {_MOST_MEMBERS}")
    return members


def check_parts(name: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """
    Raises:
        ApiError: a chat has more messages, and parts of their contents, than are looked at.
    """
    count = len(messages)
    if count <= _MOST_PARTS:
        contents = (message.get("content") for message in messages)
        count += sum(len(content) for content in contents if isinstance(content, list))
    if count > _MOST_PARTS:
        raise bad_request(f"{name}: {count:,} messages and parts of contents; expected at most {_MOST_PARTS:,}", name)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        ApiError: it is malformed.
    """
    return {name: _value(name, text) for name, text in members_of(body).items()}


def _value(name: str, text: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"{name}: it is no JSON: {error}", name) from None


def wrong_type(error: Exception) -> ApiError:
    """The error of a field of another type: `Expected `int`, got `str` - at `$.max_tokens``; or of a missing field."""
    what, _, place = str(error).partition(" - at `$.")
    if what.startswith(_LACKING) and not place:
        lacking = what.removeprefix(_LACKING).rstrip("`")
        return bad_request(f"{lacking}: it is missing", lacking)
    name = place.rstrip("`") or None
    return bad_request(what if name is None else f"{name}: {what[:1].lower()}{what[1:]}", name)


def params_of(fields: GenerateFields, defaults: SamplingParams) -> SamplingParams:
    """The sampling parameters: the request's, then the model's own; as many tokens as the context leaves.

    Raises:
        ApiError: a value that cannot be.
    """
    changes = {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
    changes["max_tokens"] = fields.most_tokens
    changes["logprobs"] = fields.num_logprobs
    # In process -1 asks for the whole vocabulary, which no client could read as JSON.
    if fields.num_logprobs is not None and not 0 <= fields.num_logprobs <= MAX_LOGPROBS:
        name = "top_logprobs" if isinstance(fields, ChatFields) else "logprobs"
        raise bad_request(f"{name}: expected an integer from 0 to {MAX_LOGPROBS}, got {fields.num_logprobs}")
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise bad_request("best_of: expected the number of answers, n; answers are not chosen among. Use n")
    try:
        form = structured_outputs_of({name: getattr(fields, name) for name in FORM_FIELDS})
    except RequestError as error:
        raise ApiError(400, str(error), param=fields.form_field) from None
    if form is not None:
        changes["structured_outputs"] = form
    try:
        return dataclasses.replace(defaults, **changes)
    except RequestError as error:
        raise of_error(error, None) from None


def check_request_id(name: str | None) -> str | None:
    """A client's name of its request.

    Raises:
        ApiError: one that a header or a log line cannot hold.
    """
    if name is None:
        return None
    if not 1 <= len(name) <= _LONGEST_ID or not name.isascii() or not name.isprintable() or " " in name:
        raise bad_request(f"request_id: expected 1 to {_LONGEST_ID} printable ASCII characters without a space")
    return name


def options_of_template(fields: ChatFields) -> Mapping[str, Any]:
    """Variables of the chat template."""
    options = dict(fields.chat_template_kwargs or {})
    for name in ("documents", "reasoning_effort"):
        if getattr(fields, name) is not None:
            options[name] = getattr(fields, name)
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"):
        if name in options:
            raise bad_request(f"chat_template_kwargs: {name} is a field of its own, or is refused", name)
    return options
