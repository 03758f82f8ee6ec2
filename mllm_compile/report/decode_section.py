"""The page's answer to "how fast, and why not faster": one decode step, what it reads, and what that costs here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mllm_compile.bench.limits.step_parts import StepPart, limit_s
from mllm_compile.bench.measure.results import Ceilings
from mllm_compile.files.byte_sizes import format_bytes
from mllm_compile.report import html_parts as parts
from mllm_compile.report.figures import format_rate, format_seconds, three_digits
from mllm_compile.report.part_names import PartName, attention_name, part_names
from mllm_compile.report.speed import DecodeStep, Device, Load, decode_step, loads

if TYPE_CHECKING:
    from mllm_compile.config.resolved import ResolvedConfig
    from mllm_compile.store.artifact import Artifact

# The hardware limits a step that reaches this share of the limit; software limits one below it.
_NEAR_LIMIT = 0.6
_ATTENTION_COLOUR = parts.colour(1)
_PIECE_COLOURS = (parts.colour(0), *(parts.colour(index) for index in range(2, len(parts.COLOURS))))
_IDLE_COLOUR = "var(--idle)"
_LOGITS = "logits"
_OUTSIDE = "inputs, choice of tokens, host"


@dataclass(frozen=True)
class _Group:
    """Parts of one name: all calls of a piece, or all attentions."""

    name: PartName
    colour: str
    parts: list[StepPart]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def measured_s(self, step: DecodeStep) -> float:
        return sum((step.part_s or {}).get(part.index, 0.0) for part in self.parts)


def verdict(artifact: Artifact, config: ResolvedConfig, device: Device | None) -> str:
    """One line on what limits a decode step, its figures, and how they are known."""
    step = decode_step(artifact, config, device)
    groups = _groups(artifact, step)
    ceilings = None if device is None else device.ceilings
    limit = None if ceilings is None else limit_s(step.parts, ceilings)
    found = loads(artifact, config, device)
    timed = next((load for load in found if load.batch == step.batch and load.measured_s is not None), None)
    num_bytes, took = step.num_bytes, step.wall_s
    if timed is not None and timed.measured_s is not None and timed.limit_s is not None:
        num_bytes, took, limit = timed.num_bytes, timed.measured_s, timed.limit_s
        lead = _timed_lead(step, timed, took, limit)
        lead = lead if step.part_s is None else parts.Html(f"{lead} {_profiled(step, groups, ceilings)}")
    elif step.part_s is not None:
        lead = _measured_lead(step, groups, ceilings, limit)
    else:
        took, lead = 0.0, _modelled_lead(step, ceilings)
    pairs = [("read in a step", format_bytes(num_bytes))]
    if limit is not None:
        pairs.append(("at least, a step", format_seconds(limit)))
    if took:
        pairs.append(("measured, a step", format_seconds(took)))
        pairs.append(("tokens/s, measured", three_digits(step.batch / took)))
        pairs += [] if limit is None else [("of the limit", f"{limit / took:.0%}")]
    elif limit is not None:
        pairs.append(("tokens/s at most", three_digits(step.batch / limit)))
    return f'<p class="lead">{parts.html_of(lead)}</p>' + parts.figures(pairs) + _loads(found, device)


def _of(step: DecodeStep | Load) -> str:
    requests = "1 request" if step.batch == 1 else f"{step.batch} requests"
    return f"A decode step of {requests} at {step.context:,} tokens"


def _modelled_lead(step: DecodeStep, ceilings: Ceilings | None) -> str:
    reads = f"{_of(step)} reads {format_bytes(step.num_bytes)}, {step.weight_bytes / step.num_bytes:.0%} of it weights"
    if ceilings is None:
        return f"{reads}. How fast the device reads was not measured."
    limit = limit_s(step.parts, ceilings)
    return (
        f"{reads}: it takes {format_seconds(limit)} or more, as this device reads {format_rate(ceilings.read_bytes_s)}."
    )


def _timed_lead(step: DecodeStep, timed: Load, took: float, limit: float) -> str:
    """The lead for a step as `bench latency` timed it, which no profiler slows."""
    told = f"{_of(timed)} takes {format_seconds(took)}, {limit / took:.0%} of what the device allows."
    if limit / took >= _NEAR_LIMIT:
        return parts.html_of(f"{told} Reading {_most_read(step)} from memory limits it.")
    if step.part_s is not None:
        return parts.html_of(told)
    return parts.Html(parts.html_of(f"{told} Where the rest goes: ") + parts.code("mllm-compile bench roofline CONFIG"))


def _most_read(step: DecodeStep) -> str:
    return "its weights" if step.weight_bytes * 2 >= step.num_bytes else "the KV cache"


def _measured_lead(step: DecodeStep, groups: Sequence[_Group], ceilings: Ceilings | None, limit: float | None) -> str:
    took = f"{_of(step)} takes {format_seconds(step.wall_s)}"
    if limit is None or ceilings is None:
        return f"{took}. How fast the device reads was not measured, so there is no limit to compare with."
    share = limit / step.wall_s
    if share >= _NEAR_LIMIT:
        return f"{took}, {share:.0%} of what the device allows: reading {_most_read(step)} from memory limits it."
    worst, lost_s = _most_lost(step, groups, ceilings)
    told = f"{took}, {share:.0%} of what the device allows."
    return f"{told} Most is lost in {_lower(worst)}: {format_seconds(lost_s)}."


def _most_lost(step: DecodeStep, groups: Sequence[_Group], ceilings: Ceilings) -> tuple[str, float]:
    """The part of a measured step that is furthest above its limit, and by how many seconds."""
    lost = {str(group.name): group.measured_s(step) - limit_s(group.parts, ceilings) for group in groups}
    lost[f"What no kernel of the model does ({_OUTSIDE})"] = step.other_s + step.outside_s
    worst = max(lost, key=lambda name: lost[name])
    return worst, lost[worst]


def _profiled(step: DecodeStep, groups: Sequence[_Group], ceilings: Ceilings | None) -> str:
    """The sentence on the profiled step, beside the time of a step that no profiler slows."""
    told = f"Below it is taken apart: {_lower(_of(step))} takes {format_seconds(step.wall_s)} under a profiler"
    if ceilings is None:
        return parts.html_of(f"{told}.")
    worst, lost_s = _most_lost(step, groups, ceilings)
    return parts.html_of(f"{told}, and most of that is lost in {_lower(worst)}: {format_seconds(lost_s)}.")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _loads(found: Sequence[Load], device: Device | None) -> str:
    """A row a batch size: the bytes that a step reads, their least time, and a token's time where measured."""
    has_limit = any(load.limit_s is not None for load in found)
    has_measured = any(load.measured_s is not None for load in found)
    columns = ["requests", "read in a step"]
    columns += ["at least", "tokens/s at most"] if has_limit else []
    columns += ["measured", "of the limit"] if has_measured else []
    columns.append("most of it is" if has_limit else "mostly")
    rows = [_load_row(load, has_limit, has_measured) for load in found]
    title = f"<h3>With more requests, {found[0].context:,} tokens each</h3>"
    table = parts.table(columns, rows, numbers=range(1, len(columns) - 1), caption="A decode step by its requests")
    return title + table + parts.note(_how_known(device, has_measured))


