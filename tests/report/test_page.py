"""The page about a runtime: complete, escaped, self-contained, and it opens where one clicks."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from mllm_compile import Engine
from mllm_compile.artifact import open_artifact
from mllm_compile.cli import run
from mllm_compile.compile import load_or_compile
from mllm_compile.report import html_parts
from mllm_compile.report.page import _role, _runs, write_page
from mllm_compile.runtime.program import DecodeForm, Program, SamplingForms, SmallForm
from tests.report.chromium import Chromium, find_chromium
from tests.tiny_model import tiny_config


@pytest.fixture(scope="module")
def page(eager_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(eager_cache, folder / "cache")
    config = tiny_config(folder / "cache", compile={"backend": "eager"})
    Engine(config).close()  # so that there are measurements
    write_page(load_or_compile(config).artifact, folder / "report.html")
    return folder / "report.html"


def test_every_section_is_there_and_none_is_empty(page):
    html = page.read_text()
    sections = re.findall(r'<section id="(\w+)">(.*?)</section>', html, re.DOTALL)
    names = [name for name, _ in sections]
    assert names == ["overview", "pipeline", "pieces", "memory", "captured", "start", "compile", "key"]
    assert all(f'href="#{name}"' in html for name in names)
    assert all(len(body) > 100 for _, body in sections)


def test_it_shows_passes_pieces_memory_and_times(page):
    html = page.read_text()
    for text in (
        "pack_projections",
        "matches",
        "after layer",
        "KV cache",
        "import torch",
        "self-check",
        "model config",
    ):
        assert text in html, text


def test_pieces_that_no_step_calls_have_a_role():
    few, many = DecodeForm(64, "few"), DecodeForm(None, "many")
    program = Program(
        steps=(),
        layers=(),
        weights=(),
        output="logits",
        small_forms={"p": (SmallForm("p_one", 0, 1, 1), SmallForm("p_few", 0, 1, 16))},
        decode_attention={"a": (few, many), "b": (few, many), "c": (DecodeForm(None, "d"),)},
        sampling=SamplingForms("bfloat16", "greedy", "logits", "scores"),
    )
    roles = {piece: _role(program, piece) for piece in program.piece_ids()}
    assert roles == {
        "p_one": "in place of another for one token",
        "p_few": "in place of another for up to 16 tokens",
        "few": "decode attention of 2 layers",
        "many": "decode attention of 2 layers",
        "d": "decode attention of 1 layer",
        "greedy": "takes the most probable tokens",
        "logits": "draws tokens",
        "scores": "draws tokens",
    }


def test_it_needs_nothing_from_elsewhere(page):
    html = page.read_text()
    assert "<script" not in html
    assert not re.findall(r"(?:src|href)=\"(?!#)", html)
    assert "default-src 'none'" in html


def test_what_comes_from_a_runtime_is_escaped():
    evil = "<img src=x onerror=alert(1)>"
    shown = [
        html_parts.table([evil], [[evil]]),
        html_parts.folded(evil, evil, evil, ""),
        html_parts.source(evil),
        html_parts.diff([f"+{evil}", f"-{evil}", f"@{evil}", evil], 1),
        html_parts.chips([evil]),
        html_parts.figures([(evil, evil)]),
        html_parts.stacked_bar([(evil, 1.0, evil)]),
        html_parts.gantt([(evil, 0.0, 1.0, 0)]),
    ]
    assert not [text for text in shown if "<img" in text]


def test_layers_in_a_row_are_shown_as_a_range():
    places = ["before layer 0", "after layer 0", "after layer 1", "after layer 2", "after layer 5"]
    assert _runs(places) == ["before layer 0", "after layers 0–2", "after layer 5"]


def test_the_command_writes_the_page_from_a_folder(page, tmp_path, capsys):
    (folder,) = (page.parent / "cache" / "runtimes").iterdir()
    assert run(["inspect", str(folder), "--html", str(tmp_path / "r.html")]) == 0
    assert capsys.readouterr().out == f"page: {tmp_path / 'r.html'}\n"
    assert (tmp_path / "r.html").read_text() == page.read_text()
    assert run(["inspect", str(folder)]) == 2
    assert "Add --html FILE for a page" in capsys.readouterr().err


def test_a_runtime_that_nothing_was_measured_with_says_so(page, tmp_path):
    (folder,) = (page.parent / "cache" / "runtimes").iterdir()
    shutil.copytree(folder, tmp_path / "runtime")
    shutil.rmtree(tmp_path / "runtime" / "measured")
    write_page(open_artifact(tmp_path / "runtime"), tmp_path / "r.html")
    assert "Nothing was measured yet: start an engine" in (tmp_path / "r.html").read_text()


@pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium")
def test_a_click_opens_and_closes_every_line(page, tmp_path):
    """MLLM_SCREENSHOTS names a folder that keeps the pictures."""
    pictures = Path(os.environ.get("MLLM_SCREENSHOTS", tmp_path))
    pictures.mkdir(parents=True, exist_ok=True)
    with Chromium(tmp_path / "profile") as browser:
        browser.open(page)
        browser.screenshot(pictures / "closed.png")
        count = browser.evaluate("document.querySelectorAll('summary').length")
        assert count > 8
        for index in range(count):
            is_open = f"document.querySelectorAll('details')[{index}].open"
            assert not browser.evaluate(is_open)
            browser.click("summary", index)
            assert browser.evaluate(is_open), index
            if index == 2:
                browser.screenshot(pictures / "diff.png")
            browser.click("summary", index)
            assert not browser.evaluate(is_open), index
        browser.click("nav a", 5)
        assert browser.evaluate("location.hash") == "#start"
        width = browser.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1], "nothing is wider than the window"
        assert browser.errors == []
    assert (pictures / "closed.png").read_bytes()[:4] == b"\x89PNG"
