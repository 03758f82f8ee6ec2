"""A trainable model on a CPU in float32: its log-probabilities are bitwise those of rollouts, and it learns."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from mllm_compile import ConfigError, Engine, EngineConfig, RequestError, RequestOutput, SamplingParams, trainable
from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.resolution.resolve import resolve
from mllm_compile.train.refusals import check_config
from mllm_compile.train.trainable import Trainable
from tests.config.resolving import CPU, QWEN
from tests.tiny_model import TINY, Reference, engine_of_pages, shallow_tiny, tiny_config

Config = Callable[..., EngineConfig]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)
TEXT = "If the file cannot be opened, an OSError is raised.\n"
PROMPTS: list[Any] = [TEXT, "A", TEXT * 5, [7, 3, 2], "x = 1\n" * 9, "The for statement is used to"]


@pytest.fixture(scope="module")
def config(eager_cache: Path) -> Config:
    def make(path: Path = TINY, **runtime: Any) -> EngineConfig:
        model = {"path": str(path)}
        settings = {"deterministic": True, "max_model_len": 128} | runtime
        return tiny_config(eager_cache, model=model, compile={"backend": "eager"}, runtime=settings)

    return make


@pytest.fixture(scope="module")
def module(config: Config) -> Iterator[Trainable]:
    made = trainable(config())
    yield made
    made.close()


@pytest.fixture
def written(module: Trainable) -> Iterator[Trainable]:
    """The module of a test that changes its parameters, which are put back."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    yield module
    module.load_state_dict(before)
    module.zero_grad()


def packed(outputs: list[RequestOutput]) -> tuple[list[int], list[int]]:
    sequences = [output.prompt_token_ids + output.token_ids for output in outputs]
    return [token for one in sequences for token in one], [len(one) for one in sequences]


