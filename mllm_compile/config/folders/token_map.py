"""The tokens that a drafter's head is cut to (FR-Spec, arXiv 2502.14856): the ids in a JSON array."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from mllm_compile.errors import ConfigError
from mllm_compile.files.json_file import read_file
from mllm_compile.runtime.files.json_data import parse_json
from mllm_compile.runtime.short_repr import short_repr

_MAX_BYTES = 16 << 20
_EXPECTED = "expected a JSON array of token ids, such as [0, 13, 198]"


def read_token_map(path: str) -> tuple[int, ...]:
    """The ids of a file, ascending.

    Raises:
        ConfigError: there is no such file, or it holds something else, no id, or one twice.
    """
    where = f"speculative.token_map {short_repr(path)}"
    data = read_file(Path(path), ConfigError, _MAX_BYTES)
    if data is None:
        raise ConfigError(f"{where}: there is no such file; {_EXPECTED}")
    try:
        ids = parse_json(data)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error}); {_EXPECTED}. Write one with json.dump.") from None
    if not isinstance(ids, list) or not ids:
        raise ConfigError(f"{where} holds {short_repr(ids)}; {_EXPECTED}")
    wrong = next((one for one in ids if type(one) is not int or one < 0), None)
    if wrong is not None:
        raise ConfigError(f"{where} holds {short_repr(wrong)}; {_EXPECTED}")
    found = sorted(ids)
    twice = next((one for one, following in pairwise(found) if one == following), None)
    if twice is not None:
        raise ConfigError(f"{where} holds token {twice} twice; expected each once. Remove one of them.")
    return tuple(found)
