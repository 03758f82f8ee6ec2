"""Bounds what tries of drafts cost that are in vain, by the time that they took in truth.

A try costs more than its steps: the one before it and the one behind it do not run beside the host. Its expected gain
says nothing of that. So each step earns a share of its time for tries, and they may spend no more; drafts that pay earn
as much as they spare. One slow try, as the first of its size may be, would stop them for long: drafts that are seen to
be right without a try earn some, too. Free of torch.
"""

from __future__ import annotations

_SHARE = 0.01  # of the time without drafts
_AT_FIRST = 4.0  # steps without drafts: two tries or so
_MOST = 6.0  # steps that are earned ahead: what pays for long is soon left where it pays no more
_OF_SEEN = 0.25  # of the tokens that a draft would have brought a request, but for one
_MOST_OF_STEP = 6.0  # that one step counts for: a clock may see it wait for something else


class TrialBudget:
    """See the module's header. It is counted in steps without drafts."""

    def __init__(self) -> None:
        self._left = _AT_FIRST

    @property
    def is_left(self) -> bool:
        """Drafts may be tried, or go on."""
        return self._left > 0

    def see(self, tokens_each: float) -> None:
        """Drafts that no step checked would have brought each request so many tokens more."""
        self._left = min(self._left + _OF_SEEN * max(tokens_each - 1.0, 0.0), _MOST)

    def pass_step(self, plain_ms: float | None, is_tried: bool, ms: float, tokens_each: float) -> None:
        """Takes a step in.

        Args:
            plain_ms: the time of such a step without drafts; None: not known.
            is_tried: it had drafts, or waited for one that had.
            ms: its own time.
            tokens_each: its tokens of each request.
        """
        self._left += _SHARE
        if is_tried and plain_ms is not None:
            self._left += tokens_each - min(ms / plain_ms, _MOST_OF_STEP)
        self._left = min(self._left, _MOST)
