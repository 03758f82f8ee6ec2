"""A runtime with streamed linears, from compiling to serving: its kernels are written, hashed, opened and loaded.

The kernels need a Hopper GPU: here their ops are stand-ins, and NVRTC gives a kernel's name in place of its code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.errors import ArtifactError
from mllm_compile.kernels import cuda
from mllm_compile.passes.fuse_gated_linear import FuseGatedLinear
from mllm_compile.passes.stream_linears import StreamLinears
from mllm_compile.report.page import write_page
from mllm_compile.runtime.ops import family, op
from mllm_compile.runtime.ops.gated_linear.kernel import gated_kernels
from mllm_compile.runtime.ops.stream_linear.linear import MAX_STREAMED_TOKENS, TOKEN_BUCKETS
from mllm_compile.runtime.ops.stream_linear.rows import MAX_TOKENS as MAX_ROW_TOKENS
from mllm_compile.runtime.ops.stream_linear.rows import RowTiling
from mllm_compile.runtime.ops.stream_linear.shapes import MAX_LARGE_TOKENS
from mllm_compile.runtime.program import link as linking
from mllm_compile.runtime.program.spec import Program
from mllm_compile.store.artifact import BINARIES, open_artifact
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as shape_of
from tests.passes.support.stand_ins import only_kernel_passes, streamed_ops_on_cpu

WIDTHS = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


@dataclass
class Loads:
    """The loaded kernels, call by call."""

    calls: list[dict[str, dict[str, bytes]]] = field(default_factory=list)  # by family and kernel

    def __call__(self, kernels, binaries, device) -> None:
        assert device == torch.device("cpu")
        self.calls.append(
            {name: {kernel.name: binaries[kernel.name] for kernel in members} for name, members in kernels.items()}
        )


@pytest.fixture(scope="module", autouse=True)
def stand_ins() -> Iterator[None]:
    with streamed_ops_on_cpu():
        yield


@pytest.fixture
def loads(monkeypatch) -> Loads:
    only_kernel_passes(monkeypatch, StreamLinears, FuseGatedLinear)
    monkeypatch.setattr(cuda, "compile_cuda", lambda source, name, architecture: name.encode())
    recorder = Loads()
    monkeypatch.setattr(linking, "load_kernels", recorder)
    return recorder


def config_of(folder: Path, cache: str = "cache", widths: dict[str, int] = WIDTHS) -> EngineConfig:
    if not (folder / "model").exists():
        save_tiny_model(shape_of("qwen3", **widths, **HEADS), folder / "model")
    return EngineConfig.from_dict(
        {
            "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
            "compile": {"backend": "eager"},
            "runtime": {"device": "cpu", "max_model_len": 256},
            "cache": {"dir": str(folder / cache)},
        }
    )


def test_kernels_are_compiled_checked_published_and_loaded(loads, tmp_path):
    config = config_of(tmp_path)
    compiled = load_or_compile(config)
    artifact, program = compiled.artifact, compiled.artifact.program
    assert {variant.max_size for variant in program.all_variants()} == {MAX_STREAMED_TOKENS}
    tilings = program.kernels["stream_linear"]
    names = {tiling.name for tiling in tilings}
    assert len(names) == len(tilings) == len({tiling.kind for tiling in tilings}) * len(TOKEN_BUCKETS)
    assert Program.from_json(program.to_json()) == program
    gated = {kernel.name for kernel in program.kernels["gated_linear"]}
    assert gated == {kernel.name for kernel in gated_kernels(1024, 256)}
    assert {path.stem for path in (artifact.folder / BINARIES).iterdir()} == names | gated | {"paged_attention"}
    with Engine(config) as engine:
        output = engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    assert len(output.token_ids) == 8
    of_self_check, of_engine = loads.calls
    assert of_self_check == of_engine
    assert of_engine["stream_linear"] == {name: name.encode() for name in names}
    assert of_engine["gated_linear"] == {name: name.encode() for name in gated}
    write_page(artifact, compiled.config, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert all(name in page for name in names)
    assert all(name in page for name in gated)
    assert "of runtime/ops/stream_linear/boxes.cuh and runtime/ops/stream_linear/tiles.cu" in page


def test_pieces_with_a_large_weight_have_kernels_of_rows_for_eight_tokens(loads, tmp_path):
    config = config_of(tmp_path, widths=WIDTHS | {"hidden_size": 1536, "intermediate_size": 3072} | ONE_LAYER)
    program = load_or_compile(config).artifact.program
    assert {variant.max_size for variant in program.all_variants()} == {MAX_LARGE_TOKENS, MAX_STREAMED_TOKENS}
    assert {
        (tiling.kind.columns, tiling.tokens)
        for tiling in program.kernels["stream_linear"]
        if isinstance(tiling, RowTiling)
    } == {(1536, MAX_ROW_TOKENS)}
    with Engine(config) as engine:
        outputs = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4]


@pytest.mark.parametrize(("num_tokens", "tile_rows"), [(256, 64), (320, 128), (319, 128), (639, 192)])
def test_a_gated_linear_that_is_wrong_for_some_number_of_tokens_is_refused(monkeypatch, num_tokens, tile_rows):
    """Of even tiles, and of others."""
    kernels, check = gated_kernels(6144, 256), family("gated_linear").faults
    assert list(check(kernels, torch.device("cpu"))) == []
    right = op("gated_linear")
    wrong = lambda x, w: right(x, w) * (1.1 if len(x) == num_tokens else 1)  # noqa: E731
    monkeypatch.setattr(torch.ops.mllm, "gated_linear", SimpleNamespace(default=wrong))
    expected = rf"gated_6144x256_rows{tile_rows} is off by 0\.1 at {num_tokens} tokens.*fuse_gated_linear"
    (fault,) = check(kernels, torch.device("cpu"))
    assert re.search(expected, fault)


def test_a_changed_kernel_is_not_loaded(loads, tmp_path):
    artifact = load_or_compile(config_of(tmp_path)).artifact
    path = next((artifact.folder / BINARIES).iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ArtifactError, match=path.name):
        open_artifact(artifact.folder)


def test_a_prompt_has_the_scores_that_it_has_without_the_pass(loads, tmp_path, monkeypatch):
    prompt, params = list(range(40)), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def scores(config: EngineConfig) -> torch.Tensor:
        with Engine(config) as engine:
            logprobs = engine.generate(prompt, params)[0].prompt_logprobs[1:]
        return torch.tensor([of[token].logprob for of, token in zip(logprobs, prompt[1:], strict=True)])

    ours = scores(config_of(tmp_path))
    assert len(loads.calls[-1]) > 0
    only_kernel_passes(monkeypatch)
    plain = scores(config_of(tmp_path, "plain"))
    assert loads.calls[-1] == {}
    assert (ours - plain).abs().max() < 0.05
