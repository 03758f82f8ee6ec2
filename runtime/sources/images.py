"""The images of a request whose states some layers of its text attend to: where their states lie, and who sees which.

A token at an image or behind it sees that image, up to the next. Images that follow each other are one group: its
tokens see all of it that is before them. Tokens ahead of all images see every state, of filled tiles too. States have
no positions, so that all that a token sees is a range from the start of a page. Free of torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.request import Image, RequestMedia
from mllm_compile.runtime.media.tiles import TileTower

if TYPE_CHECKING:
    from mllm_compile.runtime.media.tower import Grid

NO_IMAGES, AHEAD, SEES = range(3)  # kinds of tokens


@dataclass(frozen=True, eq=False)
class SeenImages:
    """
    Attributes:
        images: in order; each is encoded by itself.
        places: of each image, [2, N] int64: states, and where each is in the request's pages. A state may be twice.
        length: of these pages, in states.
        num_ahead: tokens ahead of the first image.
        starts: [V] int64 tokens, ascending: those from one to the next see the same.
        firsts, lengths: [V] int64: the place of the first state that they see, which begins a page, and how many.
    """

    images: tuple[Image, ...]
    places: tuple[np.ndarray, ...]
    length: int
    num_ahead: int
    starts: np.ndarray
    firsts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, tower: TileTower, tokens: list[int], grids: list[Grid], images: tuple[Image, ...] = ()) -> SeenImages:
        """Args: tokens: where each image is in the prompt; ascending."""
        own = [grid[1] * tower.states for grid in grids]
        filled = tower.states_of_image * len(grids) - sum(own)
        places: list[list[np.ndarray]] = [[] for _ in grids]
        firsts, lengths, at = [], [], 0
        for index, count in enumerate(own):  # what is seen ahead of images: all, filled tiles last
            places[index].append(np.stack((np.arange(count), np.arange(at, at + count))))
            at += count
        for index, count in enumerate(own):
            rest = np.arange(count, tower.states_of_image)
            places[index].append(np.stack((rest, np.arange(at, at + rest.size))))
            at += rest.size
        first, seen = 0, 0
        for index, (token, count) in enumerate(zip(tokens, own, strict=True)):
            if index and token != tokens[index - 1] + 1:  # a group of its own, whose states are here once more
                first, seen = -(-at // tower.page_size) * tower.page_size, 0
                at = first
            if first:
                places[index].append(np.stack((np.arange(count), np.arange(at, at + count))))
                at += count
            seen += count
            firsts.append(first)
            lengths.append(seen)
        is_ahead = [0] if tokens[0] else []
        return cls(
            images,
            tuple(np.concatenate(one, axis=1) for one in places),
            at,
            tokens[0],
            np.array([*is_ahead, *tokens]),
            np.array([*is_ahead, *firsts]),
            np.array([*(sum(own) + filled for _ in is_ahead), *lengths]),
        )

    @classmethod
    def of_request(cls, tower: TileTower, media: RequestMedia) -> SeenImages:
        """
        Raises:
            RequestError: its images have more states than a request may have.
        """
        tokens, grids = [image.start for image in media.images], [image.grid for image in media.images]
        found = cls.of(tower, tokens, grids, media.images)
        if found.length > tower.max_length:
            raise RequestError(
                f"the prompt's {len(tokens)} images have {found.length:,} states, {tower.states_of_image:,} each and "
                f"again where text is between them; expected at most {tower.max_length:,}. Give fewer, or raise "
                "runtime.max_model_len."
            )
        return found

    @property
    def digest(self) -> bytes:
        """A hash of all states in the pages, and of their order."""
        seen = hashlib.sha256(b"images" + self.firsts.tobytes() + self.lengths.tobytes())
        for image in self.images:
            seen.update(image.digest)
        return seen.digest()

    def of_tokens(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Kinds, first places and numbers of states, [count] int64 each, of the tokens from `start` on."""
        tokens = np.arange(start, start + count)
        views = np.searchsorted(self.starts, tokens, side="right") - 1
        return np.where(tokens < self.num_ahead, AHEAD, SEES), self.firsts[views], self.lengths[views]
