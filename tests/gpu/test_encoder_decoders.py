"""Encoder-decoders on a GPU in bfloat16, in each mode of graphs: as near to Transformers in float32 as it is in
bfloat16.

A model is compiled once, for all modes: without cascades, which not all have. Two layers have every kind of piece; of
sounds one layer is enough, as BART's decoder is Whisper's.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_outputs import BaseModelOutput

from mllm_compile import Engine, SamplingParams
from mllm_compile.runtime.cuda_graph.decodes import DecodeGraphs
from tests.gpu.test_served_models import off_by
from tests.model.encoder_decoders import save_encoder_decoder, save_whisper, save_word_tokenizer, sources_of_ids

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

WIDTH = 256  # four heads of 64
OF_BART = {"d_model": WIDTH, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}
# T5's heads are attended by pieces, others by the kernels of Hopper: of 64 two as one.
SIZES: dict[str, dict[str, Any]] = {
    "bart": OF_BART,
    "t5": {"d_model": WIDTH, "d_kv": 64, "d_ff": 512},
    "t5gemma": {"hidden_size": WIDTH, "head_dim": 64, "intermediate_size": 512, "query_pre_attn_scalar": 256},
    "bart, wide heads": OF_BART | {"encoder_attention_heads": 2, "decoder_attention_heads": 2},
}
DEVICE = "cuda:0"
LENGTHS = (7, 150, 1, 40, 65, 20)
LONGEST = {"bart": 160, "t5": 192, "t5gemma": 160}  # tokens of a request, and of a source of text
MODES = ("full_and_piecewise", "piecewise", "none")
SCORED = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
MARGIN = 1.5  # of the error of Transformers in bfloat16


def config_of(folder: Path, cache: Path, mode: str, longest: int) -> dict[str, Any]:
    runtime = {"device": DEVICE, "max_running_requests": 8, "max_num_batched_tokens": 512, "mem_fraction_static": 0.3}
    graphs = {"mode": mode, "piecewise_tokens": [8, 16]}
    graphs |= {"decode_requests": [1, 8]} if mode == "full_and_piecewise" else {}
    return {
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "runtime": runtime | {"max_model_len": longest, "cascade_attention": False},
        "cudagraph": {"mode": "none"} if mode == "none" else graphs,
        "cache": {"dir": str(cache)},
    }


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests of each captured decode."""
    found: list[int] = []
    launch = DecodeGraphs.launch

    def noting(graphs: DecodeGraphs, rows: np.ndarray, *rest: Any) -> Any:
        found.append(rows.size)
        return launch(graphs, rows, *rest)

    monkeypatch.setattr(DecodeGraphs, "launch", noting)
    return found


def check_modes(folder: Path, model: Any, prompts: list[Any], read: list[torch.Tensor], launched: list[int]) -> None:
    """
    Args:
        model: Transformers', in float32; prompts: as the engine takes them; read: as the model's encoder does.
    """
    in_bfloat16 = copy.deepcopy(model).to(torch.bfloat16)
    for mode in MODES:
        longest = LONGEST.get(model.config.model_type, 64)
        with Engine(config_of(folder / "model", folder / "cache", mode, longest)) as engine:
            print(f"{type(model).__name__}, graphs {mode}: ready", flush=True)
            launched.clear()
            outputs = engine.generate(prompts, SCORED)
            assert bool(launched) == (mode == "full_and_piecewise")
            again = engine.generate(prompts[:1], SCORED)
        assert again[0].token_ids[:1] == outputs[0].token_ids[:1]
        ours, exact, rounded = [], [], []
        for output, source in zip(outputs, read, strict=True):
            assert output.error is None
            ids, start = output.token_ids, output.decoder_prompt_token_ids
            assert output.logprobs is not None
            ours += [scores[token].logprob for scores, token in zip(output.logprobs, ids, strict=True)]
            exact.append(scores_of(model, source, start, ids))
            rounded.append(scores_of(in_bfloat16, source, start, ids))
        want = torch.cat(exact)
        error, noise = off_by(torch.tensor(ours), want), off_by(torch.cat(rounded), want)
        told = f"off by {error:.4f}, Transformers in bfloat16 by {noise:.4f}"
        print(f"{type(model).__name__}, graphs {mode}: {told}", flush=True)
        assert noise > 1e-3 and error <= MARGIN * noise + 1e-3


@torch.no_grad()
def scores_of(model: Any, source: torch.Tensor, start: list[int], ids: list[int]) -> torch.Tensor:
    """Log-probabilities of `ids` [N] behind `start`, [N] float32; source: ids or windows of sound, a batch of one."""
    states = model.get_encoder()(source.to(model.dtype) if source.is_floating_point() else source)[0]
    given = torch.tensor([[*start, *ids[:-1]]], device=states.device)
    read = BaseModelOutput(last_hidden_state=states)  # of T5Gemma Transformers 5.17 takes no tuple
    # With a cache, as generate() has one: else T5Gemma hides what is padding in an answer.
    logits = model(encoder_outputs=read, decoder_input_ids=given, use_cache=True).logits[0].float()
    of_ids = logits.log_softmax(-1)[len(start) - 1 :]
    return of_ids.gather(1, torch.tensor(ids, device=states.device)[:, None])[:, 0].cpu()


def let_layers_tell(model: Any) -> None:
    """Makes embeddings small, which else drown what T5Gemma's layers add: each token would answer with itself."""
    for part in (model.model.encoder, model.model.decoder):
        part.embed_tokens.weight.mul_(0.05)
    model.model.decoder.norm.weight.fill_(9)


@pytest.mark.parametrize("name", SIZES)
@torch.no_grad()
def test_texts_are_as_near_to_float32_as_transformers_in_bfloat16(
    name: str, launched: list[int], tmp_path: Path
) -> None:
    model = save_encoder_decoder(name.partition(",")[0], tmp_path / "model", **SIZES[name])
    if name == "t5gemma":
        let_layers_tell(model)
        model.save_pretrained(tmp_path / "model")
    model = model.to(DEVICE)
    save_word_tokenizer(tmp_path / "model")
    sources = sources_of_ids(*LENGTHS)
    read = [torch.tensor([source], device=DEVICE) for source in sources]
    check_modes(tmp_path, model, sources, read, launched)


@torch.no_grad()
def test_sounds_are_too(launched: list[int], tmp_path: Path) -> None:
    sizes = OF_BART | {"encoder_layers": 1, "decoder_layers": 1}
    model = save_whisper(tmp_path / "model", **sizes).to(DEVICE)
    extract = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    generator = np.random.default_rng(0)
    sounds = [generator.standard_normal(count).astype(np.float32) / 8 for count in (16000, 9000, 400)]
    prompts = [
        {"encoder_prompt": {"multi_modal_data": {"audio": sound}}, "decoder_prompt": [3, 20, 21]} for sound in sounds
    ]
    windows = [extract(sound, sampling_rate=16000, return_tensors="pt").input_features for sound in sounds]
    check_modes(tmp_path, model, prompts, [window.to(DEVICE) for window in windows], launched)