def _load_row(load: Load, has_limit: bool, has_measured: bool) -> list[str]:
    row = [f"{load.batch:,}", format_bytes(load.num_bytes)]
    if has_limit and load.limit_s is not None:
        row += [format_seconds(load.limit_s), three_digits(load.batch / load.limit_s)]
    if has_measured:
        measured = "" if load.measured_s is None else format_seconds(load.measured_s)
        is_known = load.measured_s is not None and load.limit_s is not None
        row += [measured, f"{load.limit_s / load.measured_s:.0%}" if is_known else ""]  # type: ignore[operator]
    doing = "arithmetic" if load.bound == "arithmetic" else f"reading {load.bound}"
    return [*row, doing]


def _how_known(device: Device | None, has_measured: bool) -> str:
    if device is None or device.ceilings is None:
        return parts.Html(
            "Bytes are of weights and KV cache. For times, write this page where the device is, with no engine "
            f"running on it: {parts.code('mllm-compile inspect CONFIG --html FILE')}."
        )
    found, fp8_flops_s = device.values["ceilings"], device.ceilings.fp8_flops_s
    in_fp8 = "" if fp8_flops_s is None else f" ({format_rate(fp8_flops_s, 'FLOP')} in fp8)"
    ceilings = (
        f"Limits are modelled: bytes of weights and KV cache at {format_rate(device.ceilings.read_bytes_s)}, or "
        f"{format_rate(device.ceilings.flops_s, 'FLOP')}{in_fp8} where that takes longer, measured on "
        f"{found['device']} ({found['date']})."
    )
    if has_measured:
        took = f" Times are of {'bench latency'} on the same device ({device.values['latency']['date']})."
        return parts.Html(parts.html_of(ceilings + took))
    return parts.Html(
        parts.html_of(ceilings)
        + f" What a token takes was not measured: {parts.code('mllm-compile bench latency CONFIG')}."
    )


