"""Pictures of shapes and digits, and questions about them: what the embedded vision model learns from.

Owns drawing and asking. A picture is a grid of cells of 16 pixels; some cells hold one thing. It is a circle, square or
triangle, or a digit, in one of five colours, with its own place and size in its cell. Everything follows from a seed.
Numpy alone: no torch, no Pillow. Read next: train_vision.py, which trains on them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

CELL = 16  # pixels
SIDES = (3, 4, 5)  # cells
COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 200, 30),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle")
# Digits of 5 by 7 points, a row a number of five bits.
DIGITS = (
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)
MOST_THINGS = 8
HELD_OUT = 1_000_000_000  # seeds from here on are never trained on
_FINE = 4  # points a pixel's side that its edge is drawn with


@dataclass(frozen=True)
class Thing:
    """One thing in a cell: `what` is a shape or a digit."""

    colour: str
    what: str

    @property
    def is_shape(self) -> bool:
        return self.what in SHAPES


@dataclass(frozen=True, eq=False)
class Picture:
    """`pixels` [height, width, 3] uint8, and the things that are drawn in it, row by row."""

    pixels: np.ndarray
    things: tuple[Thing, ...]


def draw_picture(seed: int) -> Picture:
    """The picture of a seed."""
    rng = random.Random(seed)
    rows, columns = (rng.choice(SIDES) for _ in range(2))
    kinds = [_kind(rng) for _ in range(rng.randint(1, 4))]  # few, so that several are alike
    things = [rng.choice(kinds) for _ in range(rng.randint(1, min(MOST_THINGS, rows * columns)))]
    if rng.random() < 0.5:
        things[rng.randrange(len(things))] = Thing(rng.choice(list(COLOURS)), str(rng.randrange(10)))
    pixels = np.full((rows * CELL, columns * CELL, 3), rng.randint(205, 255), np.float32)
    for thing, cell in zip(things, sorted(rng.sample(range(rows * columns), len(things))), strict=True):
        top, left = (cell // columns) * CELL, (cell % columns) * CELL
        cover = _cover(rng, thing)[..., None]
        place = pixels[top : top + CELL, left : left + CELL]
        place += cover * (np.asarray(COLOURS[thing.colour], np.float32) + rng.randint(-12, 12) - place)
    pixels += np.random.default_rng(seed).normal(0, 3, pixels.shape)
    return Picture(pixels.clip(0, 255).round().astype(np.uint8), tuple(things))


def _kind(rng: random.Random) -> Thing:
    return Thing(rng.choice(list(COLOURS)), rng.choice(SHAPES))


def _cover(rng: random.Random, thing: Thing) -> np.ndarray:
    """[CELL, CELL]: the part of each pixel that the thing covers."""
    size = rng.uniform(8.5, 13.5)
    free = CELL - size - 1
    top, left = (0.5 + rng.uniform(0, free) for _ in range(2))
    points = (np.arange(CELL * _FINE) + 0.5) / _FINE
    y, x = (points[:, None] - top) / size, (points[None, :] - left) / size
    inside = (y >= 0) & (y < 1) & (x >= 0) & (x < 1)
    if thing.what == "circle":
        inside = (y - 0.5) ** 2 + (x - 0.5) ** 2 < 0.25
    elif thing.what == "triangle":
        inside &= abs(x - 0.5) < y / 2
    elif not thing.is_shape:
        bits = np.array([[row >> (4 - column) & 1 for column in range(5)] for row in DIGITS[int(thing.what)]], bool)
        row, column = (np.clip((a * n).astype(int), 0, n - 1) for a, n in ((y, 7), ((x - 0.15) / 0.7, 5)))
        inside = inside & (abs(x - 0.5) < 0.35) & bits[row, column]
    return inside.reshape(CELL, _FINE, CELL, _FINE).mean((1, 3)).astype(np.float32)


def ask(picture: Picture, rng: random.Random) -> tuple[str, str]:
    """A question about a picture, and its answer."""
    shapes = [thing for thing in picture.things if thing.is_shape]
    digits = [thing for thing in picture.things if not thing.is_shape]
    kinds = ["count", "count", "count", "shape", "all", "yes"]
    kinds += ["digit"] * 2 * (len(digits) == 1) + ["colour"] * any(_alone(shapes, "what"))
    kind = rng.choice(kinds)
    # Half of what is asked for is there.
    thing = rng.choice(shapes) if shapes and rng.random() < 0.6 else _kind(rng)
    if kind == "count":
        return f"How many {thing.colour} {thing.what}s?", _counted(shapes.count(thing), f"{thing.colour} {thing.what}")
    if kind == "shape":
        return f"How many {thing.what}s?", _counted(sum(t.what == thing.what for t in shapes), thing.what)
    if kind == "all":
        return "How many shapes?", _counted(len(shapes), "shape")
    if kind == "yes":
        return f"Is there a {thing.colour} {thing.what}?", "Yes." if thing in shapes else "No."
    if kind == "digit":
        return "Which digit is there?", f"The digit {digits[0].what}."
    thing = rng.choice(_alone(shapes, "what"))
    return f"What colour is the {thing.what}?", f"The {thing.what} is {thing.colour}."


def describe(picture: Picture) -> tuple[str, str]:
    """A question whose answer tells all that is there, row by row: what teaches a model to see."""
    names = [thing.what if not thing.is_shape else f"{thing.colour} {thing.what}" for thing in picture.things]
    return "What is there?", f"{', '.join(names)}."


def _alone(shapes: list[Thing], attribute: str) -> list[Thing]:
    values = [getattr(thing, attribute) for thing in shapes]
    return [thing for thing in shapes if values.count(getattr(thing, attribute)) == 1]


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}."


def held_out(count: int) -> list[tuple[Picture, str, str]]:
    """Pictures that no training has seen, each with a question and its answer."""
    found = []
    for seed in range(HELD_OUT, HELD_OUT + count):
        picture = draw_picture(seed)
        found.append((picture, *ask(picture, random.Random(seed))))
    return found
