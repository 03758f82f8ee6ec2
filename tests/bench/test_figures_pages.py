import json
import re

import pytest

from benchmarks.figures import kept, pages
from benchmarks.figures.chart import CHART
from benchmarks.figures.kept import ages, read_result
from benchmarks.figures.pages import PAGES, TABLES, headline_chart, with_tables
from benchmarks.figures.shapes import RESULTS
from mllm_compile.bench.adapters.mllm_engine import settings_of
from mllm_compile.errors import ConfigError
from tests.config.resolving import resolved


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_match_the_kept_results(path):
    page = path.read_text(encoding="utf-8")
    assert with_tables(page) == page, f"{path.name} is old: make figures-pages"


def test_the_pages_have_every_table():
    named = [name for page in PAGES for name in re.findall(r"<!-- table: (\w+) -->", page.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(TABLES)


def test_the_chart_is_of_the_kept_results():
    assert CHART.read_text(encoding="utf-8") == headline_chart(), "the chart is old: make figures-pages"


def test_the_chart_has_each_figure_of_the_headline_and_its_limit():
    picture = headline_chart()
    figures = re.findall(r"\*\*([\d.]+(?: s)?)\*\*", TABLES["headline"]())
    assert len(figures) >= 6
    assert re.findall(r">([\d.]+(?: s)?)</text>", picture) == figures
    limits = re.findall(r"^\| .* \| ([\d.]+) \|$", TABLES["headline"](), re.MULTILINE)
    assert picture.count('class="limit"') == len(limits) >= 4
    assert "prefers-color-scheme: dark" in picture


def test_no_result_names_a_folder_of_a_machine(tmp_path, monkeypatch):
    for path in RESULTS.glob("*.json"):
        assert '"/' not in path.read_text(encoding="utf-8"), path
    monkeypatch.chdir(tmp_path)
    config = resolved(
        model={"path": str(tmp_path / "shapes" / "m")}, lora={"max_adapters": 1, "adapters": {"a": "/somewhere/else"}}
    )
    settings = settings_of(config)
    assert settings["model"]["source"] == "shapes/m"
    assert '"/' not in json.dumps(settings)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A copy of this engine's kept results, which a test may change."""
    for path in set(RESULTS.glob("*.json")) - set(RESULTS.glob("*-vllm.json")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    monkeypatch.setattr(kept, "RESULTS", tmp_path)
    return tmp_path


def change(path, **values):
    data = json.loads(path.read_text())
    data["environment"] |= {name: value for name, value in values.items() if value is not None}
    for name in (name for name, value in values.items() if value is None):
        del data["environment"][name]
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("commit", [None, "unknown", "0123456789ab+changes"])
def test_a_result_without_a_commit_that_can_be_checked_out_is_refused(results, commit):
    path = results / "h200-qwen-8b-shape-mllm.json"
    change(path, commit=commit)
    with pytest.raises(ConfigError, match=r"h200-qwen-8b-shape-mllm\.json is of the commit .* measure again"):
        read_result(path)
    with pytest.raises(ConfigError):
        TABLES["headline"]()


def test_the_headline_has_the_commit_of_its_figures(results):
    for path in results.glob("h200-*-mllm.json"):
        change(path, commit="feedbeef0123", date="2027-01-02 03:04 UTC")
    assert "Measured: feedbeef, 2027-01-02.\n" in TABLES["headline"]()


def test_another_engine_has_its_version_and_says_which_figures_were_taken_once(results):
    data = json.loads((results / "h200-qwen-8b-shape-mllm.json").read_text())
    data["environment"]["commit"] = "feedbeef0123"
    (run,) = data["runs"]
    run |= {"engine": "vllm", "version": "0.26.0"}
    tpot, tpot_of_8 = (line for line in run["measurements"] if line["name"] == "tpot" and line["batch"] in (1, 8))
    tpot |= {"samples": [5.25], "median": 5.25}
    (results / "h200-qwen-8b-shape-vllm.json").write_text(json.dumps(data))
    assert f"| 5.25 (once) | {tpot['limit']:.2f} |" in TABLES["headline"]()
    assert "vllm 0.26.0 by feedbeef" in TABLES["headline"]()
    (row,) = (line for line in TABLES["work"]().splitlines() if line.startswith("| vLLM"))
    assert row.startswith(f"| vLLM 0.26.0 | 5.25 | {tpot_of_8['median']:.2f} ± ")


def test_a_figure_that_varies_by_more_than_the_tables_show_is_left_out_alone(results):
    path = results / "h200-qwen-30b-a3b-shape-mllm.json"
    data = json.loads(path.read_text())
    before = row_of("work", "Qwen3-30B-A3B")
    line = line_of(data, "tpot", 8)
    line["samples"][0] = line["median"] * (1 + 1.1 * kept.MOST_SHOWN_SPREAD)
    path.write_text(json.dumps(data))
    assert row_of("work", "Qwen3-30B-A3B") == [*before[:2], "", *before[3:]]
    assert TABLES["experts"]().splitlines()[2].split(" | ")[2] == ""


def test_what_a_later_commit_measured_fills_what_the_whole_lacks_and_has_its_own_commit(results):
    path = results / "h200-qwen-8b-shape-mllm.json"
    data = json.loads(path.read_text())
    (run,) = data["runs"]
    lines = run["measurements"]
    run["measurements"] = [line for line in lines if line["name"] != "prefill32x2048"]
    path.write_text(json.dumps(data))
    steps, (*prompts, _) = row_of("work", "Qwen3-8B"), row_of("prompts", "Qwen3-8B")
    assert prompts[-1] == ""
    source = f"Qwen3-8B: {data['environment']['commit'][:8]}, {data['environment']['date'][:10]}"
    run["measurements"] = [line for line in lines if line["name"] == "prefill32x2048"]
    run["measurements"] += [line_of({"runs": [{"measurements": lines}]}, "start cold", None) | {"median": 1.0}]
    data["environment"] |= {"commit": "feedbeef0123", "date": "2027-01-02 03:04 UTC"}
    (results / "h200-qwen-8b-shape-mllm-prompts.json").write_text(json.dumps(data))
    assert row_of("work", "Qwen3-8B") == steps, "the whole result's own figures stay"
    assert row_of("prompts", "Qwen3-8B")[:-2] == prompts[:-1]
    assert row_of("prompts", "Qwen3-8B")[-2] != ""
    assert f"{source} (prefill32x2048: feedbeef, 2027-01-02)" in TABLES["work"]()


def line_of(data, name: str, batch: int | None):
    """The measurement of a result."""
    (line,) = (line for line in data["runs"][0]["measurements"] if (line["name"], line["batch"]) == (name, batch))
    return line


def row_of(table: str, title: str) -> list[str]:
    """The cells of a shape's own row."""
    (row,) = (line for line in TABLES[table]().splitlines() if line.startswith(f"| **{title}** |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_age_of_each_result_is_told(results):
    change(results / "h200-qwen-8b-shape-mllm.json", date="2020-01-02 03:04 UTC")
    told = {line.partition(":")[0]: line for line in ages()}
    assert told.keys() == {path.name for path in results.glob("*.json")}
    assert int(re.search(r"(\d+) days and ", told["h200-qwen-8b-shape-mllm.json"])[1]) > 2000
