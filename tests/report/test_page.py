"""The page about a runtime: complete, escaped, self-contained, and it opens where one clicks."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from mllm_compile import Engine
from mllm_compile.bench.limits.model_figures import model_figures
from mllm_compile.bench.measure.setting import RuntimePlace
from mllm_compile.cli import run
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.report import html_parts
from mllm_compile.report.figures import format_seconds
from mllm_compile.report.page import write_page
from mllm_compile.report.speed import decode_step, loads
from mllm_compile.store.artifact import open_artifact
from mllm_compile.store.measurements import device_key, read_measured
from mllm_compile.store.opened import CompiledRuntime
from tests.report.chromium import Chromium, find_chromium
from tests.tiny_model import TINY, tiny_config


@pytest.fixture(scope="module")
def runtime(eager_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> CompiledRuntime:
    """Of the embedded model; an engine was started from it, and the device's ceilings are known."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(eager_cache, folder / "cache")
    config = tiny_config(folder / "cache", compile={"backend": "eager"})
    Engine(config).close()
    runtime = load_or_compile(config)
    remember(runtime, ceilings={"read_bytes_s": 1e10, "flops_s": 1e11, "device": "a <CPU>", "date": "today"})
    return runtime


@pytest.fixture(scope="module")
def page(runtime: CompiledRuntime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("html") / "report.html"
    write_page(runtime.artifact, runtime.config, path)
    return path


def remember(runtime: CompiledRuntime, **values: object) -> None:
    """As a benchmark leaves it beside the runtime."""
    RuntimePlace(str(runtime.folder), device_key("cpu")).remember(values)


def page_of(of: CompiledRuntime, path: Path, **sections: dict) -> str:
    """The page when the runtime is served with other keys."""
    config = tiny_config(Path(of.config.cache.dir), compile={"backend": "eager"}, **sections)
    served = load_or_compile(config)
    assert served.folder == of.folder
    write_page(served.artifact, served.config, path)
    return path.read_text()


def test_every_section_is_there_and_none_is_empty(page):
    html = page.read_text()
    shown = re.findall(r'<(?:section|details class="section") id="(\w+)".*?>(.*?)</h2>', html, re.DOTALL)
    names = [name for name, _ in shown]
    assert names == ["verdict", "model", "memory", "passes", "pieces", "graphs", "start", "compile", "key"]
    assert all(f'href="#{name}"' in html for name in names)


def test_it_shows_passes_pieces_memory_and_times(page):
    html = page.read_text()
    for text in (
        "pack_projections",
        "matches",
        "layers 0–2: after attention",
        "o_proj, mlp, qkv",
        "KV cache",
        "import torch",
        "self-check",
        "model config",
        "a &lt;CPU&gt;",
    ):
        assert text in html, text


def test_passes_that_found_nothing_are_told_in_one_line(page, runtime):
    html = page.read_text()
    idle = [report["name"] for report in runtime.artifact.manifest.about["passes"] if not report["matches"]]
    assert idle and f"Found nothing to do: {', '.join(idle)}." in html
    assert not [name for name in idle if f"<b>{name}</b>" in html]


def test_no_line_of_a_graph_is_a_signature_of_hundreds_of_characters(runtime):
    for path in (runtime.folder / "graphs").iterdir():
        signatures = [line for line in path.read_text().splitlines() if line.startswith("def forward")]
        assert signatures and set(signatures) == {"def forward("}


def test_the_memory_is_the_configs_and_not_the_last_starts(runtime, tmp_path):
    length, requests = runtime.config.runtime.max_model_len, runtime.config.runtime.max_running_requests
    other = {"max_model_len": 256, "max_running_requests": 3}
    Engine(tiny_config(Path(runtime.config.cache.dir), compile={"backend": "eager"}, runtime=other)).close()
    write_page(runtime.artifact, runtime.config, tmp_path / "mine.html")
    mine = (tmp_path / "mine.html").read_text()
    assert f"<b>{length * requests:,} tokens</b>" in mine and "Measured by the last start with this config" in mine
    html = page_of(runtime, tmp_path / "other.html", runtime=other)
    assert f"<b>{256 * 3:,} tokens</b>" in html and "Measured by the last start with this config" in html


def test_a_config_that_was_never_started_says_what_it_asks_for(runtime, tmp_path):
    measured = memory_of(write(runtime, tmp_path / "m.html"))
    asked = page_of(runtime, tmp_path / "r.html", runtime={"max_running_requests": 5})
    assert f"<b>{512 * 5:,} tokens</b>" in asked and "No engine was started with this config here" in asked
    shutil.copytree(runtime.folder, tmp_path / "runtime")
    shutil.rmtree(tmp_path / "runtime" / "measured")
    write_page(open_artifact(tmp_path / "runtime"), runtime.config, tmp_path / "u.html")
    unmeasured = (tmp_path / "u.html").read_text()
    assert "No engine was started with this config here" in unmeasured
    assert "How fast the device reads was not measured" in unmeasured
    assert memory_of(unmeasured) == measured, "the model of the memory is right where there is enough of it"


def write(runtime: CompiledRuntime, path: Path) -> str:
    write_page(runtime.artifact, runtime.config, path)
    return path.read_text()


def memory_of(html: str) -> list[str]:
    """weights …, KV cache …: the bar's own description."""
    return re.findall(r'aria-label="memory: ([^"]+)"', html)


def test_the_parts_bytes_match_the_models_step(runtime):
    figures = model_figures(TINY, "float32")
    step = decode_step(runtime.artifact, runtime.config, None)
    assert step.weight_bytes == figures.weight_bytes(1)
    assert step.num_bytes == figures.weight_bytes(1) + step.context * figures.kv_bytes_per_token
    load = next(load for load in loads(runtime.artifact, runtime.config, None) if load.batch == 4)
    assert load.num_bytes == figures.weight_bytes(4) + 4 * load.context * figures.kv_bytes_per_token


def test_every_part_of_the_step_is_in_a_place_of_its_own(page):
    table = page.read_text().partition("Every part of the step, in order")[2].partition("</table>")[0]
    places = re.findall(r"<tr>\s*<t[hd][^>]*>(.*?)</t[hd]>", table, re.DOTALL)[1:]
    assert len(places) == len(set(places)) == 10
    assert places[0] == "before layer 0" and places[-1] == "logits"


def test_a_measured_step_is_shown_as_measured_and_another_as_modelled(runtime, tmp_path):
    shutil.copytree(runtime.folder, tmp_path / "runtime")
    copy = replace(runtime, artifact=open_artifact(tmp_path / "runtime"))
    modelled = write(copy, tmp_path / "r.html")
    assert "modelled, the least time" in modelled and "measured, a step" not in modelled
    parts = [[index, 100.0] for index in range(len(copy.artifact.program.steps))]
    step = {"batch": 2, "context": 100, "wall_us": 4000.0, "parts": parts, "other_us": 50.0, "with_graphs": False}
    remember(copy, **{"decode steps": [{**step, "date": "yesterday"}]})
    remember(copy, latency={"input_len": 64, "output_len": 8, "date": "today", "tpot_ms": [[1, 2.5]]})
    html = write(copy, tmp_path / "m.html")
    assert "A decode step of 2 requests at 100 tokens takes 4.00 ms" in html
    assert "times measured by bench roofline (yesterday)" in html and "modelled, the least time" not in html
    assert "2.50 ms" in html and "68 tokens each" in html
    outside = 4000 - 100 * len(parts)
    assert "outside the model<small>inputs, choice of tokens, host</small>" in html
    assert format_seconds(outside / 1e6) in html


def test_the_headline_is_what_the_table_says_where_both_were_measured(runtime, tmp_path):
    """`bench roofline` slows the step that it takes apart; `bench latency` does not."""
    shutil.copytree(runtime.folder, tmp_path / "runtime")
    copy = replace(runtime, artifact=open_artifact(tmp_path / "runtime"))
    parts = [[index, 100.0] for index in range(len(copy.artifact.program.steps))]
    step = {"batch": 1, "context": 100, "wall_us": 68_100.0, "parts": parts, "other_us": 50.0, "date": "yesterday"}
    remember(copy, **{"decode steps": [step]})
    remember(copy, latency={"input_len": 64, "output_len": 8, "date": "today", "tpot_ms": [[1, 18.8]]})
    html = write(copy, tmp_path / "r.html")
    verdict = html.partition('id="verdict"')[2].partition("<table")[0]
    assert "A decode step of 1 request at 68 tokens takes 18.8 ms" in verdict
    assert (
        "<dd>18.8 ms</dd><dt>measured, a step</dt>" in verdict and "<dd>53.2</dd><dt>tokens/s, measured</dt>" in verdict
    )
    assert "at 100 tokens takes 68.1 ms under a profiler, and most of that is lost in" in verdict
    assert "times measured by bench roofline (yesterday) in a step of 68.1 ms." in html


@pytest.mark.parametrize("count", [1, 2, 3, 13, 28, 36, 37, 64, 126])
@pytest.mark.parametrize("ends", [["logits"], ["logits", "other"], ["other"], []])
def test_the_axis_of_layers_ends_with_the_last_one(count, ends):
    columns = [(name, [("", 1.0, "red")]) for name in ["", *map(str, range(count)), *ends]]
    ticks = re.findall(r"<em>(.*?)</em>", html_parts.strip(columns, ""))
    shown = [int(tick) for tick in ticks if tick.isdigit()]
    assert shown[-1] == count - 1
    assert [tick for tick in ticks if tick and not tick.isdigit()] == ends
    assert len(shown) <= 13 and (count > 12 or len(shown) == count)
    assert count <= 12 or all(after - before > 1 for before, after in pairwise(shown))


def test_a_narrow_screen_has_the_name_of_each_cell_beside_it():
    html = html_parts.table(["part", "bytes", "of <it>"], [["a", "1", "2"]])
    assert '<td data-name="bytes">1</td><td data-name="of &lt;it&gt;">2</td>' in html
    page = Path(html_parts.__file__).with_name("page.html").read_text()
    narrow = page.partition("@media (max-width: 640px)")[2]
    assert "td::before { content: attr(data-name);" in narrow and "td { display: block; }" in narrow


def test_it_tells_the_rate_of_fp8_where_that_was_measured(runtime, page, tmp_path):
    shutil.copytree(runtime.folder, tmp_path / "runtime")
    copy = replace(runtime, artifact=open_artifact(tmp_path / "runtime"))
    rates = {"read_bytes_s": 1e10, "flops_s": 1e11, "fp8_flops_s": 2e11}
    remember(copy, ceilings={**rates, "device": "a GPU", "date": "today"})
    assert "at 10.0 GB/s, or 100 GFLOP/s (200 GFLOP/s in fp8) where that takes longer" in write(
        copy, tmp_path / "r.html"
    )
    assert "in fp8)" not in page.read_text()


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
        html_parts.stacked_bar([(evil, 1.0, evil)], evil),
        html_parts.gantt([(evil, 0.0, 1.0, 0)], evil),
        html_parts.strip([(evil, [(evil, 1.0, "red")])], evil),
        html_parts.swatch("red", evil, evil),
        html_parts.share_bar(0.5, evil),
        html_parts.code(evil),
        html_parts.note(evil),
    ]
    assert not [text for text in shown if "<img" in text]


