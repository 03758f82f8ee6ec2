"""The pages of models are what is seen: a sample of it, another one for each commit; all of it with `make test-all`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.model.logits_server import LogitsServer, ServingError
from tests.model.models_page import (
    SUMMARY,
    TABLES,
    WOULD_TAKE,
    architectures_of,
    differences,
    render_models_page,
    render_summary,
    rows_of,
    versions_of,
)
from tests.model.models_record import Record, SeenOnGpu
from tests.model.served_logits import TOLERANCE, compare_served_logits
from tests.model.survey import DENSE, OF_EXPERTS, Outcome, Trier, every_job, job, survey
from tests.model.tiny_configs import causal_lm_types, save_tiny_model, tiny_config
from tests.sample import how_to_repeat, sample_of, slow_but_a_sample

PAGE = TABLES.read_text(encoding="utf-8")
REMEDY = "regenerate the pages: python -m tests.model.survey --write"
AS_TRACED = [job(one, "eager") for one in architectures_of(PAGE, "eager")]
CHOSEN = [one.job for one in Record.read(TABLES).outcomes if one.backend == "gpu"]
SERVED_BY_INDUCTOR = [
    job(one, "inductor")
    for one in architectures_of(PAGE, "inductor")
    if rows_of(PAGE)[one, "inductor"].endswith("tried")
]

SERVED = {
    "opt": "full",  # sizes as one value behind the last attention
    "phi3": "window 8 on 4 of 4",  # the window is in the mask alone
    "gemma3": "window 8 on 2 of 4",  # a vision tower beside the text model
    "minicpm3": "values of another width",  # latent attention
    "bart": "full",  # positions that it counts itself
    "gpt_neo": "window 8 on 2 of 4",  # attention that it writes out, windows in a table of its own
    "bloom": "ALiBi",
    "big_bird": "full",  # kinds of tokens in a table as long as its longest text
    "llama4_text": "chunks of 8 on 2 of 4",
    "trocr": "full",  # logits of every token
    "longcat_flash": "values of another width",  # its own loop over experts, some of them empty
    "mamba2": "none; causal_conv + ssd",  # no attention at all
    "zamba": "full; causal_conv + selective_scan",  # a scan a head
    "minimax": "window 8 on 2 of 2; ssd",  # a recurrence of its own code
}
REFUSED = {
    "xlm": "its attention is not causal",  # written out, in both directions
    "deepseek_v4": "layers of kind compressed_sparse_attention, ",  # attention over compressed keys
}


@pytest.fixture(scope="module")
def trier() -> Iterator[Trier]:
    with closing(Trier()) as trier:
        yield trier


@pytest.fixture
def versions_of_the_page() -> None:
    import torch
    import transformers

    here = (transformers.__version__, torch.__version__.partition("+")[0])
    if here != versions_of(PAGE):
        pytest.skip(f"the page is of Transformers and torch {versions_of(PAGE)}, here are {here}")


def assert_page_says(outcomes: Sequence[Outcome], is_whole: bool = False) -> None:
    found = "\n".join(differences(PAGE, outcomes, is_whole))
    assert not found, f"docs/lab/models.md differs from what is seen; {REMEDY}\n{found}\n{how_to_repeat()}"


@pytest.mark.parametrize("architecture", slow_but_a_sample(SERVED, 3))
def test_an_architecture_is_served_as_transformers_computes_it(trier, architecture):
    outcome = trier.attempt(job(architecture, "eager"))
    assert (outcome.status, outcome.remark) == ("served", SERVED[architecture])
    assert outcome.error is not None
    assert outcome.error <= TOLERANCE


@pytest.mark.parametrize("architecture", REFUSED)
def test_an_architecture_that_would_be_wrong_is_refused(trier, architecture):
    outcome = trier.attempt(job(architecture, "eager"))
    assert outcome.status == "refused"
    assert REFUSED[architecture] in outcome.remark
    assert "\n" not in outcome.remark


def test_an_architecture_refused_for_its_other_layers_is_tried_with_attention_alone(trier, monkeypatch):
    serve = Trier._serve

    def refuse_others(self: Trier, architecture: str, folder: Path, dtype: str, backend: str) -> Outcome:
        kinds = json.loads((folder / "config.json").read_text(encoding="utf-8"))["layer_types"]
        if set(kinds) == {"full_attention"}:
            return serve(self, architecture, folder, dtype, backend)
        return Outcome(architecture, "refused", f"layers of kind {kinds[0]}", backend=backend)

    monkeypatch.setattr(Trier, "_serve", refuse_others)
    outcome = trier.attempt(job("minimax_m3_vl_text", "eager"))
    assert outcome.status == "refused" and "layers of kind minimax_m3_sparse" in outcome.remark
    assert outcome.attention_alone is not None and float(outcome.attention_alone) <= TOLERANCE


@pytest.mark.parametrize("one", sample_of(AS_TRACED, 2))
def test_the_page_is_right_about_a_sample(trier, versions_of_the_page, one):
    assert_page_says([trier.attempt(one)])


@pytest.mark.parametrize("one", sample_of(SERVED_BY_INDUCTOR, 1))
def test_the_page_is_right_about_one_that_inductor_compiles(trier, versions_of_the_page, one):
    assert_page_says([trier.attempt(one)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_experts_through_inductor_are_served_by_a_process_that_only_starts(tmp_path, dtype):
    save_tiny_model(tiny_config("qwen3_moe"), tmp_path / "model")
    with closing(LogitsServer()) as server:
        found = compare_served_logits(tmp_path / "model", tmp_path, tmp_path / "cache", server, dtype, "inductor")
    assert found.error <= found.limit


@pytest.mark.slow
def test_the_page_is_right_about_every_architecture_of_transformers(versions_of_the_page):
    outcomes = list(survey(every_job(causal_lm_types())))
    by_inductor = {one.architecture for one in outcomes if one.backend == "inductor" and one.status == "served"}
    assert len(by_inductor & set(DENSE)) >= 10
    assert len(by_inductor & set(OF_EXPERTS)) >= 20
    assert_page_says(outcomes, is_whole=True)


OUTCOMES = [
    Outcome("qwen3", "served", "window 8 on 2 of 4", 2e-6),
    Outcome("mixtral", "bfloat16", "ServingError: no such op", 2e-2),
    Outcome("qwen3", "served", "window 8 on 2 of 4", 3e-6, backend="inductor"),
    Outcome("mixtral", "bfloat16", "piece piece_12ab does not compile: no such op", 2e-2, backend="inductor"),
    Outcome(
        "bloom",
        "refused",
        "'bloom' models would not be served right: no attention goes through Transformers' attention interface;"
        " a | b. docs/models.md lists what is.",
    ),
    Outcome(
        "lfm2",
        "refused",
        "'lfm2' would not be served right: with two requests in one batch its logits are off by 1.1 from "
        "Transformers' (limit 0.001). Usual causes: several.",
        attention_alone="3.0e-06",
    ),
    Outcome("dbrx", "refused", "the model cannot be traced as one graph: it branches on data: u3 (dbrx.py:1)"),
    Outcome("blt", "not tried", "its sizes do not fit"),
]


def test_the_page_lists_every_outcome():
    page = render_models_page(Record.of_here(OUTCOMES))
    counts = "served in bfloat16 alone, 3 refused, 0 served wrong, 0 failed, 1 not tried."
    assert f"**Of 6: 1 served right** (worst error 2.0e-06), 1 {counts}" in page
    assert "| qwen3 | 2.0e-06 | 3.0e-06 | window 8 on 2 of 4 |" in page
    assert "| mixtral | 2.0e-02 | ServingError: no such op |" in page
    assert "| mixtral | a piece does not compile: no such op | 2.0e-02 |" in page
    assert "| bloom | no attention goes through Transformers' attention interface; a \\| b |" in page
    assert "### Other logits for two requests in one batch: 1\n" in page
    assert "| lfm2 | off by 1.1 |" in page
    assert "| lfm2 | 3.0e-06 |" in page
    assert "### For another reason: 1\n" in page
    assert "| dbrx | it branches on data: u3 (dbrx.py:1) |" in page


def test_the_summary_names_every_architecture_but_those_served():
    summary = render_summary(Record.of_here(OUTCOMES))
    assert "**Of 6: 1 served right**" in summary
    refused = "| refused | bloom, dbrx, lfm2 |\n| in bfloat16 alone | mixtral |\n"
    assert f"| **served** | all but these |\n{refused}" in summary
    assert "made | blt |\n" in summary


SEEN = SeenOnGpu(
    "qwen3",
    "with its heads",
    "FlashInfer",
    (0.012, 0.013),
    (0.02, 0.021),
    "NVIDIA H100",
    "2.11.0",
    "5.17.0",
    "2026-11-25",
)


def test_the_page_has_what_was_seen_on_a_gpu_and_through_inductor():
    chosen = [
        Outcome("qwen3", "served", "FlashInfer, heads of 96 as 128", backend="gpu"),
        Outcome("mixtral", "served", "torch: attention layer l: its head dim is 512, not one of 64", backend="gpu"),
    ]
    page = render_models_page(Record.of_here([*OUTCOMES, *chosen], [SEEN]))
    assert "| qwen3 | 2.0e-06 | 3.0e-06 | window 8 on 2 of 4 | FlashInfer, heads of 96 as 128 | yes |" in page
    figures = "| qwen3 with its heads | FlashInfer | 0.0120, 0.0130 | 0.0200, 0.0210"
    assert "Each was seen with torch 2.11.0 and Transformers 5.17.0." in page
    assert f"{figures} | H100, 2026-11-25 |" in page
    of_two = [SEEN, replace(SEEN, architecture="qwen2", torch="2.12.0")]
    assert f"{figures} | H100, torch 2.11.0, 2026-11-25 |" in render_models_page(Record.of_here(OUTCOMES, of_two))
    assert differences(page, OUTCOMES, is_whole=True) == []  # which are of a CPU


def test_every_architecture_with_heads_up_to_256_has_kernels_on_a_gpu():
    outcomes = Record.read(TABLES).outcomes
    served = {one.architecture for one in outcomes if (one.backend, one.status) == ("eager", "served")}
    chosen = {one.architecture: one.remark for one in outcomes if one.backend == "gpu"}
    assert served <= set(chosen)
    on_torch = {one: chosen[one] for one in served if not re.match("FlashInfer|own kernels|no attention", chosen[one])}
    widths = [re.search(r"its head dim is (\d+)", reason) for reason in on_torch.values()]
    assert all(width is not None and int(width[1]) > 256 for width in widths), on_torch


@pytest.mark.parametrize("one", sample_of(CHOSEN, 1))
def test_what_attends_on_a_gpu_is_chosen_as_the_page_says(trier, versions_of_the_page, one):
    outcomes = {outcome.job: outcome for outcome in Record.read(TABLES).outcomes}
    assert trier.attempt(one) == outcomes[one], how_to_repeat()


def test_a_record_takes_what_is_tried_anew_and_what_gpu_tests_have_noted(tmp_path):
    page = tmp_path / "models.md"
    Record.of_here(OUTCOMES).write(page)
    assert Record.read(page) == Record.of_here(sorted(OUTCOMES, key=lambda one: one.job))
    record = Record.read(page).with_outcomes([Outcome("bloom", "served", "ALiBi", 1e-6)])
    assert [one.status for one in record.outcomes if one.architecture == "bloom"] == ["served"]
    assert len(record.outcomes) == len(OUTCOMES)
    lines = [json.dumps(asdict(replace(SEEN, date=date))) for date in ("2026-11-24", "2026-11-25")]
    record = record.with_seen(lines)
    assert record.on_gpu == (SEEN,)
    record.write(page)
    assert Record.read(page).on_gpu == (SEEN,)
    with pytest.raises(ValueError, match=r"record is of Transformers 4\.0 .* try all architectures"):
        replace(record, transformers="4.0").with_outcomes(OUTCOMES)


def test_the_pages_of_models_are_their_record():
    record = Record.read(TABLES)
    assert render_models_page(record) == PAGE
    assert render_summary(record) == SUMMARY.read_text(encoding="utf-8")


def test_a_page_that_is_right_except_for_figures_differs_in_nothing():
    page = render_models_page(Record.of_here(OUTCOMES)).replace("2.0e-06", "4.1e-07").replace("off by 1.1", "off by 1")
    assert differences(page, OUTCOMES, is_whole=True) == []
    assert differences(page, OUTCOMES[:1]) == []


@pytest.mark.parametrize(
    ("said", "instead", "named"),
    [
        ("| qwen3 | 2.0e-06 | 3.0e-06 | window 8 on 2 of 4 |", "| qwen3 | 2.0e-06 | 3.0e-06 | full |", "qwen3 (eager)"),
        ("| qwen3 | 2.0e-06 | 3.0e-06 |", "| qwen3 | 2.0e-06 |  |", "qwen3 (inductor)"),
        ("| lfm2 | 3.0e-06 |", "", "lfm2 (alone)"),
        ("### Other logits for two requests in one batch: 1", "### For another reason: 1", "lfm2 (eager)"),
        ("## Served\n", "## Failed\n", "qwen3 (eager)"),
        ("| blt |", "| blt | sizes |\n| bltt |", "bltt (eager)"),
    ],
)
def test_a_page_that_says_something_else_is_told(said, instead, named):
    page = render_models_page(Record.of_here(OUTCOMES))
    assert said in page
    assert any(line.startswith(named) for line in differences(page.replace(said, instead), OUTCOMES, is_whole=True))


def test_what_architectures_would_take_is_said_of_those_that_are_not_served_and_is_no_row_of_theirs():
    record = Record.read(TABLES)
    served = {one.architecture for one in record.outcomes if (one.backend, one.status) == ("eager", "served")}
    others = {one.architecture for one in record.outcomes} - served
    assert set(WOULD_TAKE) <= others
    assert "for another reason" in rows_of(PAGE)["cpmant", "eager"].lower()


def test_the_versions_are_on_the_page():
    import torch
    import transformers

    assert versions_of(render_models_page(Record.of_here([]))) == (
        transformers.__version__,
        torch.__version__.partition("+")[0],
    )


def test_what_serves_has_not_compiled_and_what_it_cannot_serve_is_told(tmp_path):
    with closing(LogitsServer()) as server:
        for _ in range(2):
            with pytest.raises(ServingError, match="ModelNotFoundError: "):
                server.serve({"model": {"path": str(tmp_path / "none")}}, tmp_path / "out.safetensors")
