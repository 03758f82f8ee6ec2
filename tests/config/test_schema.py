"""EngineConfig: what a YAML may hold, and what a mistake in it says."""

from __future__ import annotations

import ast
import inspect
import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from mllm_compile.config import schema, schema_runtime, schema_speculative
from mllm_compile.config.folders.model_folder import CONFIG_FILE
from mllm_compile.config.names import source_name
from mllm_compile.config.schema import EngineConfig, RuntimeConfig
from mllm_compile.config.sources import config_or_runtime, unknown_argument, unknown_option, with_speculative
from mllm_compile.errors import ConfigError
from mllm_compile.store.artifact import PROGRAM


def write(folder: Path, text: str) -> Path:
    path = folder / "model.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def message_of(sections: object) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_dict(sections)
    return str(caught.value)


def runtime_message(**keys: object) -> str:
    return message_of({"model": {"path": "m"}, "runtime": keys})


def test_only_the_model_path_has_no_default(tmp_path):
    config = EngineConfig.from_yaml(write(tmp_path, "model: {path: Qwen/Qwen3-0.6B}"))
    assert config.model.path == "Qwen/Qwen3-0.6B"
    assert config.model.dtype == config.cudagraph.mode == config.runtime.device == config.cache.dir == "auto"
    assert config.runtime.mem_fraction_static == 0.9
    assert config.runtime.enable_prefix_cache is True


def test_every_key_of_the_documented_example_is_taken(tmp_path):
    text = """
    model:     {path: m/x, revision: null, dtype: auto, load_format: auto, trust_remote_code: false}
    compile:   {backend: inductor, disable_passes: []}
    cudagraph: {mode: auto, piecewise_tokens: auto, decode_requests: auto, mixed_tokens: auto}
    runtime:   {device: auto, attention_backend: auto, page_size: auto, kv_cache_dtype: auto, mem_fraction_static: 0.9,
                max_model_len: auto, max_running_requests: auto, max_num_batched_tokens: auto,
                enable_prefix_cache: true, deterministic: false, seed: 0}
    cache:     {dir: auto}
    """
    assert EngineConfig.from_yaml(write(tmp_path, text)) == EngineConfig(model={"path": "m/x"})


