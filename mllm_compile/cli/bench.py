"""`mllm-compile bench …`: the speed of an engine, as a table, JSON and a plot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TextIO, TypeVar

import typer

from mllm_compile.bench.measure import workloads
from mllm_compile.cli.arguments import ModelArgument
from mllm_compile.cli.output_paths import check_output_file
from mllm_compile.errors import ConfigError

_Work = TypeVar(
    "_Work",
    workloads.LatencyWork,
    workloads.ThroughputWork,
    workloads.LongWork,
    workloads.GapsWork,
    workloads.ImagesWork,
)
_Result = TypeVar("_Result", bound="_Writable")


class _Writable(Protocol):
    def write(self, path: Path) -> None: ...


class _Outputs(NamedTuple):
    """The files that a result goes to, beside the terminal."""

    json_path: Path | None
    plot: Path | None

    def take(
        self,
        result: _Result,
        show: Callable[[_Result, TextIO], None],
        draw: Callable[[_Result, Path], None] | None = None,
    ) -> None:
        """Writes the file before the table, whose reader may stop reading, and shows the table also if it fails."""
        try:
            if self.json_path is not None:
                result.write(self.json_path)
        finally:
            show(result, sys.stdout)
        if self.plot is not None and draw is not None:
            draw(result, self.plot)


def _outputs(json_path: Path | None, plot: Path | None = None) -> _Outputs:
    """Refuses files that cannot be written, before anything is measured."""
    check_output_file("--json", json_path)
    check_output_file("--plot", plot)
    if plot is not None:
        from mllm_compile.bench.show.plot import check_picture

        check_picture(plot)
    return _Outputs(json_path, plot)


_OPTIONS = {"batches": "batch", "mixed_requests": "requests", "mixed_range": "max-len"}  # by a work's fields


def _work(work: type[_Work], model: str, **given: Any) -> _Work:
    """Complete what was asked for: on a GPU by the benchmark's own sizes, on a CPU by what ends soon, and say so.

    Args:
        given: sizes by the names of the work's fields; None, also in a pair: nobody gave it.
    """
    asked = {name: value for name, value in given.items() if value not in (None, (None, None))}
    halves = {name: size for name, size in asked.items() if isinstance(size, tuple) and None in size}
    # A mistake is told before anything is started, but for a pair whose other one depends on the device.
    made = work(**{name: size for name, size in asked.items() if name not in halves})
    if not halves and work.of_cpu.keys() <= asked.keys():
        return made

    from mllm_compile.bench.measure import harness

    is_cpu = harness.serves_on_cpu(model)
    for name, size in halves.items():
        usual = work.of_cpu[name] if is_cpu else getattr(work, name)
        asked[name] = tuple(one if own is None else own for own, one in zip(size, usual, strict=True))
    if not is_cpu:
        return work(**asked)
    made = work(**{**work.of_cpu, **asked})
    *others, last = (f"--{_OPTIONS.get(name, name)}".replace("_", "-") for name in work.of_cpu)
    print(f"on a CPU: {made.sizes_text}; {', '.join(others)} and {last} set others", file=sys.stderr, flush=True)
    return made


EnginesOption = Annotated[
    str, typer.Option("--engine", help="Engines to measure, separated by commas: mllm, vllm, transformers.")
]
StreamEnginesOption = Annotated[
    str, typer.Option("--engine", help="Engines to measure, separated by commas: mllm, vllm.")
]
BatchOption = Annotated[str, typer.Option(help="Batch sizes, separated by commas.")]
RepeatsOption = Annotated[int, typer.Option(help="Timed runs of each; one more before them is not counted.")]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size", min=1, help="Cut the model over so many devices.", show_default="the config's"
    ),
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]
PlotOption = Annotated[Path | None, typer.Option(help="Also draw it into this file.")]


def _comma(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _sized(work: type[_Work], field: str, text: str, show: Callable[[Any], str] = str) -> Any:
    """An option that is a size of a work, which is smaller on a CPU where nobody gives it."""
    usual, of_cpu = show(getattr(work, field)), show(work.of_cpu[field])
    return typer.Option(help=text, show_default=f"{usual}; on a CPU {of_cpu}")


LatencyBatchOption = Annotated[
    str | None, _sized(workloads.LatencyWork, "batches", "Batch sizes, separated by commas.", _comma)
]
InputLenOption = Annotated[int | None, _sized(workloads.LatencyWork, "input_len", "Tokens of each prompt.")]
OutputLenOption = Annotated[int | None, _sized(workloads.LatencyWork, "output_len", "New tokens of the whole call.")]


def latency_command(
    model: ModelArgument,
    engine: EnginesOption = "mllm",
    batch: LatencyBatchOption = None,
    input_len: InputLenOption = None,
    output_len: OutputLenOption = None,
    repeats: RepeatsOption = workloads.REPEATS,
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes of each engine, one after another.")] = 1,
    num_ranks: RanksOption = None,
    json_path: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it, against the batch size, into this file.")] = None,
) -> None:
    """Time per output token (tpot) and of the prefill, by batch size, with the share of the machine's limit."""
    outputs = _outputs(json_path, plot)
    work = _latency_work(model, batch, input_len, output_len, repeats)

    from mllm_compile.bench.measure import harness
    from mllm_compile.bench.show.plot import plot_latency
    from mllm_compile.bench.show.report import print_result

    result = harness.run_latency(model, _names(engine), work, num_ranks, processes)
    outputs.take(result, print_result, plot_latency)


