"""The picture of a terminal in the README shows what the commands print now, but for their figures."""

from __future__ import annotations

import html
import re
import runpy
from pathlib import Path

from mllm_compile.passes.pipeline import PASSES

ROOT = Path(__file__).parents[2]
REMEDY = "draw it again: make terminal"


def shown() -> list[str]:
    """The words of the picture, each run of one style by itself."""
    picture = (ROOT / "docs" / "terminal.svg").read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>(.*?)</text>", picture, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]+>", "", text)).replace("\xa0", " ").strip() for text in texts]


def test_it_has_the_commands_that_draw_it():
    commands = runpy.run_path(str(ROOT / "docs" / "terminal.py"))["COMMANDS"]
    drawn = " ".join(filter(None, shown())).replace("'", "")  # a long one takes two lines
    assert all("$ mllm-compile " + " ".join(words) in drawn for words in commands), REMEDY
    assert drawn.count("$ mllm-compile") == len(commands), REMEDY


def test_it_has_no_rest_of_a_progress_bar():
    assert not [line for line in shown() if re.search("[━⠀-⣿]", line)], REMEDY
    read = runpy.run_path(str(ROOT / "docs" / "terminal.py"))["shown"]
    bar = "\x1b[?25l⠋ load ━━ 0:00\n\r\x1b[1A\x1b[2K⠙ load ━━ 0:01\n\r\x1b[1A\x1b[2K\x1b[?25h"
    assert read(f"one\n{bar}two\n") == "one\ntwo"


def test_it_has_every_pass_as_it_ran_or_was_left_out():
    names = {graph_pass.name for graph_pass in PASSES}
    ran = [line.split()[0] for line in shown() if re.fullmatch(r"\w+( +\d[\d.,]*){4}", line)]
    left_out = [match[1] for line in shown() if (match := re.match(r"left out: (\w+): ", line))]
    assert set(ran) | set(left_out) == names, REMEDY
    assert len(ran) + len(left_out) == len(names) and ran and left_out
    order = [graph_pass.name for graph_pass in PASSES]
    assert ran == sorted(ran, key=order.index), REMEDY
