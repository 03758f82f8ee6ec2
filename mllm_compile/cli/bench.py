"""`mllm-compile bench …`: the speed of an engine, as a table, JSON and a plot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mllm_compile.bench.measure import workloads
from mllm_compile.cli.arguments import ModelArgument
from mllm_compile.cli.output_paths import check_output_file
from mllm_compile.errors import ConfigError

if TYPE_CHECKING:
    from mllm_compile.bench.limits.roofline_report import Roofline
    from mllm_compile.bench.measure.results import BenchResult
    from mllm_compile.bench.serving.load import ServeResult


def _comma(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _points_text(points: Sequence[tuple[int, int]]) -> str:
    return ",".join(f"{count}x{length}" for count, length in points)


EnginesOption = Annotated[
    str, typer.Option("--engine", help="Engines to measure, separated by commas: mllm, vllm, transformers.")
]
BatchOption = Annotated[str, typer.Option(help="Batch sizes, separated by commas.")]
LatencyBatchOption = Annotated[
    str | None,
    typer.Option(
        help="Batch sizes, separated by commas.",
        show_default=f"{_comma(workloads.BATCHES)}; on a CPU {_comma(workloads.CPU_BATCHES)}",
    ),
]
InputLenOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens of each prompt.", show_default=f"{workloads.INPUT_LEN}; on a CPU {workloads.CPU_INPUT_LEN}"
    ),
]
OutputLenOption = Annotated[
    int | None,
    typer.Option(
        help="New tokens of the whole call.",
        show_default=f"{workloads.OUTPUT_LEN}; on a CPU {workloads.CPU_OUTPUT_LEN}",
    ),
]
RepeatsOption = Annotated[int, typer.Option(help="Timed runs of each; one more before them is not counted.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]


RanksOption = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size", min=1, help="Cut the model over so many devices.", show_default="the config's"
    ),
]


def make_bench_app() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(help="Measure speed: on the project's benchmark, against other engines, kernel by kernel.")
    app.command("latency")(latency_command)
    app.command("throughput")(throughput_command)
    app.command("long")(long_command)
    app.command("gaps")(gaps_command)
    app.command("images")(images_command)
    app.command("startup")(startup_command)
    app.command("ablation")(ablation_command)
    app.command("roofline")(roofline_command)
    app.command("serve")(serve_command)
    app.command("table")(table_command)
    return app


def latency_command(
    model: ModelArgument,
    engine: EnginesOption = "mllm",
    batch: LatencyBatchOption = None,
    input_len: InputLenOption = None,
    output_len: OutputLenOption = None,
    repeats: RepeatsOption = workloads.REPEATS,
    num_ranks: RanksOption = None,
    json_path: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it, against the batch size, into this file.")] = None,
) -> None:
    """Time per output token (tpot) and of the prefill, by batch size, with the share of the machine's limit."""
    check_output_file("--json", json_path)
    check_output_file("--plot", plot)

    from mllm_compile.bench.measure.harness import run_latency
    from mllm_compile.bench.show.plot import check_picture, plot_latency
    from mllm_compile.bench.show.report import print_result

    if plot is not None:
        check_picture(plot)
    work = _latency_work(model, batch, input_len, output_len, repeats)
    result = run_latency(model, _names(engine), work, num_ranks)
    _save_and_show(result, json_path, lambda: print_result(result, sys.stdout))
    if plot is not None:
        plot_latency(result, plot)


def throughput_command(
    model: ModelArgument,
    engine: EnginesOption = "mllm",
    requests: Annotated[int, typer.Option(help="Requests of the mixed work.")] = workloads.MIXED_REQUESTS,
    min_len: Annotated[int, typer.Option(help="Shortest prompt and answer of it.")] = workloads.MIXED_RANGE[0],
    max_len: Annotated[int, typer.Option(help="Longest prompt and answer of it.")] = workloads.MIXED_RANGE[1],
    prefill_prompts: Annotated[int, typer.Option(help="Prompts of the prefill.")] = workloads.PREFILL_PROMPTS,
    prefill_len: Annotated[int, typer.Option(help="Tokens of each of them.")] = workloads.PREFILL_LEN,
    repeats: RepeatsOption = workloads.REPEATS,
    num_ranks: RanksOption = None,
    json_path: JsonOption = None,
) -> None:
    """Output tokens a second of many requests of all lengths at once, and input tokens a second of long prompts."""
    work = workloads.ThroughputWork(
        mixed_requests=requests,
        mixed_range=(min_len, max_len),
        prefill_prompts=prefill_prompts,
        prefill_len=prefill_len,
        repeats=repeats,
    )
    check_output_file("--json", json_path)

    from mllm_compile.bench.measure.harness import run_throughput
    from mllm_compile.bench.show.report import print_result

    result = run_throughput(model, _names(engine), work, num_ranks)
    _save_and_show(result, json_path, lambda: print_result(result, sys.stdout))


