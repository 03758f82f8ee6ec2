"""`mllm-compile generate MODEL --prompt …`: text from a prompt, as it comes."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mllm_compile.cli.adapter_option import AdapterOption, AskedAdapter
from mllm_compile.cli.arguments import ModelArgument, QuietOption, SpeculativeOption, VerboseOption, reporter_of
from mllm_compile.cli.before_compile import check_takes_forms, check_takes_images, check_takes_text, no_tokenizer
from mllm_compile.config.sources import config_or_runtime, with_speculative
from mllm_compile.errors import RequestError
from mllm_compile.files.user_path import user_path
from mllm_compile.process.no_gc import imports_unseen
from mllm_compile.process.timeline import Timeline, print_timeline, seconds_since_start
from mllm_compile.runtime.short_repr import short_repr

if TYPE_CHECKING:
    from mllm_compile.engine.outputs import RequestOutput


def generate_command(
    model: ModelArgument,
    prompt: Annotated[
        str, typer.Option(help="The text to go on from; - reads it from standard input, less a newline at its end.")
    ],
    image: Annotated[
        list[str] | None,
        typer.Option(
            help="An image's file, before the prompt in a user's message; or an address, from a host that the "
            "config allows. May be given several times."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token each time; by default the model's own setting.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the fewest likeliest tokens that together are this probable; 1: all."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens; 0: all.")] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Draw from tokens that are at least this probable, as a share of the likeliest."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws: another seed, another text.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End where this text would come, which is left out. May be given several times."),
    ] = None,
    json_schema: Annotated[
        str | None, typer.Option(help="The answer is JSON that this schema describes: a file, or the schema itself.")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json", help="The answer is a JSON object.")] = False,
    regex: Annotated[str | None, typer.Option(help="The whole answer matches this regular expression.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The answer is one of these. May be given several times.")
    ] = None,
    grammar: Annotated[
        str | None, typer.Option(help="The answer has this form: a file with a grammar in GBNF or Lark, or its text.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message, through the model's chat template.")
    ] = False,
    echo: Annotated[
        bool | None,
        typer.Option("--echo/--no-echo", help="Print the prompt, too; by default on a terminal only."),
    ] = None,
    timings: Annotated[
        bool, typer.Option("--timings", help="Say where the time to the first token went, on standard error.")
    ] = False,
    adapter: AdapterOption = None,
    speculative_config: SpeculativeOption = None,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Generate text and print it as it comes. Compiles first when nothing compiled fits."""
    timeline = Timeline(reporter_of(verbose, quiet))
    timeline.add("start Python, read the command line", 0.0, seconds_since_start())
    # A mistake is told before anything heavy is imported.
    engine_config = with_speculative(config_or_runtime(model), speculative_config)
    asked_adapter = None if adapter is None else AskedAdapter.of(adapter)
    if asked_adapter is not None:
        engine_config = asked_adapter.with_place(engine_config)
    if prompt == "-" and sys.stdin is None:
        raise RequestError("--prompt - reads standard input, which is closed. Give the text itself.")
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text and not chat:
        raise RequestError("the prompt is empty; expected at least one character. Give a text with --prompt.")
    images = [{"type": "image", "image": _image(path)} for path in image or ()]
    if images:
        check_takes_images(engine_config, model)
    check_takes_text(engine_config, model, as_chat=chat or bool(images))

    with timeline.stage("import"), imports_unseen():
        from mllm_compile.engine.engine import Engine
        from mllm_compile.runtime.sampling.params import SamplingParams
        from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams

    form = {
        "json": _read(json_schema, "{"),
        "json_object": json_object or None,
        "regex": regex,
        "choice": choice or None,
        "grammar": _read(grammar, "::=", "start:"),
    }
    given_form: dict[str, Any] = {name: value for name, value in form.items() if value is not None}
    asked = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or None,
        "structured_outputs": StructuredOutputsParams(**given_form) if given_form else None,
    }
    changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    SamplingParams(**changes)  # a value that cannot be is refused before anything is compiled or loaded
    if given_form:
        check_takes_forms(engine_config)

    with Engine(engine_config, reporter=timeline) as engine:
        if engine.tokenizer is None:  # a runtime's, or a hub's model
            raise no_tokenizer(model)
        params = dataclasses.replace(engine.default_params, **changes)
        name = None if asked_adapter is None else asked_adapter.load(engine)
        if chat or images:
            content = [*images, {"type": "text", "text": text}] if images else text
            outputs = engine.stream_chat([{"role": "user", "content": content}], params, adapter=name)
        else:
            if engine.tokenizer.has_chat_template:
                timeline.tell("the model goes on with the prompt as a plain text; --chat asks it as a user does")
            outputs = engine.stream(text, params, adapter=name)
        if sys.stdout.isatty() if echo is None else echo:
            _print_prompt(text + "\n" if chat or images else text)
        _print_stream(_timed(outputs, timeline), is_quiet=quiet)
    if timings:
        print_timeline(sys.stderr, timeline.spans)


def _read(text_or_file: str | None, *signs: str) -> str | None:
    """The text of a file; what holds one of `signs` is the text itself.

    Raises:
        RequestError: the file cannot be read.
    """
    if text_or_file is None or any(sign in text_or_file for sign in signs):
        return text_or_file
    try:
        return user_path(text_or_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{short_repr(text_or_file)} cannot be read ({error}). Give a file of UTF-8 text, or the text itself."
        ) from None


def _image(path: str) -> bytes | str:
    """The bytes of an image's file, before anything is compiled; an address as it is, which the engine may fetch.

    Raises:
        RequestError: it cannot be read, or Pillow is not installed.
    """
    from mllm_compile.media.preprocessor import check_pillow
    from mllm_compile.media.sources import read_image

    check_pillow()
    source = read_image(path, "--image", local_paths=True).frames[0]
    return source.url or source.data


def _timed(outputs: Iterable[RequestOutput], timeline: Timeline) -> Iterator[RequestOutput]:
    """The same outputs; the wait for the first one is a stage."""
    asked = seconds_since_start()
    for index, output in enumerate(outputs):
        if index == 0:
            timeline.add("first token", asked, seconds_since_start())
        yield output


def _print_prompt(text: str) -> None:
    """Prints the prompt dimmed on a terminal, so that the model's text stands out."""
    print(typer.style(text, dim=True) if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text, end="")


def _print_stream(outputs: Iterable[RequestOutput], is_quiet: bool) -> None:
    start = time.perf_counter()
    num_tokens = 0
    for output in outputs:
        for completion in output.outputs:
            num_tokens += len(completion.token_ids)
            print(completion.text, end="", flush=True)
    print(flush=True)
    if sys.stderr.isatty() and not is_quiet:
        seconds = time.perf_counter() - start
        print(f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s)", file=sys.stderr)
