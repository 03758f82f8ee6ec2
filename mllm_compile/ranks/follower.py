"""A process of one rank that follows: loads its part of the model, then runs the steps that rank 0 announces.

    python -m mllm_compile.ranks.follower SOCKET [FOLDER WEIGHTS]

SOCKET is an open descriptor (start.py). It ends when rank 0 says so, or ends. On another host than rank 0's FOLDER is
the runtime there, and WEIGHTS the folder of its weights; the session's key is read from the input.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mllm_compile.process.bytecode import kept_bytecode
from mllm_compile.process.no_gc import imports_unseen
from mllm_compile.process.timeline import Timeline, process_start
from mllm_compile.ranks.start import BEAT, HERE, READY, Answer, Lines, Meeting, SealedLines, Start
from mllm_compile.runtime.files.json_data import from_json, parse_json
from mllm_compile.runtime.ranks.ring import RingReader
from mllm_compile.runtime.ranks.sealed import SealedConnection
from mllm_compile.runtime.ranks.sent_ring import ReceivedRing
from mllm_compile.runtime.tiers.names import RANKS_BEGIN as TIER

if TYPE_CHECKING:
    from mllm_compile.runtime.collectives.base import Communicator
    from mllm_compile.runtime.tiers.ranked import FollowedCopies

BEAT_S = 0.5
_JOIN_S = 10.0


def main(descriptor: int, *folders: str) -> None:
    """Follows; returns where rank 0 has ended it."""
    with kept_bytecode():  # rank 0's is kept as well, and waits for this one's imports
        connection = socket.socket(fileno=descriptor)
        sealed = SealedConnection(connection, sys.stdin.buffer.read(), is_rank_0=False) if folders else None
        serve(connection, sealed, folders)


def serve(
    connection: socket.socket,
    sealed: SealedConnection | None = None,
    folders: Sequence[str] = (),
    device: str | None = None,
) -> None:
    """Takes rank 0's orders, and follows. It imports ahead of them, as it may have been started before it was known
    what it loads, and joins the others beside that.

    Args:
        sealed: the connection, of another host than rank 0's.
        folders: the runtime's and that of the weights there.
        device: its own; None: rank 0 says.
    """
    lines = Lines(connection) if sealed is None else SealedLines(sealed)
    timeline = Timeline()
    meeting: Future[Meeting] = Future()
    try:
        with timeline.stage("import torch"), imports_unseen():
            from mllm_compile.ranks.communicators import Joining
        joining = Joining(partial(_join, connection, lines, device, meeting, timeline))
        try:
            with timeline.stage("import"), imports_unseen():
                import_all()
            own = meeting.result()  # it has been read from the connection, which others wait to read
            start = Start.from_line(lines.receive())
            ring: RingReader | ReceivedRing
            if sealed is not None:
                folder, weights_root = folders
                start = replace(start, folder=folder, weights_root=weights_root)
                ring = ReceivedRing(sealed, start.most_bytes)
            elif start.ring is not None:
                memory, event = lines.descriptors()
                ring = RingReader(replace(start.ring, memory=memory, event=event))
            else:
                raise RuntimeError(f"rank {own.rank} was told of no ring")
            _follow(start, own, joining.result, timeline, lines, ring)
        except Exception:
            joining.is_over(_JOIN_S)  # else rank 0 would wait for it amid joining
            raise
    except EOFError:
        return  # rank 0 needs no followers, or gave up before there were steps
    except BaseException as error:
        name = type(error).__name__
        lines.send(Answer("error", f"{error}" or name, name, time.monotonic()))
        raise


def import_all() -> None:
    """Imports what following needs, which takes as long as all the rest of a small model's start."""
    import mllm_compile.runtime.model_runner
    import mllm_compile.runtime.step.follower
    import mllm_compile.store.source  # noqa: F401


