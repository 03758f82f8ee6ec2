"""Repeats, turns and their figures, with times that are made up."""

from __future__ import annotations

import argparse
import json
from itertools import count

import pytest

from mllm_compile.bench.timing.clock import Stopwatch, wall_seconds
from mllm_compile.bench.timing.record import append_record, machine_line
from mllm_compile.bench.timing.rounds import by_turns, quantile, repeated, spread, until_stable, with_range


def test_warm_ups_are_run_and_do_not_count():
    times = iter([9.0, 8.0, 1.0, 2.0, 3.0])
    assert repeated(lambda: next(times), 3, warm_ups=2) == [1.0, 2.0, 3.0]
    assert next(times, None) is None


@pytest.mark.parametrize(("swapped", "order"), [(False, "ababab"), (True, "abbaab")])
def test_ways_take_turns(swapped, order):
    seen, ticks = [], count()

    def take(way):
        seen.append(way)
        return float(next(ticks))

    times = by_turns({way: lambda way=way: take(way) for way in "ab"}, 2, warm_ups=1, swapped=swapped)
    assert "".join(seen) == order
    places = {way: [index for index, one in enumerate(order) if one == way and index >= 2] for way in "ab"}
    assert times == places


def test_times_that_agree_are_not_taken_again():
    taken = count()
    assert len(until_stable(lambda: 1.0 + 0.001 * (next(taken) % 2), least=4, most=40)) == 4


def test_times_are_taken_until_their_halves_agree():
    times = iter([4.0, 3.0, 2.0, 1.0] + [1.0] * 100)
    found = until_stable(lambda: next(times), least=4, most=100)
    assert found == [4.0, 3.0, 2.0] + [1.0] * (len(found) - 3)
    assert len(found) == 14, "seven of each half, of which the earlier ones have a median of 1 too"


def test_times_that_never_agree_end_all_the_same():
    ticks = count(1)
    assert len(until_stable(lambda: float(next(ticks) ** 2), least=3, most=9)) == 9


def test_the_spread_is_of_the_median():
    assert spread([1.0, 2.0, 4.0]) == 1.5
    assert spread([1.0, 2.0, 4.0], median=3.0) == 1.0
    assert spread([]) == 0.0


def test_a_quantile_is_one_of_the_times():
    times = [float(number) for number in range(200, 0, -1)]
    assert [quantile(times, share) for share in (0.5, 0.99, 1.0)] == [100.0, 198.0, 200.0]
    assert quantile([7.0], 0.01) == 7.0


def test_a_figure_is_shown_with_its_least_and_most():
    assert with_range([3.0, 1.0, 2.0], 1, " ms") == "2.0 ms (1.0 to 3.0)"


def test_the_wall_clock_counts_the_work():
    watch = Stopwatch()
    seen = []
    seconds = wall_seconds(lambda: seen.append(1))
    assert seen == [1]
    assert 0 <= seconds <= watch.seconds


def test_a_record_is_a_line_with_commit_machine_and_settings(tmp_path):
    path = tmp_path / "figures.jsonl"
    for us in (1.5, 2.5):
        append_record(path, "What is timed.\n\nMore.", argparse.Namespace(json=path, tokens=[1, 8]), {"us": us}, "cpu")
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["script"], first["figures"], second["figures"]) == ("What is timed.", {"us": 1.5}, {"us": 2.5})
    assert first["settings"] == {"json": str(path), "tokens": [1, 8]}
    assert {"commit", "device", "torch", "date"} <= set(first["environment"])
    assert machine_line("cpu").startswith(first["environment"]["device"])
    assert machine_line("cpu").endswith(f"commit {first['environment']['commit']}")
