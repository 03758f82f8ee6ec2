"""The words of the two sides of a grammar process, and their limits. Imports nothing.

The caller starts a process with a backend's name, the limit on a mask and a vocabulary, then sends forms as JSON
(process/helper_server.py).
"""

from __future__ import annotations

GOOD = b"G"
REFUSAL = b"R"  # the reason, UTF-8
TOO_MUCH_MEMORY = b"M"

MAX_SECONDS = 5  # of processor time for a form; most take milliseconds
MAX_MASK_SECONDS = 0.25  # of processor time, for one answer's next tokens
MAX_MEMORY = 1 << 30  # bytes beside what the libraries and the vocabulary take
MAX_ANSWER = 1 << 16  # bytes