def test_every_field_has_a_docstring():
    body = [
        node
        for module in (schema, schema_runtime, schema_speculative)
        for node in ast.parse(inspect.getsource(module)).body
    ]
    sections = [node for node in body if isinstance(node, ast.ClassDef) and node.name.endswith("Config")]
    bare = []
    for section in sections:
        if section.name == "EngineConfig":  # its fields are the sections, documented at their classes
            continue
        for node, after in zip(section.body, [*section.body[1:], None], strict=True):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(node, ast.AnnAssign) and not documented:
                bare.append(f"{section.name}.{ast.unparse(node.target)}")
    assert len(sections) == 12
    assert bare == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"path": "m"}, "runtme": {}}, "runtme is not a known key; did you mean runtime?"),
        ({"model": {"path": "m"}, "page_size": 4}, "page_size is not a known key; did you mean runtime.page_size?"),
        ({"model": {"path": "m", "dtpye": "auto"}}, "model.dtpye is not a known key; did you mean model.dtype?"),
        ({"model": {"path": "m"}, "runtime": {"max_num_seqs": 4}}, "did you mean runtime.max_running_requests?"),
        ({"model": {"path": "m"}, "gpu_memory_utilization": 0.9}, "did you mean runtime.mem_fraction_static?"),
        (
            {"model": {"path": "m"}, "runtime": {"max_num_seqs": 9}},
            "did you mean runtime.max_running_requests? (`mllm-compile config runtime` shows all of them)",
        ),
        (
            {"model": {"path": "m"}, "runtime": {"zzz": 9}},
            "runtime.zzz is not a known key (`mllm-compile config runtime` shows all of them)",
        ),
        (
            {"model": {"path": "m"}, "compile": {"split_decode": False}},
            "compile.split_decode is not a known key: split_decode is in use wherever it serves. To leave it out, set "
            "runtime.without: [split_decode]",
        ),
        (
            {"model": {"path": "m"}, "cudagraph": {"sample_in_graph": True}},
            "it serves. To leave it out, set runtime.without: [sample_in_graph]",
        ),
        (
            {"model": {"path": "m"}, "runtime": {"without": ["copied_prefix"]}},
            "runtime.without is 'copied_prefix'; expected 'split_decode', 'hopper_decode', 'sample_in_graph', "
            "'whole_prompts', 'copy_prefix', 'divide_prefix', 'paged_attention' or 'any_rows'",
        ),
        (
            {"model": {"path": "m"}, "runtime": {"without": ["copy_prefix", "copy_prefix"]}},
            "runtime.without is ['copy_prefix', 'copy_prefix']; expected each entry once, but 'copy_prefix' is there 2",
        ),
        ({"model": {"path": "m"}, "zzz": 1}, "zzz is not a known key (known sections: model, compile,"),
    ],
)
def test_an_unknown_key_is_refused_with_the_closest_known_one(sections, said):
    assert said in message_of(sections)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"max_model_len": 1}, "runtime.max_model_len is 1; expected 'auto' or greater than or equal to 2"),
        ({"page_size": 0}, "runtime.page_size is 0; expected 'auto' or greater than or equal to 1"),
        ({"page_size": 257}, "runtime.page_size is 257; expected 'auto' or less than or equal to 256"),
        ({"page_size": "16"}, "runtime.page_size is '16'; expected 'auto' or a valid integer"),
        ({"page_size": True}, "runtime.page_size is True; expected 'auto' or a valid integer"),
        ({"mem_fraction_static": 1.5}, "runtime.mem_fraction_static is 1.5; expected less than 1"),
        ({"mem_fraction_static": float("nan")}, "runtime.mem_fraction_static is nan"),
        ({"max_running_requests": -1}, "runtime.max_running_requests is -1"),
        ({"seed": -1}, "runtime.seed is -1; expected greater than or equal to 0"),
        ({"device": "gpu"}, "runtime.device is 'gpu'; expected auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:x"}, "runtime.device is 'cuda:x'"),
        ({"enable_prefix_cache": "yes"}, "runtime.enable_prefix_cache is 'yes'; expected a valid boolean"),
        ({"max_step_ms": 0}, "runtime.max_step_ms is 0; expected 'auto' or 'none' or greater than 0"),
        ({"max_step_ms": "25"}, "runtime.max_step_ms is '25'; expected 'auto' or 'none' or a valid number"),
        ({"attention_backend": "fa3"}, "runtime.attention_backend is 'fa3'; expected 'auto', 'flashinfer' or 'torch'"),
    ],
)
def test_a_value_out_of_range_is_named(keys, said):
    assert said in runtime_message(**keys)


@pytest.mark.parametrize("sections", [{"model": {"path": "~nobody-here/m"}}, {"cache": {"dir": "~nobody-here/m"}}])
def test_a_home_of_nobodys_is_refused(sections):
    said = "is '~nobody-here/m'; expected a path from / on, or below a home folder that is known"
    assert said in message_of({"model": {"path": "m"}} | sections)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([], "at least one size"),
        ([8, 8], "8 is there 2 times"),
        ([4, 0], "cudagraph.decode_requests is 0; expected"),
        ([4, "x"], "cudagraph.decode_requests is 'x'; expected"),
        (8, "cudagraph.decode_requests is 8; expected 'auto' or a list"),
    ],
)
def test_a_list_of_sizes_that_cannot_be_is_refused(sizes, said):
    assert said in message_of({"model": {"path": "m"}, "cudagraph": {"decode_requests": sizes}})


def test_sizes_are_kept_in_ascending_order():
    config = EngineConfig(model={"path": "m"}, cudagraph={"piecewise_tokens": [16, 1, 4]})
    assert config.cudagraph.piecewise_tokens == (1, 4, 16)


def test_a_kv_cache_type_that_is_not_built_is_refused_with_those_that_are():
    assert "'bfloat16' or 'fp8_e4m3'" in runtime_message(kv_cache_dtype="fp8_e5m2")


def test_all_mistakes_are_told_at_once():
    message = runtime_message(device="gpu", seed="x")
    assert "runtime.device" in message
    assert "runtime.seed" in message
    assert "\n" not in message


def test_a_config_cannot_be_changed():
    config = EngineConfig(model={"path": "m"})
    with pytest.raises(ValidationError, match="frozen"):
        config.runtime.seed = 1


