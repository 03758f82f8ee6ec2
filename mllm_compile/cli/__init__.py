"""The command line: one file a command, put together here.

`mllm-compile MODEL` is `mllm-compile compile MODEL`. A user's mistake is one line on stderr and exit code
2; MLLM_COMPILE_DEBUG=1 shows the traceback instead. Nothing heavy (torch, Transformers) is imported until a command
runs.
"""

from __future__ import annotations

import difflib
import gc
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, NoReturn

import typer

from mllm_compile.cli.bench import make_bench_app
from mllm_compile.cli.cache import make_cache_app
from mllm_compile.cli.chat import chat_command
from mllm_compile.cli.compile import compile_command
from mllm_compile.cli.config import config_command
from mllm_compile.cli.explain import explain_command
from mllm_compile.cli.foreign_options import advice_on
from mllm_compile.cli.generate import generate_command
from mllm_compile.cli.inspect import inspect_command
from mllm_compile.cli.serve import serve_command
from mllm_compile.errors import MllmError
from mllm_compile.process.bytecode import kept_bytecode
from mllm_compile.process.interruption import kept_interruptions
from mllm_compile.runtime.files.disk_space import is_full
from mllm_compile.version import __version__

PROGRAM = "mllm-compile"
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130

_COMMANDS: dict[str, Callable[..., None]] = {
    "compile": compile_command,
    "generate": generate_command,
    "serve": serve_command,
    "chat": chat_command,
    "inspect": inspect_command,
    "explain": explain_command,
    "config": config_command,
}
_GROUPS: dict[str, Callable[[], typer.Typer]] = {"bench": make_bench_app, "cache": make_cache_app}


def _show_version(asked: bool) -> None:
    if asked:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


def _options_of_the_program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Compile a Hugging Face model into a cached runtime, and serve tokens from it.

    `mllm-compile MODEL` compiles; what it leaves starts in seconds. MODEL is a hub id, a model's folder, a YAML config,
    or the folder of a compiled runtime, here and in every command.
    """


def make_app() -> typer.Typer:
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_options_of_the_program)
    for name, command in _COMMANDS.items():
        app.command(name)(command)
    for name, make_group in _GROUPS.items():
        app.add_typer(make_group(), name=name)
    return app


def run(args: Sequence[str]) -> int:
    """Runs one command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character
    try:
        code = make_app()(args=_with_default_command(list(args)), prog_name=PROGRAM, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except Exception as error:
        message = _message_for_user(error, list(args))
        if message is None or os.environ.get("MLLM_COMPILE_DEBUG") == "1":
            raise
        typer.echo(f"{PROGRAM}: {typer.style('error:', fg='red', bold=True)} {message}", err=True)
        return EXIT_MISTAKE
    if code == EXIT_INTERRUPTED:  # typer makes this of a KeyboardInterrupt itself
        typer.echo(f"{PROGRAM}: interrupted", err=True)
    # typer returns the code of an Exit, and what the command returned (None) otherwise.
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    """Entry point of the console script."""
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")  # read when torch is imported; see runtime/device/open.py
    with kept_bytecode(), kept_interruptions():
        code = run(sys.argv[1:])
    gc.freeze()  # at the end Python looks through all objects; torch's take 0.3 s
    sys.exit(code)


def _with_default_command(args: list[str]) -> list[str]:
    """Puts `compile` in front of what is no command: a model, or an option of compile.

    Nothing, or a group alone, asks for help.
    """
    if not args or (len(args) == 1 and args[0] in _GROUPS):
        return [*args, "--help"]
    first = args[0]
    if first in _COMMANDS or first in _GROUPS or first in ("--help", "-h", "--version"):
        return args
    known = [*_COMMANDS, *_GROUPS]
    has_model_behind = first.isalpha() and len(args) > 1 and not args[1].startswith("-")  # `run MODEL`
    is_mistyped = not os.path.exists(first) and (has_model_behind or bool(difflib.get_close_matches(first, known, n=1)))
    return args if is_mistyped else ["compile", *args]  # typer names the command that is closest


def _message_for_user(error: Exception, args: list[str]) -> str | None:
    """One line for a user's mistake, None for an error of ours."""
    if isinstance(error, MllmError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and is_full(error):
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror}. Make room, or write to another place."
    # typer's usage errors; their base class has moved between its versions, the method has not.
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else PROGRAM
    option = getattr(error, "option_name", None) if type(error).__name__ == "NoSuchOption" else None
    meant = None if option is None else advice_on(option, args)
    if meant is not None:
        return f"{meant} (docs/coming-from-vllm.md)"
    message = " ".join(format_message().split())
    if type(error).__name__ == "UsageError" and "--lora-modules" in args:  # vLLM's takes several
        message += "; --lora-modules takes one NAME=PATH: give it once for each"
    return f"{message} (see {path} --help)"
