"""Writes the stages between a model and its program as text for people (`mllm-compile inspect`)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mllm_compile.compiler.target import alike_target, find_target
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ConfigError, UnlikeRowsError
from mllm_compile.process.progress import Reporter
from mllm_compile.process.timeline import timeline_of
from mllm_compile.report.part_names import PartName, part_names
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.steps import AttentionStep, CrossAttentionStep, PackedAttentionStep, PieceStep

if TYPE_CHECKING:
    from mllm_compile.passes.pipeline import PassReport

_LINE = 110


@dataclass(frozen=True)
class Inspected:
    """The passes' reports, why others were left out, how the model is cut over ranks, and the names of the program's
    distinct pieces."""

    reports: list[PassReport]
    left_out: Mapping[str, str]
    cut: list[str]
    pieces: list[PartName]


def inspect_model(config: EngineConfig, out_dir: Path, reporter: Reporter | None = None) -> Inspected:
    """Writes the graph before and after every pass, and the program with its pieces, as numbered text files.

    Those of an earlier call are removed from the folder first; other files stay.

    Raises:
        ConfigError: the folder cannot be made; and as find_target.
    """
    from mllm_compile.compiler.graph_text import remove_graph_texts
    from mllm_compile.compiler.lowering import build_model, private_inductor_cache
    from mllm_compile.compiler.pooling import lower_any
    from mllm_compile.compiler.program_builder import weight_shapes

    timeline = timeline_of(reporter)
    with timeline.stage("resolve"):
        target = find_target(config)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out_dir} cannot be made ({error.strerror}). Give another folder.") from error
    remove_graph_texts(out_dir)
    program_text = out_dir / "program.txt"
    program_text.unlink(missing_ok=True)
    with TemporaryDirectory(prefix="mllm-inspect-") as folder, private_inductor_cache(Path(folder)):
        try:
            built = build_model(target.config, target.model, timeline)
            lowered = lower_any(target.config, built, target.model, out_dir, timeline)
        except UnlikeRowsError:
            target = alike_target(config, target)
            remove_graph_texts(out_dir)
            built = build_model(target.config, target.model, timeline)
            lowered = lower_any(target.config, built, target.model, out_dir, timeline)
    shapes = {name: shape for name, (shape, _) in weight_shapes(lowered.graph).items()}
    lines = program_lines(lowered.program, shapes)
    program_text.write_text("\n".join([*lines, f"logits = {lowered.program.output}", ""]), encoding="utf-8")
    pieces = list(part_names(lowered.program, shapes).values())
    return Inspected(lowered.reports, lowered.left_out, lowered.cut_lines(), pieces)


def program_lines(program: Program, shapes: Mapping[str, Sequence[int]], most_steps: int | None = None) -> list[str]:
    """The program for people: each step under what it is called, no line longer than it must be.

    Args:
        shapes: the shapes of the program's weights.
        most_steps: leave out those behind them.
    """
    names = part_names(program, shapes)
    lines = []
    for step in program.steps[:most_steps]:
        if isinstance(step, AttentionStep):
            lines += [f"# {step.layer}: attention", *_wrapped(_attention_line(step)), ""]
        elif isinstance(step, PackedAttentionStep):
            call = f"{step.out} = attention[{step.layer}]({step.q}, {step.k}, {step.v}, {step.segments})"
            lines += [f"# {step.layer}: attention within segments", *_wrapped(call), ""]
        elif isinstance(step, CrossAttentionStep):
            lines += [f"# {step.layer}: attention to the source", f"{step.out} = attention[{step.layer}]({step.q})", ""]
        elif not isinstance(step, PieceStep):
            call = f"{step.out} = state[{step.layer}]({', '.join(step.operands)})"
            lines += [f"# {step.layer}", *_wrapped(call), ""]
        else:
            call = f"{', '.join(step.outputs)} = {step.piece}({', '.join(step.inputs)})"
            lines += [f"# {names[step.piece]}", *_wrapped(call), ""]
    return lines


def _attention_line(step: AttentionStep) -> str:
    told = ""
    if step.rope_inputs is not None:
        does = "rotating" if step.rope_inputs.values[2:] else "writing k and v"
        told = f", or, {does} itself, {', '.join(step.rope_inputs.values)}"
    return f"{step.out} = attention[{step.layer}]({step.q}, {step.k}, {step.v}{told})"


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, _LINE, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
