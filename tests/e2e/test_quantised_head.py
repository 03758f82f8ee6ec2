"""A head in few bits says what Transformers says of the numbers that it stands for: the checkpoint's, and one that is
quantised while it is read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import quantised_as
from tests.adapters.tiny_adapters import Adapters
from tests.e2e.test_adapter_features import PROMPTS as ADAPTED_PROMPTS
from tests.e2e.test_quantised import Lines, ask, transformers_greedy
from tests.e2e.test_weight_updates import write_changed
from tests.prediction_layers import save_with_prediction_layer
from tests.quantised_checkpoints import LINEARS, quantise_folder
from tests.sample import slow_but_a_sample
from tests.tiny_model import TINY, shallow_tiny, tiny_config

PAGE = Path(__file__).parents[2] / "docs" / "quantised.md"

WEIGHTS, HEAD, EMBEDDING = "model.safetensors", "lm_head.weight", "model.embed_tokens.weight"


def untied(folder: Path, head: torch.Tensor | None = None) -> Path:
    """Gives a model a head of its own: that of the embedding, or this."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)
    (folder / "config.json").chmod(0o644)
    own = tensors[EMBEDDING].clone() if head is None else head
    save_file(tensors | {HEAD: own}, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


def stands_for(weight: torch.Tensor, kind: Any) -> torch.Tensor:
    scheme = quantised_as(kind, weight.shape[1])
    return dequantised(quantised(weight, scheme), kind, scheme.group, weight.shape[1], torch.float32)


PLAIN = [("fp8", True, None), ("int4", True, "modelopt fp8"), ("fp8", False, "gptq"), ("int4", False, None)]


@pytest.mark.parametrize(("kind", "is_tied", "linears"), slow_but_a_sample(PLAIN, 1))
def test_a_plain_head_is_quantised_while_it_is_read(kind, is_tied, linears, tmp_path):
    folder, plain = shallow_tiny(tmp_path / "model"), tmp_path / "plain"
    if linears is None:
        shallow_tiny(plain)
    else:
        quantise_folder(folder, tmp_path / "packed", plain, LINEARS[linears])
        folder = tmp_path / "packed"
    if not is_tied:
        untied(folder)
    untied(plain, stands_for(load_file(plain / WEIGHTS)[EMBEDDING], kind))
    model = {"path": str(folder), "lm_head_quantization": kind}
    config, lines = tiny_config(tmp_path / "cache", model=model, compile={"backend": "eager"}), Lines()
    assert ask(config, lines=lines) == transformers_greedy(plain)
    kept = {spec.name for spec in load_or_compile(config).artifact.weights if any(part.kept for part in spec.parts)}
    assert {HEAD, f"{HEAD}_scales"} <= kept
    assert kind in " ".join(line for line in lines.told if "GB of linears" in line)


@pytest.mark.parametrize("name", slow_but_a_sample(["gptq", "fp8 blocks"], 1))
def test_a_head_that_the_checkpoint_quantises_stays_so(name, tmp_path):
    """GPTQ's lm_head: true, and compressed-tensors whose targets name it, have its tensors as a linear's."""
    folder = shallow_tiny(tmp_path / "model")
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    quantise_folder(folder, packed, plain, LINEARS[name])
    tensors = load_file(packed / WEIGHTS)
    parts, weight = LINEARS[name].quantise(tensors[EMBEDDING].float())
    untied(packed)
    tensors |= {HEAD.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
    save_file(tensors, packed / WEIGHTS, metadata={"format": "pt"})
    untied(plain, weight)
    sections: dict[str, Any] = {"model": {"path": str(packed)}, "compile": {"backend": "eager"}}
    config = tiny_config(tmp_path / "cache", **sections)
    assert ask(config) == transformers_greedy(plain)
    assert any(spec.name == HEAD for spec in load_or_compile(config).artifact.weights if spec.parts[0].kept)
    sections["model"]["lm_head_quantization"] = "int4"
    with pytest.raises(ConfigError, match=r"lm_head_quantization is int4, but 'lm_head.weight' is no plain matrix"):
        load_or_compile(tiny_config(tmp_path / "cache", **sections))


PROMPTS = [[41, 30, 77, 5, 12], [7, 7, 81], list(range(20, 60))]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=2)


def engine_of(tmp_path: Path, model: dict[str, Any] | None = None, **sections: Any) -> Engine:
    folder = tmp_path / "model"
    if not folder.exists():
        shallow_tiny(folder)
    model = {"path": str(folder), "lm_head_quantization": "fp8"} | (model or {})
    return Engine(tiny_config(tmp_path / "cache", model=model, compile={"backend": "eager"}, **sections))


def scores(engine: Engine) -> list[float]:
    """Of the prompts' tokens and the answers', and of those that come next."""
    found = []
    for output in engine.generate(list(PROMPTS), SCORED):
        of_tokens = [*(output.prompt_logprobs or [])[1:], *(output.logprobs or [])]
        found += [one.logprob for of_token in of_tokens for one in of_token.values()]
    return found


def check_ranks(tmp_path: Path) -> None:
    with engine_of(tmp_path) as one, engine_of(tmp_path, runtime={"tensor_parallel_size": 2}) as two:
        assert scores(one) == pytest.approx(scores(two), abs=1e-4)


def check_stages(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    with engine_of(tmp_path) as one, engine_of(tmp_path, runtime={"pipeline_parallel_size": 2}) as two:
        assert scores(one) == pytest.approx(scores(two), abs=1e-4)


def check_log_probabilities(tmp_path: Path) -> None:
    """A checkpoint that holds what the head stands for has the same scores."""
    with engine_of(tmp_path) as ours:
        found = scores(ours)
    plain = untied(
        shallow_tiny(tmp_path / "plain"), stands_for(load_file(tmp_path / "model" / WEIGHTS)[EMBEDDING], "fp8")
    )
    with engine_of(tmp_path, {"path": str(plain), "lm_head_quantization": "none"}) as theirs:
        assert found == pytest.approx(scores(theirs), abs=1e-4)


def check_adapters(tmp_path: Path) -> None:
    """Numbers are nearer to those of the adapter than its own change is large."""
    adapters = Adapters(tmp_path / "ends", some=("embed_tokens", "lm_head", "up_proj"), tie_word_embeddings=True)
    lora = {"targets": ["all-linear", "embed_tokens", "lm_head"]}
    expected, of_base = (adapters.logprobs(ADAPTED_PROMPTS[2], name) for name in ("some", None))
    for num_ranks in (1, 2):
        runtime = {"tensor_parallel_size": num_ranks}
        model = {"lm_head_quantization": "fp8"}
        with Engine(adapters.config(tmp_path / "cache", model=model, runtime=runtime, lora=lora)) as engine:
            adapters.load(engine)
            found = engine.generate(ADAPTED_PROMPTS[2], SCORED, adapter="some")[0].prompt_logprobs or []
        told = torch.tensor([next(iter(one.values())).logprob for one in found if one])
        assert (told - expected).abs().mean() < (of_base - expected).abs().mean() / 4


def check_new_weights(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        before = scores(engine)
        write_changed(tmp_path / "model", tmp_path / "changed")
        engine.update_weights_from_folder(tmp_path / "changed")
        found = scores(engine)
    with engine_of(tmp_path, {"path": str(tmp_path / "changed")}) as changed:
        assert found == scores(changed) != before


def check_drafts(tmp_path: Path) -> None:
    """A prediction layer's head is cut to some tokens, and quantised too."""
    save_with_prediction_layer("glm4_moe", tmp_path / "model")
    (tmp_path / "tokens.json").write_text(json.dumps(list(range(3, 90, 2))))
    method = {"method": "mtp", "num_speculative_tokens": 3, "token_map": str(tmp_path / "tokens.json")}
    sizes = {"max_model_len": 128}
    with (
        engine_of(tmp_path, runtime=sizes) as plain,
        engine_of(tmp_path, runtime=sizes, speculative=method) as drafting,
    ):
        answers = [[one.token_ids for one in engine.generate(list(PROMPTS), GREEDY)] for engine in (plain, drafting)]
        assert answers[0] == answers[1] and drafting.stats().drafts > 0


def check_deterministic(tmp_path: Path) -> None:
    with engine_of(tmp_path, runtime={"deterministic": True}) as engine:
        together = scores(engine)
        alone = [one.token_ids for prompt in PROMPTS for one in engine.generate([prompt], GREEDY)]
        assert alone == [one.token_ids for one in engine.generate(list(PROMPTS), GREEDY)] and scores(engine) == together


def refused(sections: dict[str, Any], message: str) -> Callable[[Path], None]:
    def check(tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=rf"model.lm_head_quantization is fp8, .*{message}"):
            engine_of(tmp_path, **sections)

    return check


FEATURES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "log-probabilities": ("works", check_log_probabilities),
    "tensor parallel ranks": ("works", check_ranks),
    "stages": ("works", check_stages),
    "adapters of the head": ("works", check_adapters),
    "new weights": ("works", check_new_weights),
    "a prediction layer with a cut head": ("works", check_drafts),
    "`runtime.deterministic`": ("works", check_deterministic),
    "`model.quantization: int8`": (
        "refused",
        refused({"model": {"quantization": "int8"}}, "has the head in eight bits"),
    ),
    "`runtime.skip_compiled`": ("refused", refused({"runtime": {"skip_compiled": True}}, "has its own head")),
    "models that pool": ("refused", refused({"model": {"task": "embed"}}, "model.task is embed")),
}


def test_the_page_has_every_feature():
    rows = re.findall(r"^\| ([^|]+) \| (works|refused) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == {name: what for name, (what, _) in FEATURES.items()}


@pytest.mark.parametrize("name", slow_but_a_sample(list(FEATURES), 1))
def test_a_quantised_head_does_what_the_page_says(name, tmp_path):
    FEATURES[name][1](tmp_path)


def test_a_head_in_few_bits_needs_the_pass_that_puts_it_there(tmp_path):
    compile_section = {"disable_passes": ["quantise_linears"]}
    model = {"path": str(TINY), "lm_head_quantization": "fp8"}
    with pytest.raises(ConfigError, match=r"lm_head_quantization is fp8, .*disable_passes names quantise_linears"):
        load_or_compile(tiny_config(tmp_path / "cache", model=model, compile=compile_section))
