"""Finds the modules that an adapter's config means, by PEFT's rules, and their rank and scale.

The rules are PEFT 0.21's: check_target_module_exists (tuners/tuners_utils.py), get_pattern_key (utils/other.py).
A regular expression came with the adapter and may take for ever: one deadline holds for all of them, and other threads
run meanwhile. It is looked at between two that are compiled too, so the length of each and its counted repeats, which
are written out, are bounded.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mllm_compile.adapters.peft_config import PeftConfig
from mllm_compile.errors import CheckpointError
from mllm_compile.runtime.config_sections import ALL_LINEAR
from mllm_compile.runtime.short_repr import short_repr

if TYPE_CHECKING:
    import regex

_MATCHING_S = 5.0
_MOST_CHARACTERS = 2000
_MOST_REPEATS = 1000
_COUNTS = re.compile(r"\{(\d+)?(?:,(\d+)?)?\}")


class ModuleNames:
    """Looks up module names in a config.

    Args:
        config: the adapter's.
        path: its file, for messages.
        not_linear: modules that all-linear does not mean.

    Attributes:
        parameters: the config's target_parameters.

    Raises:
        CheckpointError: a regular expression is malformed; from the methods too, where matching takes too long.
    """

    def __init__(self, config: PeftConfig, path: Path, not_linear: Collection[str] = ()) -> None:
        self._config, self._not_linear = config, not_linear
        self._path = path
        self._deadline = time.monotonic() + _MATCHING_S
        targets, excluded = config.target_modules, config.exclude_modules
        self._is_all_linear = isinstance(targets, str) and targets.lower() == ALL_LINEAR
        self._targets = self._compiled(targets) if isinstance(targets, str) and not self._is_all_linear else None
        self._excluded = self._compiled(excluded) if isinstance(excluded, str) else None
        self._target_names, self._excluded_names = (
            frozenset(() if isinstance(names, str) else names) for names in (targets, excluded)
        )
        self.parameters = frozenset(config.target_parameters)
        self._ranks = [(self._ending(key), value) for key, value in config.rank_pattern.items()]
        self._alphas = [(self._ending(key), value) for key, value in config.alpha_pattern.items()]
        self.rank = cache(self._rank)
        layers = config.layers_pattern or (r"[^.]*",)
        self._layers = [self._compiled(rf"(?:.*?\.)?{pattern}\.(\d+)\..*") for pattern in layers]

    def are_targets(self, module: str) -> bool:
        """True if the config's target_modules mean this module."""
        if self._excluded is not None:
            if self._fits(self._excluded, module):
                return False
        elif _ends_with(module, self._excluded_names):
            return False
        if self._is_all_linear:
            return not module.endswith("lm_head") and module not in self._not_linear
        if self._targets is not None:
            return self._fits(self._targets, module)
        return _ends_with(module, self._target_names) and self._is_in_layers(module)

    def are_parameters(self, parameter: str) -> bool:
        """True if one of target_parameters means this parameter."""
        return _ends_with(parameter, self.parameters)

    def _rank(self, module: str) -> int:
        ranks = (rank for pattern, rank in self._ranks if self._fits(pattern, module))
        return next(ranks, self._config.rank)

    def scale(self, module: str) -> float:
        """The number that B(A(x)) is multiplied with."""
        alphas = (alpha for pattern, alpha in self._alphas if self._fits(pattern, module))
        return self._config.scale(self.rank(module), next(alphas, self._config.alpha))

    def _is_in_layers(self, module: str) -> bool:
        """True if no layers are chosen, or the module is in one of them: the first number in its name counts."""
        if self._config.layers is None:
            return True
        for pattern in self._layers:
            match = self._match(pattern, module)
            if match is not None:
                return int(match[1]) in self._config.layers
        return False

    def _ending(self, key: str) -> regex.Pattern[str]:
        return self._compiled(rf"(.*\.)?({key})")

    def _compiled(self, pattern: str) -> regex.Pattern[str]:
        import regex

        counts = [int(digits[:9]) for pair in _COUNTS.findall(pattern) for digits in pair if digits]
        if len(pattern) > _MOST_CHARACTERS or math.prod(max(count, 1) for count in counts) > _MOST_REPEATS:
            raise CheckpointError(
                f"{self._path}: {short_repr(pattern)}: expected a regular expression of up to {_MOST_CHARACTERS} "
                f"characters that counts up to {_MOST_REPEATS}. Write the modules' names in its place"
            )
        self._time_left(pattern)
        try:
            return regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError) as error:
            raise CheckpointError(
                f"{self._path}: {short_repr(pattern)} is no regular expression: {error}. Download it again"
            ) from None

    def _fits(self, pattern: regex.Pattern[str], module: str) -> bool:
        return self._match(pattern, module) is not None

    def _match(self, pattern: regex.Pattern[str], module: str) -> regex.Match[str] | None:
        try:
            return pattern.fullmatch(module, timeout=self._time_left(pattern.pattern), concurrent=True)
        except TimeoutError:
            raise self._too_slow(pattern.pattern) from None

    def _time_left(self, pattern: str) -> float:
        """Seconds for this pattern and those behind it."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._too_slow(pattern)
        return left

    def _too_slow(self, pattern: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: its regular expressions take longer than {_MATCHING_S:g} s, at {short_repr(pattern)}. "
            "Write the modules' names in their place"
        )


def _ends_with(module: str, names: frozenset[str]) -> bool:
    """True if a name is the module's, or its last parts."""
    parts = module.split(".")
    return any(".".join(parts[first:]) in names for first in range(len(parts)))
