"""A sample of the survey, through the whole compiler and the real runtime; all of it with `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.models_page import render_models_page
from tests.model.survey import TOLERANCE, Outcome, survey, try_architecture
from tests.model.tiny_configs import causal_lm_types

SERVED = {
    "gpt_oss": "window 8 on 2 of 4, sinks",  # experts, attention sinks
    "phimoe": "window 8 on 4 of 4",  # the window is in the mask alone
    "gemma3": "window 8 on 2 of 4",  # a vision tower beside the text model
    "deepseek_v3": "values of another width",  # latent attention
}
REFUSED = {
    "bloom": "no attention goes through Transformers' attention interface",  # ALiBi
    "llama4_text": "its attention mask is neither causal nor a causal window",  # chunks
    "lfm2": "with two requests in one batch its logits are off",  # convolutions
    "qwen3_next": "layers of kind linear_attention",
    "bart": "with two requests in one batch its logits are off",  # learned positions that are not position_ids
    "roberta": "with two requests in one batch its logits are off",  # positions counted from elsewhere
}


@pytest.mark.parametrize("architecture", SERVED)
def test_an_architecture_is_served_as_transformers_computes_it(architecture):
    outcome = try_architecture(architecture)
    assert (outcome.status, outcome.remark) == ("served", SERVED[architecture])
    assert outcome.worst_error is not None
    assert outcome.worst_error <= TOLERANCE


@pytest.mark.parametrize("architecture", REFUSED)
def test_an_architecture_that_would_be_wrong_is_refused(architecture):
    outcome = try_architecture(architecture)
    assert outcome.status == "refused"
    assert REFUSED[architecture] in outcome.remark
    assert "\n" not in outcome.remark


def test_an_architecture_refused_for_its_other_layers_is_tried_with_attention_alone():
    outcome = try_architecture("granitemoehybrid")
    assert outcome.status == "refused"
    assert outcome.attention_alone is not None
    assert outcome.attention_alone <= TOLERANCE


def test_the_page_lists_every_outcome():
    page = render_models_page(
        [
            Outcome("qwen3", "served", "window 8 on 2 of 4", 2e-6),
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
                attention_alone=3e-6,
            ),
            Outcome("dbrx", "refused", "the model cannot be traced as one graph: it branches on data: u3 (dbrx.py:1)"),
            Outcome("blt", "not tried", "its sizes do not fit"),
        ]
    )
    assert "**Of 5: 1 served right** (worst error 2.0e-06), 3 refused, 0 served wrong, 0 failed, 1 not tried." in page
    assert "| qwen3 | 2.0e-06 | window 8 on 2 of 4 |" in page
    assert "| bloom | no attention goes through Transformers' attention interface; a \\| b |" in page
    assert "### Other logits for two requests in one batch: 1\n" in page
    assert "| lfm2 | off by 1.1 |" in page
    assert "| lfm2 | 3.0e-06 |" in page
    assert "### For another reason: 1\n" in page
    assert "| dbrx | it branches on data: u3 (dbrx.py:1) |" in page


@pytest.mark.slow
def test_no_architecture_of_transformers_is_served_wrong():
    outcomes = list(survey(causal_lm_types()))
    assert not [outcome for outcome in outcomes if outcome.status in ("wrong", "failed")]
    assert sum(outcome.status == "served" for outcome in outcomes) >= 80
    page = Path(__file__).parents[2] / "docs" / "models.md"
    named = page.read_text(encoding="utf-8")
    assert not [outcome.architecture for outcome in outcomes if f"| {outcome.architecture} |" not in named]
