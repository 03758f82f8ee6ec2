"""Makes calls of agents as they were published, for benchmarks of prefix caches.

Run: python -m benchmarks.server.agent_trace --preset agentx --sessions 200 --seed 1 --out trace.jsonl

A line is one call of the model. A session is a list of messages that grows: each call keeps the first `keep` messages,
appends some, and asks for `out_tokens`. It may begin when the calls in `after` are over and `pause_s` more have passed:
a tool ran, or a human thought. Subagents are sessions of their own with `parent` set, for which the parent's next call
waits; a call with `fork` begins with messages of its parent. Messages are given by length and seed: `text_of` makes
words by chance. Presets follow published statistics; the rest of them are guesses.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.script import parser_of, positive

Call = dict[str, Any]

# Quantiles are (probability, value); between them the logarithm is interpolated.
PRESETS: dict[str, dict[str, Any]] = {
    # vLLM's post on AgentX (2026-09-08): median 43 turns, 142k tokens in, 444 out, hits above 96 %,
    # subagents in 44 % of sessions. Spreads, pauses and the first prompt are guesses, the pauses after "codex".
    "agentx": {
        "turns": [(0, 4), (0.5, 43), (0.9, 110), (1, 220)],
        "system": (24_000, 3),
        "first": [(0, 300), (0.5, 16_000), (0.9, 60_000), (1, 120_000)],
        "append": [(0, 60), (0.5, 2_200), (0.9, 11_000), (0.99, 32_000), (1, 50_000)],
        "out": [(0, 20), (0.5, 444), (0.9, 1_600), (0.99, 5_000), (1, 8_000)],
        "tool_s": [(0, 0.2), (0.5, 5.2), (0.9, 20), (0.99, 81), (1, 600)],
        "human_s": [(0, 5), (0.5, 84), (0.9, 1_236), (0.99, 50_000), (1, 200_000)],
        "human_share": 0.06,
        "subagents": 0.44,
        "fork": 0.25,
        "limit": 400_000,
        "rewind": 0.005,
    },
    # Codex on SWE-bench Pro, vLLM's post of 2026-05-06: 33 turns, context 12k to 80k, 2,242 new tokens a turn, in to
    # out 131 to 1, hits 94.2 %, pauses 5.2 s at the median and 81 s at P99. No humans in it; subagents: none told.
    "codex": {
        "turns": [(0, 8), (0.5, 33), (0.9, 52), (1, 90)],
        "system": (9_000, 1),
        "first": [(0, 800), (0.5, 3_000), (0.9, 8_000), (1, 12_000)],
        "append": [(0, 40), (0.5, 800), (0.9, 4_200), (0.99, 20_000), (1, 30_000)],
        "out": [(0, 15), (0.5, 230), (0.9, 900), (0.99, 3_000), (1, 6_000)],
        "tool_s": [(0, 0.3), (0.5, 5.2), (0.9, 18), (0.99, 81.4), (1, 300)],
        "human_s": [(0, 1), (1, 2)],
        "human_share": 0.0,
        "subagents": 0.0,
        "fork": 0.0,
        "limit": 190_000,
        "rewind": 0.0,
    },
    # TraceLab (arXiv 2606.30560, 4,265 sessions, Claude Code and Codex): steps a session, appended and put out tokens,
    # tool times, human waits, compactions in 9.7 % of sessions. Subagents are a guess.
    "tracelab": {
        "turns": [(0, 1), (0.25, 5), (0.5, 16), (0.9, 152), (0.99, 1_236), (1, 2_000)],
        "system": (24_000, 2),
        "first": [(0, 200), (0.5, 9_000), (0.9, 50_000), (1, 120_000)],
        "append": [(0, 40), (0.5, 870), (0.9, 6_000), (0.99, 30_000), (1, 60_000)],
        "out": [(0, 10), (0.5, 220), (0.9, 1_500), (0.99, 4_500), (1, 9_000)],
        "tool_s": [(0, 0.02), (0.5, 0.3), (0.9, 13.6), (0.99, 120), (1, 1_200)],
        "human_s": [(0, 3), (0.5, 84), (0.9, 1_236), (0.99, 50_000), (1, 400_000)],
        "human_share": 0.107,
        "subagents": 0.3,
        "fork": 0.2,
        "limit": 330_000,
        "rewind": 0.005,
    },
}


_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea body information back parent
face level office door health person art war history party result change morning reason research girl guy moment air
teacher force education
"""


