"""The process that decodes sounds of other kinds than WAV, by libsndfile; samples.py starts it and talks to it.

What a stranger's file makes a codec do, it does here: within limits of memory and of processor time.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

import numpy as np

from mllm_compile.errors import RequestError
from mllm_compile.media.sound import read_file, resampled
from mllm_compile.media.sound_protocol import MOST_MEMORY, RATE, REFUSAL, SAMPLES, TOO_MUCH_MEMORY
from mllm_compile.process.helper_server import Answer, limit_files_and, serve


def main() -> None:
    """Answers requests until the pipe of requests ends."""
    serve(_open)


def _open(first: bytes) -> Callable[[bytes], Answer]:
    limit_files_and(resource.RLIMIT_DATA, MOST_MEMORY)
    return _answer


def _answer(request: bytes) -> Answer:
    (rate,) = RATE.unpack_from(request)
    try:
        samples = resampled(*read_file(request[RATE.size :]), rate)
    except RequestError as error:
        return REFUSAL, str(error).encode("utf-8", "replace")
    except MemoryError:
        return TOO_MUCH_MEMORY, b""
    return SAMPLES, samples.astype(np.float32, copy=False).tobytes()


if __name__ == "__main__":
    main()
