"""The settings of a server, checked when they are made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ConfigError
from mllm_compile.process.log_lines import FORMATS
from mllm_compile.runtime.config_sections import KVEventsSection


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The settings of a server.

    Attributes:
        model: the engine's source, as every command takes it.
        host, port: where it listens; port 0 takes a free one.
        uds: the path of a Unix socket to listen at, in the place of those.
        ssl_certfile, ssl_keyfile: of TLS; without a key's file the certificate's has the key too. None: plain HTTP.
        root_path: behind which a proxy has this server; requests may come with it, or without.
        most_body_bytes: of a request.
        otlp_traces_endpoint: where a collector takes spans of requests; None: where the environment says, if it does.
        api_keys: any of them opens every path; none: all paths are open.
        served_names: the model's names; the first one is in answers. None given: taken from the config.
        max_queue: prompts that may wait; None: four times as many as can run.
        max_queue_s: a request that has waited so long is refused; None: never.
        request_timeout_s: a request that has taken so long is ended; None: never.
        shutdown_timeout_s: running requests may go on for so long after SIGTERM.
        sleep_after_s: an engine without work for so long gives the device back; None: never.
        stuck_after_s: a step that takes so long, and a hundred usual ones, is stuck.
        allowed_origins: origins of pages that browsers may call this server from.
        is_strict: unknown fields are refused.
        how: "quiet", "plain" or "verbose".
        log: "text" or "json", the lines on standard error.
        name_in_log: of the model, where a server has several.
        speculative: --speculative-config; None: as the config says.
        lora: keys of the section lora that options give.
        allow_runtime_lora: clients may load and unload adapters.
        runtime: keys of the section runtime that options give.
        kv_events: how KV events are published; None: they are not.
        kv_event_ranks: ranks that have prefix caches of their own.
        devices: of the engine, as CUDA_VISIBLE_DEVICES names them; None: those that this process sees.
        enable_rl: clients may pause the engine, and replace its weights.
        rl_hosts: hosts beside this machine whose groups the engine may join.
        rl_folders: below these folders are those that weights may be read from.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    root_path: str = ""
    most_body_bytes: int = 16 << 20
    otlp_traces_endpoint: str | None = None
    api_keys: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ()
    max_queue: int | None = None
    max_queue_s: float | None = None
    request_timeout_s: float | None = None
    shutdown_timeout_s: float = 30.0
    sleep_after_s: float | None = None
    stuck_after_s: float = 10.0
    allowed_origins: tuple[str, ...] = ()
    is_strict: bool = False
    how: str = "plain"
    log: str = "text"
    name_in_log: str = ""
    speculative: str | None = None
    lora: Mapping[str, Any] = field(default_factory=dict)
    allow_runtime_lora: bool = False
    runtime: Mapping[str, Any] = field(default_factory=dict)
    kv_events: KVEventsSection | None = None
    kv_event_ranks: int = 1
    devices: str | None = None
    enable_rl: bool = False
    rl_hosts: tuple[str, ...] = ()
    rl_folders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port: expected a number from 0 to 65535, got {self.port}")
        if self.uds is not None and not self.uds:
            raise ConfigError("--uds: expected the path of a socket, got an empty text")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile: expected it beside --ssl-certfile")
        if not _ROOT.fullmatch(self.root_path):
            raise ConfigError(
                f"--root-path: expected a path such as /llm, without a / at its end, got {self.root_path!r}"
            )
        if not 1 << 10 <= self.most_body_bytes <= MOST_BODY:
            raise ConfigError(f"--max-body: expected from 1K to {MOST_BODY >> 20}M, got {self.most_body_bytes} bytes")
        for option, values in (("--api-key", self.api_keys), ("--served-model-name", self.served_names)):
            if any(not _is_plain(value) for value in values):
                raise ConfigError(f"{option}: expected printable ASCII characters, the first and last of them no space")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origin: expected an origin as browsers send it, such as https://app.example or "
                    f"http://localhost:3000 (small letters, no path, each one by itself), got {origin!r}"
                )
        for option, is_on in (("--allow-runtime-lora", self.allow_runtime_lora), ("--enable-rl", self.enable_rl)):
            if is_on and not (self.api_keys or self.is_local or self.uds):
                raise ConfigError(
                    f"{option}: expected an API key beside it, or a server that only this machine reaches, got "
                    f"--host {self.host} without a key. Give --api-key"
                )
        if self.enable_rl and self.sleep_after_s is not None:
            raise ConfigError("--enable-rl: an engine that sleeps forgets its weights; leave out --sleep-after")
        if self.runtime.get("enable_sleep_mode") and not self.enable_rl:
            raise ConfigError("--enable-sleep-mode: expected --enable-rl beside it, whose paths let an engine sleep")
        if (self.rl_hosts or self.rl_folders) and not self.enable_rl:
            raise ConfigError("--rl-host, --rl-folder: expected --enable-rl beside them")
        if self.log not in FORMATS:
            raise ConfigError(f"--log: expected {' or '.join(FORMATS)}, got {self.log!r}")
        if self.max_queue is not None and self.max_queue < 1:
            raise ConfigError(f"--max-queue: expected at least 1, got {self.max_queue}")
        for name in ("max_queue_s", "request_timeout_s", "sleep_after_s", "stuck_after_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ConfigError(f"--{name.removesuffix('_s').replace('_', '-')}: expected more than 0 s, got {value}")
        if not 0 <= self.shutdown_timeout_s < 1e9:
            raise ConfigError(f"--shutdown-timeout: expected 0 s or more, got {self.shutdown_timeout_s}")

    @property
    def is_local(self) -> bool:
        """True if it listens at an address that only this machine reaches."""
        return self.uds is None and self.host in ("127.0.0.1", "::1", "localhost")

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the engine's process, beside this one's."""
        return {} if self.devices is None else {VISIBLE: self.devices}

    def check_replicas(self, count: int) -> None:
        """
        Raises:
            ConfigError: an option means one engine, and there are several of the model.
        """
        for option, (is_given, instead) in _OF_ONE_ENGINE.items():
            if is_given(self):
                raise ConfigError(f"{option}: expected one engine, got --replicas {count}. {instead}")


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """The settings of a server of several models, beside ServeOptions.

    Attributes:
        sources: name → source.
        pinned: names of models that are never parked.
        turn_s: a model with requests runs for so long while others wait for its memory.
        most_awake: models that run at once on one device; None: as many as fit.
    """

    sources: Mapping[str, str]
    pinned: tuple[str, ...] = ()
    turn_s: float = 5.0
    most_awake: int | None = None

    @classmethod
    def of(
        cls,
        options: ServeOptions,
        models: Mapping[str, str],
        configs: Mapping[str, EngineConfig | Path],
        given: Mapping[str, Any],
    ) -> ModelsOptions:
        """The settings of these models.

        Args:
            options: of the server; those that mean one model are refused.
            models: name → source.
            configs: name → what config_or_runtime makes of it.
            given: further attributes.

        Raises:
            ConfigError: an option or a key does not go with several models.
        """
        for option, (is_given, instead) in _OF_ONE_MODEL.items():
            if is_given(options):
                raise ConfigError(f"{option}: expected one model, got {len(models)}. {instead}")
        pinned = [name for name, one in configs.items() if isinstance(one, EngineConfig) and one.runtime.pinned]
        return cls(sources=models, pinned=tuple(pinned), **given)

    def __post_init__(self) -> None:
        if not 0 < self.turn_s < 1e6:
            raise ConfigError(f"--turn: expected more than 0 s, got {self.turn_s}")
        if self.most_awake is None or len(self.pinned) < self.most_awake or len(self.pinned) == len(self.sources):
            return
        raise ConfigError(
            f"--max-awake {self.most_awake}: {', '.join(self.pinned) or 'no model'} pinned (runtime.pinned) leaves no "
            "place for the others. Raise it, or pin fewer"
        )


