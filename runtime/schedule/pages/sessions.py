"""Sessions: which requests belong together, and so which cached pages are of further use. Free of torch.

A session tags the runs of pages on the path of its newest request. What is left without a tag is given up first: runs
that its next turn has left (a compaction, an edit), and those of a session that was ended. Runs that other requests
use too are left as they are. A tag never pins a page, and gives no right to one: only salt and tokens do.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

MOST_SESSIONS = 1 << 16  # the least recently used one is forgotten, which ends nothing
RETENTIONS = {"5m": 300, "1h": 3600, "24h": 86_400}  # seconds by name


class SessionTag(NamedTuple):
    """A request's session.

    Attributes:
        key: of its session; None: it has none.
        retain_s: its pages are given up behind others for so long, one of RETENTIONS; 0: as others are.
        is_one_line: each request follows the one before, and replaces it.
    """

    key: Hashable = None
    retain_s: int = 0
    is_one_line: bool = True


class RunTag:
    """The users of a run."""

    __slots__ = ("is_shared", "retain_s", "sessions", "used_s")

    def __init__(self, is_shared: bool) -> None:
        self.sessions: set[Session[Any]] = set()
        self.is_shared = is_shared  # requests without a session use it too
        self.retain_s = 0
        self.used_s = 0.0  # time.monotonic() of its last use

    @property
    def is_over(self) -> bool:
        """True if nobody will ask for the run again, as far as is known."""
        return not self.sessions and not self.is_shared

    def copy(self) -> RunTag:
        other = RunTag(self.is_shared)
        other.sessions, other.retain_s, other.used_s = set(self.sessions), self.retain_s, self.used_s
        return other


class TaggedRun:
    """A run as sessions see it; page_run.py has the rest."""

    __slots__ = ("tag",)

    def __init__(self) -> None:
        self.tag: RunTag | None = None

    @property
    def num_tokens(self) -> int:
        raise NotImplementedError


R = TypeVar("R", bound=TaggedRun)


class SessionState(NamedTuple):
    """The state of a session.

    Attributes:
        running: requests that wait or run.
        turns: requests that have ended.
        prompt_tokens, cached_tokens: of all its requests so far, and those of them that came from the cache.
        kept_tokens: of its newest path, in the device's prefix cache.
        idle_s: since its last request began or ended.
    """

    running: int
    turns: int
    prompt_tokens: int
    cached_tokens: int
    kept_tokens: int
    idle_s: float


class Session(Generic[R]):
    """Requests that follow each other; compared by identity."""

    __slots__ = ("cached_tokens", "is_over", "key", "prompt_tokens", "running", "runs", "turns", "used_s")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.running = self.turns = self.prompt_tokens = self.cached_tokens = 0
        self.used_s = time.monotonic()
        self.runs: set[R] = set()
        self.is_over = False  # it was ended; its last requests tag nothing


class Sessions(Generic[R]):
    """The sessions of one prefix cache.

    Args:
        moved: puts a run into its place in the order of eviction, after its tag has changed.
    """

    def __init__(self, moved: Callable[[R], None]) -> None:
        self._moved = moved
        self._sessions: OrderedDict[Hashable, Session[R]] = OrderedDict()
        self.are_used = False  # some request had a tag: others mark what they use too
        self.num_ended = 0
        self.pages_given_up = 0  # of no further use

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, tag: SessionTag) -> Session[R] | None:
        """The session of a new request, made if it is new; None: it asks for no session."""
        self.are_used = True
        if tag.key is None:
            return None
        session = self._sessions.get(tag.key)
        if session is None:
            session = self._sessions[tag.key] = Session(tag.key)
            if len(self._sessions) > MOST_SESSIONS:
                self._forget(self._sessions.popitem(last=False)[1])
        self._sessions.move_to_end(tag.key)
        session.running += 1
        session.used_s = time.monotonic()
        return session

    def over(self, session: Session[R], prompt_tokens: int, cached_tokens: int) -> None:
        """Count a request that has ended."""
        session.running -= 1
        session.turns += 1
        session.prompt_tokens += prompt_tokens
        session.cached_tokens += cached_tokens
        session.used_s = time.monotonic()

    def used(self, path: Iterable[tuple[R, bool]], session: Session[R] | None, tag: SessionTag | None) -> None:
        """Tag the runs of a path that a request gives up.

        Args:
            path: the last run first, each with True where the request found it in the cache.
            session: None: the request has none.
            tag: None: the request asks for nothing, and so marks tagged runs as shared.
        """
        kept = set()
        for run, was_found in path:
            kept.add(run)
            if tag is None:
                if run.tag is not None and not run.tag.is_shared:
                    run.tag.is_shared = True
                    self._moved(run)
                continue
            if run.tag is None:
                run.tag = RunTag(is_shared=was_found or session is None)
            run.tag.retain_s = max(run.tag.retain_s, tag.retain_s)
            if session is not None and not session.is_over:
                run.tag.sessions.add(session)
                session.runs.add(run)
            self._moved(run)
        if session is not None and tag is not None and tag.is_one_line and not session.running:
            self._release(session, [run for run in session.runs if run not in kept])

    def divided(self, run: R, start: R) -> None:
        """Give the first part of a divided run the tag of the whole."""
        if run.tag is not None:
            start.tag = run.tag.copy()
            for session in start.tag.sessions:
                session.runs.add(start)

    def give_up(self, run: TaggedRun, num_pages: int) -> None:
        """Count pages of a run that are given up."""
        if run.tag is not None and run.tag.is_over:
            self.pages_given_up += num_pages

    def dropped(self, run: R) -> None:
        """Forget a run whose pages are all given up."""
        if run.tag is not None:
            for session in run.tag.sessions:
                session.runs.discard(run)
            run.tag = None

    def end(self, key: Hashable) -> bool:
        """End a session: its pages go first. False: it is unknown."""
        session = self._sessions.pop(key, None)
        if session is None:
            return False
        session.is_over = True
        self.num_ended += 1
        self._release(session, list(session.runs))
        return True

    def state(self, key: Hashable) -> SessionState | None:
        """The state of a session; None: it is unknown."""
        session = self._sessions.get(key)
        if session is None:
            return None
        kept, idle = sum(run.num_tokens for run in session.runs), time.monotonic() - session.used_s
        return SessionState(
            session.running, session.turns, session.prompt_tokens, session.cached_tokens, kept, round(idle, 3)
        )

    def _release(self, session: Session[R], runs: Iterable[R]) -> None:
        for run in runs:
            session.runs.discard(run)
            if run.tag is not None:
                run.tag.sessions.discard(session)
                if run.tag.is_over:
                    run.tag.retain_s = 0
                    self._moved(run)

    def _forget(self, session: Session[R]) -> None:
        """Forget the session that was not used for longest; its pages are as others."""
        for run in session.runs:
            if run.tag is not None:
                run.tag.sessions.discard(session)
                run.tag.is_shared = True
        session.runs.clear()
        session.is_over = True
