"""Puts the page together from a runtime's folder and its measurements; runs nothing.

The page is one file with no script and nothing from elsewhere: it can be mailed, and opened in ten years. It has first
the limit of a decode step, then its time by part of the model, then the config's memory. How the runtime was made is
folded below.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.files.byte_sizes import format_bytes
from mllm_compile.report import html_parts as parts
from mllm_compile.report import speed
from mllm_compile.report.decode_section import model_section, verdict
from mllm_compile.report.figures import format_seconds
from mllm_compile.report.part_names import all_names
from mllm_compile.runtime.program.pieces import SOURCE_SUFFIX
from mllm_compile.store.artifact import GRAPHS, PIECES, Artifact
from mllm_compile.store.explain import grouped, shortened
from mllm_compile.store.key import key_of
from mllm_compile.store.measurements import start_with

_TEMPLATE = Path(__file__).with_name("page.html")
_MAX_DIFF_LINES = 3000
_MAX_STEPS = 2000


@dataclass(frozen=True)
class Subject:
    """The subject of a page: a runtime, served with a config, on a device."""

    artifact: Artifact
    config: ResolvedConfig
    device: speed.Device | None

    @property
    def start(self) -> dict[str, Any]:
        """The values that the last start with this config left on this device; {}: there was none."""
        return start_with(self.device.values, self.config) if self.device is not None else {}


@dataclass(frozen=True)
class _Section:
    name: str
    title: str
    body: Callable[[Subject], str]
    remark: Callable[[Subject], str] | None = None  # what a folded one says beside its title; None: it is not folded


def write_page(artifact: Artifact, config: ResolvedConfig, path: Path) -> None:
    """Writes the page about a runtime.

    Args:
        config: the config to serve with; memory and loads are this config's.

    Raises:
        OSError: the file cannot be written.
    """
    subject = Subject(artifact, config, speed.page_device(artifact, config))
    compiled = artifact.manifest.about.get("compiled", "")
    html = Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(Path(config.model.source).name),
        path=escape(str(artifact.folder)),
        facts=parts.chips(_facts(subject)),
        nav="".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in _SECTIONS),
        sections="".join(_shown(section, subject) for section in _SECTIONS),
        footer=escape(f"mllm_compile {artifact.factors.get('mllm_compile', '')} · compiled {compiled}"),
    )
    path.write_text(html, encoding="utf-8")


def _shown(section: _Section, subject: Subject) -> str:
    body, title = section.body(subject), escape(section.title)
    if section.remark is None:
        style = ' class="verdict"' if section.name == "verdict" else ""
        return f'<section id="{section.name}"{style}><h2>{title}</h2>{body}</section>'
    remark = parts.html_of(section.remark(subject))
    return (
        f'<details class="section" id="{section.name}"><summary><h2>{title}</h2><span>{remark}</span></summary>'
        f"{body}</details>"
    )


def _facts(subject: Subject) -> list[str]:
    """The facts of the runtime, in a few words each."""
    artifact, config = subject.artifact, subject.config
    device = config.runtime.device if subject.device is None else subject.device.name
    return [
        f"{artifact.manifest.sizes.num_hidden_layers} layers",
        f"{format_bytes(_weight_bytes(artifact))} of weights",
        config.model.dtype,
        str(artifact.manifest.config["compile"]["backend"]),
        f"attention by {config.runtime.attention_backend}",
        device,
    ]


def _weight_bytes(artifact: Artifact) -> int:
    return sum(spec.num_bytes for spec in artifact.weights)


def _verdict(subject: Subject) -> str:
    return verdict(subject.artifact, subject.config, subject.device)


def _model(subject: Subject) -> str:
    return model_section(subject.artifact, subject.config, subject.device)


def _memory(subject: Subject) -> str:
    """Memory of this config: as its last start on this device measured it, else as the config asks for it."""
    config, start = subject.config.runtime, subject.start
    asked = config.max_running_requests * config.max_model_len
    if start:
        tokens, sizes = start["kv_tokens"], start["memory"]
        told = "Measured by the last start with this config on this device."
    else:
        page_tokens = -(-config.max_model_len // config.page_size) * config.page_size
        tokens = config.max_running_requests * page_tokens
        # And the page that padding writes to.
        per_token = sum(part.num_bytes for part in _kv_of_one_token(subject))
        sizes = {"weights": _weight_bytes(subject.artifact), "KV cache": (tokens + config.page_size) * per_token}
        told = "No engine was started with this config here: what it asks for. A device with less room holds less KV."
    bar = parts.stacked_bar(
        [(name, size, format_bytes(size)) for name, size in sizes.items() if size],
        "memory: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size),
    )
    requests, length = f"{config.max_running_requests:,}", f"{config.max_model_len:,}"
    fits = "all of them at full length" if tokens >= asked else f"{tokens / asked:.0%} of what all of them could use"
    return (
        bar
        + f"<p>The KV cache holds <b>{tokens:,} tokens</b> in {escape(config.kv_cache_dtype)}: for {requests} requests "
        f"of up to {length} tokens, {fits}.</p>" + parts.note(told)
    )


def _kv_of_one_token(subject: Subject) -> list[Any]:
    """The attentions of a step of one request that has one token."""
    return [part for part in speed.decode_parts(subject.artifact, subject.config, 1, 1) if part.piece is None]


def _passes(subject: Subject) -> str:
    """A folded line a pass that changed something, with the diff of the graph; the others in one line."""
    artifact = subject.artifact
    names = sorted(name for name in artifact.manifest.files if name.startswith(GRAPHS + "/"))
    texts = {name: artifact.texts[name].decode().splitlines() for name in names}
    reports = {report["name"]: report for report in artifact.manifest.about.get("passes", ())}
    lines, idle = [], []
    for before, after in pairwise(names):
        name = Path(after).stem.partition("_")[2]
        report = reports.get(name, {"matches": 0, "nodes_before": 0, "nodes_after": 0, "ms": 0.0})
        changed = texts[before][1:] != texts[after][1:]
        if not report["matches"] and not changed:
            idle.append(name)
            continue
        matches = f"{report['matches']:,} match{'es' * (report['matches'] != 1)}"
        remark = f"{matches}, {report['nodes_before']:,} → {report['nodes_after']:,} nodes"
        lines.append(parts.folded(name, remark, f"{report['ms']:.0f} ms", _diff(texts[before], texts[after])))
    trace = [parts.folded("trace", "the model as captured", "", parts.source(_head(texts[names[0]])))] if names else []
    nothing = [parts.note(f"Found nothing to do: {', '.join(idle)}.")] if idle else []
    left_out = [f"{name} ({why})" for name, why in artifact.manifest.about.get("passes left out", {}).items()]
    others = [parts.note(f"Left out: {'; '.join(left_out)}.")] if left_out else []
    return "".join(trace + lines + nothing + others)


def _passes_remark(subject: Subject) -> str:
    reports = subject.artifact.manifest.about.get("passes", ())
    return f"{sum(bool(report['matches']) for report in reports)} of {len(reports)} changed the graph"


def _diff(before: Sequence[str], after: Sequence[str]) -> str:
    lines = list(difflib.unified_diff(before[1:], after[1:], lineterm="", n=2))[2:]
    if not lines:
        return parts.source("(the graph is the same)")
    return parts.diff(lines[:_MAX_DIFF_LINES], max(0, len(lines) - _MAX_DIFF_LINES))


def _head(lines: Sequence[str]) -> str:
    more = [f"… {len(lines) - _MAX_DIFF_LINES} more lines"] if len(lines) > _MAX_DIFF_LINES else []
    return "\n".join([*lines[:_MAX_DIFF_LINES], *more])


def _pieces(subject: Subject) -> str:
    """A folded line a piece: what it is, how large it is, its source."""
    artifact = subject.artifact
    program = artifact.program
    names = all_names(program, {spec.name: spec.shape for spec in artifact.weights})
    calls = [getattr(step, "piece", None) for step in program.steps]
    lines = []
    for piece in program.piece_ids():
        source = artifact.texts.get(f"{PIECES}/{piece}{SOURCE_SUFFIX}", artifact.pieces[piece])  # eager: what runs
        count = f"{calls.count(piece)} ×" if piece in calls else ""
        body = parts.note(f"File {piece}{artifact.manifest.piece_suffix}") + parts.source(source.decode())
        lines.append(parts.folded(names[piece], count, format_bytes(len(artifact.pieces[piece])), body))
    lines += _cuda_kernels(artifact)
    steps = parts.source("\n".join(_steps(artifact)))
    return "".join(lines) + parts.folded("the program", f"{len(program.steps)} steps", "", steps)


def _pieces_remark(subject: Subject) -> str:
    program = subject.artifact.program
    calls = sum(hasattr(step, "piece") for step in program.steps)
    return f"{len(program.step_pieces())} distinct ones, called {calls} times a step"


def _cuda_kernels(artifact: Artifact) -> list[str]:
    """A folded line a kernel in CUDA C++: its file, its size, and what distinguishes it from the file's others."""
    return [
        parts.folded(
            kernel.name,
            f"of runtime/{' and runtime/'.join((*kernel.headers, kernel.source))}",
            format_bytes(len(artifact.binaries[kernel.name])),
            parts.source("\n".join(f"#define {name} {value}" for name, value in kernel.constants().items())),
        )
        for kernel in artifact.program.every_cuda_kernel()
    ]


