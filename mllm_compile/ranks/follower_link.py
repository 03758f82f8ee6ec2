"""A follower as its engine sees it: what it has answered, since when it is silent, and how it ended.

group.py decides what follows from that; follower.py is the follower's own process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from mllm_compile.ranks.launch_local import RankProcess
from mllm_compile.ranks.nodes import RemoteRank
from mllm_compile.ranks.start import BEAT, Answer, Lines, Meeting, SealedLines, Start
from mllm_compile.runtime.files.json_data import from_json, parse_json
from mllm_compile.runtime.ranks.sealed import ForgedFrameError

_LOOKED_S = 1.0  # that a look tells of at most: for longer than that this process was stopped, and nobody looked


class FollowerLink:
    """One rank that follows.

    Attributes:
        news: what it has answered so far, beats left out.
        heard, num_read: it has beaten since the last look at this; frames that it has read.
    """

    def __init__(self, rank: int, process: RankProcess) -> None:
        self.rank = rank
        self.process = process
        self.news: list[Answer] = []
        self.connection = SealedLines(process.sealed) if isinstance(process, RemoteRank) else Lines(process.socket)
        self.beat, self.cpu_time = -1, -1.0
        self.looked, self.silent_s = time.monotonic(), 0.0
        self.heard, self.num_read = False, 0

    def tell(self, message: Meeting | Start, descriptors: Sequence[int]) -> None:
        """Sends it a message; one that has ended gets nothing, and its watcher says how it ended."""
        with suppress(OSError):
            if isinstance(self.connection, SealedLines):
                self.connection.send(message)
            else:
                self.connection.send(message, descriptors)

    @property
    def is_remote(self) -> bool:
        """True if it is on another host."""
        return isinstance(self.process, RemoteRank)

    def is_at(self, at: str) -> bool:
        """True if it has said so."""
        return any(answer.at == at for answer in self.news)

    @property
    def error(self) -> Answer | None:
        """The error that ends it, if it has told one."""
        return next((answer for answer in self.news if answer.error is not None), None)

    def look(self) -> None:
        """Takes the news that have come; behind a forged frame nothing more is taken."""
        if self.error is not None and self.error.kind == ForgedFrameError.__name__:
            return
        try:
            for line in self.connection.arrived():
                answer = from_json(Answer, parse_json(line))
                if answer.at == BEAT:
                    self.heard, self.num_read = True, answer.read
                else:
                    self.news.append(answer)
        except ForgedFrameError as error:
            self.news.append(Answer("error", f"{error}", type(error).__name__, time.monotonic()))

    def silence(self, beats: np.ndarray, now: float) -> float:
        """The seconds since it last beat or computed; `beats` are the ring's."""
        beat, cpu_time = int(beats[self.rank - 1]), _cpu_time(self.process.pid)
        self.silent_s += min(now - self.looked, _LOOKED_S)
        if beat != self.beat or cpu_time != self.cpu_time:
            self.beat, self.cpu_time, self.silent_s = beat, cpu_time, 0.0
        self.looked = now
        return self.silent_s

    @property
    def name(self) -> str:
        """The rank and where it is, for people."""
        place = self.process.place if isinstance(self.process, RemoteRank) else f"(process {self.process.pid})"
        return f"rank {self.rank} {place}"

    def end_of(self) -> str:
        """How its process ended, for people."""
        return f"{self.name} {self.process.end_of()}"


def _cpu_time(process: int) -> float:
    """Ticks of processor time that a process has taken; -1 where it is not there."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return float(fields[11]) + float(fields[12])
    except (OSError, IndexError, ValueError):
        return -1.0
