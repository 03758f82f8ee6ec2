"""The whole way of texts to embeddings, labels and scores, against Transformers' own forward of each text alone.

`make test` takes a few classes, another sample for each commit; `make test-all` all of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mllm_compile import Engine
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.config.schema import EngineConfig
from mllm_compile.engine.device_share import device_needs
from mllm_compile.errors import ConfigError, RequestError, UnsupportedModelError
from mllm_compile.process.progress import NullReporter
from mllm_compile.report.serve_check import serve_check
from tests.fakes import fake_engine
from tests.model.pooling_models import (
    LIMIT,
    by_transformers,
    largest_error,
    pooling_config,
    save_pooling_model,
    served,
    texts_of,
    texts_of_ids,
)
from tests.pooling_folder import save_embedder, save_module_files
from tests.quantised_checkpoints import LINEARS, quantise_folder
from tests.sample import slow_but_a_sample

# Of each way that attention sees, that positions are counted, and that heads read: the rest is the survey's.
CLASSES = (
    *("RobertaModel", "XLMRobertaForSequenceClassification", "ModernBertModel", "ModernBertForSequenceClassification"),
    *("T5EncoderModel", "DistilBertForTokenClassification", "ElectraModel", "AlbertForSequenceClassification"),
    *(
        "Qwen3ForSequenceClassification",
        "LlamaForTokenClassification",
        "NomicBertModel",
        "BartModel",
        "XLMRobertaXLModel",
    ),
    *("GPT2ForSequenceClassification", "UMT5EncoderModel", "MPNetModel", "ErnieModel", "Gemma3TextModel"),
    # Attention that the model writes out: in both directions, causal by a mask, by the graph.
    *("MegatronBertModel", "GPTJForSequenceClassification", "GPTNeoForTokenClassification"),
    "DebertaForTokenClassification",
    "MiniCPM3ForSequenceClassification",  # latent attention, which writes its keys' parts
)
DENSE = 24


@pytest.mark.parametrize("class_name", slow_but_a_sample(CLASSES, 1))
def test_texts_in_one_row_are_answered_as_each_alone(class_name: str, tmp_path: Path) -> None:
    model = save_pooling_model(class_name, tmp_path / "model")
    texts = texts_of(model)
    with Engine(pooling_config(tmp_path / "model", tmp_path / "cache")) as engine:
        assert largest_error(served(engine, texts), by_transformers(model, texts)) < LIMIT


def test_a_classifier_with_a_decoder_reads_texts_that_end_as_its_tokenizers_do(tmp_path: Path) -> None:
    model = save_pooling_model("BartForSequenceClassification", tmp_path / "model")
    texts = texts_of(model)
    with Engine(pooling_config(tmp_path / "model", tmp_path / "cache")) as engine:
        assert largest_error(served(engine, texts), by_transformers(model, texts)) < LIMIT
        with pytest.raises(RequestError, match=r"text 1 ends with token id 9; expected 102, at which the model's head"):
            engine.classify([texts[0], [5, 9]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "class_name",
    [
        *("BertModel", "ModernBertModel", "T5EncoderModel", "BertForSequenceClassification"),
        *("DebertaV2ForSequenceClassification", "MPNetModel", "XLMRobertaForTokenClassification", "Qwen3Model"),
    ],
)
def test_pieces_through_inductor_answer_alike(class_name: str, tmp_path: Path) -> None:
    model = save_pooling_model(class_name, tmp_path / "model")
    texts = texts_of_ids()
    with Engine(pooling_config(tmp_path / "model", tmp_path / "cache", "inductor")) as engine:
        assert largest_error(served(engine, texts), by_transformers(model, texts)) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("class_name", ["MobileBertModel", "FNetModel"])
def test_an_encoder_that_mixes_neighbours_is_refused_by_name(class_name: str, tmp_path: Path) -> None:
    save_pooling_model(class_name, tmp_path / "model")
    name = class_name.removesuffix("Model").lower()
    with pytest.raises(UnsupportedModelError, match=f"'{name}' .*would not be served right"):
        Engine(pooling_config(tmp_path / "model", tmp_path / "cache"))


class Embedder:
    """A tiny embedder with sentence-transformers' files, its engine, and Transformers' model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "model"
        self.model = save_embedder(self.folder)
        modes = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True, "include_prompt": False}
        settings = {"prompts": {"query": "w7 w8 "}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        kinds = ("Transformer", "Pooling", "Dense", "Normalize")
        save_module_files(self.folder, *kinds, pooling=modes, settings=settings)
        dense = self.folder / "2_Dense"
        dense.mkdir()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(DENSE, 128, generator=generator)
        save_file({"linear.weight": self.weight}, dense / "model.safetensors")
        said = {"bias": False, "activation_function": "torch.nn.modules.activation.Tanh"}
        (dense / "config.json").write_text(json.dumps(said))
        config = json.loads((self.folder / "config.json").read_text()) | {"matryoshka_dimensions": [8, 16]}
        (self.folder / "config.json").write_text(json.dumps(config))
        self.engine = Engine(pooling_config(self.folder, folder / "cache"))

    @torch.no_grad()
    def expected(self, ids: list[int], left_out: int = 0) -> np.ndarray:
        hidden = self.model(input_ids=torch.tensor([ids]))[0][0]
        rows = torch.cat([hidden[0], hidden[left_out:].mean(0)])
        return torch.nn.functional.normalize(torch.tanh(self.weight @ rows), dim=-1).numpy()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedder]:
    """Takes some seconds."""
    made = Embedder(tmp_path_factory.mktemp("embedder"))
    yield made
    made.engine.close()


