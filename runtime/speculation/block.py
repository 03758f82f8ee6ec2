"""How a head drafts several tokens in one pass. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftBlock:
    """Masks behind the newest token: the head says of each which token it stands for.

    Attributes:
        mask_token_id: what masks are embedded as.
        most: most tokens of a draft.
        sees_ahead: the newest token and masks attend to each other in both directions. Hidden states of the model are
            rows of their own before them, of NO_TOKEN.
        from_newest: the newest token's row says the first token, and each mask the one behind its place.
    """

    mask_token_id: int
    most: int
    sees_ahead: bool
    from_newest: bool

    def num_masks(self, num_drafted: int) -> int:
        """Masks of a draft of so many tokens."""
        return num_drafted - self.from_newest
