from __future__ import annotations

import dis
from types import SimpleNamespace

import pytest
import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.model.sources.seen_images import SeenImagesAdapter
from mllm_compile.model.towers.find import tower_adapter
from mllm_compile.model.towers.fixed_size import reads
from tests.tiny_seen_images import VOCAB, mllama_config
from tests.tiny_vision import vision_config


@pytest.mark.parametrize("model_type", ["qwen3_vl", "mistral3", "gemma4", "llava_next", "llava"])  # one a protocol
@pytest.mark.parametrize("token", [10**6, -1])
def test_a_placeholder_that_the_embedding_has_no_row_for_is_refused(model_type: str, token: int) -> None:
    config = vision_config(model_type)
    config.image_token_id = token
    hf_model = build_config_on_meta(config, torch.float32)
    with pytest.raises(
        UnsupportedModelError, match=rf"images cannot be served: its placeholder is {token}, and no row"
    ):
        tower_adapter(hf_model)


@pytest.mark.parametrize("token", [VOCAB + 8, -1])
def test_so_is_one_of_images_that_layers_attend_to(token: int) -> None:
    config = mllama_config()
    config.image_token_index = token
    hf_model = build_config_on_meta(config, torch.float32)
    assert tower_adapter(hf_model) is None, "no token takes a feature"
    with pytest.raises(UnsupportedModelError, match=rf"its placeholder is {token}, and no row of its embedding"):
        SeenImagesAdapter.of(hf_model)


def test_a_model_with_layers_that_attend_to_images_of_another_kind_is_refused() -> None:
    hf_model = build_config_on_meta(mllama_config(), torch.float32)
    del hf_model.model.model.multi_modal_projector
    with pytest.raises(UnsupportedModelError, match=r"\(cross attention\), and it has no multi_modal_projector"):
        SeenImagesAdapter.of(hf_model)


def test_a_variable_is_read_also_by_an_instruction_that_reads_two(monkeypatch: pytest.MonkeyPatch) -> None:
    code = reads.__code__
    assert reads(code, "code") and not reads(code, "other")
    two = SimpleNamespace(opname="LOAD_FAST_LOAD_FAST", argval=("one", "other"))  # as Python 3.13 has them
    monkeypatch.setattr(dis, "get_instructions", lambda _: [two])
    assert reads(code, "other") and not reads(code, "code")
