"""`mllm-compile serve MODEL`: OpenAI's HTTP interface over an engine."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mllm_compile.cli.arguments import ModelsArgument, QuietOption, SpeculativeOption, VerboseOption, reporter_of
from mllm_compile.cli.before_listening import check_settings
from mllm_compile.cli.serve_options import PLACES, check_adapters, kv_events, lora_keys, other_keys, runtime_keys
from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.several import is_folder_of_yamls, named_models
from mllm_compile.config.sources import (
    config_or_runtime,
    runtime_settings,
    with_lora,
    with_runtime,
    with_speculative,
)
from mllm_compile.errors import ConfigError
from mllm_compile.files.user_path import user_path
from mllm_compile.process.log_lines import start_log
from mllm_compile.process.no_gc import imports_unseen
from mllm_compile.process.progress import Reporter
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.config_sections import LOGPROBS_MODES

if TYPE_CHECKING:
    from mllm_compile.server.options import ModelsOptions, ServeOptions

_NEEDED = ("httptools", "msgspec", "prometheus_client", "starlette", "uvicorn", "uvloop")


def serve_command(
    models: ModelsArgument,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0: all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0: a free one.")] = 8000,
    uds: Annotated[
        str | None, typer.Option(help="The path of a Unix socket to listen at, in the place of --host and --port.")
    ] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="A certificate in PEM: speak TLS.")] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="Its key, where the certificate's file has none.")] = None,
    root_path: Annotated[
        str,
        typer.Option(help="The path behind which a proxy has this server, such as /llm; requests may come with it."),
    ] = "",
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="Where a collector takes spans of requests by OTLP over HTTP (extra otel)."),
    ] = None,
    max_body: Annotated[str, typer.Option(help="The largest body of a request (512K, 64M).")] = "16M",
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that every path but /health, /ready and /ping then needs; may be given several times. "
            "MLLM_API_KEY is one too, and is not seen in the list of processes."
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with such keys, one a line.")] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="The model's name for clients; may be given several times, the first one is in answers."),
    ] = None,
    max_queue: Annotated[
        int | None,
        typer.Option(help="Prompts that may wait; more are refused with 429.", show_default="4 × those that can run"),
    ] = None,
    max_queue_seconds: Annotated[
        str | None, typer.Option(help="Refuse a request that has waited so long (90s, 5m).")
    ] = None,
    request_timeout: Annotated[str | None, typer.Option(help="End a request that has taken so long.")] = None,
    shutdown_timeout: Annotated[str, typer.Option(help="Time of running requests after SIGTERM.")] = "30s",
    sleep_after: Annotated[
        str | None,
        typer.Option(help="Without requests for so long, end the engine and give the device back until the next one."),
    ] = None,
    stuck_after: Annotated[
        str, typer.Option(help="A step without an end for so long (and for 100 usual ones) is stuck.")
    ] = "10s",
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(help="An origin whose pages may call this server from a browser; may be given several times."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse unknown fields of requests; without it a header names them.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Say what the server would be, without loading the model, and end.")
    ] = False,
    log: Annotated[str, typer.Option(help="The lines of the log: text, or json for what collects logs.")] = "text",
    speculative_config: SpeculativeOption = None,
    enable_lora: Annotated[
        bool, typer.Option("--enable-lora", help="Serve adapters: the config's section lora, else places for four.")
    ] = False,
    max_loras: Annotated[int | None, typer.Option(min=1, help="Most adapters on the device at once.")] = None,
    max_lora_rank: Annotated[int | None, typer.Option(help="Highest rank of an adapter.")] = None,
    lora_modules: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="An adapter's folder; may be given several times.")
    ] = None,
    allow_runtime_lora: Annotated[
        bool,
        typer.Option(
            "--allow-runtime-lora", help="Clients may load adapters of this machine's folders, and unload them."
        ),
    ] = False,
    enable_rl: Annotated[
        bool,
        typer.Option(
            "--enable-rl", help="Rollouts: clients may pause the engine and replace its weights (docs/rollouts.md)."
        ),
    ] = False,
    rl_host: Annotated[
        list[str] | None, typer.Option(help="A host whose group the engine may join; this machine always is one.")
    ] = None,
    rl_folder: Annotated[
        list[str] | None, typer.Option(help="A folder below which weights may be read; may be given several times.")
    ] = None,
    enable_sleep_mode: Annotated[
        bool,
        typer.Option(
            "--enable-sleep-mode", help="The config's runtime.enable_sleep_mode: /sleep gives memory back in place."
        ),
    ] = False,
    kv_offloading_size: Annotated[
        float | None, typer.Option(help="The config's runtime.kv_offloading_size: GiB of the host's memory behind KV.")
    ] = None,
    kv_offloading_disk_path: Annotated[
        str | None, typer.Option(help="The config's runtime.kv_offloading_disk_path: a folder behind that.")
    ] = None,
    kv_offloading_disk_size: Annotated[
        float | None, typer.Option(help="The config's runtime.kv_offloading_disk_size: GiB of files in it.")
    ] = None,
    logprobs_mode: Annotated[
        str | None,
        typer.Option(metavar="|".join(LOGPROBS_MODES), help="The config's runtime.logprobs_mode.", show_default=False),
    ] = None,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="The config's runtime.kv_transfer_config: a store, or other engines."),
    ] = None,
    kv_events_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="The config's runtime.kv_events_config: events for routers.")
    ] = None,
    nnodes: Annotated[
        int | None, typer.Option(help="The config's runtime.nnodes: hosts that run this command.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(help="The config's runtime.node_rank: which this is; node 0 answers.")
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option(help="The config's runtime.master_addr: where the others reach node 0.")
    ] = None,
    master_port: Annotated[int | None, typer.Option(help="The config's runtime.master_port, of node 0.")] = None,
    max_awake: Annotated[
        int | None,
        typer.Option(min=1, help="Of several models, most that run at once on a device; others are parked."),
    ] = None,
    turn: Annotated[
        str | None,
        typer.Option(help="Of several models, how long one runs while others wait.", show_default="5s"),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="Engines of the model behind one port, each on devices of its own.")
    ] = 1,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Serve OpenAI's HTTP interface. Compiles first when nothing compiled fits; the port is open at once."""
    reporter = reporter_of(verbose, quiet)  # refuses both
    # A mistake is told before anything is started.
    given_keys = {
        "logprobs_mode": logprobs_mode,
        "enable_sleep_mode": enable_sleep_mode or None,
        "nnodes": nnodes,
        "node_rank": node_rank,
        "master_addr": master_addr,
        "master_port": master_port,
        "kv_offloading_size": kv_offloading_size,
        "kv_offloading_disk_path": kv_offloading_disk_path and os.path.abspath(user_path(kv_offloading_disk_path)),
        "kv_offloading_disk_size": kv_offloading_disk_size,
        "kv_transfer_config": kv_transfer_config,
        "kv_events_config": kv_events_config,
    }
    runtime = runtime_keys(given_keys)
    are_several = len(models) > 1 or is_folder_of_yamls(models[0])
    by_name = named_models(models) if are_several else {"": models[0]}
    sources = {name: with_speculative(config_or_runtime(one), speculative_config) for name, one in by_name.items()}
    own = max(0 if isinstance(one, Path) else one.lora.max_adapters for one in sources.values())
    lora = lora_keys(enable_lora, max_loras, max_lora_rank, lora_modules or (), own or PLACES)
    sources = {name: with_runtime(with_lora(one, lora), runtime) for name, one in sources.items()}
    check_settings(sources, sleep_after, starts=not check)
    is_node_0 = are_several or (settings := runtime_settings(sources[""])) is None or not settings.node_rank
    if not is_node_0 and not check:
        start_log(logging.WARNING if quiet else logging.INFO, log)
        from mllm_compile.ranks.node import run_node

        run_node(sources[""], Timeline(reporter))
        return
    _check_packages()
    with imports_unseen():
        from mllm_compile.server.options import ModelsOptions, ServeOptions, bytes_of, seconds_of
        from mllm_compile.server.replicas.devices import devices_of

    options = ServeOptions(
        model="" if are_several else models[0],
        host=host,
        port=port,
        uds=uds,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        root_path=root_path,
        otlp_traces_endpoint=otlp_traces_endpoint,
        most_body_bytes=bytes_of("--max-body", max_body),
        api_keys=(*(api_key or ()), *other_keys(api_key_file)),
        served_names=tuple(served_model_name or ()),
        max_queue=max_queue,
        max_queue_s=seconds_of("--max-queue-seconds", max_queue_seconds),
        request_timeout_s=seconds_of("--request-timeout", request_timeout),
        shutdown_timeout_s=seconds_of("--shutdown-timeout", shutdown_timeout) or 0.0,
        sleep_after_s=seconds_of("--sleep-after", sleep_after),
        stuck_after_s=seconds_of("--stuck-after", stuck_after) or 0.0,
        allowed_origins=tuple(allowed_origin or ()),
        is_strict=strict,
        how="quiet" if quiet else "verbose" if verbose else "plain",
        log=log,
        speculative=speculative_config,
        lora=lora,
        allow_runtime_lora=allow_runtime_lora,
        runtime=runtime,
        **kv_events(sources.values()),
        enable_rl=enable_rl,
        rl_hosts=tuple(rl_host or ()),
        rl_folders=tuple(rl_folder or ()),
    )
    given = {"most_awake": max_awake} | ({} if turn is None else {"turn_s": seconds_of("--turn", turn)})
    of_several = ModelsOptions.of(options, by_name, sources, given) if are_several else None
    if of_several is None and (max_awake is not None or turn is not None):
        raise ConfigError("--max-awake, --turn: expected several models, which take turns")
    if replicas > 1:
        if are_several:
            raise ConfigError(f"--replicas {replicas}: expected one model, got {len(by_name)}. Serve each by itself")
        options.check_replicas(replicas)
    devices = devices_of(replicas, sources[""]) if replicas > 1 else ()
    for name, source in sources.items():
        if isinstance(source, EngineConfig):
            check_adapters(source, replace(options, served_names=(name,)) if are_several else options)
    if check:
        _print_checks(sources, reporter)
        return
    start_log(logging.WARNING if quiet else logging.INFO, options.log)
    _run(options, of_several, devices)


def _run(options: ServeOptions, of_several: ModelsOptions | None, devices: tuple[str | None, ...]) -> None:
    """Serves until a signal ends it; the engine of a single model is started beside the server's imports."""
    from mllm_compile.server.engine_process import early_engine
    from mllm_compile.server.spare import spare_process

    is_single = of_several is None and not devices
    with early_engine(options) if is_single else nullcontext() as early, spare_process() as spare:
        with imports_unseen():
            from mllm_compile.server.serve import run_models, run_replicas, run_server

        if of_several is not None:
            run_models(options, of_several, spare=spare)
        elif devices:
            run_replicas(options, devices, spare=spare)
        else:
            run_server(options, early=early, spare=spare)


def _check_packages() -> None:
    """
    Raises:
        ConfigError: one that the server needs is not installed.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the server needs {', '.join(missing)}, not installed: pip install 'mllm-compile[serve]'")


def _print_checks(sources: Mapping[str, EngineConfig | Path], reporter: Reporter) -> None:
    from mllm_compile.report.serve_check import serve_check

    for model, source in sources.items():
        if model:
            print(f"{'name':<9} {model}")
        for name, text in serve_check(source, reporter):
            print(f"{name:<9} {text}")
