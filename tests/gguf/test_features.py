"""Features that meet GGUF files, as the table of docs/gguf.md lists them: each works, or is refused by name."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.cli.before_compile import check_takes_text
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ConfigError, RequestError, UnsupportedModelError
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from tests.gguf.test_architectures import opened
from tests.gguf.test_folder import split
from tests.gguf.test_served import config_of, greedy
from tests.gguf.test_tokenizers import byte_level, metadata
from tests.gguf.writer import tiny_model, write_model
from tests.sample import slow_but_a_sample
from tests.tiny_model import engine_of_pages

Q = gguf.GGMLQuantizationType
PROMPTS = [[30, 50, 70, 90], list(range(200, 240)), list(range(300, 325))]
TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
PAGE = Path(__file__).parents[2] / "docs/gguf.md"


class File(NamedTuple):
    """A GGUF file with a tokenizer, the tokens of its model, and a cache for what is made of it."""

    path: Path
    tokens: list[list[int]]
    cache: Path

    def config(self, **sections: Any) -> dict[str, Any]:
        config = config_of(self.path, self.cache, max_model_len=128)
        return config | {name: config.get(name, {}) | keys for name, keys in sections.items()}

    def serves(self, engine: Engine) -> bool:
        """True if a batch has the tokens of Transformers on the file's numbers."""
        found = engine.generate(PROMPTS, GREEDY, progress=False)
        return [one.outputs[0].token_ids for one in found] == self.tokens


def written(name: str, folder: Path, **sizes: Any) -> File:
    model = tiny_model(name, **sizes)
    keys: dict[str, Any] = {}
    if sizes:
        values = metadata(byte_level("gpt-2"), "gpt2", pre="gpt-2", add_bos_token=False)
        texts = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
        keys = {key: [one.decode() for one in value] if key in texts else value for key, value in values.items()}
    write_model(model, name, folder / "tiny.gguf", lambda name: Q.Q8_0 if "ffn" in name else Q.Q4_1, **keys)
    prompts = PROMPTS if sizes else [[token % 100 for token in prompt] for prompt in PROMPTS]
    return File(folder / "tiny.gguf", [greedy(model, prompt, TOKENS) for prompt in prompts], folder / "cache")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return written("qwen3", tmp_path_factory.mktemp("gguf"), vocab_size=900)


def grammars(file: File, folder: Path) -> None:
    form = StructuredOutputsParams(regex=r"(yes|no) [0-9]{3}")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, structured_outputs=form)
    with Engine(file.config()) as engine:
        (found,) = engine.generate(["Is it so?"], params, progress=False)
    assert re.fullmatch(r"(yes|no) [0-9]{3}", found.outputs[0].text)


def two_ranks(file: File, folder: Path) -> None:
    with Engine(file.config(runtime={"tensor_parallel_size": 2})) as engine:
        assert file.serves(engine)


def prefix_hits(file: File, folder: Path) -> None:
    with Engine(file.config(runtime={"enable_prefix_cache": True})) as engine:
        assert file.serves(engine) and file.serves(engine)
        assert engine.generate(PROMPTS[1:2], GREEDY, progress=False)[0].num_cached_tokens > 0