# Likewise, options that mean one engine.
_OF_ONE_ENGINE: Mapping[str, tuple[Callable[[ServeOptions], object], str]] = {
    "--sleep-after": (
        lambda options: options.sleep_after_s,
        "One that sleeps forgets its prefixes: leave it out",
    ),
    "--kv-events-config": (lambda options: options.kv_events, "Serve each by itself behind the router that reads them"),
    "--enable-rl": (lambda options: options.enable_rl, "Serve each by itself: the trainer asks all"),
    "--allow-runtime-lora": (lambda options: options.allow_runtime_lora, "Give adapters by --lora-modules"),
}
# Options that mean one model: by name, what says that one is given, and what to do instead.
_OF_ONE_MODEL: Mapping[str, tuple[Callable[[ServeOptions], object], str]] = {
    "--served-model-name": (lambda options: options.served_names, "Give each as NAME=MODEL"),
    "--speculative-config": (lambda options: options.speculative, "Write it into each model's YAML"),
    "--lora-modules": (lambda options: options.lora.get("adapters"), "Write lora.adapters into the model's YAML"),
    "--sleep-after": (lambda options: options.sleep_after_s, "Others are parked when a model needs their memory"),
    "--kv-events-config": (lambda options: options.kv_events, "Serve the models by themselves behind a router"),
    "--enable-rl": (lambda options: options.enable_rl, "Serve the model that is trained by itself"),
}

VISIBLE = "CUDA_VISIBLE_DEVICES"

# A page's origin as a browser sends it: scheme, host and port; "null" for a page without them.
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d+)?")


_ROOT = re.compile(r"(/[A-Za-z0-9._~-]+)*")
MOST_BODY = 256 << 20  # all that are being read have as much


def _is_plain(text: str) -> bool:
    """True for what a header can hold, and give back as it is."""
    return bool(text) and text.isascii() and text.isprintable() and text == text.strip()


def bytes_of(option: str, text: str) -> int:
    """A size such as 65536, 512K or 16M in bytes.

    Raises:
        ConfigError: it is malformed.
    """
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in ("K", "M") else (text, "")
    if not (number.isascii() and number.isdecimal() and len(number) <= 12):
        raise ConfigError(f"{option}: expected a size such as 512K or 16M, got {text!r}")
    return int(number) << {"": 0, "K": 10, "M": 20}[unit]


def seconds_of(option: str, text: str | None) -> float | None:
    """A time such as 90, 90s, 5m or 2h in seconds.

    Raises:
        ConfigError: it is malformed.
    """
    if text is None:
        return None
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m", "h") else (text, "s")
    try:
        seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError:
        raise ConfigError(f"{option}: expected a time such as 90s, 5m or 2h, got {text!r}") from None
    return seconds
