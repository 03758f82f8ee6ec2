"""Puts the page together: what is in a runtime's folder and what was measured with it, nothing is run.

The page is one file with no script and nothing from elsewhere: it can be mailed, and opened in ten years.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

from mllm_compile.artifact import GRAPHS, PIECES, Artifact
from mllm_compile.byte_sizes import format_bytes
from mllm_compile.cache_key import key_of
from mllm_compile.measured import DeviceKey, read_all_measured
from mllm_compile.report import html_parts as parts
from mllm_compile.runtime.pieces import SOURCE_SUFFIX
from mllm_compile.runtime.program import AttentionStep, PieceStep, Program

_TEMPLATE = Path(__file__).with_name("page.html")
_MAX_DIFF_LINES = 3000
_MAX_STEPS = 2000


@dataclass(frozen=True)
class _Section:
    name: str
    title: str
    note: str
    body: Callable[[Artifact], str]


def write_page(artifact: Artifact, path: Path) -> None:
    """Writes the page about a runtime."""
    config = artifact.manifest.config
    shown = [(section, section.body(artifact)) for section in _SECTIONS]
    html = Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"Runtime of {Path(config['model']['source']).name}"),
        subtitle=escape(f"{artifact.folder} · compiled {artifact.manifest.about.get('compiled', '')}"),
        nav="".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section, _ in shown),
        sections="".join(
            f'<section id="{section.name}"><h2>{escape(section.title)}</h2>'
            f'<p class="note">{escape(section.note)}</p>{body}</section>'
            for section, body in shown
        ),
    )
    path.write_text(html, encoding="utf-8")


def _overview(artifact: Artifact) -> str:
    program, manifest = artifact.program, artifact.manifest
    num_pieces = sum(isinstance(step, PieceStep) for step in program.steps)
    compile_s = sum(seconds for _, seconds in manifest.about.get("stages", ()))
    return parts.figures(
        [
            ("attention layers", str(len(program.layers))),
            ("steps that are pieces", str(num_pieces)),
            ("distinct pieces", str(len(program.step_pieces()))),
            ("weights", format_bytes(sum(spec.num_bytes for spec in artifact.weights))),
            ("dtype", str(manifest.config["model"]["dtype"])),
            ("device", str(manifest.config["runtime"]["device"])),
            ("to compile", f"{compile_s:.1f} s"),
        ]
    )


def _pipeline(artifact: Artifact) -> str:
    """A folded line a pass, with the diff of the graph before and after it."""
    names = sorted(name for name in artifact.manifest.files if name.startswith(GRAPHS + "/"))
    texts = {name: (artifact.folder / name).read_text(encoding="utf-8").splitlines() for name in names}
    reports = {report["name"]: report for report in artifact.manifest.about.get("passes", ())}
    lines = []
    for before, after in pairwise(names):
        name = Path(after).stem.partition("_")[2]
        report = reports.get(name, {"matches": 0, "nodes_before": 0, "nodes_after": 0, "ms": 0.0})
        remark = f"{report['matches']} matches, {report['nodes_before']} → {report['nodes_after']} nodes"
        lines.append(parts.folded(name, remark, f"{report['ms']:.1f} ms", _diff(texts[before], texts[after])))
    trace = [parts.folded("trace", "as captured", names[0], parts.source(_head(texts[names[0]])))] if names else []
    return "".join(trace + lines)


def _diff(before: Sequence[str], after: Sequence[str]) -> str:
    lines = list(difflib.unified_diff(before[1:], after[1:], lineterm="", n=2))[2:]
    if not lines:
        return parts.source("(the graph is the same)")
    return parts.diff(lines[:_MAX_DIFF_LINES], max(0, len(lines) - _MAX_DIFF_LINES))


def _head(lines: Sequence[str]) -> str:
    more = [f"… {len(lines) - _MAX_DIFF_LINES} more lines"] if len(lines) > _MAX_DIFF_LINES else []
    return "\n".join([*lines[:_MAX_DIFF_LINES], *more])


def _pieces(artifact: Artifact) -> str:
    """A folded line a piece: where it runs, how large it is, its source."""
    places = _places(artifact)
    lines = []
    for piece in artifact.program.piece_ids():
        text = (artifact.folder / PIECES / (piece + SOURCE_SUFFIX)).read_text(encoding="utf-8")
        used = places.get(piece, [])
        remark = f"{len(used)} × : {', '.join(_runs(used))}" if used else _role(artifact.program, piece)
        size = format_bytes(len(artifact.pieces[piece]))
        lines.append(parts.folded(piece.removeprefix("piece_"), remark, size, parts.source(text)))
    lines += _cuda_kernels(artifact)
    return "".join(lines) + parts.folded("program", "every step", "", parts.source("\n".join(_steps(artifact))))


def _cuda_kernels(artifact: Artifact) -> list[str]:
    """A folded line a kernel in CUDA C++: its file, its size, and what distinguishes it from the file's others."""
    return [
        parts.folded(
            kernel.name,
            f"of runtime/{' and runtime/'.join((*kernel.headers, kernel.source))}",
            format_bytes(len(artifact.cubins[kernel.name])),
            parts.source("\n".join(f"#define {name} {value}" for name, value in kernel.constants().items())),
        )
        for kernel in artifact.program.cuda_kernels()
    ]