def test_sections_are_also_taken_as_objects():
    config = EngineConfig(model={"path": Path("m")}, runtime=RuntimeConfig(seed=3))
    assert (config.model.path, config.runtime.seed) == ("m", 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("model", "the top level is 'model'"),
        (
            "model:\n  path: [a\nruntime: b\n",
            "not valid YAML: line 3, column 8: expected ',' or ']', but got ':', "
            "while parsing a flow sequence that begins in line 2",
        ),
        ("model:\n\tpath: m", "not valid YAML: line 2, column 1: found character '\\t' that cannot start any token"),
        ("model: {path: \x07}", "not valid YAML: unacceptable character"),
        ("model: {path: a}\nruntime: {seed: 1}\nruntime: {seed: 2}", "line 3: the key 'runtime' is there twice"),
        ("model: {path: a}\n? [a, b]\n: 1", "line 2: a key is a list or a mapping; expected the name of a key"),
        ("runtime: {seed: 1}", "model.path is missing"),
        ("model: {path: null}", "model.path is None"),
        ("model: {path: ''}", "model.path is ''"),
        ("model:", "model is None; expected keys: path, revision"),
        ("model: ../folder", "model is '../folder'; expected model: {path: ../folder}"),
        ("1: 2", "1 is not a known section"),
    ],
)
def test_a_broken_file_is_told_with_its_name(tmp_path, text, said):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_yaml(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_a_section_whose_keys_are_commented_out_is_empty(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("model: {path: ./a}\nruntime:\n#  seed: 3\ncache:\n")
    assert EngineConfig.from_yaml(path).runtime == RuntimeConfig()


def test_a_missing_file_a_folder_and_a_binary_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        EngineConfig.from_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="this is a folder; expected a YAML config"):
        EngineConfig.from_yaml(tmp_path)
    (tmp_path / "model.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        EngineConfig.from_yaml(tmp_path / "model.yaml")


def test_the_kind_of_an_engines_source_is_known_by_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "runtime", "other", "Qwen"):
        Path(name).mkdir()
    for name in (CONFIG_FILE, "runtime/" + PROGRAM, "runtime/" + CONFIG_FILE, "model/" + CONFIG_FILE):
        Path(name).touch()
    path = write(tmp_path, "model: {path: m/x}\nruntime: {seed: 3}")
    assert config_or_runtime(path) == config_or_runtime(str(path)) == EngineConfig.from_yaml(path)
    for folder in ("model", "./model", "model/", tmp_path / "model"):
        config = config_or_runtime(folder)
        assert os.path.samefile(config.model.path, "model")
        assert config == EngineConfig(model={"path": config.model.path})
    # Without its manifest: the error comes when it is opened.
    assert config_or_runtime("runtime") == Path("runtime")
    for hub_id in ("Qwen/Qwen3-0.6B", "gpt2"):
        assert config_or_runtime(hub_id) == EngineConfig(model={"path": hub_id})
    for wrong, said in {
        "other": r"other: this is a folder, but no model's \(it holds no config\.json\) and no runtime's",
        "./modle": r"\./modle: there is no such file or folder \(the nearest is model\)\. Expected a hub id such as",
        "a/b/c": "a/b/c: there is no such file or folder. Expected a hub id",
        "config.yml": "config.yml: there is no such file",
        "Qwen/none.gguf": r"Qwen/none\.gguf: there is no such file or folder. Expected a hub id",
        "": r"the model is an empty text\. Expected a hub id",
    }.items():
        with pytest.raises(ConfigError, match=said):
            config_or_runtime(wrong)


def test_a_link_that_leads_nowhere_is_told(tmp_path):
    (tmp_path / "m.gguf").symlink_to(tmp_path / "gone")
    with pytest.raises(
        ConfigError, match=r"m\.gguf: there is no such file or folder \(it is a link to .*/gone, which is"
    ):
        config_or_runtime(tmp_path / "m.gguf")


def test_what_was_given_has_a_short_name(tmp_path):
    names = {
        "Qwen/Qwen3-0.6B": "Qwen3-0.6B",
        "configs/tiny.yaml": "tiny",
        "m/v1.5/": "v1.5",
        "a/b.gguf": "b",
        "gpt2": "gpt2",
    }
    assert {given: source_name(given) for given in names} == names


def test_a_folder_that_may_not_be_entered_is_left_to_whoever_opens_runtimes(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert config_or_runtime(tmp_path) == tmp_path


def test_an_engine_takes_a_config_as_a_dict_too():
    config = EngineConfig(model={"path": "m"})
    assert config_or_runtime({"model": {"path": "m"}}) == config_or_runtime(config) == config
    with pytest.raises(ConfigError, match="did you mean model"):
        config_or_runtime({"modl": {"path": "m"}})
    for wrong in (None, 3, ["m"]):
        with pytest.raises(
            ConfigError, match="expected a hub id, a model's folder, a YAML file, a runtime's folder, an EngineConfig"
        ):
            config_or_runtime(wrong)


def test_a_relative_model_path_is_taken_from_the_yaml_folder(tmp_path, monkeypatch):
    (tmp_path / "configs" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def model_path(text: str) -> str:
        return EngineConfig.from_yaml(write(Path("configs"), f"model: {{path: {text}}}")).model.path

    assert model_path("tiny") == str(tmp_path / "configs" / "tiny")
    assert model_path("./none") == str(tmp_path / "configs" / "none")
    assert model_path("../other") == str(tmp_path / "other")
    assert model_path("/abs/model") == "/abs/model"
    assert model_path("~/model") == str(Path.home() / "model")
    assert model_path("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_relative_cache_folder_is_taken_from_the_yaml_folder(tmp_path):
    config = EngineConfig.from_yaml(write(tmp_path, "model: {path: m}\ncache: {dir: ./runtimes}"))
    assert config.cache.dir == str(tmp_path / "runtimes")


def test_speculation_has_the_names_and_bounds_of_its_page():
    keys = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}
    config = EngineConfig.from_dict({"model": {"path": "m"}, "speculative": keys})
    assert (config.speculative.num_speculative_tokens, config.speculative.prompt_lookup_min) == (5, 2)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"method": "medusa"},
            "is 'medusa'; expected 'auto', 'none', 'ngram', 'suffix', 'draft_model', 'eagle3', 'dflash' or 'mtp'",
        ),
        ({"method": "ngram", "num_speculative_tokens": 0}, "speculative.num_speculative_tokens is 0; expected"),
        ({"method": "ngram", "num_speculative_tokens": 33}, "speculative.num_speculative_tokens is 33; expected"),
        ({"method": "ngram", "prompt_lookup_min": 5}, "prompt_lookup_min of at most prompt_lookup_max, which is 4"),
        ({"method": "suffix", "prompt_lookup_max": 9}, "expected method: ngram, which alone reads prompt_lookup_max"),
        (
            {"method": "ngram", "suffix_decoding_max_tree_depth": 9},
            "expected method: suffix, which alone reads suffix_decoding_max_tree_depth",
        ),
        (
            {"method": "auto", "token_map": "t.json"},
            "expected method: eagle3 or dflash or mtp, which alone reads token_map",
        ),
        ({"method": "draft_model"}, "expected method: draft_model with speculative.model, a hub id or a folder"),
        ({"method": "eagle3"}, "expected method: eagle3 with speculative.model, a hub id or a folder"),
        (
            {"method": "suffix", "model": "m"},
            "expected method: draft_model or eagle3 or dflash, which alone reads model",
        ),
        ({"method": "mtp", "model": "m"}, "expected method: draft_model or eagle3 or dflash, which alone reads model"),
        ({"method": "auto", "prompt_lookup_max": 9}, "expected method: ngram, which alone reads prompt_lookup_max"),
        (
            {"num_speculative_tokens": 5},
            "expected method: another than none, which alone reads num_speculative_tokens",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": "many"},
            "speculative.num_speculative_tokens is 'many'; expected 'auto' or",
        ),
        (
            {"method": "ngram", "synthetic_acceptance_length": 2.5},
            "num_speculative_tokens: a number, where synthetic_acceptance_length is set",
        ),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": {"1-64": 3}},
            "num_speculative_tokens_per_batch_size is not a known key: num_speculative_tokens: auto finds the best one",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "synthetic_acceptance_length": 4.5},
            "synthetic_acceptance_length of at most num_speculative_tokens + 1, which is 4",
        ),
        ({"method": "ngram", "num_tokens": 5}, "speculative.num_tokens is not a known key"),
    ],
)
def test_a_mistake_in_speculation_says_what_was_expected(keys, said):
    assert said in message_of({"model": {"path": "m"}, "speculative": keys})


