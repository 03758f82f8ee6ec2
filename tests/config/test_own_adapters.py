"""The adapter beside a model's weights that computes its sounds: from the folder to the section."""

import json

import pytest

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.folders.own_adapters import adapter_of_sounds
from mllm_compile.config.resolution.resolve import resolve
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import CheckpointError
from tests.config.resolving import CPU, QWEN


@pytest.mark.parametrize(
    ("said", "is_there"),
    [
        ({"has_lora_adapter": True}, True),
        ({"has_lora_adapter": False, "projector_config": {}}, False),
        ({"projector_config": {}}, True),
        ({}, False),
    ],
)
def test_the_config_says_whether_a_folder_is_its_adapters_too(tmp_path, said, is_there):
    model = ModelFolder(tmp_path, said, ())
    assert adapter_of_sounds(model) is None, "no file"
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "rank_pattern": {"q_proj": 64}}))
    own = adapter_of_sounds(model)
    assert (own is not None) == is_there
    assert own is None or own == (tmp_path, 64)


def test_it_may_be_in_a_folder_of_its_own(tmp_path):
    folder = tmp_path / "speech-lora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 320}')
    assert adapter_of_sounds(ModelFolder(tmp_path, {"audio_config": {}}, ())) == (folder, 320)
    assert adapter_of_sounds(ModelFolder(tmp_path, {}, ())) is None, "a text alone"


@pytest.mark.parametrize("fields", [{"r": 0}, {"r": "8"}, {}, {"r": 8, "rank_pattern": [3]}, {"r": 513}])
def test_ranks_that_no_config_may_have_are_refused(tmp_path, fields):
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"expected ranks \(r, rank_pattern\) of 1 to 512, got"):
        adapter_of_sounds(ModelFolder(tmp_path, {"has_lora_adapter": True}, ()))


def test_it_has_a_place_and_its_rank_and_one_of_its_name_is_in_its_stead(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 64}')
    model = ModelFolder(tmp_path, QWEN | {"has_lora_adapter": True}, ())

    def lora(**sections):
        return resolve(EngineConfig.from_dict({"model": {"path": "m"}} | sections), model, CPU)

    own = lora()
    assert (own.lora.max_adapters, own.lora.max_rank, own.lora.of_sounds) == (1, 64, "sounds")
    assert own.lora.adapters == {"sounds": str(tmp_path)}
    assert resolve(own.as_config(), model, CPU).lora == own.lora
    asked = {"max_adapters": 3, "max_rank": 128, "adapters": {"sounds": "/mine", "sql": "/sql"}}
    mine = lora(lora=asked).lora
    assert (mine.max_adapters, mine.max_rank) == (3, 128)
    assert mine.adapters == {"sounds": "/mine", "sql": "/sql"}
    for runtime in ({"skip_compiled": True}, {"pipeline_parallel_size": 2}):
        without = lora(runtime=runtime).lora
        assert (without.max_adapters, without.adapters, without.of_sounds) == (0, {}, "")