def test_the_command_writes_the_page_from_a_folder_and_measures_the_device_once(runtime, tmp_path, capsys):
    shutil.copytree(runtime.folder, tmp_path / "runtime")
    shutil.rmtree(tmp_path / "runtime" / "measured")
    assert run(["inspect", str(tmp_path / "runtime"), "--html", str(tmp_path / "r.html")]) == 0
    assert capsys.readouterr().out == f"page: {tmp_path / 'r.html'}\n"
    ceilings = read_measured(tmp_path / "runtime" / "measured", device_key("cpu"))["ceilings"]
    assert ceilings["read_bytes_s"] > 0 and ceilings["device"] in (tmp_path / "r.html").read_text()
    assert run(["inspect", str(tmp_path / "runtime"), "--html", str(tmp_path / "r.html")]) == 0
    assert read_measured(tmp_path / "runtime" / "measured", device_key("cpu"))["ceilings"] == ceilings
    assert run(["inspect", str(runtime.folder)]) == 2
    assert "Add --html FILE for a page" in capsys.readouterr().err


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
            line = is_open.removesuffix(".open")
            browser.evaluate(f"{line}.parentElement.closest('details')?.setAttribute('open', '')")
            assert not browser.evaluate(is_open)
            browser.click("summary", index)
            assert browser.evaluate(is_open), index
            browser.click("summary", index)
            assert not browser.evaluate(is_open), index
        browser.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
        browser.screenshot(pictures / "open.png")
        browser.click("nav a", 6)
        assert browser.evaluate("location.hash") == "#start"
        for width in (1240, 390):
            browser.resize(width)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, "wider than the window"
            browser.screenshot(pictures / f"{width}.png")
        assert browser.errors == []
    assert (pictures / "closed.png").read_bytes()[:4] == b"\x89PNG"
