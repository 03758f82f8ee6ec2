"""The chat page of a server, as a browser shows it before the first answer."""

from __future__ import annotations

import re
from pathlib import Path

import mllm_compile.server

PAGE = (Path(mllm_compile.server.__file__).parent / "page.html").read_text(encoding="utf-8")


def test_no_heading_is_empty_nor_is_above_nothing():
    headings = re.findall(r"<h[1-6][^>]*>(.*?)</h[1-6]>", PAGE, re.DOTALL)
    assert len(headings) >= 4 and all(heading.strip(" …") for heading in headings)
    assert PAGE.count("<h1") == 1
    sections = re.split(r"<h[1-6][^>]*>.*?</h[1-6]>", PAGE.partition("<script>")[0])[1:]
    assert all(re.sub(r"<[^>]+>|\s", "", section) for section in sections)


def test_a_request_names_the_model_that_the_server_told_and_not_what_the_heading_says():
    assert "const asked = { model, messages," in PAGE
    assert 'let messages = [], running = null, model = ""' in PAGE