def _steps(artifact: Artifact) -> list[str]:
    from mllm_compile.report.inspect import program_lines

    lines = program_lines(artifact.program, {spec.name: spec.shape for spec in artifact.weights}, _MAX_STEPS)
    left_out = len(artifact.program.steps) - _MAX_STEPS
    return [*lines, f"… {left_out} more steps: see program.json"] if left_out > 0 else lines


def _graphs(subject: Subject) -> str:
    captured = subject.start.get("captured", ())
    if not captured:
        return parts.note(_no_graphs(subject))
    modes = dict.fromkeys(mode for mode, *_ in captured)
    return "".join(
        f"<h3>{escape(mode)}</h3>"
        + parts.chips(
            f"{tokens} tokens · {seconds * 1e3:.0f} ms · {mib:.1f} MiB"
            for captured_mode, tokens, seconds, mib in captured
            if captured_mode == mode
        )
        for mode in modes
    )


def _no_graphs(subject: Subject) -> str:
    if subject.config.cudagraph.mode == "none":
        return "This config captures none."
    return "No engine was started with this config here."


def _graphs_remark(subject: Subject) -> str:
    captured = subject.start.get("captured", ())
    return f"{len(captured)} batch sizes are replayed" if captured else _no_graphs(subject)


def _start(subject: Subject) -> str:
    spans = subject.start.get("start", ())
    if not spans:
        return parts.note("No engine was started with this config here: start one once.")
    begin = min(start for _, start, _, _ in spans)
    shown = [(name, start - begin, end - begin, depth) for name, start, end, depth in spans]
    return parts.gantt(shown, "stages of the last start, in seconds")


