"""How likely drafted tokens are accepted: by their place in a draft, for all requests, and for each request.

What a request's drafts brought counts for its next ones, the newest for most. It fades with the steps, so a request
whose drafts are never accepted is tried again at times. A request without a history is hoped to be a fair one, or to be
like the others. Free of torch.

Shape legend: N requests, K most tokens of a draft.
"""

from __future__ import annotations

import numpy as np

HOPE = 0.5  # the share of a draft that is accepted, where nothing is known
# Of what is known of a request, after each step. A draft that is not accepted counts for one, and hope for one too. So
# a request that never has an accepted one loses less than the time of a 100th of its steps to further tries.
_KEPT = 0.985
_NEWEST = 8  # drafts that count where some are accepted; of what is in vain all count
_KEPT_OF_NEWEST = 1 - 1 / _NEWEST
_KEPT_OF_ALL = 0.97  # of what is known of all requests, after each step with drafts
_MOST = 0.98  # nothing is certain


class AcceptanceRates:
    """The rates of the requests of rows, which `forget` tells of new owners.

    Args:
        num_rows: rows of requests, the dummy among them.
        most: K.
        hope: the least share that a request without a history is hoped to have accepted, where others have less.
    """

    def __init__(self, num_rows: int, most: int, hope: float = HOPE) -> None:
        self._hope = hope
        # Of each row: drafts that were asked for and made of the newest, drafts checked, and their accepted shares.
        self._counts = np.zeros((4, num_rows))
        self._num_steps = np.zeros(num_rows)  # when these were brought up to date
        self._now = 0
        self._places = np.arange(most)[:, None]
        # Drafts by place: checked as far, and accepted there. Then the sums of all: drafts and their accepted shares.
        self._by_place = np.zeros((2, most))
        self._checked = self._shares = 0.0

    def forget(self, rows: np.ndarray) -> None:
        """The rows [n] have new owners."""
        self._counts[:, rows] = 0.0

    def pass_step(self) -> None:
        """A step was planned."""
        self._now += 1

    def learn(self, rows: np.ndarray, num_drafted: np.ndarray, num_accepted: np.ndarray) -> None:
        """Takes in the drafts [n] that were asked for; one of 0 tokens was not made."""
        asked, made_before, checked, shares = self._faded(rows)
        made = num_drafted > 0
        reached = np.minimum(num_accepted + 1, num_drafted)
        new_shares = num_accepted / np.maximum(reached, 1)
        self._counts[:, rows] = (
            _one_more(asked, made),
            made_before * _KEPT_OF_NEWEST + made,
            np.where(made, _one_more(checked, num_accepted > 0), checked),
            np.where(made, shares * _KEPT_OF_NEWEST + new_shares, shares),
        )
        self._num_steps[rows] = self._now
        self._by_place *= _KEPT_OF_ALL
        self._by_place += (reached > self._places).sum(axis=1), (num_accepted > self._places).sum(axis=1)
        self._checked = _KEPT_OF_ALL * self._checked + float(made.sum())
        self._shares = _KEPT_OF_ALL * self._shares + float(new_shares.sum())

    def expected(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The gain that drafts of these requests are likely to bring.

        Returns:
            [N, K]: that the token at each place of a draft is accepted, with all before it; [N]: that there is a draft.
        """
        asked, made, checked, shares = self._faded(rows)
        mean = (self._shares + HOPE) / (self._checked + 1)
        own = (shares + max(mean if self._checked else 0.0, self._hope)) / (checked + 1)
        likely = np.minimum((own / mean)[:, None] * self._rates_by_place(), _MOST)
        return likely.cumprod(axis=1), (made + 1) / (asked + 1)

    def _rates_by_place(self) -> np.ndarray:
        """The probability that a token of a draft is accepted if those before it are, by its place: [K]."""
        rates, before = [], HOPE
        for reached, accepted in self._by_place.T.tolist():
            before = (accepted + before) / (reached + 1)
            rates.append(before)
        return np.array(rates)

    def _faded(self, rows: np.ndarray) -> np.ndarray:
        """[4, n]: the counts as they are now."""
        counts: np.ndarray = self._counts[:, rows] * _KEPT ** (self._now - self._num_steps[rows])
        return counts


def _one_more(counts: np.ndarray, were_of_use: np.ndarray) -> np.ndarray:
    """Counts [n] with one more each: of the newest alone where it was of use, else of all."""
    return np.where(were_of_use, np.minimum(counts, _NEWEST) * _KEPT_OF_NEWEST, counts) + 1
