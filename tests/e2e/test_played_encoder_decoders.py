"""An encoder-decoder whose steps are captured, on a CPU: graphs are played, and attention to sources is by the backend
of a GPU over kernels in plain torch. An engine without either gives the same tokens. So is attention to images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.runtime.attention.flashinfer_backend import FlashInferAttnBackend
from mllm_compile.runtime.attention.layer_kernels import LayerKernels
from mllm_compile.runtime.attention.split.split_decode import LinkedDecode
from mllm_compile.runtime.attention.split.splits import MOST_FEW_SEQUENCES, OF_FEW, OF_MANY
from mllm_compile.runtime.cuda_graph import graph_runner, piece_graphs
from mllm_compile.runtime.cuda_graph.decodes import DecodeGraphs
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.program import seen_images, sources
from mllm_compile.runtime.program.executor import ProgramExecutor
from tests.e2e.test_seen_images import PROMPTS
from tests.model.encoder_decoders import save_encoder_decoder, save_word_tokenizer, sources_of_ids
from tests.runtime.attention.torch_flashinfer import Library, attended, library
from tests.runtime.cuda_graph.played_cases import Capturer, capture_on_cpu, play_graphs
from tests.tiny_seen_images import save_mllama
from tests.tiny_vision import vision_engine_config

__all__ = ["library"]
pytestmark = pytest.mark.slow
PAGE = 4
WIDE = {"bart": {"d_model": 256}, "t5": {"d_model": 256, "d_kv": 64}}  # heads of 64, as kernels have them
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=1)


def own_piece(scale: float) -> Callable[[list[torch.Tensor]], None]:
    """split_decode's op, of pages of PAGE tokens."""

    def run(inputs: list[torch.Tensor]) -> None:
        q, keys, values, table, lens, out, *_ = inputs
        for row, count in enumerate(lens.tolist()):
            places = torch.arange(count)
            slots = table[row].long()[places // PAGE] * PAGE + places % PAGE
            if count:
                out[row] = attended(q[row], keys[slots], values[slots], scale)

    return run


def attend_by_flashinfer(patch: pytest.MonkeyPatch, has_own: bool, module: Any = sources) -> None:
    """Gives attention to a module's sources the backend of a GPU, with decodes of the program's own or FlashInfer's."""
    make = module.make_attention_backend

    def made(config: Any, model: Any, *rest: Any, **options: Any) -> Any:
        kernels = {}
        for layer in model.layers if has_own else ():
            piece = own_piece(layer.sm_scale)
            decodes = LinkedDecode(piece, MOST_FEW_SEQUENCES, OF_FEW), LinkedDecode(piece, None, OF_MANY)
            kernels[layer.name] = LayerKernels(decode=decodes)
        config = replace(config, runtime=replace(config.runtime, attention_backend="flashinfer"))
        return make(config, replace(model, layer_kernels=kernels), *rest, **options)

    patch.setattr(module, "make_attention_backend", made)


def capture_all(patch: pytest.MonkeyPatch) -> list[int]:
    """Plays captures of decodes and of pieces; gives the requests of each captured decode, as they are launched."""
    play_graphs(patch)
    patch.setattr(graph_runner, "ProgramExecutor", ProgramExecutor)
    patch.setattr(piece_graphs, "WeakTensor", lambda tensor: SimpleNamespace(tensor=lambda: tensor))
    patch.setattr(torch.cuda, "current_stream", lambda: None)
    patch.setattr(Capturer, "stream", None, raising=False)
    launched: list[int] = []
    launch = DecodeGraphs.launch

    def noting(graphs: DecodeGraphs, rows: np.ndarray, *rest: Any) -> Any:
        launched.append(rows.size)
        return launch(graphs, rows, *rest)

    def init(runner: ModelRunner) -> None:
        capture_on_cpu(runner, (1, 2, 4))
        assert runner.source_attention is not None
        assert isinstance(runner.source_attention._backend, FlashInferAttnBackend)

    patch.setattr(DecodeGraphs, "launch", noting)
    patch.setattr(ModelRunner, "init_cuda_graphs", init)
    return launched


@pytest.mark.parametrize(("name", "has_own"), [("bart", True), ("bart", False), ("t5", True)])
def test_captured_decodes_attend_to_their_own_sources(
    name: str, has_own: bool, library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_encoder_decoder(name, tmp_path / "model", **WIDE[name])
    save_word_tokenizer(tmp_path / "model")
    runtime = {"device": "cpu", "page_size": PAGE, "max_running_requests": 4, "max_model_len": 64}
    config = {
        "model": {"path": str(tmp_path / "model"), "dtype": "bfloat16"},
        "runtime": runtime | {"max_num_batched_tokens": 64, "max_total_tokens": 2000},
        "compile": {"backend": "eager"},
        "cache": {"dir": str(tmp_path / "cache")},
    }
    prompts = sources_of_ids(7, 40, 1, 20, 33, 7)
    with Engine(config) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    attend_by_flashinfer(monkeypatch, has_own)
    launched = capture_all(monkeypatch)
    with Engine(config) as engine:
        assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected
        assert [output.token_ids for output in engine.generate(prompts[:2], GREEDY)] == expected[:2]
    assert bool(launched) is has_own, "FlashInfer's decodes are planned on the host, ahead of a replay"


@pytest.mark.parametrize("has_own", [True, False])
def test_layers_attend_to_images_from_any_page_on(
    has_own: bool, library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_mllama(tmp_path / "model", hidden_size=256, intermediate_size=256)
    config = vision_engine_config(tmp_path / "model", tmp_path / "cache", page_size=PAGE).model_dump(mode="json")
    config["model"]["dtype"] = "bfloat16"
    with Engine(config) as engine:
        expected = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
    attend_by_flashinfer(monkeypatch, has_own, seen_images)
    with Engine(config) as engine:
        assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == expected
        assert [output.token_ids for output in engine.generate(PROMPTS[:2], GREEDY)] == expected[:2]
