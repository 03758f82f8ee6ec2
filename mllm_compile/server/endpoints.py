"""The endpoints that do not generate: the model, its tokenizer, the server's health and figures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from mllm_compile.errors import MllmError
from mllm_compile.media.messages import has_media
from mllm_compile.server.api import anthropic, anthropic_answers
from mllm_compile.server.api.errors import ApiError, bad_request, not_ready, of_error, openai_refusal
from mllm_compile.server.api.fields import ChatFields, check_parts, members_of, read_fields, read_object
from mllm_compile.server.api.logprobs import TokenTexts
from mllm_compile.server.api.prompts import chat_text
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.flow.job import JSON
from mllm_compile.server.flow.memory import Share
from mllm_compile.server.flow.writer import Headers, Send
from mllm_compile.server.front import Front, ignored_headers
from mllm_compile.server.http import (
    ClientGoneError,
    Receive,
    Scope,
    client_of,
    respond,
    respond_error,
    respond_json,
    unless_gone,
)
from mllm_compile.server.telemetry.metrics import CONTENT_TYPE
from mllm_compile.text.tokenizer import Tokenizer
from mllm_compile.version import __version__

Answer = Callable[[Scope, Receive, Send], Awaitable[None]]
Endpoint = Callable[[Front], Answer]
Told = tuple[dict[str, Any], list[str]]  # an answer, and the names of fields that nobody knows
ToldBytes = tuple[bytes, list[str]]
_MOST_TOKENS = 1 << 20


def page(front: Front) -> Answer:
    html = Path(__file__).with_name("page.html").read_bytes()
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (
            b"content-security-policy",
            b"default-src 'self' 'unsafe-inline' data:; frame-ancestors 'none'; base-uri 'none'",
        ),
        (b"x-content-type-options", b"nosniff"),
    ]

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, html, headers=headers)

    return answer


def _health(front: Front) -> Answer:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_well, state = front.health()
        await respond_json(send, state, 200 if is_well else 503)

    return answer


def _ready(front: Front) -> Answer:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_ready, state = front.readiness()
        await respond_json(send, state, 200 if is_ready else 503)

    return answer


def version(front: Front) -> Answer:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await respond_json(send, {"version": __version__})

    return answer


def _metrics(front: Front) -> Answer:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, front.metrics.text(), headers=[(b"content-type", CONTENT_TYPE.encode())])

    return answer


def _models(front: Front) -> Answer:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if front.names.first is None:
            await respond_error(send, not_ready("the engine starts; its name is not known yet", "starting"))
            return
        await respond_json(send, {"object": "list", "data": front.names.cards()})

    return answer


def _model(front: Front) -> Answer:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["name"]
        try:
            front.names.check(name)
        except ApiError as error:
            await respond_error(send, error)
            return
        await respond_json(send, next(card for card in front.names.cards() if card["id"] == name))

    return answer


def _abort(front: Front) -> Answer:
    async def abort(body: bytes) -> Told:
        given = read_object(body)
        return {"aborted": front.dispatcher.abort(request_ids(given))}, [name for name in given if name != "request_id"]

    return _json(front, abort)


def request_ids(given: Mapping[str, Any]) -> list[str]:
    """The ids of requests that a body names.

    Raises:
        ApiError: it names none.
    """
    names = given.get("request_id")
    asked = [names] if isinstance(names, str) else names
    if not isinstance(asked, list) or not all(isinstance(name, str) for name in asked):
        raise bad_request("request_id: expected an id, or a list of ids, as answers have them", "request_id")
    return asked


class TokenizeFields(msgspec.Struct, kw_only=True):
    """The fields of /tokenize, with a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatFields(ChatFields, kw_only=True):
    """The fields of /tokenize, with messages."""

    return_token_strs: bool | None = None


def _check_texts(fields: ChatFields) -> None:
    """
    Raises:
        ApiError: there are images among the texts.
    """
    check_parts("messages", fields.messages)
    if has_media(fields.messages):
        raise bad_request("messages: expected texts; what images take, the usage of an answer says")


