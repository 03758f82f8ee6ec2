"""`mllm-compile chat MODEL|URL`: a conversation in the terminal, with an engine of its own or with a server."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from mllm_compile.cli.adapter_option import AdapterOption, AskedAdapter
from mllm_compile.cli.arguments import QuietOption, VerboseOption, reporter_of
from mllm_compile.cli.before_compile import check_takes_text
from mllm_compile.config.sources import config_or_runtime
from mllm_compile.errors import ConfigError, MllmError, RequestError

if TYPE_CHECKING:
    from mllm_compile.engine.engine import Engine
    from mllm_compile.runtime.sampling.params import SamplingParams

Message = dict[str, str]
Settings = dict[str, Any]
# The pieces of an answer, each with how many tokens it is.
Ask = Callable[[list[Message], Settings], Iterator[tuple[str, int]]]
Check = Callable[[Settings], object]  # raises an MllmError that says what is wrong with them

_HELP = "/reset forgets the conversation, /set NAME VALUE sets temperature, top_p, max_tokens, …, /quit or Ctrl-D ends"
_TIMEOUT_S = 600.0


def chat_command(
    target: Annotated[
        str,
        typer.Argument(metavar="MODEL|URL", help="A model, as every command takes it, or the URL of an OpenAI server."),
    ],
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="By default the model's own.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="MLLM_API_KEY")] = None,
    adapter: AdapterOption = None,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Chat with a model in the terminal; /help says what can be typed beside messages."""
    settings: Settings = {"max_tokens": max_tokens}
    if temperature is not None:
        settings["temperature"] = temperature
    reporter = reporter_of(verbose, quiet)
    asked = None if adapter is None else AskedAdapter.of(adapter)
    if "://" in target:
        _end(converse(_server(target, api_key, asked), system, settings, is_quiet=quiet))
        return
    config = config_or_runtime(target)  # a mistake is told before anything heavy is imported
    config = config if asked is None else asked.with_place(config)
    check_takes_text(config, target, as_chat=True)
    from mllm_compile.engine.engine import Engine

    with Engine(config, reporter=reporter) as engine:
        check = partial(_params, engine)
        name = None if asked is None else asked.load(engine)
        answered_all = converse(_engine(engine, name), system, settings, check=check, is_quiet=quiet)
    _end(answered_all)


def _end(answered_all: bool) -> None:
    """Tells a script that a message of its got no answer."""
    if not answered_all and not _is_terminal():
        raise typer.Exit(1)


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def converse(
    ask: Ask, system: str | None, settings: Settings, *, check: Check | None = None, is_quiet: bool = False
) -> bool:
    """Reads messages and commands from standard input until it ends, and prints answers as they come.

    Args:
        check: refuses a setting when it is typed; a server refuses it with the next message.

    Returns:
        True if every message got an answer.
    """
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    is_terminal = _is_terminal()
    answered_all = True
    if is_terminal and not is_quiet:
        print(_HELP, file=sys.stderr)
    while True:
        line = _read(is_terminal)
        if line is None or line.split()[:1] == ["/quit"]:
            return answered_all
        if line == "/reset":
            messages = list(start)
        elif line.startswith("/set"):
            _set(settings, line, check)
        elif line.startswith("/"):
            print(_HELP, file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(ask, messages, settings, is_quiet)
            if answer is None:
                answered_all = False
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _read(is_terminal: bool) -> str | None:
    """The next line, None at the end."""
    if not is_terminal:
        line = sys.stdin.readline() if sys.stdin is not None else ""
        return line.strip() if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  arrows and history in input()
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        return ""


def _set(settings: Settings, line: str, check: Check | None) -> None:
    try:
        _, name, text = shlex.split(line)
        value = json.loads(text)
    except ValueError:
        print("/set takes a name and a number, such as /set temperature 0.5; null is the model's own", file=sys.stderr)
        return
    changed = {key: other for key, other in settings.items() if key != name}
    if value is not None:
        changed[name] = value
    try:
        if check is not None:
            check(changed)
    except MllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return
    settings.clear()
    settings.update(changed)


def _answer(ask: Ask, messages: list[Message], settings: Settings, is_quiet: bool) -> str | None:
    """Prints an answer; returns its text, None if it was refused or interrupted."""
    begin = time.perf_counter()
    first: float | None = None
    texts: list[str] = []
    count = 0
    try:
        with contextlib.closing(ask(messages, settings)) as pieces:  # type: ignore[type-var]
            for text, tokens in pieces:
                first = first or time.perf_counter()
                count += tokens
                texts.append(text)
                print(text, end="", flush=True)
    except MllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print()
        return None
    print()
    if not is_quiet and first is not None:
        seconds = time.perf_counter() - first
        speed = f", {(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds else ""
        print(f"[first token {1e3 * (first - begin):.0f} ms, {count} tokens{speed}]", file=sys.stderr)
    return "".join(texts)


def _engine(engine: Engine, adapter: str | None) -> Ask:
    def ask(messages: list[Message], settings: Settings) -> Iterator[tuple[str, int]]:
        with engine.stream_chat(messages, _params(engine, settings), adapter=adapter) as outputs:
            for output in outputs:
                yield output.text, len(output.token_ids)

    return ask


def _params(engine: Engine, settings: Settings) -> SamplingParams:
    """
    Raises:
        RequestError: SamplingParams has no such field, or the value is not in its range.
    """
    try:
        return dataclasses.replace(engine.default_params, **settings)
    except TypeError as error:
        raise RequestError(str(error)) from None


def _server(url: str, api_key: str | None, adapter: AskedAdapter | None = None) -> Ask:
    if adapter is not None and adapter.folder is not None:
        raise ConfigError(f"--adapter: expected NAME, as the server has loaded it, got {adapter.name}={adapter.folder}")
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    refusal = ConfigError(f"{url} is no URL of a server; expected such as http://127.0.0.1:8000")
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in kinds and bool(parts.netloc) and parts.port != 0
    except ValueError:  # of a port that is no number, or a bracket that is not closed
        raise refusal from None
    if not is_url:
        raise refusal
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})

    def ask(messages: list[Message], settings: Settings) -> Iterator[tuple[str, int]]:
        connection = kinds[parts.scheme](parts.netloc, timeout=_TIMEOUT_S)
        body = {"messages": messages, "stream": True, "stream_options": {"continuous_usage_stats": True}, **settings}
        if adapter is not None:
            body["model"] = adapter.name
        try:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                hint = ". Give the key as --api-key, or as MLLM_API_KEY" if response.status == 401 else ""
                raise RequestError(f"{url} answers {response.status}: {_message(response.read())}{hint}")
            ignored = response.getheader("x-mllm-ignored")
            if ignored:
                print(f"{url} knows no {ignored}, and answers without; /set NAME null forgets it", file=sys.stderr)
            yield from _pieces(response)
        except ConnectionRefusedError:
            raise RequestError(f"{url}: no server listens there. Start one: mllm-compile serve MODEL") from None
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"{url}: {error or type(error).__name__}") from None
        finally:
            connection.close()

    return ask


def _pieces(response: http.client.HTTPResponse) -> Iterator[tuple[str, int]]:
    """The pieces of a stream; their tokens by its usage, one each where it has none."""
    told = 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RequestError(chunk["error"]["message"])
        text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        count = (chunk.get("usage") or {}).get("completion_tokens", told + bool(text))
        if text:
            yield text, count - told
            told = count


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