def _start_remark(subject: Subject) -> str:
    spans = subject.start.get("start", ())
    if not spans:
        return "none with this config here"
    seconds = max(end for _, _, end, _ in spans) - min(start for _, start, _, _ in spans)
    return f"the last one took {format_seconds(seconds)}"


def _compile_times(subject: Subject) -> str:
    spans, now = [], 0.0
    for name, seconds in subject.artifact.manifest.about.get("stages", ()):
        spans.append((name, now, now + seconds, 0))
        now += seconds
    return parts.gantt(spans, "stages of compiling, in seconds")


def _compile_remark(subject: Subject) -> str:
    return format_seconds(sum(seconds for _, seconds in subject.artifact.manifest.about.get("stages", ())))


def _key(subject: Subject) -> str:
    artifact = subject.artifact
    shown = []
    for group, factors in grouped(artifact.factors).items():
        rows = [(name, shortened(value)) for name, value in factors.items()]
        shown.append(f"<h3>{escape(group)}</h3>" + parts.table(("factor", "value"), rows, caption=f"key: {group}"))
    long = [(name, value) for name, value in artifact.factors.items() if shortened(value) != value]
    whole = parts.table(("factor", "value"), [(name, value.replace(", ", ",\n")) for name, value in long])
    files = [(name, format_bytes(facts.num_bytes), facts.sha256) for name, facts in artifact.manifest.files.items()]
    table = parts.table(("file", "size", "sha256"), files, numbers=[1])
    return (
        "".join(shown)
        + parts.folded("whole values", f"{len(long)} that are shortened above", "", f'<div class="lines">{whole}</div>')
        + parts.folded("files", f"{len(files)}, each with its hash", "", table)
    )


def _key_remark(subject: Subject) -> str:
    return f"{key_of(subject.artifact.factors)}: a change in any of it is another runtime"


_SECTIONS = (
    _Section("verdict", "What limits you", _verdict),
    _Section("model", "A decode step, part by part", _model),
    _Section("memory", "Memory", _memory),
    _Section("passes", "Passes", _passes, _passes_remark),
    _Section("pieces", "Pieces and program", _pieces, _pieces_remark),
    _Section("graphs", "CUDA graphs", _graphs, _graphs_remark),
    _Section("start", "Start", _start, _start_remark),
    _Section("compile", "Compiling", _compile_times, _compile_remark),
    _Section("key", "Key and files", _key, _key_remark),
)
