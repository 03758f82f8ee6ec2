"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from mllm_compile.errors import ConfigError
from mllm_compile.process.progress import NullReporter, Reporter, reporter_for

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A hub id, a model's folder, a GGUF file, a YAML config (configs/ has examples), or the folder of a "
        "compiled runtime.",
    ),
]
ModelsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="A hub id, a model's folder, a GGUF file, a YAML config, or the folder of a compiled runtime. Several are "
        "one server (docs/many-models.md): each as MODEL or NAME=MODEL, or a folder of YAMLs.",
    ),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also say what each setting became, and where the time goes.")
]
SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help='The config\'s section speculative, such as {"method": "ngram", "num_speculative_tokens": 3}.',
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors alone.")]


def reporter_of(verbose: bool, quiet: bool) -> Reporter:
    """The reporter of --verbose and --quiet: a line when it is ready, bars or lines of what takes long; all; nothing.

    Raises:
        ConfigError: both are given.
    """
    if verbose and quiet:
        raise ConfigError("--verbose says more, --quiet nothing; give one of them")
    return NullReporter() if quiet else reporter_for(plain_lines=True, details=verbose)