def check_bitwise(module: Trainable, outputs: list[RequestOutput], temperature: float = 1.0) -> None:
    """Every log-probability that the outputs have is the module's, to its last bit."""
    parts = module(*packed(outputs), temperature).tolist()
    for output in outputs:
        count, end = len(output.prompt_token_ids), len(output.prompt_token_ids) + len(output.token_ids)
        own, parts = parts[:end], parts[end:]
        assert own[count:] == [
            entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        if output.prompt_logprobs is not None:
            told = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
            assert own[:count] == [0.0, *(entry[token].logprob for entry, token in told)]
    assert not parts


def test_a_rollouts_log_probabilities_are_bitwise_the_modules(config: Config, module: Trainable) -> None:
    with Engine(config()) as engine:
        check_bitwise(module, engine.generate(PROMPTS, SAMPLED))
        cached = engine.generate([TEXT * 5 + "Now", TEXT * 5 + "So"], SamplingParams(temperature=1.0, logprobs=0))
        assert all(output.num_cached_tokens > 32 for output in cached)
        check_bitwise(module, cached)
        tempered = SamplingParams(temperature=0.7, max_tokens=12, logprobs=0, logprobs_mode="tempered_logprobs")
        check_bitwise(module, engine.generate(PROMPTS, tempered), 0.7)


def test_a_preempted_rollouts_are_too(config: Config, module: Trainable) -> None:
    short = [list(range(100 * i, 100 * i + 10)) for i in range(1, 8)]
    long = [41, 30, 77, 5, 12] * 10
    with engine_of_pages(config(enable_prefix_cache=False, max_model_len=96), 1 + 7 + 3 + len(long) // 16) as engine:
        outputs = engine.generate([*short, long], SAMPLED)
        assert engine.stats().preemptions > 0
    check_bitwise(module, outputs)


def test_parameters_are_transformers_own(module: Trainable) -> None:
    reference = Reference().model
    named, theirs = dict(module.named_parameters()), dict(reference.named_parameters())
    assert named.keys() == theirs.keys()
    assert all(torch.equal(named[name], theirs[name]) for name in theirs)
    reference.load_state_dict(module.state_dict(), strict=False)


def test_packed_weights_are_written_in_place(module: Trainable) -> None:
    of_heads = [module.get_parameter(f"model.layers.0.self_attn.{name}_proj.weight") for name in "qkv"]
    places = [one.untyped_storage().data_ptr() for one in of_heads]
    assert len(set(places)) == 1
    assert of_heads[1].data_ptr() == of_heads[0].data_ptr() + of_heads[0].nbytes


def test_a_step_changes_what_a_fresh_load_of_the_weights_has(
    config: Config, written: Trainable, tmp_path: Path
) -> None:
    ids, lengths = list(range(5, 70)), [20, 1, 44]
    before = written(ids, lengths)
    (-before.sum()).backward()
    torch.optim.SGD(written.parameters(), lr=1e-4).step()
    after = written(ids, lengths)
    assert after.sum() > before.sum()
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    tensors = {name: value.contiguous() for name, value in written.state_dict().items()}
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    fresh = trainable(config(tmp_path / "model"))
    assert torch.equal(fresh(ids, lengths), after)
    fresh.close()
    with Engine(config()) as engine:
        engine.update_weights(written.state_dict().items())
        check_bitwise(written, engine.generate(PROMPTS, SAMPLED))


def test_sequences_of_a_batch_have_the_gradients_of_each(module: Trainable, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, lengths = [(7 * i) % 900 for i in range(150)], [100, 20, 30]

    def gradients() -> list[torch.Tensor]:
        module.zero_grad()
        (module(ids, lengths) * torch.linspace(0, 1, len(ids))).sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    together = gradients()
    monkeypatch.setattr("mllm_compile.train.trainable._TOKENS_AT_ONCE", 1)
    monkeypatch.setattr("mllm_compile.train.layers.QUERY_BLOCK", 16)
    for one, other in zip(together, gradients(), strict=True):
        assert torch.linalg.vector_norm(one - other) <= 1e-5 * torch.linalg.vector_norm(one)


class Largest(TorchDispatchMode):
    """Notes the numbers of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, torch.Tensor) and one.untyped_storage().nbytes() == one.nbytes:
                self.numel = max(self.numel, one.numel())
        return made


def test_no_tensor_holds_the_logits_of_all_tokens(written: Trainable) -> None:
    vocab_size = written.get_parameter("model.embed_tokens.weight").shape[0]
    ids = [(11 * i) % 900 for i in range(120 * 3)]
    written._gradients._rows_at_once, before = 16, written._gradients._rows_at_once
    try:
        with Largest() as largest:
            written(ids, [120] * 3).sum().backward()
    finally:
        written._gradients._rows_at_once = before
    weights = max(parameter.numel() for parameter in written.parameters())
    assert largest.numel <= max(weights, 32 * vocab_size) < len(ids) * vocab_size


def test_a_step_between_forward_and_backward_is_an_error(written: Trainable) -> None:
    loss = written([1, 2, 3], [3]).sum()
    with torch.no_grad():
        written.get_parameter("model.norm.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_parameter_that_was_replaced_is_refused(written: Trainable) -> None:
    norm = written.get_parameter("model.norm.weight")
    data = norm.data
    norm.data = data.clone()
    with pytest.raises(RequestError, match=r"model\.norm\.weight has been replaced.*copy_"):
        written([1, 2], [2])
    norm.data = data


@pytest.mark.slow
def test_compiled_pieces_and_weights_in_panels_give_the_same(tmp_path: Path) -> None:
    model = {"path": str(shallow_tiny(tmp_path / "model"))}
    compiled = tiny_config(tmp_path / "cache", model=model, runtime={"deterministic": True, "max_model_len": 128})
    module = trainable(compiled)
    embedding = module.get_parameter("model.embed_tokens.weight")
    with torch.no_grad():
        embedding.mul_(1.01)
    with Engine(compiled) as engine:
        outputs = engine.generate(PROMPTS, SAMPLED)
        with pytest.raises(AssertionError):
            check_bitwise(module, outputs)
        with torch.no_grad():
            embedding.copy_(Reference().model.get_parameter("model.embed_tokens.weight"))
        check_bitwise(module, outputs)
    module.close()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (([1.5, 2.0], [2]), r"token_ids is of float32; expected integers"),
        (([1, 2], [3]), r"lengths is \[3\]; expected the tokens of each sequence, 2 in all"),
        (([1, 2], [2, 0]), r"lengths has 0; expected 1 to 128"),
        (([1] * 129, [129]), r"lengths has 129; expected 1 to 128 \(runtime\.max_model_len\)"),
        (([1, -2], [2]), r"token_ids has -2; expected ids from 0 to \d+"),
        (([1, 10**6], [2]), r"token_ids has 1000000; expected"),
        (([1, 2], [2], 0.0), r"temperature is 0\.0; expected a positive number"),
    ],
)
def test_what_is_no_batch_is_refused(module: Trainable, call: tuple[Any, ...], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        module(*call)


def test_a_models_own_adapter_is_refused_by_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    asked = EngineConfig.from_dict({"model": {"path": "m"}, "runtime": {"deterministic": True}})
    resolved = resolve(asked, ModelFolder(tmp_path, QWEN | {"has_lora_adapter": True}, ()), CPU)
    with pytest.raises(ConfigError, match="the model brings an adapter for its sounds; expected a model of text"):
        check_config(resolved)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"runtime": {"deterministic": False}}, r"runtime\.deterministic is false.* Set it to true"),
        ({"runtime": {"tensor_parallel_size": 2}}, r"the config is of 2 ranks; expected one"),
        ({"speculative": {"method": "ngram"}}, r"speculative\.method is ngram; expected none"),
        ({"lora": {"max_adapters": 1}}, r"the section lora has adapters; expected none"),
        ({"model": {"quantization": "int8"}}, r"model\.quantization is int8; expected none"),
        ({"model": {"lm_head_quantization": "fp8"}}, r"model\.lm_head_quantization is fp8; expected none"),
        ({"runtime": {"skip_compiled": True}}, r"runtime\.skip_compiled is true; expected false"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_it_is_compiled(tmp_path: Path, sections: Any, said: str) -> None:
    runtime = {"deterministic": True} | sections.pop("runtime", {})
    with pytest.raises(ConfigError, match=said):
        trainable(tiny_config(tmp_path, runtime=runtime, **sections))
    assert not any(tmp_path.iterdir())
