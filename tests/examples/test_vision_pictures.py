"""The pictures that the embedded vision model learns from: each question's answer is what is drawn."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "examples" / "tiny_models" / "vision_pictures.py"


@pytest.fixture(scope="module")
def drawn():
    spec = importlib.util.spec_from_file_location("vision_pictures", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_seed_is_a_picture(drawn):
    first, again, other = drawn.draw_picture(5), drawn.draw_picture(5), drawn.draw_picture(6)
    assert np.array_equal(first.pixels, again.pixels) and first.things == again.things
    assert first.pixels.shape != other.pixels.shape or not np.array_equal(first.pixels, other.pixels)


def test_each_thing_has_a_cell_of_its_colour(drawn):
    for seed in range(50):
        picture = drawn.draw_picture(seed)
        rows, columns = (side // drawn.CELL for side in picture.pixels.shape[:2])
        cells = picture.pixels.reshape(rows, drawn.CELL, columns, drawn.CELL, 3).transpose(0, 2, 1, 3, 4)
        cells = cells.reshape(rows * columns, -1, 3).astype(int)
        full = [cell for cell in cells if np.abs(cell - np.median(cell, 0)).max() > 60]
        assert len(full) == len(picture.things)
        for cell, thing in zip(full, picture.things, strict=True):
            assert np.abs(cell - drawn.COLOURS[thing.colour]).max(1).min() < 30


def test_answers_are_the_things_in_the_picture(drawn):
    asked = Counter()
    for seed in range(300):
        picture, rng = drawn.draw_picture(seed), random.Random(seed)
        shapes = [thing for thing in picture.things if thing.is_shape]
        question, answer = drawn.ask(picture, rng)
        words = question.rstrip("?").split()
        asked[" ".join(words[:2])] += 1
        if words[:2] == ["How", "many"]:
            wanted = [word.removesuffix("s") for word in words[2:]]
            count = sum(all(word in ("shape", t.colour, t.what) for word in wanted) for t in shapes)
            assert answer.split()[0] == str(count)
        elif words[0] == "Is":
            assert (answer == "Yes.") == any((t.colour, t.what) == tuple(words[3:]) for t in shapes)
        elif words[0] == "Which":
            assert [t.what for t in picture.things if not t.is_shape] == [answer.split()[-1].rstrip(".")]
        else:
            assert [t.colour for t in shapes if t.what == words[-1]] == [answer.split()[-1].rstrip(".")]
    assert len(asked) == 4 and min(asked.values()) > 10


def test_no_held_out_picture_is_trained_on(drawn):
    assert len(drawn.held_out(3)) == 3
    assert drawn.held_out(1)[0][0].things == drawn.draw_picture(drawn.HELD_OUT).things
