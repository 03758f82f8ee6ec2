"""Prompts of requests: what a client gave becomes token ids, or is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mllm_compile.errors import MllmError
from mllm_compile.media.file_sources import SourceItem
from mllm_compile.media.messages import has_media, take_media
from mllm_compile.media.workers import SharedPrompt
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.short_repr import typed_repr
from mllm_compile.server.api.errors import bad_request, of_error
from mllm_compile.server.api.fields import (
    MOST_COMPLETIONS,
    ChatFields,
    CompletionFields,
    GenerateFields,
    options_of_template,
)
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.text.calls.messages import for_template
from mllm_compile.text.calls.tools import Tool, ToolChoice, read_tool_choice, read_tools
from mllm_compile.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the model sees it; `text` as the client gave it, None for token ids and messages. `decoder_ids` are
    what a decoder begins with, whose encoder reads it, or `window`, float32 of a window of sound."""

    token_ids: list[int]
    text: str | None = None
    media: SharedPrompt | None = None
    decoder_ids: list[int] | None = None
    window: bytes | None = None


def prompt_items(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion request: a text, token ids, or a list of either.

    Raises:
        ApiError: it is of another type, or has too many.
    """
    items: list[Any] = [prompt]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        items = prompt
    if prompt is None:
        raise bad_request("prompt: it is missing; expected a text, a list of token ids, or a list of either")
    if not all(isinstance(item, (str, list)) for item in items):
        raise bad_request(
            f"prompt: expected a text, a list of token ids, or a list of either, got {typed_repr(prompt)}"
        )
    if len(items) > MOST_COMPLETIONS:
        raise bad_request(f"prompt: expected at most {MOST_COMPLETIONS} prompts, got {len(items)}")
    return items


def completion_prompts(
    facts: EngineFacts, fields: CompletionFields, items: list[str | list[int]], params: SamplingParams
) -> list[Prompt]:
    """Token ids of a completion request's prompts.

    Raises:
        ApiError: one of them is refused.
    """
    _check_reads_texts(facts)
    adds_special = fields.add_special_tokens is not False
    if adds_special and fields.truncate_prompt_tokens is None:
        whole = [Prompt([], item) if isinstance(item, str) else Prompt(item) for item in items]
        return _checked(facts, fields, whole, params)
    prompts = []
    for item in items:
        if isinstance(item, str):
            prompts.append(Prompt(_truncated(_tokenizer(facts).encode(item, adds_special), fields), item))
        else:
            prompts.append(Prompt(_truncated(item, fields)))
    return _checked(facts, fields, prompts, params)


def take_images(facts: EngineFacts, fields: ChatFields) -> list[SourceItem]:
    """The images and sounds of a chat, in whose messages places are left for them.

    Raises:
        ApiError, RequestError: one is malformed, or the model takes none, or reads no texts.
    """
    _check_reads_texts(facts)
    if not has_media(fields.messages):
        return []
    facts.media.check()
    fields.messages, items = take_media(fields.messages, local_paths=False)
    if fields.truncate_prompt_tokens not in (None, -1):
        raise bad_request("truncate_prompt_tokens: expected it without images or sounds, which it would cut")
    return items


def chat_prompts(
    facts: EngineFacts, fields: ChatFields, params: SamplingParams, text: str, items: Sequence[SourceItem]
) -> list[Prompt]:
    """Token ids of a chat with `text` from `chat_text`; with images after a worker has prepared them.

    Raises:
        ApiError, RequestError: the prompt is refused.
        MllmError: the system gives no process, or no memory.
    """
    if items:
        shared = facts.media.prepare_shared(text, items, fields.add_special_tokens is True)
        token_ids = np.frombuffer(shared.token_ids, np.int32).tolist()
        return _checked(facts, fields, [Prompt(token_ids, media=shared)], params)
    token_ids = fields.input_ids
    if token_ids is None:
        token_ids = _tokenizer(facts).encode_chat(text, fields.add_special_tokens is True)
        facts.media.check_text(token_ids)
    return _checked(facts, fields, [Prompt(_truncated(token_ids, fields))], params)


class ChatText(NamedTuple):
    """The prompt's text of a chat, and the fields that the model's template does not read."""

    text: str
    unread: tuple[str, ...] = ()


def chat_text(facts: EngineFacts, fields: ChatFields) -> ChatText:
    """The prompt's text of a chat, through the model's template.

    Variables that the template does not read, tools among them, are left out: they could not change the prompt, and
    libraries send them to every model.

    Raises:
        ApiError, RequestError: the messages or their options are refused.
    """
    tokenizer, options = _tokenizer(facts), options_of_template(fields)
    offered, _ = tools_of(fields.tools, fields.tool_choice)
    tools = [tool.definition for tool in offered] or None
    unread = tokenizer.unread_variables(options, tools) if options or tools else []
    text = tokenizer.apply_chat_template(
        for_template(fields.messages, facts.syntax),
        tools=None if "tools" in unread else tools,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        **{name: value for name, value in options.items() if name not in unread},
    )
    own = fields.chat_template_kwargs or {}
    return ChatText(text, tuple(f"chat_template_kwargs.{name}" if name in own else name for name in unread))


def given_text(facts: EngineFacts, fields: ChatFields) -> ChatText:
    """The text of a chat's prompt whose token ids a client gives itself; messages do not come into it.

    Raises:
        ApiError: there is what the ids would have to have, or no id of the model's.
    """
    for name in ("continue_final_message", "add_generation_prompt", "add_special_tokens", "documents"):
        if getattr(fields, name):
            raise bad_request(f"{name}: expected none beside input_ids, which are the whole prompt")
    if has_media(fields.messages):
        raise bad_request("input_ids: expected none beside images, for which the template leaves places")
    token_ids = fields.input_ids or []
    wrong = next((token for token in token_ids if not 0 <= token < facts.hello.vocab_size), None)
    if wrong is not None:
        raise bad_request(f"input_ids: expected token ids from 0 to {facts.hello.vocab_size - 1}, got {wrong}")
    return ChatText(_tokenizer(facts).decode(token_ids, skip_special_tokens=False))


def last_answer(messages: list[dict[str, Any]]) -> str:
    """The text of the last message, where it is the assistant's."""
    content = messages[-1].get("content") if messages and messages[-1].get("role") == "assistant" else None
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if isinstance(part, dict) and part.get("type") == "text")
    return content if isinstance(content, str) else ""


