"""Pictures of latency: every time and share is written out, in units, for one batch size and for many."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.measure.results import Measurement
from mllm_compile.bench.serving.client import Seen
from mllm_compile.bench.serving.load import ServeResult, ServeWork, figures
from mllm_compile.bench.show.bars_plot import draw_bars, plot_bars
from mllm_compile.bench.show.plot import _apart, draw_latency, plot_latency
from mllm_compile.bench.show.rates_plot import draw_rates, plot_rates
from tests.bench.result_cases import result, run, tpot

pytest.importorskip("matplotlib")
PREFILL = Measurement.of("prefill", "ms", [9.0, 10.0], batch=1).with_limit(5.0)
RESULT = result(run("mllm", tpot(1, 4.0, 4.2, limit=3.0), tpot(8, 60.0, limit=3.3), PREFILL), run("vllm", tpot(1, 5.0)))


def texts(figure: Any) -> list[str]:
    """All that is written in a picture, once it is drawn."""
    from matplotlib.text import Text

    figure.canvas.draw()
    found = [text.get_text() for text in figure.findobj(Text)]
    ticks = [text.get_text() for axes in figure.axes for text in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    return [text for text in (*found, *ticks) if text]


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    plot_latency(RESULT, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"plot\.nosuch"):
        plot_latency(RESULT, tmp_path / "plot.nosuch")


def test_times_shares_units_and_the_title_are_written_and_no_tick_is_a_power() -> None:
    written = texts(draw_latency(RESULT))
    assert "m on a GPU" in written, "model and device"
    assert "Time per output token, ms" in written
    assert {"4.10", "60.00", "5.00"} <= set(written), "every median"
    assert {"73 %", "6 %"} <= set(written), "3.0 of 4.1, 3.3 of 60"
    assert "60 %" in written, "the other engine's share of the same limit, 3 of 5"
    assert not [text for text in written if re.search(r"\\times|\^|10\^|×", text)]
    assert {"5", "10", "20", "50"} <= set(written), "ticks are plain numbers"


def test_the_title_says_the_lengths_of_the_work() -> None:
    shaped = replace(RESULT, work={"input_len": 512, "output_len": 128})
    assert "m on a GPU: prompts of 512 tokens, answers of 128" in texts(draw_latency(shaped))


def test_one_batch_size_is_bars_with_what_they_say() -> None:
    one = result(run("mllm", tpot(4, 4.0, limit=3.0)), run("vllm", tpot(4, 6.0)))
    written = texts(draw_latency(one))
    assert "Time per output token, 4 requests, ms" in written
    assert "4.00 ms, 75% of the limit" in written
    assert "6.00 ms, 50% of the limit" in written


def test_values_of_many_batch_sizes_do_not_overlap() -> None:
    sizes = list(range(1, 257, 4))
    kept = _apart(sizes)
    assert kept[0] == 1 and kept[-1] == sizes[-1] and 5 <= len(kept) <= 10
    assert all(later / earlier > 1.5 for earlier, later in pairwise(kept))
    many = result(run("mllm", *(tpot(size, float(size), limit=0.5 * size) for size in sizes)))
    assert sum(text == "50 %" for text in texts(draw_latency(many))) == len(kept)


def test_a_server_under_load_is_drawn_by_its_rates(tmp_path: Path) -> None:
    work = ServeWork(rates=(4.0, math.inf), requests=2, input_tokens=16)
    seen = [Seen(0.0, [0.02 * (one + 1), 0.03 * (one + 1)], 0.1, output_tokens=2) for one in range(2)]
    lost = Seen(0.0, [], 0.1, error="429 queue full")
    rates = (figures(4.0, 1.0, seen, work), figures(math.inf, 1.0, [lost], work))
    told = ServeResult("http://h:1", "tiny", asdict(work), rates)
    plot_rates(told, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    figure = draw_rates(told)
    first, gaps, tokens = figure.axes
    assert [line.get_ydata()[0] for line in first.lines] == pytest.approx([30.0, 38.0, 39.8])
    assert [line.get_ydata()[0] for line in gaps.lines] == pytest.approx([15.0, 19.0, 19.9])
    assert tokens.lines[0].get_ydata()[0] == 4.0
    assert all(math.isnan(line.get_ydata()[1]) for axes in figure.axes for line in axes.lines)
    written = texts(figure)
    assert {"4/s", "all at once", "p99", "tiny at http://h:1: 16 tokens in, 128 tokens out"} <= set(written)
    assert not [text for text in written if "10^" in text]
    with pytest.raises(BenchmarkError, match=r"rates\.nosuch"):
        plot_rates(told, tmp_path / "rates.nosuch")


def test_bars_show_every_work_of_every_engine_with_a_panel_a_unit(tmp_path: Path) -> None:
    rate = Measurement.of("prefill of 50", "tok/s in", [1234.0], batch=4).with_limit(2000.0)
    long = result(run("mllm", tpot(1, 4.0, limit=3.0), rate), run("vllm", tpot(1, 5.0)), command="long")
    figure = draw_bars(long)
    written = texts(figure)
    assert len(figure.axes) == 2
    assert {"tpot b=1", "prefill of 50 b=4", "mllm", "vllm", " 4.00", " 5.00", " 1,234"} <= set(written)
    assert "m: long on a GPU" in written
    assert {text.split(" (")[0] for text in written if "black: limit" in text} == {"ms", "tok/s in"}
    plot_bars(long, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BenchmarkError, match="cannot be written"):
        plot_bars(long, tmp_path / "no" / "p.png")