def _ids(text: str) -> list[int]:
    return [2, *(int(word[1:]) for word in text.split()), 3]


def test_an_embedding_is_that_of_the_module_files(embedder: Embedder) -> None:
    texts = ["w10 w11 w12", "w50", "w20 w30 w40 w50 w60"]
    found = embedder.engine.embed([*texts, _ids("w50")])
    for text, one in zip([*texts, "w50"], found, strict=True):
        assert one.prompt_token_ids == _ids(text) and one.outputs.hidden_size == DENSE
        np.testing.assert_allclose(one.outputs.embedding, embedder.expected(_ids(text)), atol=LIMIT)


def test_a_prompt_goes_ahead_and_is_left_out_of_the_mean(embedder: Embedder) -> None:
    (found,) = embedder.engine.embed("w10 w11", prompt_name="query")
    ids = _ids("w7 w8 w10 w11")
    assert found.prompt_token_ids == ids
    np.testing.assert_allclose(found.outputs.embedding, embedder.expected(ids, left_out=3), atol=LIMIT)


def test_an_embedding_is_cut_and_then_normalised(embedder: Embedder) -> None:
    (whole,), (cut,) = (embedder.engine.embed("w10", **said) for said in ({"normalize": False}, {"dimensions": 8}))
    first = whole.outputs.embedding[:8]
    np.testing.assert_allclose(cut.outputs.embedding, first / np.linalg.norm(first), atol=LIMIT)


def test_a_score_of_an_embedder_is_the_cosine(embedder: Embedder) -> None:
    one, *others = (answer.outputs.embedding for answer in embedder.engine.embed(["w10", "w11 w12", "w13"]))
    scores = [answer.outputs.score for answer in embedder.engine.score("w10", ["w11 w12", "w13"])]
    np.testing.assert_allclose(scores, [one @ other for other in others], atol=LIMIT)