def test_names_of_speculation_elsewhere_lead_to_the_section():
    for name in ("speculative_config", "speculative_algorithm", "num_speculative_tokens"):
        assert "'speculative': {'" in str(unknown_argument(name, ()))
    assert "speculative: {method: …}" in (unknown_option("--speculative-config") or "")


def test_the_option_of_speculation_is_the_section(tmp_path):
    source = config_or_runtime({"model": {"path": "m"}, "runtime": {"seed": 3}})
    found = with_speculative(source, '{"method": "ngram", "num_speculative_tokens": 2}')
    assert isinstance(found, EngineConfig)
    assert (found.speculative.num_speculative_tokens, found.runtime.seed) == (2, 3)
    assert with_speculative(source, None) is source
    for text in ("ngram", "[1]", "{"):
        with pytest.raises(ConfigError, match=r"--speculative-config is '.*'; expected a JSON object such as"):
            with_speculative(source, text)
    with pytest.raises(ConfigError, match=r"speculative\.method is 'medusa'"):
        with_speculative(source, '{"method": "medusa"}')
    with pytest.raises(ConfigError, match="--speculative-config has 'method' twice; give it once"):
        with_speculative(source, '{"method": "ngram", "method": "suffix"}')
    with pytest.raises(ConfigError, match="is a compiled runtime, whose config it has"):
        with_speculative(tmp_path, '{"method": "ngram"}')


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"max_adapters": 257}, "lora.max_adapters is 257; expected less than or equal to 256"),
        ({"max_rank": 8}, "expected max_adapters of at least 1, without which max_rank has no effect"),
        ({"adapters": {"a": "/a"}}, "expected max_adapters of at least 1, without which adapters has no effect"),
        ({"max_adapters": 1, "targets": []}, "expected auto, or last parts of modules' names such as q_proj"),
        ({"max_adapters": 1, "targets": [".*proj"]}, "expected auto, or last parts of modules' names such as q_proj"),
        ({"max_adapters": 1, "targets": ["q_proj", "q_proj"]}, "each entry once"),
        ({"max_adapters": 1, "adapters": {"": "/a"}}, "an adapter's name of up to 200 letters"),
        ({"max_adapters": 1, "adapters": {"a\nb": "/a"}}, "an adapter's name of up to 200 letters"),
    ],
)
def test_a_mistake_in_the_section_of_adapters_says_what_was_expected(keys, said):
    assert said in message_of({"model": {"path": "m"}, "lora": keys})


