"""A process of one rank that follows: loads its part of the model, then runs the steps that rank 0 announces.

    python -m mllm_compile.ranks.follower SOCKET

SOCKET is an open descriptor (start.py). It ends when rank 0 says so, or ends.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

from mllm_compile.ranks.start import HERE, READY, Answer, Lines, Meeting, Start, receive_shared
from mllm_compile.runtime.json_data import from_json, parse_json
from mllm_compile.runtime.ranks.ring import RingReader

BEAT_S = 0.5


def main(descriptor: int) -> None:
    """Follows; returns where rank 0 has ended it."""
    serve(socket.socket(fileno=descriptor))


def serve(connection: socket.socket) -> None:
    """Takes what ranks share and its orders, and follows. It imports ahead of that, as it may have been started before
    it was known what it loads."""
    lines = Lines(connection)
    try:
        import_all()
        shared = receive_shared(connection)
        if shared is None:
            return  # rank 0 needs no followers
        start = Start.from_line(lines.receive())
        memory, event, place = shared
        _follow(replace(start, ring=replace(start.ring, memory=memory, event=event), meeting_place=place), lines)
    except EOFError:
        return  # rank 0 gave up before there were steps
    except BaseException as error:
        lines.send(Answer("error", f"{error}" or type(error).__name__, type(error).__name__))
        raise


def import_all() -> None:
    """Imports what following needs, which takes as long as all the rest of a small model's start."""
    import mllm_compile.ranks.communicators
    import mllm_compile.runtime.model_runner
    import mllm_compile.runtime.step.follower
    import mllm_compile.store.source  # noqa: F401


def _follow(start: Start, lines: Lines) -> None:
    import torch

    from mllm_compile.config.resolved import ResolvedConfig
    from mllm_compile.process.timeline import timeline_of
    from mllm_compile.ranks.communicators import device_of_rank, meet
    from mllm_compile.runtime.device.cpu_threads import use_threads
    from mllm_compile.runtime.device.open import open_device
    from mllm_compile.runtime.model_runner import ModelRunner
    from mllm_compile.runtime.sampling.sampler import Sampler
    from mllm_compile.runtime.step.follower import FollowingStepRunner
    from mllm_compile.store.artifact import open_artifact
    from mllm_compile.store.opened import CompiledRuntime
    from mllm_compile.store.source import ArtifactSource, runner_config

    ring = RingReader(start.ring)
    threading.Thread(target=_beat, args=(ring,), name="beat", daemon=True).start()
    config = ResolvedConfig.model_validate(start.config)
    device = device_of_rank(config.runtime.device, start.rank)
    config = config.model_copy(update={"runtime": replace(config.runtime, device=device)})
    if device == "cpu":
        use_threads(start.threads)
    open_device(device)
    artifact = open_artifact(Path(start.folder))
    compiled = CompiledRuntime(artifact, config, artifact.weights_root(Path(start.weights_root)), True, True)
    source = ArtifactSource(compiled, timeline_of(None), start.rank)
    lines.send(Answer(HERE))
    meeting = from_json(Meeting, parse_json(lines.receive()))
    communicator = meet(meeting, start.rank, start.size, torch.device(device), start.meeting_place)
    settings = replace(runner_config(config), num_pages=start.num_pages)
    runner = ModelRunner(settings, source, communicator)
    runner.initialize()
    steps = FollowingStepRunner(runner, Sampler(runner.model.sampling))
    lines.send(Answer(READY))
    while (record := ring.next()) is not None:
        steps.follow(record)
        ring.done()


def _beat(ring: RingReader) -> None:
    pause = threading.Event()
    while True:
        ring.beat()
        pause.wait(BEAT_S)


if __name__ == "__main__":
    code = 1
    try:
        main(int(sys.argv[1]))
        code = 0
    finally:
        sys.stderr.flush()
        if code == 0:
            os._exit(0)  # nothing is left to be done, and what threads hold would be waited for