def tools_of(tools: Any, choice: Any) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model is offered, and how it may choose; `none` offers no tools.

    Raises:
        RequestError: they are malformed.
    """
    offered = read_tools(tools)
    how = read_tool_choice(choice, offered)
    return (() if how.mode == "none" else offered), how


def _check_reads_texts(facts: EngineFacts) -> None:
    """
    Raises:
        ApiError: the model's encoder reads sounds.
    """
    if facts.decoder is not None and facts.decoder.source.is_sound:
        raise bad_request(
            "the model writes down sounds, and reads no texts. Send a sound to /v1/audio/transcriptions, or to "
            "/v1/audio/translations for English."
        )


def _tokenizer(facts: EngineFacts) -> Tokenizer:
    if facts.tokenizer is None:
        raise bad_request("the model has no tokenizer; give prompts as token ids to /v1/completions")
    return facts.tokenizer


def _truncated(token_ids: list[int], fields: GenerateFields) -> list[int]:
    """The last tokens of a prompt where a client has bounded it, or its first ones."""
    most = fields.truncate_prompt_tokens
    if most is None or most == -1:
        return token_ids
    if most < 1:
        raise bad_request(f"truncate_prompt_tokens: expected at least 1, got {most}")
    return token_ids[:most] if fields.truncation_side == "right" else token_ids[-most:]


def _checked(facts: EngineFacts, fields: GenerateFields, prompts: list[Prompt], params: SamplingParams) -> list[Prompt]:
    if len(prompts) * params.n > MOST_COMPLETIONS:
        raise bad_request(
            f"n: expected at most {MOST_COMPLETIONS} answers of a request, got {len(prompts)} × {params.n}"
        )
    given: list[Any] = []
    for prompt in prompts:
        one: dict[str, Any] = {"cache_salt": fields.cache_salt}
        if prompt.token_ids or prompt.text is None:
            one["prompt_token_ids"] = prompt.token_ids
        else:
            one["prompt"] = prompt.text
        given.append(one)
    try:
        found = facts.builder.check(given, params)
    except MllmError as error:
        raise of_error(error, None) from None
    most = facts.hello.max_model_len
    decoder_ids = _decoder_ids(facts, fields)
    checked = []
    for prompt, token_ids in zip(prompts, found, strict=True):
        if isinstance(token_ids, MllmError):
            raise of_error(token_ids, fields.subject)
        length = len(token_ids if decoder_ids is None else decoder_ids)
        if length >= most:
            raise bad_request(
                f"the prompt has {length} tokens, but the model's context is {most} tokens, the answer included. "
                "Shorten it, or serve the model with a larger runtime.max_model_len.",
                fields.subject,
                "context_length_exceeded",
            )
        checked.append(Prompt(token_ids, prompt.text, prompt.media, decoder_ids))
    return checked


def _decoder_ids(facts: EngineFacts, fields: GenerateFields) -> list[int] | None:
    """The ids that the decoder of an encoder-decoder begins with; None of another model.

    Raises:
        ApiError: it is not what is expected, or of another model.
    """
    given = {name: getattr(fields, name, None) for name in ("decoder_prompt", "target_language")}
    named = next((name for name, value in given.items() if value is not None), None)
    if facts.decoder is None:
        if named is not None:
            raise bad_request(f"{named}: expected none, as the model has no encoder. Put it into the prompt.", named)
        return None
    if getattr(fields, "echo", None):
        raise bad_request("echo: expected false, as the answer is the decoder's and the prompt the encoder's", "echo")
    try:
        return facts.decoder.split(given)[1]
    except MllmError as error:
        raise of_error(error, named) from None