def throughput_command(
    model: ModelArgument,
    engine: EnginesOption = "mllm",
    requests: Annotated[
        int | None, _sized(workloads.ThroughputWork, "mixed_requests", "Requests of the mixed work.")
    ] = None,
    min_len: Annotated[
        int | None,
        _sized(workloads.ThroughputWork, "mixed_range", "Shortest prompt and answer of it.", lambda both: str(both[0])),
    ] = None,
    max_len: Annotated[
        int | None,
        _sized(workloads.ThroughputWork, "mixed_range", "Longest prompt and answer of it.", lambda both: str(both[1])),
    ] = None,
    prefill_prompts: Annotated[
        int | None, _sized(workloads.ThroughputWork, "prefill_prompts", "Prompts of the prefill.")
    ] = None,
    prefill_len: Annotated[
        int | None, _sized(workloads.ThroughputWork, "prefill_len", "Tokens of each of them.")
    ] = None,
    repeats: RepeatsOption = workloads.REPEATS,
    num_ranks: RanksOption = None,
    json_path: JsonOption = None,
) -> None:
    """Output tokens a second of many requests of all lengths at once, and input tokens a second of long prompts."""
    outputs = _outputs(json_path)
    work = _work(
        workloads.ThroughputWork,
        model,
        mixed_requests=requests,
        mixed_range=(min_len, max_len),
        prefill_prompts=prefill_prompts,
        prefill_len=prefill_len,
        repeats=repeats,
    )

    from mllm_compile.bench.measure import harness
    from mllm_compile.bench.show.report import print_result

    outputs.take(harness.run_throughput(model, _names(engine), work, num_ranks), print_result)