def long_command(
    model: ModelArgument,
    engine: EnginesOption = "mllm",
    points: Annotated[
        str | None,
        typer.Option(
            help="Requests at once x tokens of each prompt, separated by commas.",
            show_default=f"{_points_text(workloads.LONG_POINTS)}; on a CPU {_points_text(workloads.CPU_LONG_POINTS)}",
        ),
    ] = None,
    output_len: OutputLenOption = None,
    repeats: RepeatsOption = workloads.REPEATS,
    json_path: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it into this file.")] = None,
) -> None:
    """Time per output token and prefill with long contexts, of few requests and of many."""
    check_output_file("--json", json_path)
    check_output_file("--plot", plot)
    asked: dict[str, Any] = {"repeats": repeats}
    asked |= {} if points is None else {"points": _points(points)}
    asked |= {} if output_len is None else {"output_len": output_len}
    work = workloads.LongWork(**asked)

    from mllm_compile.bench.measure.harness import run_long, serves_on_cpu
    from mllm_compile.bench.show.bars_plot import plot_bars
    from mllm_compile.bench.show.plot import check_picture
    from mllm_compile.bench.show.report import print_result

    if plot is not None:
        check_picture(plot)
    smaller: dict[str, Any] = {"points": workloads.CPU_LONG_POINTS, "output_len": workloads.CPU_OUTPUT_LEN}
    if not smaller.keys() <= asked.keys() and serves_on_cpu(model):
        work = workloads.LongWork(**(smaller | asked))
        _tell_small(f"points {_points_text(work.points)}, {work.output_len} new tokens", "--points and --output-len")
    result = run_long(model, _names(engine), work)
    _save_and_show(result, json_path, lambda: print_result(result, sys.stdout))
    if plot is not None:
        plot_bars(result, plot)


def gaps_command(
    model: ModelArgument,
    engine: Annotated[
        str, typer.Option("--engine", help="Engines to measure, separated by commas: mllm, vllm.")
    ] = "mllm",
    decodes: Annotated[
        int | None,
        typer.Option(
            help="Answers that run.", show_default=f"{workloads.GAP_DECODES}; on a CPU {workloads.CPU_GAP_DECODES}"
        ),
    ] = None,
    decode_len: Annotated[int, typer.Option(help="Tokens of each one's prompt.")] = workloads.GapsWork.decode_len,
    tokens: Annotated[int, typer.Option(help="Tokens that each has made when the prompt comes.")] = (
        workloads.GapsWork.tokens
    ),
    prompt_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the prompt that comes.",
            show_default=f"{workloads.GAP_PROMPT_LEN}; on a CPU {workloads.CPU_GAP_PROMPT_LEN}",
        ),
    ] = None,
    repeats: RepeatsOption = workloads.REPEATS,
    json_path: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it into this file.")] = None,
) -> None:
    """Gaps between the tokens of running answers, alone and while a long prompt comes in, and that prompt's time."""
    check_output_file("--json", json_path)
    check_output_file("--plot", plot)
    asked: dict[str, Any] = {"decode_len": decode_len, "tokens": tokens, "repeats": repeats}
    asked |= {} if decodes is None else {"decodes": decodes}
    asked |= {} if prompt_len is None else {"prompt_len": prompt_len}
    work = workloads.GapsWork(**asked)

    from mllm_compile.bench.measure.harness import run_gaps, serves_on_cpu
    from mllm_compile.bench.show.bars_plot import plot_bars
    from mllm_compile.bench.show.plot import check_picture
    from mllm_compile.bench.show.report import print_result

    if plot is not None:
        check_picture(plot)
    smaller: dict[str, Any] = {"decodes": workloads.CPU_GAP_DECODES, "prompt_len": workloads.CPU_GAP_PROMPT_LEN}
    if not smaller.keys() <= asked.keys() and serves_on_cpu(model):
        work = workloads.GapsWork(**(smaller | asked))
        _tell_small(f"{work.decodes} answers, a prompt of {work.prompt_len} tokens", "--decodes and --prompt-len")
    result = run_gaps(model, _names(engine), work)
    _save_and_show(result, json_path, lambda: print_result(result, sys.stdout))
    if plot is not None:
        plot_bars(result, plot)


