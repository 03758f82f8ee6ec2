"""The stages between a model and its program as text, for people: what `mllm-compile inspect` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mllm_compile.config import EngineConfig
from mllm_compile.errors import ConfigError
from mllm_compile.progress import Reporter
from mllm_compile.target import find_target
from mllm_compile.timeline import timeline_of

if TYPE_CHECKING:
    from mllm_compile.passes.pipeline import PassReport


def inspect_model(config: EngineConfig, out_dir: Path, reporter: Reporter | None = None) -> list[PassReport]:
    """Writes the graph before and after every pass, and the program with its pieces, as numbered text files.

    Those of an earlier call are removed from the folder first; other files stay.

    Returns:
        One report a pass.

    Raises:
        ConfigError: the folder cannot be made; and as find_target.
    """
    from mllm_compile.lowering import build_model, lower, remove_graph_texts

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
    lowered = lower(target.config, build_model(target.config, target.model, timeline), out_dir, timeline)
    lines = [step_line(step) for step in lowered.program.to_json()["steps"]]
    program_text.write_text("\n".join([*lines, f"logits = {lowered.program.output}", ""]), encoding="utf-8")
    return lowered.reports


def step_line(step: Mapping[str, Any]) -> str:
    """A step of program.json for people."""
    if step["op"] == "piece":
        return f"{', '.join(step['outputs'])} = {step['piece']}({', '.join(step['inputs'])})"
    unrotated = step["unrotated"]
    told = "" if unrotated is None else f", or, rotating itself, {', '.join(unrotated['values'])}"
    return f"{step['out']} = attention[{step['layer']}]({step['q']}, {step['k']}, {step['v']}{told})"