def model_section(artifact: Artifact, config: ResolvedConfig, device: Device | None) -> str:
    """The model as a strip, its parts as a table, and each layer's, folded."""
    step = decode_step(artifact, config, device)
    groups = _groups(artifact, step)
    ceilings = None if device is None else device.ceilings
    names = {part.index: group for group in groups for part in group.parts}
    scale, told = _scale(step, ceilings)
    columns = [
        (
            label,
            [
                (_pointed(names[part.index].name, part, step, ceilings), scale(part), names[part.index].colour)
                for part in found
            ],
        )
        for label, found in _columns(step)
    ]
    if step.part_s is not None:
        outside = step.other_s + step.outside_s
        columns.append(("other", [(f"{_OUTSIDE}: {format_seconds(outside)}", outside, _IDLE_COLOUR)]))
    label = f"{_of(step)}: " + ", ".join(f"{group.name} {format_bytes(group.num_bytes)}" for group in groups)
    return (
        parts.note(f"{_of(step)}, to scale: {told}")
        + parts.strip(columns, label)
        + _part_table(groups, step, ceilings)
        + parts.folded("Layer by layer", f"{len(step.parts)} parts", "", _layer_table(names, step, ceilings))
    )


def _scale(step: DecodeStep, ceilings: Ceilings | None):  # type: ignore[no-untyped-def]
    """The function for a part's width, and its description."""
    if step.part_s is not None:
        times = step.part_s
        told = f"times measured by bench roofline ({step.date}) in a step of {format_seconds(step.wall_s)}."
        return (lambda part: times.get(part.index, 0.0)), told
    if ceilings is not None:
        return (lambda part: part.limit_s(ceilings)), "modelled, the least time that the device allows; not measured."
    return (lambda part: float(part.num_bytes)), "bytes; no time was measured."


def _columns(step: DecodeStep) -> list[tuple[str, list[StepPart]]]:
    """The part before the first attention, then a numbered column a layer (attention and the piece after it), and the
    logits if they have a piece of their own."""
    columns: dict[str, list[StepPart]] = defaultdict(list)
    previous: StepPart | None = None
    for part in step.parts:
        after = part.layer if part.piece is None else part.layer - 1
        is_end = part is step.parts[-1] and previous is not None and previous.piece is not None
        columns[_LOGITS if is_end else "" if after < 0 else str(after)].append(part)
        previous = part
    return list(columns.items())


def _groups(artifact: Artifact, step: DecodeStep) -> list[_Group]:
    """Equal parts together, in order of first use, each with its colour."""
    names = part_names(artifact.program, {spec.name: spec.shape for spec in artifact.weights})
    by_piece: dict[str | None, list[StepPart]] = defaultdict(list)
    for part in step.parts:
        by_piece[part.piece].append(part)
    colours = iter(_PIECE_COLOURS * len(by_piece))
    return [
        _Group(attention_name(artifact.program), _ATTENTION_COLOUR, found)
        if piece is None
        else _Group(names[piece], next(colours), found)
        for piece, found in by_piece.items()
    ]