def images_command(
    model: ModelArgument,
    engine: Annotated[
        str, typer.Option("--engine", help="Engines to measure, separated by commas: mllm, vllm.")
    ] = "mllm",
    batch: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = _comma(
        workloads.IMAGE_BATCHES
    ),
    side: Annotated[
        int | None,
        typer.Option(
            help="Pixels of each side of an image.",
            show_default=f"{workloads.IMAGE_SIDE}; on a CPU {workloads.CPU_IMAGE_SIDE}",
        ),
    ] = None,
    text_len: Annotated[int, typer.Option(help="Tokens of text around each image.")] = workloads.IMAGE_TEXT_LEN,
    output_len: OutputLenOption = None,
    repeats: RepeatsOption = workloads.REPEATS,
    json_path: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it into this file.")] = None,
) -> None:
    """First tokens and tpot of prompts with an image, new or seen before, beside text of the same length."""
    check_output_file("--json", json_path)
    check_output_file("--plot", plot)
    asked: dict[str, Any] = {"batches": _numbers("--batch", batch), "text_len": text_len, "repeats": repeats}
    asked |= {} if side is None else {"side": side}
    asked |= {} if output_len is None else {"output_len": output_len}
    work = workloads.ImagesWork(**asked)

    from mllm_compile.bench.measure.harness import run_images, serves_on_cpu
    from mllm_compile.bench.show.bars_plot import plot_bars
    from mllm_compile.bench.show.plot import check_picture
    from mllm_compile.bench.show.report import print_result

    if plot is not None:
        check_picture(plot)
    smaller: dict[str, Any] = {"side": workloads.CPU_IMAGE_SIDE, "output_len": workloads.CPU_OUTPUT_LEN}
    if not smaller.keys() <= asked.keys() and serves_on_cpu(model):
        work = workloads.ImagesWork(**(smaller | asked))
        _tell_small(f"images of {work.side} × {work.side}, {work.output_len} new tokens", "--side and --output-len")
    result = run_images(model, _names(engine), work)
    _save_and_show(result, json_path, lambda: print_result(result, sys.stdout))
    if plot is not None:
        plot_bars(result, plot)


def startup_command(
    model: ModelArgument,
    engine: EnginesOption = "mllm",
    repeats: Annotated[int, typer.Option(help="Cold starts, each followed by a warm one.")] = workloads.REPEATS,
    json_path: JsonOption = None,
) -> None:
    """Seconds from a fresh process's first line to its first token, with empty caches and with filled ones."""
    work = workloads.StartupWork(repeats=repeats)
    check_output_file("--json", json_path)

    from mllm_compile.bench.measure.harness import run_startup
    from mllm_compile.bench.show.report import print_result

    result = run_startup(model, _names(engine), work)
    _save_and_show(result, json_path, lambda: print_result(result, sys.stdout))


def ablation_command(
    model: ModelArgument,
    lever: Annotated[str, typer.Option(help="Levers to leave out one by one, separated by commas; default: all.")] = "",
    batch: LatencyBatchOption = None,
    input_len: InputLenOption = None,
    output_len: OutputLenOption = None,
    repeats: RepeatsOption = workloads.REPEATS,
    json_path: JsonOption = None,
) -> None:
    """Show what each pass and kernel brings: the latency work without each in turn. Compiles a runtime for each."""
    check_output_file("--json", json_path)
    work = _latency_work(model, batch, input_len, output_len, repeats)

    from mllm_compile.bench.show.ablation import lever_names, print_ablation, run_ablation

    result = run_ablation(model, _names(lever) if lever else lever_names(), work)
    _save_and_show(result, json_path, lambda: print_ablation(result, sys.stdout))


def roofline_command(
    model: ModelArgument,
    batch: BatchOption = "1",
    context: Annotated[int, typer.Option(help="Tokens of each request.")] = workloads.StepWork.context,
    steps: Annotated[
        int, typer.Option(help="Profiled steps; the table is of the typical one.")
    ] = workloads.StepWork.steps,
    top: Annotated[int, typer.Option(min=1, help="Rows to print.")] = 40,
    num_ranks: RanksOption = None,
    json_path: JsonOption = None,
) -> None:
    """Where a decode step's time goes: each kernel's bytes, time and share of the ceiling, the most time lost first."""
    work = workloads.StepWork(batches=_numbers("--batch", batch), context=context, steps=steps)
    check_output_file("--json", json_path)

    from mllm_compile.bench.limits.roofline_report import print_roofline, run_roofline

    result = run_roofline(model, work, num_ranks)
    _save_and_show(result, json_path, lambda: print_roofline(result, top, sys.stdout))