def long_command(
    model: ModelArgument,
    engine: EnginesOption = "mllm",
    points: Annotated[
        str | None,
        _sized(
            workloads.LongWork,
            "points",
            "Requests at once x tokens of each prompt, separated by commas.",
            workloads.points_text,
        ),
    ] = None,
    output_len: OutputLenOption = None,
    repeats: RepeatsOption = workloads.REPEATS,
    json_path: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Time per output token and prefill with long contexts, of few requests and of many."""
    outputs = _outputs(json_path, plot)
    pairs = None if points is None else _points(points)
    work = _work(workloads.LongWork, model, points=pairs, output_len=output_len, repeats=repeats)

    from mllm_compile.bench.measure import harness
    from mllm_compile.bench.show.bars_plot import plot_bars
    from mllm_compile.bench.show.report import print_result

    outputs.take(harness.run_long(model, _names(engine), work), print_result, plot_bars)


def gaps_command(
    model: ModelArgument,
    engine: StreamEnginesOption = "mllm",
    decodes: Annotated[int | None, _sized(workloads.GapsWork, "decodes", "Answers that run.")] = None,
    decode_len: Annotated[int, typer.Option(help="Tokens of each one's prompt.")] = workloads.GapsWork.decode_len,
    tokens: Annotated[int, typer.Option(help="Tokens that each has made when the prompt comes.")] = (
        workloads.GapsWork.tokens
    ),
    prompt_len: Annotated[
        int | None, _sized(workloads.GapsWork, "prompt_len", "Tokens of the prompt that comes.")
    ] = None,
    repeats: RepeatsOption = workloads.REPEATS,
    json_path: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Gaps between the tokens of running answers, alone and while a long prompt comes in, and that prompt's time."""
    outputs = _outputs(json_path, plot)
    sizes = {"decodes": decodes, "decode_len": decode_len, "tokens": tokens, "prompt_len": prompt_len}
    work = _work(workloads.GapsWork, model, **sizes, repeats=repeats)

    from mllm_compile.bench.measure import harness
    from mllm_compile.bench.show.bars_plot import plot_bars
    from mllm_compile.bench.show.report import print_result

    outputs.take(harness.run_gaps(model, _names(engine), work), print_result, plot_bars)


def images_command(
    model: ModelArgument,
    engine: StreamEnginesOption = "mllm",
    batch: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = _comma(
        workloads.IMAGE_BATCHES
    ),
    side: Annotated[int | None, _sized(workloads.ImagesWork, "side", "Pixels of each side of an image.")] = None,
    text_len: Annotated[int, typer.Option(help="Tokens of text around each image.")] = workloads.IMAGE_TEXT_LEN,
    output_len: OutputLenOption = None,
    repeats: RepeatsOption = workloads.REPEATS,
    json_path: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """First tokens and tpot of prompts with an image, new or seen before, beside text of the same length."""
    outputs = _outputs(json_path, plot)
    batches = _numbers("--batch", batch)
    sizes = {"batches": batches, "side": side, "text_len": text_len, "output_len": output_len, "repeats": repeats}
    work = _work(workloads.ImagesWork, model, **sizes)

    from mllm_compile.bench.measure import harness
    from mllm_compile.bench.show.bars_plot import plot_bars
    from mllm_compile.bench.show.report import print_result

    outputs.take(harness.run_images(model, _names(engine), work), print_result, plot_bars)


def startup_command(
    model: ModelArgument,
    engine: EnginesOption = "mllm",
    repeats: Annotated[int, typer.Option(help="Cold starts, each followed by a warm one.")] = workloads.REPEATS,
    json_path: JsonOption = None,
) -> None:
    """Seconds from a fresh process's first line to its first token, with empty caches and with filled ones."""
    outputs = _outputs(json_path)
    work = workloads.StartupWork(repeats=repeats)

    from mllm_compile.bench.measure import harness
    from mllm_compile.bench.show.report import print_result

    outputs.take(harness.run_startup(model, _names(engine), work), print_result)


def ablation_command(
    model: ModelArgument,
    switch: Annotated[
        str, typer.Option(help="Switches to leave out one by one, separated by commas; default: all.")
    ] = "",
    batch: LatencyBatchOption = None,
    input_len: InputLenOption = None,
    output_len: OutputLenOption = None,
    repeats: RepeatsOption = workloads.REPEATS,
    json_path: JsonOption = None,
) -> None:
    """Show what each pass and kernel brings: the latency work without each in turn. Compiles a runtime for each."""
    outputs = _outputs(json_path)
    work = _latency_work(model, batch, input_len, output_len, repeats)

    from mllm_compile.bench.show.ablation import print_ablation, run_ablation, switch_names

    outputs.take(run_ablation(model, _names(switch) if switch else switch_names(), work), print_ablation)


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
    outputs = _outputs(json_path)
    work = workloads.StepWork(batches=_numbers("--batch", batch), context=context, steps=steps)

    from mllm_compile.bench.limits.roofline_report import print_roofline, run_roofline

    outputs.take(run_roofline(model, work, num_ranks), lambda result, stream: print_roofline(result, top, stream))


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
    outputs = _outputs(json_path, plot)

    from mllm_compile.bench.serving.load import ServeWork, run_load
    from mllm_compile.bench.serving.local_server import served
    from mllm_compile.bench.show.rates_plot import plot_rates
    from mllm_compile.bench.show.serving import print_rates

    work = ServeWork(
        rates=_rates(rate),
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
    outputs.take(result, print_rates, plot_rates)


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


_COMMANDS: dict[str, Callable[..., None]] = {
    "latency": latency_command,
    "throughput": throughput_command,
    "long": long_command,
    "gaps": gaps_command,
    "images": images_command,
    "startup": startup_command,
    "ablation": ablation_command,
    "roofline": roofline_command,
    "serve": serve_command,
    "table": table_command,
}


def make_bench_app() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(help="Measure speed: on the project's benchmark, against other engines, kernel by kernel.")
    for name, command in _COMMANDS.items():
        app.command(name)(command)
    return app


def _latency_work(
    model: str, batch: str | None, input_len: int | None, output_len: int | None, repeats: int
) -> workloads.LatencyWork:
    sizes = {"input_len": input_len, "output_len": output_len, "repeats": repeats}
    batches = None if batch is None else _numbers("--batch", batch)
    return _work(workloads.LatencyWork, model, batches=batches, **sizes)


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


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--rate is {text!r}; expected numbers separated by commas, such as 1,4,inf") from None


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))
