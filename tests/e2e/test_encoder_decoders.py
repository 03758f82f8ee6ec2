"""The whole way of an encoder's text to its decoder's answer, against Transformers' own forward of each text alone.

`make test` takes one class for all tests here, another for each commit; `make test-all` has an answer of all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams, StructuredOutputsParams
from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.resolution.device import DeviceInfo, detect_device
from mllm_compile.config.resolution.resolve import resolve
from mllm_compile.errors import ConfigError, RequestError, UnsupportedModelError, WeightUpdateError
from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.runtime.program.sources import SourceEncoder
from mllm_compile.runtime.sources.request import RequestSource
from tests.config.resolving import H200
from tests.model.encoder_decoders import (
    CLASSES,
    VOCAB,
    config_of_class,
    greedy,
    save_encoder_decoder,
    save_word_tokenizer,
    sources_of_ids,
)
from tests.sample import sample_of

PAGE = 16
COUNT = 12
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
LENGTHS = (7, 20, 1, 40, 5)
LONGEST = 160
(SAMPLED,) = sample_of(list(CLASSES), 1)
THROUGH_INDUCTOR = ("bart", "nllb", "t5")


def config_of(folder: Path, cache: Path, **changes: Any) -> dict[str, Any]:
    runtime = {"device": "cpu", "page_size": PAGE, "max_running_requests": 3, "max_model_len": LONGEST} | changes.pop(
        "runtime", {}
    )
    own = {"path": str(folder), "dtype": "float32"}
    return {
        "model": own,
        "runtime": runtime,
        "compile": {"backend": "eager"},
        "cache": {"dir": str(cache)},
        **changes,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sampled")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    model = save_encoder_decoder(SAMPLED, folder / "model")
    save_word_tokenizer(folder / "model")
    return model


@pytest.fixture(scope="module")
def engine(folder: Path, model: Any) -> Iterator[Engine]:
    with Engine(config_of(folder / "model", folder / "cache")) as engine:
        yield engine


def start_of(engine: Engine) -> tuple[int, ...]:
    """The tokens that the decoder begins with."""
    assert engine.decoder is not None
    return engine.decoder.start


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[RequestSource]:
    """Sources that the encoder has read."""
    found: list[RequestSource] = []
    encode = SourceEncoder.encode

    def noting(encoder: SourceEncoder, sources: Sequence[RequestSource], *rest: Any) -> None:
        found.extend(sources)
        encode(encoder, sources, *rest)

    monkeypatch.setattr(SourceEncoder, "encode", noting)
    return found


def test_answers_in_one_batch_are_those_of_each_source_alone(engine: Engine, model: Any) -> None:
    expect_those_of_each_source_alone(engine, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CLASSES if name != SAMPLED])
def test_answers_of_the_other_classes_are_too(name: str, tmp_path: Path) -> None:
    model = save_encoder_decoder(name, tmp_path / "model")
    with Engine(config_of(tmp_path / "model", tmp_path / "cache")) as engine:
        expect_those_of_each_source_alone(engine, model)


def expect_those_of_each_source_alone(engine: Engine, model: Any) -> None:
    sources = sources_of_ids(*LENGTHS)
    outputs = engine.generate(sources, GREEDY)
    starts = [output.decoder_prompt_token_ids or [] for output in outputs]
    assert [output.token_ids for output in outputs] == [
        greedy(model, source, start, COUNT) for source, start in zip(sources, starts, strict=True)
    ]
    assert [output.prompt_token_ids for output in outputs] == sources


@pytest.mark.slow
@pytest.mark.parametrize("name", THROUGH_INDUCTOR)
def test_answers_are_the_same_through_inductor(name: str, tmp_path: Path) -> None:
    model, sources = save_encoder_decoder(name, tmp_path / "model"), sources_of_ids(*LENGTHS)
    config = config_of(tmp_path / "model", tmp_path / "cache", compile={"backend": "inductor"})
    with Engine(config) as engine:
        outputs = engine.generate(sources, GREEDY)
    assert [output.token_ids for output in outputs] == [
        greedy(model, source, output.decoder_prompt_token_ids or [], COUNT)
        for source, output in zip(sources, outputs, strict=True)
    ]


def test_a_decoder_begins_with_what_the_files_or_a_prompt_say(engine: Engine, model: Any) -> None:
    (source,) = sources_of_ids(9)
    start = start_of(engine)
    first = start[0]
    by_ids = {"encoder_prompt": {"prompt_token_ids": source}, "decoder_prompt": [3, 20, 21]}
    by_text = {"encoder_prompt": source, "decoder_prompt": "w20 w21"}
    by_language = {"prompt_token_ids": source, "target_language": "w30"}
    outputs = engine.generate([by_ids, by_text, by_language, source], GREEDY)
    starts = [[3, 20, 21], [first, 20, 21], [first, 30], list(start)]
    assert [output.decoder_prompt_token_ids for output in outputs] == starts
    assert [output.token_ids for output in outputs] == [greedy(model, source, start, COUNT) for start in starts]


def test_a_text_is_read_with_the_special_tokens_of_the_encoder(engine: Engine, model: Any) -> None:
    (output,) = engine.generate("w10 w11", GREEDY)
    assert output.prompt_token_ids == [10, 11, 3]
    assert output.token_ids == greedy(model, [10, 11, 3], start_of(engine), COUNT)


def test_a_source_is_read_once_and_a_prefix_never_crosses_sources(
    engine: Engine, model: Any, read: list[RequestSource]
) -> None:
    first, second = sources_of_ids(18, 18)
    beginning = [3, *range(10, 10 + 2 * PAGE)]  # two pages of a decoder's tokens, which are alike
    asked = [{"encoder_prompt": one, "decoder_prompt": beginning} for one in (first, second)]
    outputs = engine.generate(asked, GREEDY)
    assert len(read) == 2
    expected = [greedy(model, one, beginning, COUNT) for one in (first, second)]
    assert [output.token_ids for output in outputs] == expected
    again = engine.generate(asked[::-1], GREEDY)
    assert [output.token_ids for output in again] == expected[::-1]
    assert len(read) == 2
    assert all(output.num_cached_tokens == 2 * PAGE for output in again)
    (other,) = engine.generate({**asked[0], "cache_salt": "a"}, GREEDY)
    assert other.token_ids == expected[0]
    assert (len(read), other.num_cached_tokens) == (3, 0)


def test_answers_to_one_source_share_its_pages(engine: Engine, model: Any, read: list[RequestSource]) -> None:
    (source,) = sources_of_ids(33)
    params = SamplingParams(top_k=1, max_tokens=COUNT, ignore_eos=True, n=3)
    (output,) = engine.generate([source[1:]], params)
    assert len(read) == 1
    assert {tuple(one.token_ids) for one in output.outputs} == {
        tuple(greedy(model, source[1:], start_of(engine), COUNT))
    }


def test_preempted_requests_answer_as_if_they_were_alone(folder: Path, model: Any) -> None:
    sources = sources_of_ids(30, 20, 30, 17)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    config = config_of(
        folder / "model", folder / "cache", runtime={"max_total_tokens": 10 * PAGE, "enable_prefix_cache": False}
    )
    with Engine(config) as engine:
        outputs = engine.generate(sources, params)
        assert engine.stats().preemptions > 0
        assert engine.stats().kv_pages_used == 0
        start = start_of(engine)
    assert [output.token_ids for output in outputs] == [greedy(model, source, start, 60) for source in sources]


def test_parameters_and_forms_of_answers_meet_an_encoder(engine: Engine, model: Any) -> None:
    (source,) = sources_of_ids(11)
    scored = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2)
    (output,) = engine.generate([source], scored)
    states = model.get_encoder()(torch.tensor([source]))
    with torch.no_grad():
        logits = model(encoder_outputs=states, decoder_input_ids=torch.tensor([start_of(engine)])).logits[0, -1]
    assert output.logprobs is not None
    of_first = output.logprobs[0][output.token_ids[0]].logprob
    assert of_first == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-4)
    formed = SamplingParams(
        temperature=0, max_tokens=3, structured_outputs=StructuredOutputsParams(choice=["w7w8"])
    )  # no word in it begins another
    assert engine.generate([source], formed)[0].text == "w7w8"
    seeded = SamplingParams(temperature=1, seed=5, max_tokens=8, ignore_eos=True)
    alone = engine.generate([source], seeded)[0].token_ids
    assert engine.generate([source, *sources_of_ids(4, 6)], seeded)[0].token_ids == alone
    prompted = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (with_prompt,) = engine.generate({"encoder_prompt": source, "decoder_prompt": [3, 20, 21]}, prompted)
    assert with_prompt.prompt_logprobs is not None
    assert len(with_prompt.prompt_logprobs) == 3


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "empty"),
        ([10] * 161, "reads at most 160"),
        ([VOCAB], "vocabulary"),
        ({"encoder_prompt": [10], "decoder_prompt": [VOCAB]}, "decoder_prompt: token id 128 is outside"),
        ({"encoder_prompt": [10], "decoder_prompt": 5}, "decoder_prompt: expected a text or a list"),
        ({"encoder_prompt": [10], "decoder_prompt": [True]}, "integers"),
        ({"encoder_prompt": [10], "decoder_prompt": [10] * 160}, "max_model_len is 160"),
        ({"encoder_prompt": [10], "prompt": "w10"}, "got both"),
        ({"encoder_prompt": [10], "target_language": "xx"}, "no token 'xx'"),
        ({"encoder_prompt": [10], "target_language": "w30", "decoder_prompt": [3]}, "got both"),
        ({"encoder_prompt": {"prompt_token_ids": [10], "what": 1}}, "a prompt's keys"),
    ],
)
def test_a_bad_prompt_is_refused_and_hurts_no_other(engine: Engine, model: Any, prompt: Any, said: str) -> None:
    (source,) = sources_of_ids(6)
    refused, served = engine.generate([prompt, source], GREEDY)
    assert (refused.finish_reason, refused.token_ids) == ("error", [])
    assert said in (refused.error or "")
    assert served.token_ids == greedy(model, source, start_of(engine), COUNT)


REFUSED: dict[str, Any] = {
    "speculative.method": "ngram",
    "lora.max_adapters": 1,
    "runtime.tensor_parallel_size": 2,
    "runtime.pipeline_parallel_size": 2,
    "runtime.expert_parallel_size": 2,
    "runtime.enable_dbo": True,
    "runtime.deterministic": True,
    "runtime.enable_sleep_mode": True,
    "runtime.skip_compiled": True,
    "runtime.expert_stats": True,
    "runtime.routed_experts": True,
    "runtime.kv_offloading_size": 1.0,
    "runtime.kv_events_config": {"enable_kv_cache_events": True},
    "model.quantization": "int8",
}


def test_the_page_names_what_is_refused() -> None:
    page = (Path(__file__).parents[2] / "docs/encoder-decoders.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and line.endswith("| refused |")]
    named = {name for line in rows for name in re.findall(r"`(\w+\.\w+)`", line)}
    assert named == {*REFUSED}
    assert "| a GPU (`runtime.device`), captured decodes | works |" in page  # tests/gpu/test_encoder_decoders.py


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_is_served_without_is_refused_by_name(folder: Path, model: Any, name: str) -> None:
    section, key = name.split(".")
    config = config_of(folder / "model", folder / "cache")
    config[section] = {**config.get(section, {}), key: REFUSED[name]}
    with pytest.raises(ConfigError, match=f"{name} is .*encoder and a decoder"):
        resolved(config)


@pytest.mark.parametrize("name", ["bart", "t5gemma"])
def test_a_gpu_takes_them(name: str, tmp_path: Path) -> None:
    save_encoder_decoder(name, tmp_path / "model")
    told = config_of(tmp_path / "model", tmp_path / "cache", runtime={"device": "cuda:0"})
    config = resolved(told | {"model": told["model"] | {"dtype": "bfloat16"}, "compile": {}}, H200)
    assert config.runtime.attention_backend == "flashinfer" and config.cudagraph.decode_requests


def resolved(config: dict[str, Any], device: DeviceInfo | None = None) -> Any:
    folder = Path(config["model"]["path"])
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return resolve(EngineConfig.from_dict(config), ModelFolder(folder, told, ()), device or detect_device("cpu"))


def test_weights_stay_while_it_serves(engine: Engine) -> None:
    with pytest.raises(WeightUpdateError, match="has an encoder"):
        engine.update_weights(iter(()))


def test_chats_need_a_template_that_such_models_have_not(engine: Engine) -> None:
    with pytest.raises(RequestError, match="chat template"):
        engine.chat([{"role": "user", "content": "w10"}])


@pytest.mark.parametrize("class_name", ["MvpForConditionalGeneration", "FSMTForConditionalGeneration"])
def test_attention_of_its_own_is_refused(class_name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="nothing attends to the encoder's states"):
        build_config_on_meta(config_of_class(class_name), torch.float32)
