"""The survey's outcomes as the page docs/models.md."""

from __future__ import annotations

import datetime
import platform
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.model.survey import Outcome

_MAX_REASON = 160
# What most readers look for.
_WELL_KNOWN = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "gemma2", "gemma3"),
    *("gemma4", "phi3", "olmo2", "glm4", "deepseek_v3", "deepseek_v32", "gpt_oss", "granite", "granitemoehybrid"),
    *("smollm3", "gpt2", "llama4", "lfm2", "mamba2", "falcon", "bloom"),
)

_INTRODUCTION = """\
# Models

No list in the code says which models are served. A model's own forward, as Transformers has it, is traced; a gate then
decides whether the trace will be served right (`mllm_compile/model/gate.py`), a self-check compares what was compiled
with Transformers (`mllm_compile/check/program.py`), and what fails either is refused with the reason. This page is what
came of every causal-LM architecture that Transformers knows, by its `model_type` in `config.json`.

{counts}

{well_known}

```bash
python -m tests.model.survey --write docs/models.md
```

{date}, Transformers {transformers}, torch {torch}, Python {python}, on a CPU in float32. Each architecture is a tiny
random model (4 layers, width 64, windows of 8 tokens, kinds of layers alternating), saved as a checkpoint and served
from it, with the pieces as traced (`compile.backend: eager`) and the plain torch attention over the paged cache. Five
texts of 3, 4, 7, 25 and 55 tokens go through a packed prefill with the longest one in chunks, a mixed step and a decode
step. The error is the largest difference of any log-probability of any token from what Transformers' forward gives that
text alone; above {tolerance:g} it would count as wrong. So this page is about meaning, not about speed or about each
published checkpoint.

On a GPU, FlashInfer has no attention with sinks, with values of another width than keys, or with heads of another width
than 64, 128 or 256: such models need `runtime: {{attention_backend: torch}}` there, which is slow.

## Your model

It is its config that decides, not its name. To know before there are any weights, put its `config.json` into a folder
and compile that; for 32 layers this takes half a minute, and ends with the runtime or the reason:

```yaml
model: {{path: ./folder, load_format: dummy}}
compile: {{backend: eager}}
runtime: {{device: cpu, max_model_len: 1024}}
```

For every architecture:

- RoPE of the types default, linear, llama3 and yarn is served at every length that the model takes; `longrope`
  (Phi-3.5, Phi-4-mini) up to its `original_max_position_embeddings`, and `dynamic` up to `max_position_embeddings`.
  Beyond these a long request would change the frequencies of all others, so `max_model_len` ends there.
- A quantised checkpoint is refused.
- An architecture that mixes attention with other layers is refused for the others: where a config has none of them, it
  may be served ([below](#served-where-every-layer-is-full-attention)).
- Of models with images or sound that are served (gemma3, phi4_multimodal) it is the text part.
"""

# What a refusal says → where it is listed.
_GROUPS = (
    (
        r"Its config names layers of kind",
        "Layers that are not plain attention",
        "Recurrent layers, convolutions and sparse attention keep state from token to token, or choose what they read. "
        "Below, the kinds of layers that the config names, and where the trace ended; `u0` is the number of tokens.",
    ),
    (
        r"no attention goes through|a table of its own|directly, past the attention|do not follow Transformers'",
        "Attention of its own",
        "Their attention does not go through Transformers' attention interface: old models, ALiBi, relative positions.",
    ),
    (
        r"its attention (mask|passes)|changes its attention mask",
        "Attention that the runtime does not have",
        "Chunks, biases, masks that depend on data, and attention in both directions.",
    ),
    (
        r"its logits are off by",
        "Other logits for two requests in one batch",
        "A token reads what is not its own text: convolutions, or positions that are counted from elsewhere than 0 or "
        "not taken from `position_ids`. The figure is ‖ours − Transformers'‖ / ‖Transformers'‖ of the self-check.",
    ),
    (
        r"",
        "For another reason",
        "Branches or sizes that a trace cannot settle (`u0` is the number of tokens), state, or no causal LM alone.",
    ),
)


