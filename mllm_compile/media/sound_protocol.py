"""The words of the two sides of a process that decodes sounds, and their limits."""

from __future__ import annotations

import struct

SAMPLES = b"S"  # float32
REFUSAL = b"R"  # the reason, UTF-8
TOO_MUCH_MEMORY = b"M"

RATE = struct.Struct(">I")  # samples a second that are wanted, ahead of a file's bytes
MOST_SECONDS = 60  # of processor time for a file; two hours of MP3 take 30
MOST_MEMORY = 4 << 30  # bytes that the process may write to
MOST_ANSWER = 2 << 30  # bytes
