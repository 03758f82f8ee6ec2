"""Shows values in messages: short, and never with an error of their own."""

from __future__ import annotations

_MOST_CHARACTERS = 60


def short_repr(value: object) -> str:
    """The value's repr, cut; or what can be said of it, where Python refuses (an integer of 5000 digits)."""
    try:
        text = repr(value)
    except Exception:  # it is a caller's object, and may do anything
        text = f"of {value.bit_length()} bits" if isinstance(value, int) else "that cannot be shown"
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def typed_repr(value: object) -> str:
    """The same behind the name of its type."""
    return f"{type(value).__name__} {short_repr(value)}"