def preemption(file: File, folder: Path) -> None:
    longest = max(map(len, PROMPTS)) + TOKENS
    config = EngineConfig.from_dict(file.config(runtime={"max_model_len": longest}))
    with engine_of_pages(config, longest // 4 + 3) as engine:
        assert file.serves(engine)
        assert engine.stats().preemptions > 0


def packed_weights(file: File, folder: Path) -> None:
    path = Path(shutil.copy(file.path, folder))
    config = EngineConfig.from_dict(file.config(model={"path": str(path)}))
    packed = load_or_compile(config, None, CompileOptions(folder / "out", pack_weights=True))
    path.unlink()
    with Engine(packed.folder) as engine:
        assert file.serves(engine)


def speculation(file: File, folder: Path) -> None:
    with Engine(file.config(speculative={"method": "ngram", "num_speculative_tokens": 3})) as engine:
        assert file.serves(engine)


def deterministic(file: File, folder: Path) -> None:
    with Engine(file.config(runtime={"deterministic": True, "enable_prefix_cache": False})) as engine:
        assert file.serves(engine)


def split_files(file: File, folder: Path) -> None:
    parts = split(file.path, folder / "parts", 3)
    with Engine(file.config(model={"path": str(parts)})) as engine:
        assert file.serves(engine)


def pieces_by_inductor(file: File, folder: Path) -> None:
    with Engine(file.config(compile={"backend": "inductor"})) as engine:
        assert file.serves(engine)


def states(file: File, folder: Path) -> None:
    served_in_a_pool("mamba", folder)


def experts(file: File, folder: Path) -> None:
    served_in_a_pool("qwen3moe", folder)


def experts_over_ranks(file: File, folder: Path) -> None:
    served_in_a_pool("qwen3moe", folder, expert_parallel_size=2)


def served_in_a_pool(name: str, folder: Path, **runtime: Any) -> None:
    """Requests of another architecture come one by one, hit prefixes and share steps."""
    other = written(name, folder)
    prompts = [[token % 100 for token in prompt] for prompt in PROMPTS]
    with Engine(other.config(runtime={"max_num_batched_tokens": 16, **runtime})) as engine:
        for _ in range(2):
            found = engine.generate(prompts, GREEDY, progress=False)
            assert [one.outputs[0].token_ids for one in found] == other.tokens


def dequantize(file: File, folder: Path) -> None:
    with Engine(file.config(model={"path": str(file.path), "quantization": "dequantize"})) as engine:
        assert file.serves(engine)


def keep_a8(file: File, folder: Path) -> None:
    model = {"path": str(file.path), "quantization": "keep_a8"}
    with Engine(file.config(model=model, compile={"backend": "inductor"})) as engine:
        together = [one.outputs[0].token_ids for one in engine.generate(PROMPTS, GREEDY, progress=False)]
        alone = [engine.generate([one], GREEDY, progress=False)[0].outputs[0].token_ids for one in PROMPTS]
    assert together == alone


def int4_of_plain_numbers(file: File, folder: Path) -> None:
    model = tiny_model("llama")
    write_model(model, "llama", folder / "plain.gguf")
    model.save_pretrained(folder / "model")
    found = []
    for path in (folder / "plain.gguf", folder / "model"):
        config = file.config(model={"path": str(path), "quantization": "int4"}, cache={"dir": str(folder / "cache")})
        with Engine(config) as engine:
            found.append(engine.generate([[30, 50, 70]], GREEDY, progress=False)[0].outputs[0].token_ids)
    assert found[0] == found[1] != greedy(model, [30, 50, 70], TOKENS)


def int4_and_fp8(file: File, folder: Path) -> None:
    for quantization in ("int4", "fp8", "none"):
        config = file.config(model={"path": str(file.path), "quantization": quantization})
        with pytest.raises(ConfigError, match=r"model\.quantization is .* quantised( already)? \(gguf Q4_1 and Q8_0\)"):
            Engine(config)


def images(file: File, folder: Path) -> None:
    writer = gguf.GGUFWriter(folder / "mmproj.gguf", "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="of the architecture 'clip' are not read"):
        opened(folder / "mmproj.gguf", folder)
    request = {"prompt_token_ids": PROMPTS[0], "multi_modal_data": {"image": b"x"}}
    with Engine(file.config()) as engine, pytest.raises(RequestError, match="takes text alone"):
        engine.generate(request, GREEDY, progress=False)


Feature = Callable[[File, Path], None]
WORK: dict[str, Feature] = {
    "grammars": grammars,
    "two ranks (`tensor_parallel_size`)": two_ranks,
    "prefix hits": prefix_hits,
    "preemption": preemption,
    "`--pack-weights`": packed_weights,
    "speculation": speculation,
    "`deterministic`": deterministic,
    "split files": split_files,
    "pieces by Inductor": pieces_by_inductor,
    "states": states,
    "experts": experts,
    "experts over ranks": experts_over_ranks,
    "`quantization: dequantize`": dequantize,
    "`quantization: keep_a8`": keep_a8,
    "`quantization: int4` of files without blocks": int4_of_plain_numbers,
}
REFUSED: dict[str, Feature] = {
    "`quantization: int4`, `fp8`, `none` of blocks": int4_and_fp8,
    "images": images,
}


LONG = [one for one in WORK if any(word in one for word in ("ranks", "Inductor", "without blocks", "keep_a8"))]


@pytest.mark.parametrize(
    "name",
    [
        *slow_but_a_sample([one for one in WORK | REFUSED if one not in LONG], 1),
        *(pytest.param(one, marks=pytest.mark.slow) for one in LONG),
    ],
)
def test_a_feature_meets_a_gguf_file_as_the_page_says(name, file, tmp_path):
    (WORK | REFUSED)[name](file, tmp_path)


def test_a_chat_without_a_template_is_refused_before_a_compile(file):
    config = EngineConfig.from_dict(file.config())
    check_takes_text(config, "tiny.gguf", as_chat=False)
    with pytest.raises(RequestError, match="the model has no chat template; pass the prompt as text"):
        check_takes_text(config, "tiny.gguf", as_chat=True)


def test_the_page_lists_every_feature():
    rows = re.findall(r"^\| (works|refused) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert {how: set(names.split("; ")) for how, names in rows} == {"works": {*WORK}, "refused": {*REFUSED}}