def test_what_drafts_is_beside_the_file_as_the_model_is(tmp_path):
    text = "model: {path: m}\nspeculative: {method: eagle3, model: ./head, token_map: tokens.json}"
    section = EngineConfig.from_yaml(write(tmp_path, text)).speculative
    assert (section.model, section.token_map) == (str(tmp_path / "head"), str(tmp_path / "tokens.json"))
    text = text.replace("./head", "org/head")
    assert EngineConfig.from_yaml(write(tmp_path, text)).speculative.model == "org/head"


def test_a_relative_folder_of_an_adapter_is_taken_from_the_yaml_folder(tmp_path):
    text = "model: {path: m}\nlora: {max_adapters: 2, adapters: {sql: ./sql, far: /far}}"
    adapters = EngineConfig.from_yaml(write(tmp_path, text)).lora.adapters
    assert adapters == {"sql": str(tmp_path / "sql"), "far": "/far"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enpoint": "x"}, "runtime.kv_events_config.enpoint is not a known key; did you mean endpoint?"),
        ({"endpoint": "5557"}, "runtime.kv_events_config.endpoint is '5557'; expected an address such as tcp://*:5557"),
        ({"hwm": 0}, "runtime.kv_events_config.hwm is 0; expected greater than or equal to 1"),
        ("zmq", "runtime.kv_events_config is 'zmq'; expected keys: enable_kv_cache_events, publisher, endpoint"),
    ],
)
def test_a_mistake_in_a_section_of_a_section_is_named_whole(given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        EngineConfig.from_dict({"model": {"path": "m"}, "runtime": {"kv_events_config": given}})
