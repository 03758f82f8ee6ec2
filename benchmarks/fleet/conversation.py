"""The messages of a session, as ids of tokens that no other message has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.server.agent_trace import Call

_ID_BITS = 24  # of a token's id those of its place in its message


@dataclass(frozen=True)
class Conversation:
    """A prompt and its answer, which is the last message.

    Attributes:
        ids: [tokens] int64, of all.
        ends: where each message ends, behind a 0.
        keys: the hash of each message with those before it.
    """

    ids: np.ndarray
    ends: list[int]
    keys: list[int]

    @property
    def prompt(self) -> np.ndarray:
        """The ids of the prompt."""
        return self.ids[: self.ends[-2]]

    @property
    def answer(self) -> np.ndarray:
        """The ids of the answer."""
        return self.ids[self.ends[-2] :]


EMPTY = Conversation(np.empty(0, np.int64), [0], [])


def gone_on(before: Conversation, call: Call) -> Conversation:
    """The messages of a call, which keeps some of those `before`."""
    keep = call["keep"]
    ends, keys = before.ends[: keep + 1], before.keys[:keep]
    parts = [before.ids[: ends[-1]]]
    key = keys[-1] if keys else 0
    new = [(part["seed"], part["tokens"]) for part in call["append"]]
    for seed, tokens in (*new, (call["reply_seed"], call["out_tokens"])):
        parts.append((seed << _ID_BITS) + np.arange(tokens, dtype=np.int64))
        ends.append(ends[-1] + tokens)
        key = hash((key, seed))
        keys.append(key)
    return Conversation(np.concatenate(parts), ends, keys)
