"""A model's own layer for multi-token prediction drafts what Transformers' MtpModel drafts, and changes no answer."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile, open_runtime
from mllm_compile.compiler.target import find_target
from mllm_compile.errors import CheckpointError, ConfigError, UnsupportedModelError
from mllm_compile.runtime.step.draft_model import ModelDrafter
from mllm_compile.store.shared_weights import num_weight_bytes
from tests.e2e.test_quantised import Lines
from tests.e2e.test_speculation import config_of, parts_of, prompts_of
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as config_of_architecture
from tests.prediction_layers import OF_ITS_OWN, TransformersDrafts, save_with_prediction_layer
from tests.sample import slow_but_a_sample
from tests.tiny_model import engine_of_pages

ARCHITECTURES = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text")
MTP = {"method": "mtp", "num_speculative_tokens": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def note_drafts(monkeypatch, has_states: bool = False) -> dict[tuple[int, ...], list[int]]:
    """The drafts that are made from now on, by the texts before them. Behind a state's prefix the last keys are of
    another text."""
    drafted: dict[tuple[int, ...], list[int]] = {}
    propose = ModelDrafter.propose

    def noted(self, asked):
        drafts = propose(self, asked)
        for one, draft in zip(asked, drafts, strict=True):
            if draft and not (one.request.num_cached_tokens and has_states):
                text = (*one.request.prompt_token_ids, *one.request.output_token_ids)
                drafted.setdefault(text, list(draft))
        return drafts

    monkeypatch.setattr(ModelDrafter, "propose", noted)
    return drafted


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("architecture", slow_but_a_sample(ARCHITECTURES, 1))
def test_the_layer_drafts_what_transformers_does_and_changes_no_answer(architecture, is_cut, tmp_path, monkeypatch):
    """Also with a head that is cut to some tokens."""
    save_with_prediction_layer(architecture, tmp_path / "model")
    known, method = None, MTP
    if is_cut:
        known = list(range(3, 90, 2))
        (tmp_path / "tokens.json").write_text(json.dumps(known[::-1]))
        method = MTP | {"token_map": str(tmp_path / "tokens.json")}
    drafted = note_drafts(monkeypatch, architecture in OF_ITS_OWN)
    with Engine(config_of(tmp_path, speculative=method)) as engine:
        rounds = [engine.generate(prompts_of(5), GREEDY) for _ in range(2)]  # the second with prefix hits
        assert engine.stats().drafts > 0
    reference = TransformersDrafts(tmp_path / "model")
    assert len(drafted) > 20
    for text, draft in list(drafted.items())[::3]:
        assert draft == reference.draft(text, len(draft), known), f"behind {len(text)} tokens"
    for outputs in rounds:
        for prompt, output in zip(prompts_of(5), outputs, strict=True):
            assert output.token_ids == reference.greedy(prompt, 12)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_rule_takes_the_layer_where_the_checkpoint_has_it(architecture, tmp_path):
    def method(**runtime):
        return find_target(config_of(tmp_path, speculative={"method": "auto"}, runtime=runtime)).config.speculative

    config = save_with_prediction_layer(architecture, tmp_path / "model")
    assert (method().method, method().by_cost) == ("mtp", True)
    assert method(skip_compiled=True).method == method(tensor_parallel_size=2).method == "suffix"
    of_layer = ("mtp.", f"model.layers.{config.num_hidden_layers}.")
    keep_tensors(tmp_path / "model", lambda name: not name.startswith(of_layer))
    assert method().method == "suffix"


def test_a_rule_does_without_a_layer_that_is_refused(tmp_path):
    """The runtime is compiled once, and told of; who names the method gets the error."""
    save_with_prediction_layer("glm4_moe", tmp_path / "model")
    keep_tensors(tmp_path / "model", lambda name: not name.endswith("hnorm.weight"))
    by_rule, told = config_of(tmp_path, speculative={"method": "auto"}), Lines()
    first = load_or_compile(by_rule, told)
    (line,) = (line for line in told.told if "speculative" in line)
    assert "speculative.method is suffix, as mtp is refused: the checkpoint lacks 'layers.0.hnorm.weight'" in line
    second = load_or_compile(by_rule)
    for compiled in (first, second, open_runtime(first.folder)):
        assert (compiled.config.speculative.method, compiled.drafter) == ("suffix", None)
    assert second.was_cached and not first.was_cached and second.folder == first.folder
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks 'layers.0.hnorm.weight'"):
        load_or_compile(config_of(tmp_path, speculative=MTP))
    with Engine(by_rule) as engine:
        assert len(engine.generate([[5, 6] * 8], GREEDY)[0].token_ids) == 12


def keep_tensors(folder, is_kept):
    """Removes the other tensors of a checkpoint."""
    (path,) = folder.glob("*.safetensors")
    kept = {name: tensor for name, tensor in load_file(path).items() if is_kept(name)}
    save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "architecture, num_layers", [pytest.param("deepseek_v3", 3, marks=pytest.mark.slow), ("glm4_moe", 2)]
)
def test_several_layers_draft_a_token_each_as_transformers_does(architecture, num_layers, tmp_path, monkeypatch):
    """In chunks, behind cached prefixes, and in requests that are preempted."""
    save_with_prediction_layer(architecture, tmp_path / "model", num_layers)
    method = MTP | {"num_speculative_tokens": num_layers}
    config = config_of(tmp_path, speculative=method, runtime={"max_num_batched_tokens": 16})
    drafted = note_drafts(monkeypatch)
    prompts = [*prompts_of(5), [*prompts_of(5)[4][:30], 5, 6]]
    with engine_of_pages(config, 30) as engine:
        rounds = [engine.generate(prompts, GREEDY) for _ in range(2)]
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    reference = TransformersDrafts(tmp_path / "model", num_layers)
    assert len(drafted) > 20
    assert num_layers in {len(draft) for draft in drafted.values()}
    for text, draft in list(drafted.items())[::4]:
        assert draft == reference.draft(text, len(draft)), f"behind {len(text)} tokens"
    answers = [reference.greedy(prompt, 12) for prompt in prompts]
    assert [[output.token_ids for output in outputs] for outputs in rounds] == [answers] * 2
    with pytest.raises(
        ConfigError, match=rf"is 4, and the checkpoint's {num_layers} layers for multi-token prediction"
    ):
        find_target(config_of(tmp_path, speculative=MTP | {"num_speculative_tokens": 4}))


def test_a_model_without_the_layer_is_refused(tmp_path):
    save_tiny_model(config_of_architecture("qwen3", eos_token_id=None), tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="names no layer for multi-token prediction"):
        load_or_compile(config_of(tmp_path, speculative=MTP))


def test_a_checkpoint_without_the_layer_or_a_part_of_it_is_refused(tmp_path):
    config = save_with_prediction_layer("glm4_moe", tmp_path / "model")
    start = f"model.layers.{config.num_hidden_layers}."
    keep_tensors(tmp_path / "model", lambda name: name != f"{start}hnorm.weight")
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks 'layers.0.hnorm.weight'"):
        load_or_compile(config_of(tmp_path, speculative=MTP))
    keep_tensors(tmp_path / "model", lambda name: not name.startswith(start))
    with pytest.raises(CheckpointError, match="has no tensors of a layer for multi-token prediction"):
        load_or_compile(config_of(tmp_path, speculative=MTP))


@pytest.fixture(scope="module")
def folder_with_layer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("with_layer")
    save_with_prediction_layer("glm4_moe", folder / "model")
    return folder


@pytest.mark.parametrize(
    "content, text",
    [
        (None, "there is no such file; expected a JSON array of token ids"),
        ("[]", r"holds \[\]; expected a JSON array"),
        ('{"5": 1}', "holds {'5': 1}; expected a JSON array"),
        ("[5, -1]", "holds -1; expected a JSON array"),
        ("[5, 6.5]", "holds 6.5; expected a JSON array"),
        ("[5, true]", "holds True; expected a JSON array"),
        ("\x80\x02]q", "is no JSON"),
        ("[7, 5, 7]", "holds token 7 twice"),
        ("[5, 128]", "holds token 128, and the vocabulary has 128"),
    ],
)
def test_a_map_of_tokens_that_is_none_is_refused(content, text, folder_with_layer, tmp_path):
    path = tmp_path / "tokens.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=text):
        load_or_compile(config_of(folder_with_layer, speculative=MTP | {"token_map": str(path)}))


@pytest.mark.parametrize("is_cut", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_embeddings_and_head_of_the_model_are_in_memory_once(is_cut, folder_with_layer, tmp_path):
    method = MTP
    if is_cut:
        (tmp_path / "tokens.json").write_text("[3, 5]")
        method = MTP | {"token_map": str(tmp_path / "tokens.json")}
    config = config_of(folder_with_layer, speculative=method)
    with parts_of(config) as parts:
        runner = parts.step_runner._runner
        model, layer = runner.model.live.tensors, runner.drafter.model.live.tensors
        places = {tensor.data_ptr(): name for name, tensor in model.items()}
        shared = {name: places[tensor.data_ptr()] for name, tensor in layer.items() if tensor.data_ptr() in places}
        of_head = {} if is_cut else {"shared_head.weight": "lm_head.weight"}
        assert shared == {"embed_tokens.weight": "model.embed_tokens.weight"} | of_head
        num_bytes = sum(
            tensor.nbytes for tensor in {t.data_ptr(): t for t in (*model.values(), *layer.values())}.values()
        )
        assert num_weight_bytes(load_or_compile(config)) == num_bytes
        assert runner._source.weight_bytes + runner.drafter._source.weight_bytes == num_bytes


def test_what_the_layer_does_not_go_with_is_refused(tmp_path):
    save_tiny_model(config_of_architecture("glm4_moe", eos_token_id=None), tmp_path / "model")
    for runtime, text in (({"skip_compiled": True}, "skip_compiled"), ({"tensor_parallel_size": 2}, "2 ranks")):
        with pytest.raises(ConfigError, match=text):
            load_or_compile(config_of(tmp_path, speculative=MTP, runtime=runtime))


def test_a_layer_that_chooses_keys_is_refused_by_its_method(tmp_path):
    config = config_of_architecture("minimax_m3_vl_text", index_block_size=4, index_topk_blocks=2, eos_token_id=None)
    save_tiny_model(config, tmp_path / "model")
    text = (
        "the layer of speculative.method: mtp was made for at most 8 tokens. Set it to 8 or less, or use another method"
    )
    with pytest.raises(ConfigError, match=text):
        load_or_compile(config_of(tmp_path, speculative=MTP))
