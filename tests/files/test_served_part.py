from mllm_compile.files.served_part import served_part
from mllm_compile.media.files import placeholder_of


def test_a_whole_omni_models_thinker_is_served() -> None:
    whole = {"model_type": "of_all", "thinker_config": {"audio_token_id": 7}, "talker_config": {}}
    assert served_part(whole) == {"audio_token_id": 7}
    assert placeholder_of(served_part(whole), "audio") == 7


def test_what_a_whole_models_config_says_of_all_weights_holds_for_its_thinker() -> None:
    part = {"model_type": "of_text", "dtype": "float16"}
    whole = {"thinker_config": part, "dtype": "float32", "quantization_config": {"quant_method": "fp8"}, "other": 1}
    assert served_part(whole) == part | {"quantization_config": {"quant_method": "fp8"}}


def test_other_configs_are_as_they_are() -> None:
    assert served_part({"audio_token_id": 7}) == {"audio_token_id": 7}
    assert served_part({"thinker_config": None, "a": 1}) == {"thinker_config": None, "a": 1}
