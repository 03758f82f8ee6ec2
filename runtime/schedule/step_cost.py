"""Learns how long a step takes from steps that were run, so that the scheduler can tell before it cuts a prompt.

There are two linear estimates. A step of decodes alone is estimated by its rows and the keys that they read. A step
with prompts is estimated by its tokens and the pairs of a prompt's token with a token that it attends to. The keys that
decodes read beside a prompt cost what they cost alone. Each is fitted to the last steps by least squares of the
relative error, and no coefficient is negative. A step that was held up by something else hardly moves that error.
Neither does a step that seems short because the one before was seen to end late. What few steps cannot tell apart is
put down to the tokens: a longer chunk is then estimated too slow, and not too fast.

Free of torch. Times are in ms.
"""

from __future__ import annotations

from dataclasses import dataclass

_KEPT = 0.97  # of an earlier step's weight after each further one: the last 30 or so count
# So much of each feature is about as long as the others: it makes the fit well conditioned.
_ROWS, _KEYS, _TOKENS, _PAIRS = 64.0, 2.0**17, 512.0, 2.0**21
_RIDGE = 1e-5  # of what is put down to the preferred feature; the others' is a hundred times as much
_MOST_EXPECTED = 20.0  # times what a step took: a first one that was held up is forgotten soon
_LEAST_MS = 1e-3  # of a step that a clock saw end as it began
_SETS = ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,))


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The work of a step.

    Attributes:
        num_decodes: rows that decode.
        decode_keys: tokens that they attend to, all together.
        prompt_tokens: tokens of prompts.
        prompt_pairs: pairs of such a token with one that it attends to.
    """

    num_decodes: int
    decode_keys: int
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0


def pairs_of(num_tokens: float, context: float) -> float:
    """Pairs of a chunk of `num_tokens` behind `context` tokens."""
    return num_tokens * (context + num_tokens / 2)


class StepCost:
    """The estimates."""

    def __init__(self) -> None:
        self._decodes = _Fit(preferred=0)  # of 1, rows, keys
        self._mixed = _Fit(preferred=1)  # of 1, tokens, pairs; without what keys of decodes take

    def learn(self, load: StepLoad, ms: float) -> None:
        """Takes in a step that took so long."""
        ms = max(ms, _LEAST_MS)
        if not load.prompt_tokens:
            self._decodes.add((1.0, load.num_decodes / _ROWS, load.decode_keys / _KEYS), ms)
            return
        # At least a fifth: estimates of keys may be of another time, and a step is never all theirs.
        without_keys = max(ms - self._keys_ms(load.decode_keys), ms / 5)
        tokens = load.num_decodes + load.prompt_tokens
        self._mixed.add((1.0, tokens / _TOKENS, load.prompt_pairs / _PAIRS), without_keys)

    @property
    def knows_decodes(self) -> bool:
        """A step of decodes alone was seen."""
        return self._decodes.count > 0

    @property
    def knows_prompts(self) -> bool:
        """A step with prompts was seen."""
        return self._mixed.count > 0

    def decodes_ms(self, num_decodes: int, decode_keys: int) -> float:
        """Time of a step of these decodes alone; 0 until one was seen."""
        base, rows, _ = self._decodes.coefficients
        return base + rows * num_decodes / _ROWS + self._keys_ms(decode_keys)

    def beside_ms(self, num_decodes: int, decode_keys: int) -> float:
        """Time of a step with prompts that does not depend on them."""
        base, tokens, _ = self._mixed.coefficients
        return base + tokens * num_decodes / _TOKENS + self._keys_ms(decode_keys)

    @property
    def token_ms(self) -> float:
        """Time of a prompt's token, without what it attends to."""
        return self._mixed.coefficients[1] / _TOKENS

    @property
    def pair_ms(self) -> float:
        return self._mixed.coefficients[2] / _PAIRS

    def _keys_ms(self, num_keys: int) -> float:
        return self._decodes.coefficients[2] * num_keys / _KEYS


class _Fit:
    """Least squares of the relative error over three features, weights fading, coefficients ≥ 0.

    In plain floats, as numpy takes longer for three of them, and the host is waited for.
    """

    def __init__(self, preferred: int) -> None:
        """
        Args:
            preferred: the feature that gets what the steps cannot tell apart.
        """
        self.count = 0
        self._products = [[0.0] * 3 for _ in range(3)]
        self._sums = [0.0] * 3
        self._ridge = [_RIDGE if feature == preferred else 100 * _RIDGE for feature in range(3)]
        self._found: tuple[float, float, float] | None = (0.0, 0.0, 0.0)

    def add(self, features: tuple[float, float, float], ms: float) -> None:
        """Takes in one step's features and time."""
        # The error is relative to the expected time if that is longer. A step whose predecessor was seen to end late
        # seems short, and relative to itself would outweigh all others.
        expected = sum(a * b for a, b in zip(self.coefficients, features, strict=True))
        scale = max(ms, min(expected, _MOST_EXPECTED * ms))
        row = [feature / scale for feature in features]
        for i in range(3):
            self._sums[i] = _KEPT * self._sums[i] + row[i] * ms / scale
            for j in range(3):
                self._products[i][j] = _KEPT * self._products[i][j] + row[i] * row[j]
        self.count += 1
        self._found = None

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """ms of each feature; zeros until a step was taken in."""
        if self._found is None:
            self._found = self._solve()
        return self._found

    def _solve(self) -> tuple[float, float, float]:
        """The solution of the best set of features, of seven, whose own solution has no negative part."""
        scale = sum(self._products[i][i] for i in range(3))
        products = [row.copy() for row in self._products]
        for i in range(3):
            products[i][i] += self._ridge[i] * scale
        best, least = [0.0, 0.0, 0.0], 0.0
        for features in _SETS:
            part = _solved([[products[i][j] for j in features] for i in features], [self._sums[i] for i in features])
            # The sum of squares without the term that all sets share.
            error = -sum(self._sums[i] * value for i, value in zip(features, part, strict=True))
            if error < least and min(part) >= 0:
                best, least = [0.0, 0.0, 0.0], error
                for i, value in zip(features, part, strict=True):
                    best[i] = value
                if len(features) == len(best):
                    break  # no set of fewer has a smaller error
        return best[0], best[1], best[2]


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a positive definite system, by elimination; both arguments are changed."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            right[j] -= factor * right[i]
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
    for i in reversed(range(size)):
        right[i] = (right[i] - sum(matrix[i][k] * right[k] for k in range(i + 1, size))) / matrix[i][i]
    return right