def _role(program: Program, piece: str) -> str:
    """What a piece is for that no step calls."""
    for form in program.all_small_forms():
        if form.piece == piece:
            return f"in place of another for {'one token' if form.max_size == 1 else f'up to {form.max_size} tokens'}"
    if program.sampling is not None and piece in program.sampling.piece_ids():
        return "takes the most probable tokens" if piece == program.sampling.greedy else "draws tokens"
    if program.decode_loop is not None and piece in program.decode_loop.piece_ids():
        is_first = piece == program.decode_loop.begin
        return "makes a captured decode's inputs ready" if is_first else "chooses a captured decode's tokens"
    layers = [forms for forms in program.decode_attention.values() if piece in {form.piece for form in forms}]
    return f"decode attention of {len(layers)} layer{'s' * (len(layers) != 1)}"


def _places(artifact: Artifact) -> dict[str, list[str]]:
    """Piece → where it stands, as "before layer 0", "after layer 0", ….

    Layers are counted by their attention: a piece after one holds the rest of that layer and the start of the next.
    """
    places: dict[str, list[str]] = {}
    seen = 0
    for step in artifact.program.steps:
        if isinstance(step, AttentionStep):
            seen += 1
        else:
            places.setdefault(step.piece, []).append(f"after layer {seen - 1}" if seen else "before layer 0")
    return places


def _runs(places: Iterable[str]) -> list[str]:
    """["after layer 0", "after layer 1", "after layer 2"] → ["after layers 0–2"]."""
    runs: list[list[Any]] = []
    for place in places:
        text, _, number = place.rpartition(" ")
        if runs and runs[-1][0] == text and runs[-1][2] + 1 == int(number):
            runs[-1][2] += 1
        else:
            runs.append([text, int(number), int(number)])
    return [f"{text} {first}" if first == last else f"{text}s {first}–{last}" for text, first, last in runs]


def _steps(artifact: Artifact) -> list[str]:
    from mllm_compile.inspect_model import step_line

    lines = [step_line(step) for step in artifact.program.to_json()["steps"][:_MAX_STEPS]]
    left_out = len(artifact.program.steps) - len(lines)
    return [*lines, f"… {left_out} more steps: see program.json"] if left_out else lines


def _memory(artifact: Artifact) -> str:
    def bar(values: dict[str, Any]) -> str:
        sizes = [(name, size, format_bytes(size)) for name, size in values["memory"].items() if size]
        return parts.stacked_bar(sizes) + f"<p>KV cache of {values['kv_tokens']:,} tokens.</p>"

    return _by_device(artifact, bar)


def _captured(artifact: Artifact) -> str:
    def shapes(values: dict[str, Any]) -> str:
        if not values["captured"]:
            return "<p>No CUDA graphs.</p>"
        modes = dict.fromkeys(mode for mode, *_ in values["captured"])
        return "".join(
            f"<p><b>{escape(mode)}</b></p>"
            + parts.chips(
                f"{tokens} tokens · {seconds * 1e3:.0f} ms · {mib:.1f} MiB"
                for captured_mode, tokens, seconds, mib in values["captured"]
                if captured_mode == mode
            )
            for mode in modes
        )

    return _by_device(artifact, shapes)


def _start(artifact: Artifact) -> str:
    def timeline(values: dict[str, Any]) -> str:
        begin = min(start for _, start, _, _ in values["start"])
        return parts.gantt([(name, start - begin, end - begin, depth) for name, start, end, depth in values["start"]])

    return _by_device(artifact, timeline)


def _by_device(artifact: Artifact, show: Callable[[dict[str, Any]], str]) -> str:
    measured: list[tuple[DeviceKey, dict[str, Any]]] = read_all_measured(artifact.measured_folder)
    if not measured:
        return "<p>Nothing was measured yet: start an engine from this runtime once.</p>"
    return "".join(
        f"<p><b>{escape(key.name)}</b>{f', {format_bytes(key.memory_bytes)}' if key.memory_bytes else ''}</p>"
        + show(values)
        for key, values in measured
    )


def _compile_times(artifact: Artifact) -> str:
    spans, now = [], 0.0
    for name, seconds in artifact.manifest.about.get("stages", ()):
        spans.append((name, now, now + seconds, 0))
        now += seconds
    return parts.gantt(spans)


def _key(artifact: Artifact) -> str:
    rows = [("key", key_of(artifact.factors)), *artifact.factors.items()]
    files = [(name, format_bytes(facts.num_bytes), facts.sha256) for name, facts in artifact.manifest.files.items()]
    return parts.table(("factor", "value"), rows) + parts.folded(
        "files", f"{len(files)}, each with its hash", "", parts.table(("file", "size", "sha256"), files, numbers=[1])
    )


_SECTIONS = (
    _Section("overview", "Overview", "What was compiled.", _overview),
    _Section(
        "pipeline", "Pipeline", "What each pass did. Open one for the graph before and after it, as a diff.", _pipeline
    ),
    _Section(
        "pieces",
        "Pieces",
        "What runs between two attentions, equal stretches as one piece; decodes' attention, and the choice of tokens.",
        _pieces,
    ),
    _Section("memory", "Memory", "What the device holds while an engine serves.", _memory),
    _Section("captured", "Captured shapes", "Batch sizes that are replayed as CUDA graphs.", _captured),
    _Section("start", "Start", "The last start of an engine.", _start),
    _Section("compile", "Compile", "Where the time of compiling went.", _compile_times),
    _Section("key", "Key and files", "What this runtime was made for. A change in any of it is another runtime.", _key),
)
