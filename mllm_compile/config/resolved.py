"""The resolved config: no `auto` left, and nothing changes after it (resolution/resolve.py makes it)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mllm_compile.config.schema import EngineConfig, HeadQuantization
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.config_sections import (
    CudaGraphSection,
    DtypeName,
    LoraSection,
    RuntimeSection,
    SpeculativeSection,
)
from mllm_compile.runtime.pooling.facts import ModelTask

LAST_HIDDEN_STATE = -1  # the place of what a model's head reads (model/hidden_states.py)


class AutoChoice(NamedTuple):
    """The value that one `auto` became, and why."""

    key: str
    value: str
    why: str


class _Resolved(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


# keep: the checkpoint's own; keep_a8: so with inputs in eight bits, as int8 has them.
Quantization = Literal["none", "dequantize", "keep", "keep_a8", "fp8", "int8", "int4"]


class ResolvedModel(_Resolved):
    """`source` is model.path as it was asked for, `folder` the local folder that it was found in. `prediction_layer` of
    a drafter that is a part of the model: the number of its layer for multi-token prediction. `token_map` is the file
    of the tokens that a drafter's head is cut to. `has_encoder`: it is an encoder-decoder, whose decoder generates."""

    source: str
    folder: str
    revision: str | None
    dtype: DtypeName
    load_format: Literal["safetensors", "dummy"]
    quantization: Quantization
    trust_remote_code: bool
    split_special_tokens: bool
    task: ModelTask = "generate"
    classifier_from_token: tuple[str, str] | None = None
    has_encoder: bool = False
    score_template: str | None = None
    lm_head_quantization: HeadQuantization = "none"
    prediction_layer: int | None = None
    token_map: str | None = None

    @property
    def pools(self) -> bool:
        """True if it embeds or classifies texts, and generates none."""
        return self.task != "generate"

    @property
    def keeps_weights(self) -> bool:
        """True if linears compute with the checkpoint's weights as they are stored."""
        return self.quantization in ("keep", "keep_a8")


class ResolvedCompile(_Resolved):
    """`split_decode` and `hopper_decode` say which of our decode kernels serve; no key sets them."""

    backend: Literal["inductor", "eager"]
    disable_passes: tuple[str, ...]
    split_decode: bool
    hopper_decode: bool


class ResolvedStructuredOutputs(_Resolved):
    """`backends` in the order in which they are asked."""

    backends: tuple[str, ...]
    threads: int


class ResolvedMedia(_Resolved):
    allowed_domains: tuple[str, ...]


class ResolvedCache(_Resolved):
    """`dir` is absolute."""

    dir: str


class ResolvedConfig(_Resolved):
    """EngineConfig without any `auto`; `model_dump(mode="json")` and `model_validate` take it to JSON and back."""

    model: ResolvedModel
    compile: ResolvedCompile
    cudagraph: CudaGraphSection
    runtime: RuntimeSection
    speculative: SpeculativeSection
    lora: LoraSection = Field(default_factory=LoraSection)
    structured_outputs: ResolvedStructuredOutputs
    media: ResolvedMedia
    cache: ResolvedCache
    choices: tuple[AutoChoice, ...] = Field(default=(), exclude=True, repr=False)
    without_effect: tuple[str, ...] = Field(default=(), exclude=True, repr=False)  # keys that the device ignores

    def as_config(self) -> EngineConfig:
        """A config that asks for the same of the same checkpoint, wherever resolved; sizes of CUDA graphs are auto."""
        sections = self.model_dump(mode="json")
        model, runtime = sections["model"], sections["runtime"]
        del model["source"], model["prediction_layer"], model["token_map"], model["has_encoder"]
        model |= {"path": model.pop("folder"), "revision": None}
        if runtime["max_step_ms"] == "tenfold":
            runtime["max_step_ms"] = "auto"
        if self.speculative.num_speculative_tokens == "by_cost":
            sections["speculative"]["num_speculative_tokens"] = "auto"
        runtime["kv_cache_dtype"] = runtime["kv_cache_dtype"].replace("float8_e4m3fn", "fp8_e4m3")
        sections["cudagraph"] = {"mode": self.cudagraph.mode}
        sections["lora"]["targets"] = sections["lora"]["targets"] or "auto"
        del sections["lora"]["of_sounds"]
        del sections["compile"]["split_decode"], sections["compile"]["hopper_decode"], runtime["any_rows"]
        backends = sections["structured_outputs"].pop("backends")
        sections["structured_outputs"]["backend"] = backends[0] if len(backends) == 1 else "auto"
        return EngineConfig.from_dict(sections)

    def line_on_cpu(self) -> str | None:
        """The line on the types that a CPU computes in, and why; None on a GPU."""
        if self.runtime.device != "cpu":
            return None
        why = {choice.key: choice.why for choice in self.choices}
        reason = why.get("model.dtype", "as model.dtype says")
        asked = self.model.quantization
        linears = "" if asked in ("none", "dequantize") else f"; linears from {_LINEARS.get(asked, asked)}"
        return f"computing on the CPU in {self.model.dtype}: {reason}{linears}"

    def report(self, reporter: Reporter) -> None:
        """Shows the value of every `auto`, and keys that have no effect here."""
        if self.choices:
            reporter.table("auto values", ("key", "value", "why"), self.choices)
        if self.without_effect:
            reporter.announce(f"without effect on a CPU: {', '.join(self.without_effect)}")


_LINEARS = {
    "keep": "the checkpoint's weights as they are stored",
    "keep_a8": "the checkpoint's weights as they are stored, with inputs rounded to eight bits",
    "int8": "int8, with inputs rounded to eight bits",
}


class AutoChoices:
    """Collects what each `auto` became."""

    def __init__(self) -> None:
        self.made: list[AutoChoice] = []

    def resolve(self, key: str, asked: Any, choose: Callable[[], tuple[Any, str]]) -> Any:
        """Returns `asked`, or if that is auto the value of `choose() -> (value, why)`."""
        if asked != "auto":
            return asked
        value, why = choose()
        self.made.append(AutoChoice(key, _show(value), why))
        return value


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{value[0]} … {value[-1]} ({len(value)} sizes)" if len(value) > 4 else ", ".join(map(str, value)) or "-"
    return str(value)
