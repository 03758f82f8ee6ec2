"""Runs the commands of the demo in a terminal and draws what it shows: `make terminal` → terminal.svg.

The model is compiled first: the picture is of warm starts. tests/rules/test_terminal.py tells when it is old.
"""

from __future__ import annotations

import os
import pty
import re
import runpy
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 112
ROOT = Path(__file__).parents[1]
DEMO = runpy.run_path(str(ROOT / "examples" / "demo.py"))
COMPILE, *ANSWERS = DEMO["commands"](DEMO["MODEL"])
COMMANDS = (*ANSWERS, ("inspect", DEMO["MODEL"], "--out", "/tmp/graphs"))
# Without web fonts, which a picture in a page does not load.
SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>{lines}
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def output_of(arguments: tuple[str, ...]) -> str:
    """The bytes that a terminal of COLUMNS columns gets."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "mllm_compile", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        sent = b""
        try:
            while data := os.read(ours, 1 << 16):
                sent += data
        except OSError:  # the terminal's other end is closed
            pass
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{sent.decode()}")
    return sent.decode()


def shown(sent: str) -> str:
    """The visible text: progress bars go up (CSI A) and erase themselves (CSI 2K), and cursors are no text."""
    lines: list[str] = []
    for line in sent.split("\n"):
        up = sum(int(number or 1) for number in re.findall(r"\x1b\[(\d*)A", line))
        del lines[max(0, len(lines) - up) :]
        lines.append(line.rsplit("\x1b[2K", 1)[-1].strip("\r"))
    return re.sub(r"\x1b\[\?25[lh]|\x1b\[\d*[A-G]", "", "\n".join(lines)).strip("\n")


def main() -> None:
    if (reason := DEMO["fetch"]()) is not None:
        raise SystemExit(f"the picture is of {DEMO['MODEL']}: {reason}")
    output_of(COMPILE)
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    for arguments in COMMANDS:
        words = (word if re.fullmatch(r"[\w./-]+", word) else f"'{word}'" for word in arguments)
        console.print(Text("$ ", style="bold green") + Text(f"mllm-compile {' '.join(words)}", style="bold"))
        console.print(Text.from_ansi(shown(output_of(arguments))))
        console.print()
    picture = console.export_svg(title="mllm_compile", code_format=SVG, unique_id="terminal")
    (ROOT / "docs" / "terminal.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
