"""The parts of a request by which its engine is chosen (routing.py): the text of its prompt, and names of sessions."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mllm_compile.server.api.anthropic import MessagesFields
from mllm_compile.server.api.fields import ChatFields, CompletionFields, members_of
from mllm_compile.server.api.responses import ResponseFields
from mllm_compile.server.replicas.text import Text

# By path, the fields whose texts are the prompt's, in its order; those before them make other pages of one text.
_BEFORE = ("cache_salt", "model", "tools")
_PROMPTS = {
    CompletionFields.path: (*_BEFORE, "prompt"),
    ChatFields.path: (*_BEFORE, "messages", "input_ids"),
    ResponseFields.path: (*_BEFORE, "instructions", "input"),
    MessagesFields.path: (*_BEFORE, "system", "messages"),
}
# What ends a list or a string of JSON: a text that goes on has other bytes there. NUL is between the fields.
_ENDS = b'\0]" \t\r\n'


@dataclass(frozen=True)
class Keys:
    """The arguments of Routing.choose; `session` and `hint` as the client names them."""

    text: Text = field(default_factory=Text)
    session: str | None = None
    hint: str | None = None


def keys_of(path: str, body: bytes, session_header: str | None) -> Keys:
    """The keys of a request; none for a path without prompts.

    Args:
        session_header: X-Session-Id, where the request has it.
    """
    fields = _PROMPTS.get(path)
    if fields is None:
        return Keys()
    members = members_of(body)
    content = b"\0".join(bytes(members[name]) if name in members else b"" for name in fields)
    session = _text_of(members, "session_id")
    return Keys(
        Text.of(content.rstrip(_ENDS)),
        session_header if session is None else session,
        _text_of(members, "prompt_cache_key"),
    )


def _text_of(members: dict[str, msgspec.Raw], name: str) -> str | None:
    """A member's text; None: it has none, and the engine's front says so where it should."""
    try:
        return msgspec.json.decode(members[name], type=str | None) if name in members else None
    except msgspec.MsgspecError:
        return None
