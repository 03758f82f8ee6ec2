"""The words of the two sides of a template process, and their limits. Free of Jinja.

The caller starts a process with a model's templates, then sends requests, both JSON (process/helper_server.py).
"""

from __future__ import annotations

VARIABLES_OF = "variables_of"  # the only name in a request for the names, as JSON, that a template reads
TEXT = b"X"  # the prompt, UTF-8 with what surrogates the messages hold
REFUSAL = b"R"  # the reason for a failure, likewise
TOO_MUCH_MEMORY, TOO_LONG = b"M", b"L"

MAX_REQUEST = 32 << 20  # bytes of JSON
MAX_CHARACTERS = 8 << 20  # of a prompt: two million tokens of English, and a tokenizer takes 100 bytes for each
MAX_MEMORY = 512 << 20  # bytes of address space
MAX_SECONDS = 2  # of processor time for a request: templates take milliseconds
MAX_ANSWER = 4 * MAX_CHARACTERS  # bytes