def render_models_page(outcomes: Sequence[Outcome]) -> str:
    """Markdown: what is served, what is refused and why, what was not tried."""
    import torch
    import transformers

    from tests.model.survey import TOLERANCE

    by_status = {
        status: sorted((o for o in outcomes if o.status == status), key=lambda o: o.architecture)
        for status in ("served", "wrong", "refused", "failed", "not tried")
    }
    introduction = _INTRODUCTION.format(
        counts=_counts({status: len(found) for status, found in by_status.items()}, by_status["served"]),
        well_known=_well_known(by_status),
        date=datetime.date.today().isoformat(),
        transformers=transformers.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        tolerance=TOLERANCE,
    )
    lines = [introduction, "## Served", "", *_errors(by_status["served"])]
    for status, title in (("wrong", "Served wrong"), ("failed", "Failed")):
        if by_status[status]:
            lines += [f"## {title}", "", *_reasons(by_status[status])]
    lines += _refused(by_status["refused"])
    lines += ["## Not tried", "", "Of these no tiny model could be made from the architecture's default config.", ""]
    lines += _reasons(by_status["not tried"])
    return "\n".join(lines).rstrip() + "\n"


def _counts(count: dict[str, int], served: list[Outcome]) -> str:
    worst = max((o.worst_error or 0.0 for o in served), default=0.0)
    return (
        f"**Of {sum(count.values())}: {count['served']} served right** (worst error {worst:.1e}), {count['refused']} "
        f"refused, {count['wrong']} served wrong, {count['failed']} failed, {count['not tried']} not tried."
    )


def _well_known(by_status: dict[str, list[Outcome]]) -> str:
    def named(status: str) -> str:
        found = {o.architecture for o in by_status[status]}
        return ", ".join(name for name in _WELL_KNOWN if name in found)

    return f"Well-known ones that are served: {named('served')}. That are refused: {named('refused')}."


def _refused(refused: list[Outcome]) -> Iterator[str]:
    if not refused:
        return
    yield from ("## Refused", "")
    listed: set[str] = set()
    for pattern, title, explanation in _GROUPS:
        group = [o for o in refused if o.architecture not in listed and re.search(pattern, o.remark)]
        listed |= {o.architecture for o in group}
        if group:
            yield from (f"### {title}: {len(group)}", "", explanation, "", *_reasons(group))
    with_attention_alone = [o for o in refused if o.attention_alone is not None]
    if with_attention_alone:
        yield from ("## Served where every layer is full attention", "")
        yield from ("Refused above for their other layers. With full attention in each layer:", "")
        yield from ("| architecture | max error |", "|---|---|")
        yield from (f"| {o.architecture} | {o.attention_alone:.1e} |" for o in with_attention_alone)
        yield ""


def _errors(served: list[Outcome]) -> Iterator[str]:
    yield from ("| architecture | max error | its attention |", "|---|---|---|")
    yield from (f"| {o.architecture} | {o.worst_error:.1e} | {o.remark} |" for o in served)
    yield ""


def _reasons(outcomes: list[Outcome]) -> Iterator[str]:
    yield from ("| architecture | reason |", "|---|---|")
    yield from (f"| {o.architecture} | {_reason(o.remark)} |" for o in outcomes)
    yield ""


def _reason(remark: str) -> str:
    """The refusal without what every one of them says."""
    text = re.sub(r"^'[^']+' (models )?would not be served right: ", "", remark)
    text = text.removesuffix(" docs/models.md lists what is.").split(" Usual causes: ")[0]
    text = text.replace("the model cannot be traced as one graph: ", "")
    text = re.sub(r"^'[^']+' is not a causal language model that Transformers can build with a .*?: ", "", text)
    text = re.sub(r"with two requests in one batch its logits are off by (\S+) from .*", r"off by \1", text)
    text = re.sub(r"^(.*)\. Its config names layers of kind (.*), which are not served yet", r"\2: \1", text)
    text = text.replace("|", "\\|").replace("<", "&lt;").removesuffix(".")
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON].rsplit(" ", 1)[0] + " …"