def test_a_long_text_is_cut_where_that_is_asked_for(embedder: Embedder) -> None:
    text = " ".join(["w10"] * 400)
    with pytest.raises(RequestError, match="text 0 has 402 tokens; the model takes 256"):
        embedder.engine.embed(text)
    (cut,) = embedder.engine.embed(text, truncate_prompt_tokens=-1)
    assert len(cut.prompt_token_ids) == 256 and cut.prompt_token_ids[-1] == 3
    (shorter,) = embedder.engine.embed("w10 w11 w12 w13", truncate_prompt_tokens=4)
    assert shorter.prompt_token_ids == _ids("w10 w11")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.embed([]), "there is no text"),
        (lambda engine: engine.embed([[]]), "expected a text or token ids"),
        (lambda engine: engine.embed([[5, 128]]), "token id 128; expected 0 to 127"),
        (lambda engine: engine.embed("w10", dimensions=9), "expected one of 8, 16"),
        (lambda engine: engine.embed("w10", pooling="last"), "dense layers were made for cls, mean"),
        (lambda engine: engine.embed("w10", prompt_name="passage"), "it has: query"),
        (lambda engine: engine.embed("w10", truncate_prompt_tokens=257), "expected 1 to 256"),
        (lambda engine: engine.classify("w10"), "no head for 'classify'; it has: embed, token_embed, score"),
        (lambda engine: engine.reward("w10"), "no head for 'classify'"),
        (lambda engine: engine.encode("w10", pooling_task="plugin"), "no head for 'plugin'"),
        (lambda engine: engine.score(["w10", "w11"], ["w10"] * 3), "2 and 3 texts"),
        (lambda engine: engine.generate("w10"), "the model generates no text; it has: embed, token_embed"),
        (lambda engine: engine.stream("w10"), "the model generates no text"),
        (lambda engine: engine.sleep(), "the model generates no text"),
    ],
)
def test_what_the_model_cannot_do_is_refused(embedder: Embedder, call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call(embedder.engine)
    assert embedder.engine.is_alive


def test_packed_weights_serve_where_the_checkpoint_is_gone(tmp_path: Path) -> None:
    save_pooling_model("ModernBertModel", tmp_path / "model")
    texts = texts_of_ids()
    config = EngineConfig.from_dict(pooling_config(tmp_path / "model", tmp_path / "cache"))
    with Engine(config) as engine:
        expected = served(engine, texts)
    packed = load_or_compile(config, None, CompileOptions(tmp_path / "out", pack_weights=True))
    shutil.rmtree(tmp_path / "model")
    with Engine(packed.folder) as engine:
        assert largest_error(served(engine, texts), expected) == 0


def test_a_quantised_checkpoint_is_served_as_what_it_stands_for(tmp_path: Path) -> None:
    model = save_pooling_model("Qwen3ForSequenceClassification", tmp_path / "model")
    quantise_folder(tmp_path / "model", tmp_path / "packed", tmp_path / "plain", LINEARS["fp8 one scale"])
    texts, scores = texts_of_ids(), []
    for name in ("plain", "packed"):
        with Engine(pooling_config(tmp_path / name, tmp_path / "cache")) as engine:
            scores.append(served(engine, texts))
    plain, packed = scores
    assert largest_error(packed, plain) < LIMIT < largest_error(packed, by_transformers(model, texts))


def test_the_second_start_is_from_the_cached_runtime(embedder: Embedder, tmp_path: Path) -> None:
    with Engine(embedder.engine.folder) as engine:
        (found,) = engine.embed("w10 w11")
    np.testing.assert_allclose(found.outputs.embedding, embedder.expected(_ids("w10 w11")), atol=LIMIT)


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("lora", {"max_adapters": 1}),
        ("speculative", {"method": "ngram"}),
        ("runtime", {"deterministic": True}),
        ("runtime", {"tensor_parallel_size": 2}),
        ("runtime", {"enable_sleep_mode": True}),
        ("runtime", {"skip_compiled": True}),
        ("runtime", {"expert_stats": True}),
        ("runtime", {"kv_offloading_size": 1}),
        ("runtime", {"kv_events_config": {"enable_kv_cache_events": True}}),
        ("runtime", {"routed_experts": True}),
        ("model", {"quantization": "int8"}),
    ],
)
def test_features_of_generation_are_refused_by_name(
    embedder: Embedder, section: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    config = pooling_config(embedder.folder, tmp_path)
    config[section] = config.get(section, {}) | keys
    with pytest.raises(ConfigError, match=f"{section}.{next(iter(keys))} is .* model.task is embed"):
        Engine(config)


def test_a_server_of_several_models_refuses_one_that_pools(embedder: Embedder, tmp_path: Path) -> None:
    source = EngineConfig(**pooling_config(embedder.folder, embedder.folder.parent / "cache"))
    with pytest.raises(ConfigError, match=r"the model pools: .* Serve it by itself"):
        device_needs(source, NullReporter())


@pytest.mark.slow
def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    model = save_embedder(tmp_path / "model", "BertForSequenceClassification", num_labels=1)
    with Engine(pooling_config(tmp_path / "model", tmp_path / "cache")) as engine:
        found = engine.score("w10 w11", ["w12", "w13 w14 w15"])
        rewards = engine.reward("w10 w11")
        for document, one in zip(["w12", "w13 w14 w15"], found, strict=True):
            first, second = _ids("w10 w11"), _ids(document)[1:]
            ids, kinds = torch.tensor([first + second]), torch.tensor([[0] * len(first) + [1] * len(second)])
            with torch.no_grad():
                logit = model(input_ids=ids, token_type_ids=kinds).logits[0, 0]
            assert one.prompt_token_ids == ids[0].tolist()
            assert abs(one.outputs.score - logit.sigmoid().item()) < LIMIT
        with torch.no_grad():
            reward = model(input_ids=torch.tensor([_ids("w10 w11")])).logits[0].numpy()
        np.testing.assert_allclose(rewards[0].outputs.data, reward, atol=LIMIT)


@pytest.mark.slow
def test_a_causal_model_reranks_by_two_tokens(tmp_path: Path) -> None:
    model = save_embedder(tmp_path / "model", "Qwen3ForCausalLM")
    config = pooling_config(tmp_path / "model", tmp_path / "cache", classifier_from_token=["w20", "w21"])
    with Engine(config) as engine, torch.no_grad():
        (found,) = engine.score("w10 w11", "w12")
        logits = model(input_ids=torch.tensor([found.prompt_token_ids])).logits[0, -1]
        assert abs(found.outputs.score - logits[[20, 21]].softmax(-1)[1].item()) < LIMIT


def test_a_template_is_around_query_and_document(tmp_path: Path) -> None:
    save_embedder(tmp_path / "model", "BertForSequenceClassification", num_labels=1)
    said = {"score_template": "w30 {document} w31 w32 {query} w33"}
    with Engine(pooling_config(tmp_path / "model", tmp_path / "cache", **said)) as engine:
        (found,) = engine.score("w10 {document}", "w12")
        (same,) = engine.classify("w30 w12 w31 w32 w10 {document} w33")
        assert found.prompt_token_ids == same.prompt_token_ids
        np.testing.assert_allclose(found.outputs.score, same.outputs.probs[0], atol=LIMIT)
        with pytest.raises(RequestError, match=r"truncate_prompt_tokens is set, and .*whose end would be cut"):
            engine.score("w10", "w12", truncate_prompt_tokens=-1)


@pytest.mark.parametrize(
    ("template", "task", "message"),
    [
        ("{query}", "classify", r"expected \{query\} and \{document\} in it"),
        ("{query} {document}", "embed", "reads no pairs"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(template: str, task: str, message: str, tmp_path: Path) -> None:
    save_embedder(tmp_path / "model", "BertForSequenceClassification", num_labels=1)
    with pytest.raises(ConfigError, match=message):
        Engine(pooling_config(tmp_path / "model", tmp_path / "cache", task=task, score_template=template))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PhiForCausalLM", "GraniteForCausalLM"])
def test_a_causal_model_whose_logits_have_a_bias_or_a_scale_reranks_nothing(name: str, tmp_path: Path) -> None:
    own = {"logits_scaling": 8.0} if name.startswith("Granite") else {}
    save_embedder(tmp_path / "model", name, **own)
    config = pooling_config(tmp_path / "model", tmp_path / "cache", classifier_from_token=["w20", "w21"])
    with pytest.raises(UnsupportedModelError, match="would not be served right: its logits have a scale or a bias"):
        Engine(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_a_causal_model_embeds_by_its_last_token(name: str, tmp_path: Path) -> None:
    model = save_pooling_model(name, tmp_path / "model")
    texts = texts_of_ids()
    with Engine(pooling_config(tmp_path / "model", tmp_path / "cache", task="embed")) as engine, torch.no_grad():
        found = [answer.outputs.embedding for answer in engine.embed(texts)]
        means = [answer.outputs.embedding for answer in engine.embed(texts, pooling="mean", normalize=True)]
        for text, one, mean in zip(texts, found, means, strict=True):
            hidden = model.model(input_ids=torch.tensor([text]))[0][0]
            np.testing.assert_allclose(one, hidden[-1].numpy(), atol=LIMIT)
            np.testing.assert_allclose(mean, torch.nn.functional.normalize(hidden.mean(0), dim=-1).numpy(), atol=LIMIT)


def test_a_model_that_generates_refuses_to_embed() -> None:
    with fake_engine() as engine, pytest.raises(RequestError, match=r"Set model.task: embed"):
        engine.embed("text")


def test_check_names_the_tasks_of_a_runtime(embedder: Embedder) -> None:
    lines = dict(serve_check(embedder.engine.folder, NullReporter()))
    assert lines["tasks"] == "embed, token_embed; pooled by cls, mean"
    assert lines["limits"] == "texts of 256 tokens"
