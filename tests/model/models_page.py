"""The record of models (models_record.py) as two pages, and where a page says something else than is seen.

docs/models.md is for users; docs/lab/models.md has the tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.model.models_record import Record, SeenOnGpu
    from tests.model.survey import Outcome

DOCS = Path(__file__).parents[2] / "docs"
SUMMARY = DOCS / "models.md"
TABLES = DOCS / "lab" / "models.md"
_MAX_REASON = 160
_SUMMARY = """\
# Models

No list in the code says which models are served. A model's own forward, as Transformers has it, is traced. A gate
then decides whether the trace will be served right, and a self-check compares what was compiled with Transformers.
A model that fails either is refused with the reason. So it is a model's config that decides, not its name.

{counts}

*Served right* means here: a small random model of the architecture, in float32 on a CPU, gives Transformers'
log-probabilities within {tolerance:g} (Transformers {transformers}, torch {torch}, {date}). No published checkpoint
is meant by it, and no speed. Through Inductor {by_inductor} were tried too, and {on_gpu} on a GPU in bfloat16. [The
lab](lab/models.md#served) lists all with their error, kinds of layers, attention on a GPU, and reason of refusal.

| | architectures |
|---|---|
| **served** | all but these |
{others}

These are Transformers' causal language models, by the `model_type` in `config.json`. Of models with images or sound
it is the text part; [images](images.md) has those whose images are served too.

## Your model

To know before there are any weights, put its `config.json` into a folder and compile that. For 32 layers this takes
half a minute, and ends with the runtime or the reason:

```yaml
model: {{path: ./folder, load_format: dummy}}
compile: {{backend: eager}}
runtime: {{device: cpu, max_model_len: 1024}}
```

- **RoPE** of every type is served at every length that the model takes. Where frequencies follow the length of a text
  (`longrope`, `dynamic`), each request has its own, as Transformers' `generate` gives it alone. Models whose own
  `generate` then computes the text anew (phi3, phi4_multimodal) are preempted once, at
  `original_max_position_embeddings` tokens.
- **Quantised** checkpoints are served in [most formats](quantised.md).
- **Layers with a [state](state.md)** are served where they call known functions or are known modules.
- **Sparse attention** whose indexer chooses keys (DSA: deepseek_v32, glm_moe_dsa and others; blocks: minimax_m3) reads
  all of them up to that many tokens, where `max_model_len: auto` ends. A greater one needs `attention_backend: torch`,
  and qwen4_exp refuses it ([table](lab/sparse_keys.md)).
- **Models of the roberta family** count positions from behind their padding token: set `max_model_len` as the error
  says.

## On a GPU

Attention kernels have heads of 64, 128 and 256. Others are padded with zeros to the next of these widths, in the KV
cache too (`pad_heads`). Latent attention (MLA), ALiBi and chunks have kernels of their own. Decodes are attended for
by the program's kernels wherever a layer has up to {group} query heads a KV head. Heads wider than 256 need `runtime:
{{attention_backend: torch}}`, which is slow: {too_wide}.
"""

_INTRODUCTION = """\
# Models, tried

What came of every causal-LM architecture that Transformers knows, by its `model_type`. [The page of
models](../models.md) says what it means for a user.

{counts}

```bash
python -m tests.model.survey --write
```

{date}, Transformers {transformers}, torch {torch}, Python {python}, on a CPU in float32. Each architecture is a tiny
random model (4 layers, width 64, windows of 8 tokens, kinds of layers alternating), saved as a checkpoint, compiled
with the pieces as traced (`compile.backend: eager`), and served by a process that has not compiled it, with the plain
torch attention over the paged cache. Five texts of 3, 4, 7, 25 and 55 tokens go through a packed prefill with the
longest one in chunks, a mixed step and a decode step. The error is the largest difference of any log-probability of
any token from what Transformers' forward gives that text alone; above {tolerance:g} it would count as wrong. What
fails in float32 is tried in bfloat16. `make test` holds a sample of it, `make test-all` all of it.

The table's second figure is of those that were tried through Inductor as well, which is what configs have by default.
The last two columns are of GPUs: what attends there for prompts, as the compiler chooses it for the heads of the
architecture's default config (nothing runs for that), and whether a small model was [seen](#on-a-gpu) to be right on
one.
"""

_IN_BFLOAT16 = """\
These fail in float32, where every request ends with the error below. In bfloat16 they are served: the error is that of
a token in the middle, the mean over its vocabulary, and no more than 1.5 times that of Transformers' own forward in
bfloat16."""

_THROUGH_INDUCTOR = """\
These fail when they are compiled as configs have it by default (`compile.backend: inductor`), or are served in bfloat16
alone."""

_ON_A_GPU = """\
Tiny models in bfloat16 with the pieces as traced, prompts of 1 to 1,500 tokens in one batch, windows shorter than these
(`MLLM_MODELS_SEEN=FILE pytest tests/gpu/test_architectures.py`, then `python -m tests.model.survey --seen FILE`). Of
those with experts it is 40 prompts of 3 to 120 tokens, and captured graphs gave what the pieces give bit for bit
(`tests/gpu/test_expert_models.py`). The figures are the mean error of a token's log-probability from float32: ours, and
that of Transformers' own forward in bfloat16; ours may be 1.25 times that, and 0.001.
Each was seen with {versions}."""

# A refusal's text → where it is listed.
_GROUPS = (
    (
        r"Its config names layers of kind",
        "Layers that are not plain attention",
        "Sparse attention over compressed keys or blocks, and recurrent layers of their own code. Below, the kinds of "
        "layers that the config names, and where the trace ended; `u0` is the number of tokens.",
    ),
    (
        r"no attention goes through|directly, past the attention",
        "Attention of its own",
        "Their attention does not go through Transformers' attention interface, and none is found in the trace.",
    ),
    (
        r"its attention (mask|passes|is)|changes its attention mask",
        "Attention that the runtime does not have",
        "Chunks, biases, masks that depend on data, and attention in both directions.",
    ),
    (
        r"its logits are off by",
        "Other logits for two requests in one batch",
        "A token reads what is not its own text: convolutions, or positions that are not taken from `position_ids`. "
        "The figure is ‖ours − Transformers'‖ / ‖Transformers'‖ of the self-check.",
    ),
    (
        r"",
        "For another reason",
        "Branches or sizes that a trace cannot settle (`u0` is the number of tokens), state, or no causal LM alone.",
    ),
)


# What serving an architecture would take, of those that are not.
WOULD_TAKE = {
    "bigbird_pegasus": "attention whose module says that it is not causal, and whose mask says that it is; it is the "
    "decoder of an encoder-decoder, and no checkpoint is of it alone",
    "blt": "an encoder of bytes, whose patches end where a model of their entropy says: as many steps of the large "
    "model as a text has patches, found while it is written",
    "cpmant": "attention in both directions within a prompt, with a bias by segments, over 32 tokens that the model "
    "puts ahead of each text",
    "deepseek_v4": "two states a layer, the last tokens' keys and gates (up to 7 of a compressed_sparse_attention "
    "layer, 127 of a heavily_compressed_attention one), which end in a compressed key for each 4 or 128 tokens; pages "
    "for these, beside a window's; attention over both at once with sinks, the compressed ones chosen by an indexer "
    "over compressed keys of its own. No text is short enough to do without, unless it has fewer than 4 tokens",
    "doge": "a bias for each head and key, beside each key in the cache; beyond keep_window_size tokens the keys of "
    "the largest ones alone",
    "gemma4_assistant": "attention over the keys of the Gemma 4 that it drafts for; it is no causal LM alone",
    "gemma4_unified_assistant": "as gemma4_assistant",
    "inkling2_text": "as inkling_text, and an attention over a token's own layers by scaled_dot_product_attention",
    "inkling_text": "a bias by distance that each token makes of its own hidden state, as operand of attention and of "
    "its kernels; positions that each layer counts are the tokens' own then",
    "musicgen": "four to eight tokens a step, one of each codebook; Transformers builds no causal LM of its config",
    "musicgen_melody": "as musicgen",
    "prophetnet": "attention to n-grams that it predicts, several streams a token, with buckets of distances",
    "reformer": "attention within hashed or local blocks of a padded text",
    "xlm": "nothing, as it is: its default config is an encoder's. With causal: true, attention of its own whose views "
    "no trace of any length settles",
    "xlnet": "attention of its own to distances in both directions: a token sees those behind it, so that no key of a "
    "text that goes on can be kept",
    "xmod": "a batch sorted by language, each with weights of its own, named in the config for all of a batch",
}

_STATUSES = ("served", "bfloat16", "wrong", "refused", "failed", "not tried")


def render_summary(record: Record) -> str:
    """Markdown for users: which architectures are served, and what holds for all of them."""
    from mllm_compile.kernels.decode_attention import MAX_GROUP
    from tests.model.served_logits import TOLERANCE

    by_status = _by_status(record)
    return _SUMMARY.format(
        counts=_counts(by_status),
        others="\n".join(_named(by_status)),
        group=MAX_GROUP,
        by_inductor=len({o.architecture for o in record.outcomes if _is_served_by_inductor(o)}),
        on_gpu=len({one.architecture for one in record.on_gpu}),
        date=record.date,
        transformers=record.transformers,
        torch=record.torch,
        tolerance=TOLERANCE,
        too_wide=_on_torch(record.outcomes),
    )


def render_models_page(record: Record) -> str:
    """Markdown of the laboratory: each architecture's figures, the reason of each refusal, what was not tried."""
    from tests.model.served_logits import TOLERANCE

    outcomes = record.outcomes
    by_status = _by_status(record)
    introduction = _INTRODUCTION.format(
        counts=_counts(by_status),
        date=record.date,
        transformers=record.transformers,
        torch=record.torch,
        python=record.python,
        tolerance=TOLERANCE,
    )
    lines = [introduction, "## Served", "", *_errors(by_status["served"], record)]
    if by_status["bfloat16"]:
        lines += ["## Served in bfloat16", "", _IN_BFLOAT16, "", *_in_bfloat16(by_status["bfloat16"])]
    for status, title in (("wrong", "Served wrong"), ("failed", "Failed")):
        if by_status[status]:
            lines += [f"## {title}", "", *_reasons(by_status[status])]
    served = {o.architecture for o in by_status["served"]}
    by_inductor = [o for o in outcomes if o.backend == "inductor"]
    lines += _through_inductor([o for o in by_inductor if o.status != "served" or o.architecture not in served])
    lines += _on_gpu(record.on_gpu)
    lines += _refused(by_status["refused"])
    lines += ["## Not tried", "", "Of these no tiny model could be made from the architecture's default config.", ""]
    lines += _reasons(by_status["not tried"])
    lines += _would_take([*by_status["refused"], *by_status["not tried"]])
    return "\n".join(lines).rstrip() + "\n"


def _by_status(record: Record) -> dict[str, list[Outcome]]:
    """The result of each architecture with its pieces as traced, by its name."""
    as_traced = sorted((o for o in record.outcomes if o.backend == "eager"), key=lambda o: o.architecture)
    return {status: [o for o in as_traced if o.status == status] for status in _STATUSES}


def _counts(by_status: dict[str, list[Outcome]]) -> str:
    count = {status: len(found) for status, found in by_status.items()}
    worst = max((o.error or 0.0 for o in by_status["served"]), default=0.0)
    return (
        f"**Of {sum(count.values())}: {count['served']} served right** (worst error {worst:.1e}), {count['bfloat16']} "
        f"served in bfloat16 alone, {count['refused']} refused, {count['wrong']} served wrong, {count['failed']} "
        f"failed, {count['not tried']} not tried."
    )


def _named(by_status: dict[str, list[Outcome]]) -> Iterator[str]:
    """A line for each group of architectures that are not served right."""
    parts = {
        "refused": by_status["refused"],
        "served wrong": by_status["wrong"],
        "failed": by_status["failed"],
        "in bfloat16 alone": by_status["bfloat16"],
        "not tried, as no small model could be made": by_status["not tried"],
    }
    for title, found in parts.items():
        if found:
            yield f"| {title} | {', '.join(one.architecture for one in found)} |"


def _on_torch(outcomes: Sequence[Outcome]) -> str:
    """The architectures that no kernel of a GPU attends for, with reasons but for the width of heads."""
    served = {o.architecture for o in outcomes if o.backend == "eager" and o.status == "served"}
    found = [o for o in outcomes if o.backend == "gpu" and o.architecture in served and o.remark.startswith("torch: ")]
    return ", ".join(sorted(o.architecture for o in found)) or "none of those below"


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
        yield from (f"| {o.architecture} | {o.attention_alone} |" for o in with_attention_alone)
        yield ""


def _would_take(outcomes: list[Outcome]) -> Iterator[str]:
    found = [o.architecture for o in outcomes if o.architecture in WOULD_TAKE]
    if found:
        yield from (f"## {_TAKE_SECTION}", "", "Of Transformers' code, read:", "")
        yield from ("| architecture | to serve it |", "|---|---|")
        yield from (f"| {one} | {WOULD_TAKE[one]} |" for one in sorted(found))
        yield ""


def _errors(served: list[Outcome], record: Record) -> Iterator[str]:
    by_inductor = {o.architecture: o.error for o in record.outcomes if _is_served_by_inductor(o)}
    chosen = {o.architecture: o for o in record.outcomes if o.backend == "gpu"}
    seen = {one.architecture for one in record.on_gpu}
    yield "| architecture | max error | by Inductor | its attention; layers with a state | prompts on a GPU by | seen |"
    yield "|---|---|---|---|---|---|"
    for o in served:
        error = by_inductor.get(o.architecture)
        figures = f"{o.error:.1e} | {'' if error is None else f'{error:.1e}'}"
        attention = _chosen(chosen.get(o.architecture))
        is_seen = "yes" if o.architecture in seen else "no"
        yield f"| {o.architecture} | {figures} | {o.remark} | {attention} | {is_seen} |"
    yield ""


def _is_served_by_inductor(outcome: Outcome) -> bool:
    return outcome.backend == "inductor" and outcome.status == "served"


def _chosen(outcome: Outcome | None) -> str:
    if outcome is None or outcome.status == "not tried":
        return "not tried"
    if outcome.status == "refused":
        return f"refused: {_reason(outcome.remark)}"
    of_torch = re.search(r"torch: .* its head dim is (\d+)", outcome.remark)
    return f"torch, heads of {of_torch[1]}" if of_torch else _reason(outcome.remark)


def _on_gpu(seen: Sequence[SeenOnGpu]) -> Iterator[str]:
    versions = sorted({(one.torch, one.transformers) for one in seen})
    named = " or ".join(f"torch {torch} and Transformers {transformers}" for torch, transformers in versions)
    yield from (f"## {_GPU_SECTION}", "", _ON_A_GPU.format(versions=named or "none yet"), "")
    yield "| architecture | prompts attended by | prompts | answers | seen on |"
    yield "|---|---|---|---|---|"
    for one in sorted(seen, key=lambda one: (one.architecture, one.variant)):
        name = f"{one.architecture} {one.variant}".rstrip()
        figures = " | ".join(f"{ours:.4f}, {theirs:.4f}" for ours, theirs in (one.prompts, one.answers))
        gpu = one.gpu.removeprefix("NVIDIA ").partition(" ")[0]
        place = f"{gpu}, {one.date}" if len(versions) == 1 else f"{gpu}, torch {one.torch}, {one.date}"
        yield f"| {name} | {one.attention} | {figures} | {place} |"
    yield ""


def _in_bfloat16(outcomes: list[Outcome]) -> Iterator[str]:
    yield from ("| architecture | error in bfloat16 | in float32 |", "|---|---|---|")
    yield from (f"| {o.architecture} | {o.error:.1e} | {_reason(o.remark)} |" for o in outcomes)
    yield ""


def _through_inductor(outcomes: list[Outcome]) -> Iterator[str]:
    if not outcomes:
        return
    yield from (f"## {_INDUCTOR_SECTION}", "", _THROUGH_INDUCTOR, "")
    yield from ("| architecture | float32 | bfloat16 |", "|---|---|---|")
    for o in sorted(outcomes, key=lambda o: o.architecture):
        figure = "" if o.error is None else f"{o.error:.1e}"
        cells = {"served": f"{figure} | not tried", "bfloat16": f"{_reason(o.remark)} | {figure}"}
        yield f"| {o.architecture} | {cells.get(o.status, f'{o.status}: {_reason(o.remark)} | -')} |"
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
    text = re.sub(r"requires the \w+ library but .*", "requires a library that is no dependency here", text)
    text = re.sub(r" \(its source: .*", "", text)
    text = re.sub(r"piece piece_\w+ ", "a piece ", text)
    text = re.sub(r"^(.*)\. Its config names layers of kind (.*), some of which are not served: .*", r"\2: \1", text)
    text = text.replace("|", "\\|").replace("<", "&lt;").removesuffix(".")
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON].rsplit(" ", 1)[0] + " …"


# The page, read -------------------------------------------------------------------------------------------------------

# Figures that depend on the machine's order of sums.
_FIGURES = re.compile(r"\b\d\.\de[-+]\d\d\b|off by \S+|error \S+")
_INDUCTOR_SECTION = "Through Inductor"
_GPU_SECTION = "On a GPU"
_SERVED_SECTION = "Served"
_TAKE_SECTION = "What they would take"
_ALONE_SECTION = "Served where every layer is full attention"


def versions_of(page: str) -> tuple[str, str]:
    """Of Transformers and of torch that made the page."""
    found = re.search(r"Transformers (\S+), torch ([^\s,+]+)", page)
    if found is None:
        raise ValueError("the page names no versions")
    return found[1], found[2]


def rows_of(page: str) -> dict[tuple[str, str], str]:
    """(architecture, eager | inductor | alone) → the headings and the cells, without figures."""
    rows = {}
    section = group = ""
    for line in page.splitlines():
        if line.startswith("## "):
            section, group = line[3:], ""
        elif line.startswith("### "):
            group = ", " + line[4:].rpartition(":")[0]
        elif line.startswith("| ") and not line.startswith("| architecture |"):
            architecture, _, cells = line.strip("| ").partition(" | ")
            if section in (_GPU_SECTION, _TAKE_SECTION):
                continue
            if section == _SERVED_SECTION:
                _, by_inductor, cells = cells.rsplit(" | ", 2)[0].split(" | ", 2)  # what is cut off is of other runs
                if by_inductor:
                    rows[architecture, "inductor"] = _INDUCTOR_SECTION
            kind = {_INDUCTOR_SECTION: "inductor", _ALONE_SECTION: "alone"}.get(section, "eager")
            rows[architecture, kind] = _FIGURES.sub("…", f"{section}{group}: {cells}")
    return rows


def architectures_of(page: str, backend: str) -> list[str]:
    """Sorted; what the page has of them is in `rows_of`."""
    return sorted(architecture for architecture, kind in rows_of(page) if kind == backend)


def differences(page: str, outcomes: Sequence[Outcome], is_whole: bool = False) -> list[str]:
    """Where the page says something else than was seen, but for figures.

    Args:
        page: the file's text.
        outcomes: of some architectures.
        is_whole: they are all; the page may have no others.
    """
    from tests.model.models_record import Record

    said, seen = rows_of(page), rows_of(render_models_page(Record.of_here(outcomes)))
    tried = {(o.architecture, o.backend) for o in outcomes}
    tried |= {(architecture, "alone") for architecture, backend in tried if backend == "eager"}
    return [
        f"{architecture} ({kind}): the page has {said.get((architecture, kind))!r}, seen is "
        f"{seen.get((architecture, kind))!r}"
        for architecture, kind in sorted(tried | (set(said) if is_whole else set()))
        if said.get((architecture, kind)) != seen.get((architecture, kind))
    ]