def _tokenize(front: Front) -> Answer:
    async def tokenize(body: bytes) -> Told:
        fields: TokenizeChatFields | TokenizeFields
        if "messages" in members_of(body):
            fields, unknown = read_fields(TokenizeChatFields, body)
        else:
            fields, unknown = read_fields(TokenizeFields, body)
        facts = await front.facts_of_texts(fields.model)
        tokenizer = _tokenizer(facts)

        def encode() -> tuple[list[int], list[str] | None]:
            if isinstance(fields, TokenizeChatFields):
                _check_texts(fields)
                tokens = tokenizer.encode_chat(chat_text(facts, fields).text, fields.add_special_tokens is True)
            else:
                tokens = tokenizer.encode(fields.prompt, fields.add_special_tokens is not False)
            if not fields.return_token_strs:
                return tokens, None
            texts = TokenTexts(tokenizer)
            return tokens, [texts.text_of(token_id) for token_id in tokens]

        tokens, strings = await front.in_thread(len(body), encode)
        most = facts.hello.max_model_len
        return {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": strings}, unknown

    return _json(front, tokenize)


def _tokenizer_info(front: Front) -> Answer:
    """The facts that lm_eval's remote tokenizer asks for, under the names of a tokenizer_config.json."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            facts = await front.facts_of_texts(None)
            tokenizer = _tokenizer(facts)
        except ApiError as error:
            await respond_error(send, error)
            return
        about = {"chat_template": tokenizer.source_for_tools or None, "model_max_length": facts.hello.max_model_len}
        await respond_json(send, {**tokenizer.special_tokens, **about})

    return answer


def _count_tokens(front: Front) -> Answer:
    async def count(body: bytes) -> Told:
        fields, unknown = anthropic.read_chat(body)
        _check_texts(fields)
        facts = await front.facts_of_texts(fields.model)
        tokenizer = _tokenizer(facts)
        text, _ = await front.in_thread(len(body), chat_text, facts, fields)
        return {"input_tokens": len(await front.in_thread(len(body), tokenizer.encode_chat, text))}, unknown

    return _json(front, count, anthropic_answers.refusal)


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """The fields of /detokenize."""

    tokens: list[int]
    model: str | None = None


def _detokenize(front: Front) -> Answer:
    async def detokenize(body: bytes) -> Told:
        fields, unknown = read_fields(DetokenizeFields, body)
        facts = await front.facts_of_texts(fields.model)
        tokenizer = _tokenizer(facts)
        if len(fields.tokens) > _MOST_TOKENS:
            raise bad_request(f"tokens: expected at most {_MOST_TOKENS} token ids, got {len(fields.tokens)}")
        wrong = next((token for token in fields.tokens if not 0 <= token < facts.hello.vocab_size), None)
        if wrong is not None:
            raise bad_request(f"tokens: expected token ids from 0 to {facts.hello.vocab_size - 1}, got {wrong}")
        return {"prompt": await front.in_thread(len(body), tokenizer.decode, fields.tokens, False)}, unknown

    return _json(front, detokenize)


def _tokenizer(facts: EngineFacts) -> Tokenizer:
    if facts.tokenizer is None:
        raise bad_request("the model has no tokenizer")
    return facts.tokenizer


def _json(
    front: Front,
    answer_to: Callable[[bytes], Coroutine[Any, Any, Told]],
    refusal: Callable[[ApiError], bytes] = openai_refusal,
) -> Answer:
    """An endpoint from a JSON body to a JSON answer."""

    async def encoded(body: bytes, client: str, share: Share) -> ToldBytes:
        data, unknown = await answer_to(body)
        return msgspec.json.encode(data), unknown

    return from_body(front, encoded, JSON, refusal)


def from_body(
    front: Front,
    answer_to: Callable[[bytes, str, Share], Coroutine[Any, Any, ToldBytes]],
    headers: Headers,
    refusal: Callable[[ApiError], bytes] = openai_refusal,
) -> Answer:
    """An endpoint from a body to an answer with these headers.

    Args:
        answer_to: takes the body, the client's name for the log, and the share of the memory that the request has
            until its answer is sent; cancelled where the client goes.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        with front.memory.share() as share:
            try:
                body = await front.bodies.read(receive, share)
                data, unknown = await unless_gone(answer_to(body, client_of(scope), share), receive)
                front.check_ignored(unknown)
            except ClientGoneError:
                return
            except (ApiError, MllmError) as error:
                refused = error if isinstance(error, ApiError) else of_error(error, None)
                front.refused(refused, scope["path"], client_of(scope))
                await respond_error(send, refused, refusal(refused))
            else:
                await respond(send, data, headers=[*headers, *ignored_headers(unknown)])

    return answer


ENDPOINTS: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/", page),
    ("GET", "/health", _health),
    ("GET", "/ready", _ready),
    # SageMaker's probe: requests are sent once it is 200.
    ("GET", "/ping", _ready),
    ("POST", "/ping", _ready),
    ("GET", "/version", version),
    ("GET", "/metrics", _metrics),
    ("GET", "/v1/models", _models),
    ("GET", "/v1/models/{name:path}", _model),
    ("GET", "/tokenizer_info", _tokenizer_info),
    ("POST", "/v1/abort", _abort),
    ("POST", "/v1/messages/count_tokens", _count_tokens),
    ("POST", "/tokenize", _tokenize),
    ("POST", "/detokenize", _detokenize),
    ("POST", "/v1/tokenize", _tokenize),
    ("POST", "/v1/detokenize", _detokenize),
)
