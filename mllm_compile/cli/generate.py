"""`mllm-compile generate CONFIG.yaml --prompt …`: text from a prompt, as it comes."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mllm_compile.cli.arguments import ConfigArgument
from mllm_compile.config import EngineConfig
from mllm_compile.progress import reporter_for

if TYPE_CHECKING:
    from mllm_compile.outputs import RequestOutput


def generate_command(
    config: ConfigArgument,
    prompt: Annotated[str, typer.Option(help="The text to go on from; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token each time; by default the model's own setting.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message, through the model's chat template.")
    ] = False,
) -> None:
    """Generate text and print it as it comes. Compiles first when nothing compiled fits."""
    engine_config = EngineConfig.from_yaml(config)
    text = sys.stdin.read() if prompt == "-" else prompt

    from mllm_compile.runtime.sampling_params import SamplingParams

    changes: dict[str, Any] = {"max_tokens": max_tokens} | ({} if temperature is None else {"temperature": temperature})
    SamplingParams(**changes)  # a value that cannot be is refused before anything is compiled or loaded

    from mllm_compile.engine import Engine

    with Engine(engine_config, reporter=reporter_for(plain_lines=True)) as engine:
        params = dataclasses.replace(engine.default_params, **changes)
        if chat:
            _print_stream(engine.stream_chat([{"role": "user", "content": text}], params))
        else:
            _print_stream(engine.stream(text, params))


def _print_stream(outputs: Iterable[RequestOutput]) -> None:
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr] # a terminal that cannot show a character
    start = time.perf_counter()
    num_tokens = 0
    for output in outputs:
        for completion in output.outputs:
            num_tokens += len(completion.token_ids)
            print(completion.text, end="", flush=True)
    print(flush=True)
    if sys.stderr.isatty():
        seconds = time.perf_counter() - start
        print(f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s)", file=sys.stderr)