def text_of(seed: int, tokens: int) -> str:
    """About so many tokens of text, always the same."""
    words = _WORDS.split()
    picks = np.random.default_rng(seed).integers(0, len(words), max(1, tokens))
    return " ".join(words[pick] for pick in picks)


class Quantiles:
    """Draws numbers by some of their quantiles."""

    def __init__(self, points: list[tuple[float, float]], scale: float = 1.0) -> None:
        self._at = np.array([at for at, _ in points])
        self._logs = np.log([value * scale for _, value in points])

    def draw(self, rng: np.random.Generator) -> float:
        return self.at(rng.random())

    def at(self, probability: float) -> float:
        return float(np.exp(np.interp(probability, self._at, self._logs)))


@dataclass
class Session:
    """A conversation while it is made: its messages as (role, tokens, seed)."""

    name: str
    parent: str | None
    messages: list[tuple[str, int, int]] = field(default_factory=list)
    forked: int = 0  # messages of its parent's that it begins with

    @property
    def tokens(self) -> int:
        return sum(tokens + OVERHEAD for _, tokens, _ in self.messages)


OVERHEAD = 4  # tokens of a chat template for each message, about


class Generator:
    """Makes the calls of sessions.

    Args:
        scale: of all lengths in tokens, for small models.
        pace: of all pauses.
        longest_pause_s: none is longer.
    """

    def __init__(self, preset: dict[str, Any], seed: int, scale: float, pace: float, longest_pause_s: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.preset, self.scale, self.pace, self.longest = preset, scale, pace, longest_pause_s
        tokens = {name: Quantiles(preset[name], scale) for name in ("first", "append", "out")}
        self.first, self.append, self.out = tokens["first"], tokens["append"], tokens["out"]
        self.turns = Quantiles(preset["turns"])
        self.tool_s, self.human_s = Quantiles(preset["tool_s"], pace), Quantiles(preset["human_s"], pace)
        self.limit = int(preset["limit"] * scale)
        self._seeds = iter(range(seed * 1_000_003 + 17, 2**62))

    def sessions(self, count: int) -> list[Call]:
        """All calls of so many sessions, whose lengths are spread evenly over the quantiles: few are like many."""
        length, kind = (self.rng.permutation(count) + self.rng.random(count) for _ in range(2))
        each = zip((length / count).tolist(), (kind / count).tolist(), strict=True)
        return [call for number, at in enumerate(each) for call in self.session(f"s{number}", *at)]

    def session(self, name: str, length_at: float, kind_at: float) -> list[Call]:
        """All calls of a session and of its subagents."""
        rng, preset = self.rng, self.preset
        tokens, kinds = preset["system"]
        kind = int(rng.integers(kinds))
        session = Session(name, None, [("system", max(8, int(tokens * self.scale)), 1 + kind)])
        num_turns = max(1, round(self.turns.at(length_at)))
        has_subagents = kind_at < preset["subagents"] and num_turns > 3
        spawns = set()
        if has_subagents:
            count = min(num_turns - 1, 1 + rng.poisson(1.5))
            spawns = set(rng.choice(np.arange(1, num_turns), size=count, replace=False).tolist())
        calls: list[Call] = []
        after: list[str] = []
        for turn in range(num_turns):
            is_human = turn > 0 and rng.random() < preset["human_share"]
            keep = len(session.messages)
            cause = "first" if turn == 0 else "human" if is_human else "tool"
            if turn > 1 and rng.random() < preset["rewind"]:
                keep, cause = 1 + 2 * int(rng.integers(0, (keep - 1) // 2)), "rewind"
            elif session.tokens > self.limit:
                keep, cause = 1, "compact"
            length = self.first.draw(rng) if turn == 0 else self.append.draw(rng)
            if cause == "human":
                length = 40 + 0.15 * length
            if cause == "compact":
                length = 0.05 * self.limit + length
            pause = 0.0 if turn == 0 else (self.human_s if is_human else self.tool_s).draw(rng)
            call = self._call(session, turn, cause, keep, length, pause, after)
            calls.append(call)
            after = [call["id"]]
            if turn in spawns:
                ends = []
                for number in range(1 + int(rng.integers(0, 3))):
                    made = self._subagent(session, f"{name}.{turn}.{number}", call["id"])
                    calls += made
                    ends.append(made[-1]["id"])
                after += ends
        calls[-1]["ends_session"] = True
        return calls

    def _subagent(self, parent: Session, name: str, after: str) -> list[Call]:
        rng = self.rng
        session = Session(name, parent.name)
        if rng.random() < self.preset["fork"]:  # it begins with all that its parent knows
            session.messages, session.forked = list(parent.messages), len(parent.messages)
        else:
            session.messages = [("system", max(8, int(6_000 * self.scale)), 101)]
        calls, last = [], [after]
        for turn in range(2 + int(rng.integers(0, 14))):
            length = self.first.draw(rng) * 0.3 if turn == 0 else self.append.draw(rng)
            pause = 0.0 if turn == 0 else self.tool_s.draw(rng)
            keep = len(session.messages) if session.tokens <= self.limit else 1
            cause = "first" if turn == 0 else "tool" if keep > 1 else "compact"
            calls.append(self._call(session, turn, cause, keep, length, pause, last))
            last = [calls[-1]["id"]]
        calls[-1]["ends_session"] = True
        return calls

    def _call(
        self, session: Session, turn: int, cause: str, keep: int, length: float, pause_s: float, after: list[str]
    ) -> Call:
        keep = session.forked if turn == 0 else keep
        history, begun = session.messages[:keep], session.messages if turn == 0 else []
        new = [*begun[keep:], ("user", max(1, round(length)), next(self._seeds))]
        session.messages = [*history, *new]
        context, out = session.tokens, max(1, round(self.out.draw(self.rng)))
        reply = ("assistant", out, next(self._seeds))
        session.messages.append(reply)
        return {
            "id": f"{session.name}/{turn}",
            "session": session.name,
            "parent": session.parent,
            "turn": turn,
            "cause": cause,
            "after": list(after),
            "pause_s": round(min(pause_s, self.longest), 3),
            "keep": keep,
            "fork": turn == 0 and keep > 0,
            "append": [{"role": role, "tokens": tokens, "seed": seed} for role, tokens, seed in new],
            "out_tokens": out,
            "reply_seed": reply[2],
            "context_tokens": context,
            "ends_session": False,
        }


def prompts_of(calls: list[Call]) -> Iterator[tuple[Call, list[tuple[str, int, int]]]]:
    """Each call with its prompt: [(role, tokens, seed)], the answers of earlier ones included, in the trace's order."""
    histories: dict[str, list[tuple[str, int, int]]] = {}
    for call in calls:
        new = [(part["role"], part["tokens"], part["seed"]) for part in call["append"]]
        prompt = histories.get(call["parent"] if call["fork"] else call["session"], [])[: call["keep"]] + new
        histories[call["session"]] = [*prompt, ("assistant", call["out_tokens"], call["reply_seed"])]
        yield call, prompt


def in_time(calls: list[Call], concurrency: int, prefill_rate: float, decode_ms: float) -> list[Call]:
    """The calls by the time at which they begin, with so many sessions at once."""
    waiting = {call["id"]: set(call["after"]) for call in calls}
    by_id = {call["id"]: call for call in calls}
    after: dict[str, list[str]] = defaultdict(list)
    for call in calls:
        for other in call["after"]:
            after[other].append(call["id"])
    starts = [call["id"] for call in calls if call["parent"] is None and call["turn"] == 0]
    ready: list[tuple[float, str]] = [(0.1 * index, starts.pop(0)) for index in range(min(concurrency, len(starts)))]
    heapq.heapify(ready)
    order, events = [], ready
    while events:
        now, name = heapq.heappop(events)
        call = by_id[name]
        order.append(call)
        new = sum(part["tokens"] + OVERHEAD for part in call["append"])
        end = now + new / prefill_rate + call["out_tokens"] * decode_ms / 1e3
        for other in after[name]:
            waiting[other].discard(name)
            if not waiting[other]:
                heapq.heappush(events, (end + by_id[other]["pause_s"], other))
        if call["ends_session"] and call["parent"] is None and starts:
            heapq.heappush(events, (end, starts.pop(0)))
    return order


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="agentx")
    parser.add_argument("--sessions", type=positive, default=32)
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths in tokens")
    parser.add_argument("--pace", type=float, default=1.0, help="of all pauses")
    parser.add_argument("--longest-pause", type=float, default=3600.0, help="seconds")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    maker = Generator(PRESETS[args.preset], args.seed, args.scale, args.pace, args.longest_pause)
    calls = maker.sessions(args.sessions)
    args.out.write_text("".join(json.dumps(call) + "\n" for call in calls))
    print(f"{len(calls)} calls of {len({call['session'] for call in calls})} sessions, {args.out}")


if __name__ == "__main__":
    main()