def _join(
    connection: socket.socket,
    lines: Lines | SealedLines,
    device: str | None,
    meeting: Future[Meeting],
    timeline: Timeline,
) -> Communicator:
    """Waits to be told where ranks meet, and joins the others, which join when all have their devices."""
    from mllm_compile.ranks.communicators import join
    from mllm_compile.runtime.device.open import open_device

    try:
        own = from_json(Meeting, parse_json(lines.receive()))
        (place,) = lines.descriptors() or (None,)
        if not own.host:
            own = replace(own, host=connection.getsockname()[0])
        own = replace(own, device=device or own.device)
        meeting.set_result(own)
    except BaseException as error:
        meeting.set_exception(error)
        raise
    with timeline.stage("have the device"):
        open_device(own.device)
    lines.send(Answer(HERE))
    with timeline.stage("join"):
        return join(own, place)


def _follow(
    start: Start,
    meeting: Meeting,
    joined: Callable[[], Communicator],
    timeline: Timeline,
    lines: Lines | SealedLines,
    ring: RingReader | ReceivedRing,
) -> None:
    from mllm_compile.config.resolved import ResolvedConfig
    from mllm_compile.runtime.device.cpu_threads import use_threads
    from mllm_compile.runtime.model_runner import ModelRunner
    from mllm_compile.runtime.ranks.records import StepRecord
    from mllm_compile.runtime.sampling.sampler import Sampler
    from mllm_compile.runtime.step.follower import FollowingStepRunner
    from mllm_compile.store.artifact import open_artifact
    from mllm_compile.store.opened import CompiledRuntime
    from mllm_compile.store.source import ArtifactSource, runner_config

    beat = ring.beat if isinstance(ring, RingReader) else partial(_tell_beat, lines, ring)
    threading.Thread(target=_beat, args=(beat,), name="beat", daemon=True).start()
    config = ResolvedConfig.model_validate(start.config)
    config = config.model_copy(update={"runtime": replace(config.runtime, device=meeting.device)})
    if meeting.device == "cpu":
        use_threads(start.threads)
    with timeline.stage("open runtime"):
        artifact = open_artifact(Path(start.folder))
        compiled = CompiledRuntime(artifact, config, artifact.weights_root(Path(start.weights_root)), True, True)
    source = ArtifactSource(compiled, timeline, meeting.rank)
    runner = ModelRunner(replace(runner_config(config), num_pages=start.num_pages), source, joined)
    runner.initialize(timeline.stage)
    steps = FollowingStepRunner(runner, Sampler(runner.model.sampling))
    gc.collect(1)
    gc.freeze()  # the process is its own: what is there stays, and a look at all imports would keep all ranks waiting
    stages = tuple((span.name, span.start_s, span.end_s) for span in timeline.spans)
    lines.send(Answer(READY, began=process_start(), stages=stages))
    tiers: FollowedCopies | None = None
    while (record := ring.next()) is not None:
        if isinstance(record, StepRecord):
            steps.follow(record)
        elif record.startswith(TIER):
            if tiers is None:
                from mllm_compile.runtime.tiers.ranked import FollowedCopies

                tiers = FollowedCopies(runner, meeting.rank)
            tiers.take(record)
        else:
            steps.take(record)
        ring.done()
        if not isinstance(record, StepRecord):
            beat()  # rank 0 may wait until it is taken


def _beat(beat: Callable[[], None]) -> None:
    pause = threading.Event()
    while True:
        beat()
        pause.wait(BEAT_S)


def _tell_beat(lines: Lines | SealedLines, ring: ReceivedRing) -> None:
    """Tells rank 0's host that this process lives; where nobody hears it, it has nothing to do any more."""
    try:
        lines.send(Answer(BEAT, read=ring.num_read))
    except OSError:
        os._exit(1)


if __name__ == "__main__":
    code = 1
    try:
        main(int(sys.argv[1]), *sys.argv[2:])
        code = 0
    finally:
        sys.stderr.flush()
        if code == 0:
            os._exit(0)  # nothing is left to be done, and what threads hold would be waited for