def serve_command(
    target: Annotated[
        str,
        typer.Argument(metavar="MODEL|URL", help="A model, which is served for it, or the URL of any OpenAI server."),
    ],
    rate: Annotated[str, typer.Option(help="Requests a second, arriving at random; inf: all at once.")] = "inf",
    requests: Annotated[int, typer.Option(help="Requests of each rate.")] = 100,
    input_words: Annotated[int, typer.Option(help="Words of each prompt.")] = 256,
    output_tokens: Annotated[int, typer.Option(help="New tokens of each request.")] = 128,
    input_tokens: Annotated[
        int | None,
        typer.Option(help="Token ids of each prompt, in place of words.", show_default="words"),
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Most requests at once.", show_default="no bound")] = None,
    clients: Annotated[int, typer.Option(help="Processes that the requests come from; each takes a core.")] = 1,
    slo_ttft: Annotated[float, typer.Option(help="A good request's first token comes within so many seconds.")] = 1.0,
    slo_gap: Annotated[float, typer.Option(help="And its mean gap between tokens is at most so many.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 0,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="MLLM_API_KEY")] = None,
    json_path: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it, against the rate, into this file.")] = None,
) -> None:
    """Load a server over HTTP: percentiles of the first token and of gaps between tokens, and goodput, by rate."""
    check_output_file("--json", json_path)
    check_output_file("--plot", plot)

    from mllm_compile.bench.serving.load import ServeWork, run_load
    from mllm_compile.bench.serving.own_server import served
    from mllm_compile.bench.show.plot import check_picture
    from mllm_compile.bench.show.rates_plot import plot_rates
    from mllm_compile.bench.show.serving import print_rates

    if plot is not None:
        check_picture(plot)
    try:
        rates = tuple(float(part) for part in rate.split(","))
    except ValueError:
        raise ConfigError(f"--rate is {rate!r}; expected numbers separated by commas, such as 1,4,inf") from None
    work = ServeWork(
        rates=rates,
        requests=requests,
        input_words=input_words,
        output_tokens=output_tokens,
        input_tokens=input_tokens,
        concurrency=concurrency,
        clients=clients,
        slo_ttft_s=slo_ttft,
        slo_gap_s=slo_gap,
        seed=seed,
    )
    if "://" in target:
        result = run_load(target, api_key, work)
    else:
        with served(target) as server:
            result = run_load(server.url, api_key, work)
    _save_and_show(result, json_path, lambda: print_rates(result, sys.stdout))
    if plot is not None:
        plot_rates(result, plot)


def _save_and_show(
    result: BenchResult | Roofline | ServeResult, json_path: Path | None, show: Callable[[], None]
) -> None:
    """Writes the file before the table, whose reader may stop reading, and shows the table also if the file fails."""
    try:
        if json_path is not None:
            result.write(json_path)
    finally:
        show()


def table_command(
    files: Annotated[list[Path], typer.Argument(metavar="RESULT.json…", help="Files that --json wrote.")],
) -> None:
    """Print results as Markdown tables, engines side by side."""
    from mllm_compile.bench.measure.results import BenchResult
    from mllm_compile.bench.show.ablation import COMMAND, ablation_markdown
    from mllm_compile.bench.show.report import markdown

    results = [BenchResult.read(path) for path in files]
    ablations = [result for result in results if result.command == COMMAND]
    others = [result for result in results if result.command != COMMAND]
    print("\n".join([*([markdown(others)] if others else []), *map(ablation_markdown, ablations)]))


def _latency_work(
    model: str, batch: str | None, input_len: int | None, output_len: int | None, repeats: int
) -> workloads.LatencyWork:
    """Complete what was asked for: on a GPU by the benchmark's own sizes, on a CPU by what ends soon, and say so."""
    given: dict[str, Any] = {
        "batches": None if batch is None else _numbers("--batch", batch),
        "input_len": input_len,
        "output_len": output_len,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    work = workloads.LatencyWork(**asked, repeats=repeats)  # a mistake is told before anything is started
    if len(asked) == len(given):
        return work

    from mllm_compile.bench.measure.harness import serves_on_cpu

    if not serves_on_cpu(model):
        return work
    smaller: dict[str, Any] = {
        "batches": workloads.CPU_BATCHES,
        "input_len": workloads.CPU_INPUT_LEN,
        "output_len": workloads.CPU_OUTPUT_LEN,
    }
    work = workloads.LatencyWork(**(smaller | asked), repeats=repeats)
    batches = " and ".join(map(str, work.batches))
    _tell_small(
        f"batches of {batches}, prompts of {work.input_len} tokens, {work.output_len} new ones",
        "--batch, --input-len and --output-len",
    )
    return work


def _tell_small(sizes: str, options: str) -> None:
    print(f"on a CPU: {sizes}; {options} set others", file=sys.stderr, flush=True)


def _points(text: str) -> tuple[tuple[int, int], ...]:
    try:
        pairs = [tuple(int(number) for number in part.split("x")) for part in text.split(",")]
        return tuple((count, length) for count, length in pairs)
    except ValueError:
        raise ConfigError(f"--points is {text!r}; expected requests x tokens, such as 1x2000,8x16000") from None


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; expected whole numbers separated by commas, such as 1,8,64") from None


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))
