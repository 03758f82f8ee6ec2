"""The survey's outcomes as the page docs/models.md."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.models.survey import Outcome

_MAX_REASON = 280


def render_models_page(outcomes: Sequence[Outcome]) -> str:
    """Markdown: what is served, what is refused and why, what was not tried."""
    import torch
    import transformers

    by_status = {
        status: sorted((o for o in outcomes if o.status == status), key=lambda o: o.architecture)
        for status in ("served", "wrong", "refused", "failed", "not tried")
    }
    served, refused, not_tried = by_status["served"], by_status["refused"], by_status["not tried"]
    worst = max((o.worst_error or 0.0 for o in served), default=0.0)
    lines = [
        "# Models",
        "",
        "There is no list of supported models in the code. A model's own forward, as Transformers has it, is traced; a "
        "gate then decides whether what was traced will be served right (`mllm_compile/gate.py`, "
        "`mllm_compile/self_check.py`), and refuses it with a reason otherwise. This page is what came of every "
        "causal-LM architecture that Transformers knows.",
        "",
        "```bash",
        "python -m tests.models.survey --write docs/models.md",
        "```",
        "",
        f"Measured with Transformers {transformers.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, on a CPU in float32, pieces run as traced (`compile.backend: eager`), attention "
        "by the plain torch backend over the paged cache. Each architecture is a tiny random model (4 layers, width "
        "64, windows of 8 tokens, layer kinds alternating), saved as a checkpoint and served from it. Five texts of 3, "
        "4, 7, 25 and 55 tokens go through a packed prefill with the longest cut short, a mixed step and a decode "
        "step; the error is the largest difference of any log-probability of any token from what Transformers' own "
        "forward gives that text alone.",
        "",
        f"**{len(served)} served** (worst error {worst:.1e}), {len(by_status['wrong'])} served wrong, {len(refused)} "
        f"refused, {len(by_status['failed'])} failed, {len(not_tried)} not tried.",
        "",
        "What decides is a checkpoint's own config, when it is compiled, and not its name in this list: RoPE whose "
        "frequencies follow the longest text of a batch (`dynamic`, `longrope`) and quantised weights are refused for "
        "any architecture. *Logits that are off with two requests in one batch* mean that a token reads what is not "
        "its own text: layers that carry state, convolutions, positions that are not the text's own.",
        "",
        "## Served",
        "",
        "| architecture | max abs. error of log-probabilities | its attention |",
        "|---|---|---|",
        *(f"| {o.architecture} | {o.worst_error:.1e} | {o.remark} |" for o in served),
        "",
    ]
    for status, title in (("wrong", "Served wrong"), ("failed", "Failed"), ("refused", "Refused")):
        if by_status[status]:
            lines += [f"## {title}", "", "| architecture | reason |", "|---|---|"]
            lines += [f"| {o.architecture} | {_reason(o.remark)} |" for o in by_status[status]] + [""]
    lines += ["## Not tried", "", "No tiny model of these could be made from their default config.", ""]
    lines += ["| architecture | why |", "|---|---|"]
    lines += [f"| {o.architecture} | {_reason(o.remark)} |" for o in not_tried]
    return "\n".join([*lines, ""])


def _reason(remark: str) -> str:
    """The refusal without what every one of them says."""
    text = re.sub(r"^'[^']+' models would not be served right: ", "", remark)
    text = text.removesuffix(" docs/models.md lists what is.").split(" Usual causes: ")[0]
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON].rsplit(" ", 1)[0] + " …"