def _pointed(name: PartName, part: StepPart, step: DecodeStep, ceilings: Ceilings | None) -> str:
    what = "attention" if part.piece is None else name.holds
    texts = [f"{_place(part, name)}: {what}", format_bytes(part.num_bytes)]
    if ceilings is not None:
        texts.append(f"at least {format_seconds(part.limit_s(ceilings))}")
    if step.part_s is not None:
        texts.append(f"measured {format_seconds(step.part_s.get(part.index, 0.0))}")
    return ", ".join(texts)


def _place(part: StepPart, name: PartName) -> str:
    if part.piece is None:
        return f"layer {part.layer}"
    if name.where == _LOGITS:  # which is behind the last attention as well as the piece ahead of it
        return _LOGITS
    return f"after layer {part.layer - 1}'s attention" if part.layer else "before layer 0"


def _part_table(groups: Sequence[_Group], step: DecodeStep, ceilings: Ceilings | None) -> str:
    columns = ["part", "times", "bytes", *_time_columns(step, ceilings), "share of the step"]
    whole = _total_s(step.parts, step, ceilings)
    rows: list[list[str]] = []
    for group in groups:
        own = _share_of(group, step, ceilings)
        share = own / whole if whole else group.num_bytes / step.num_bytes
        name = parts.swatch(group.colour, group.name.where, group.name.holds)
        cells = _time_cells(limit_s(group.parts, ceilings) if ceilings else None, group.measured_s(step), step)
        rows.append(
            [name, str(group.name.count), format_bytes(group.num_bytes), *cells, parts.share_bar(share, f"{share:.0%}")]
        )
    if step.part_s is not None:
        outside = step.other_s + step.outside_s
        name = parts.swatch(_IDLE_COLOUR, "outside the model", _OUTSIDE)
        cells = ["", format_seconds(outside), ""] if ceilings else [format_seconds(outside)]
        share = outside / whole
        rows.append([name, "", "", *cells, parts.share_bar(share, f"{share:.0%}")])
    cells = _time_cells(limit_s(step.parts, ceilings) if ceilings else None, step.wall_s, step)
    rows.append(["the step", "", format_bytes(step.num_bytes), *cells, ""])
    numbers = range(1, len(columns) - 1)
    return parts.table(columns, rows, numbers=numbers, caption=f"{_of(step)} by its parts", has_total=True)


def _total_s(found: Sequence[StepPart], step: DecodeStep, ceilings: Ceilings | None) -> float:
    if step.part_s is not None:
        return sum(step.part_s.values()) + step.other_s + step.outside_s
    return limit_s(found, ceilings) if ceilings is not None else 0.0


def _share_of(group: _Group, step: DecodeStep, ceilings: Ceilings | None) -> float:
    if step.part_s is not None:
        return group.measured_s(step)
    return limit_s(group.parts, ceilings) if ceilings is not None else 0.0


def _time_columns(step: DecodeStep, ceilings: Ceilings | None) -> list[str]:
    columns = ["at least"] if ceilings is not None else []
    if step.part_s is not None:
        columns.append("measured")
        columns += ["of the limit"] if ceilings is not None else []
    return columns


def _time_cells(limit: float | None, measured_s: float, step: DecodeStep) -> list[str]:
    """The cells of _time_columns."""
    cells = [] if limit is None else [format_seconds(limit)]
    if step.part_s is not None:
        cells.append(format_seconds(measured_s))
        cells += [] if limit is None else [f"{limit / measured_s:.0%}" if measured_s else ""]
    return cells


def _layer_table(names: Mapping[int, _Group], step: DecodeStep, ceilings: Ceilings | None) -> str:
    columns = ["where", "holds", "bytes", *_time_columns(step, ceilings)]
    rows = []
    for part in step.parts:
        name = names[part.index].name
        holds = "attention" if part.piece is None else name.holds
        cells = _time_cells(
            part.limit_s(ceilings) if ceilings is not None else None, (step.part_s or {}).get(part.index, 0.0), step
        )
        rows.append([_place(part, name), holds, format_bytes(part.num_bytes), *cells])
    return parts.table(columns, rows, numbers=range(2, len(columns)), caption="Every part of the step, in order")
