"""GGUF files of a hub's repository: which one a hub id means, fetched or from the hub's cache."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import huggingface_hub
import pytest

from mllm_compile.config.folders.hub_gguf import chosen_files
from mllm_compile.config.folders.model_folder import locate_model_folder
from mllm_compile.config.schema import EngineConfig, ModelConfig
from mllm_compile.config.sources import config_or_runtime
from mllm_compile.errors import ConfigError, ModelNotFoundError
from tests.config.test_hub_cache import COMMIT, NEEDED, cache, put

__all__ = ["cache"]
ONE = ["README.md", "Tiny.Q8_0.gguf"]
SEVERAL = [
    "config.json",
    "mmproj-F16.gguf",
    "Tiny-mmproj-F16.gguf",
    "Tiny-Q8_0.gguf",
    "tiny-q4_k_m.gguf",
    "Tiny-Q4_K_S.gguf",
]
SPLIT = [f"BF16/Tiny-BF16-{part:05}-of-00002.gguf" for part in (2, 1)]


@pytest.mark.parametrize(
    ("names", "tag", "files"),
    [
        (["README.md", "model.safetensors"], None, []),
        (ONE, None, ["Tiny.Q8_0.gguf"]),
        (ONE, "q8_0", ["Tiny.Q8_0.gguf"]),
        (SEVERAL, None, ["tiny-q4_k_m.gguf"]),
        (SEVERAL, "Q8_0", ["Tiny-Q8_0.gguf"]),
        (SEVERAL, "Q4_K_M", ["tiny-q4_k_m.gguf"]),
        (["T-UD-Q2_K.gguf", "T-Q2_K.gguf"], "UD-Q2_K", ["T-UD-Q2_K.gguf"]),
        (["T-UD-Q2_K.gguf", "T-Q2_K.gguf"], "T-Q2_K.gguf", ["T-Q2_K.gguf"]),
        ([*SEVERAL, *SPLIT], "BF16", sorted(SPLIT)),
    ],
)
def test_a_tag_is_the_quantisation_or_the_name_of_a_file(names, tag, files):
    assert chosen_files(names, tag, "org/m") == files


@pytest.mark.parametrize(
    ("names", "tag", "said"),
    [
        (SEVERAL, "Q6_K", r"has no GGUF model named 'Q6_K', but Tiny-Q8_0\.gguf, tiny-q4_k_m"),
        (["README.md"], "Q8_0", r"has no GGUF model named 'Q8_0', but none at all"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], None, r"several GGUF models \(a-Q8_0\.gguf, b-Q8_0\.gguf\)\. Name one as"),
        (["T-UD-Q2_K.gguf", "T-Q2_K.gguf"], "Q2_K", r"several GGUF models \(T-UD-Q2_K\.gguf, T-Q2_K\.gguf\)"),
        ([f"m{number}.gguf" for number in range(9)], None, "and 3 more"),
    ],
)
def test_no_model_or_several_are_refused_in_one_line(names, tag, said):
    with pytest.raises(ModelNotFoundError, match=said) as error:
        chosen_files(names, tag, "org/m" if tag is None else f"org/m:{tag}")
    assert "\n" not in str(error.value)


class Hub:
    """A repository whose files are fetched into a snapshot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, names: list[str]) -> None:
        self.folder, self.names, self.fetched = folder / COMMIT, names, []
        self.folder.mkdir()
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda api, name, revision: self.listed(name))

    def listed(self, name: str) -> list[str]:
        assert name == "org/m"
        return self.names

    def download(self, name: str, *, allow_patterns: list[str], ignore_patterns: list[str] = (), **_: object) -> str:
        assert name == "org/m"
        for file in self.names:
            is_wanted = any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns)
            if is_wanted and not any(fnmatch.fnmatch(file, pattern) for pattern in ignore_patterns):
                (self.folder / file).parent.mkdir(exist_ok=True)
                (self.folder / file).touch()
                self.fetched.append(file)
        return str(self.folder)


@pytest.mark.parametrize(
    ("names", "path", "found", "fetched"),
    [
        (ONE, "org/m", "Tiny.Q8_0.gguf", ["Tiny.Q8_0.gguf"]),
        (SEVERAL, "org/m:Q8_0", "Tiny-Q8_0.gguf", ["config.json", "Tiny-Q8_0.gguf"]),
        ([*SEVERAL, *SPLIT], "org/m:bf16", SPLIT[1], ["config.json", *SPLIT]),
        ([*SEVERAL, "model.safetensors"], "org/m", "", ["config.json", "model.safetensors"]),
        ([*SEVERAL, "model.safetensors"], "org/m:Q4_K_S", "Tiny-Q4_K_S.gguf", ["config.json", "Tiny-Q4_K_S.gguf"]),
    ],
)
def test_the_files_of_one_model_are_fetched(names, path, found, fetched, monkeypatch, tmp_path):
    hub = Hub(monkeypatch, tmp_path, names)
    assert locate_model_folder(ModelConfig(path=path)) == hub.folder / found
    assert hub.fetched == fetched


@pytest.mark.parametrize("path", ["org/m", "org/m:Q8_0", "org/m:Tiny-Q8_0.gguf"])
def test_a_cached_file_needs_no_network(path, cache):
    snapshot = put(cache, ("Tiny-Q8_0.gguf",), ("Tiny-Q4_0.gguf", "config.json"))
    assert locate_model_folder(ModelConfig(path=path)) == snapshot / "Tiny-Q8_0.gguf"


def test_a_file_that_is_not_cached_is_named(cache):
    put(cache, ("Tiny-Q8_0.gguf",), ("Tiny-Q4_0.gguf",))
    with pytest.raises(ModelNotFoundError, match=r"no GGUF model named 'Q4_0', but Tiny-Q8_0\.gguf"):
        locate_model_folder(ModelConfig(path="org/m:Q4_0"))


def test_cached_safetensors_are_taken_unless_a_file_is_named(cache):
    snapshot = put(cache, (*NEEDED, "Tiny-Q8_0.gguf"), ())
    assert locate_model_folder(ModelConfig(path="org/m")) == snapshot
    assert locate_model_folder(ModelConfig(path="org/m:Q8_0")) == snapshot / "Tiny-Q8_0.gguf"


def test_a_file_of_the_hub_is_a_source_like_a_repository():
    config = config_or_runtime("org/m:Q4_K_M")
    assert isinstance(config, EngineConfig) and config.model.path == "org/m:Q4_K_M"
    for wrong in ("m:Q4_K_M", "org/m:", "org/m:a/b"):
        with pytest.raises(ConfigError, match="no such file or folder"):
            config_or_runtime(wrong)


def test_a_file_beside_a_yaml_is_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").touch()
    (tmp_path / "serve.yaml").write_text("model: {path: models/tiny.gguf}")
    monkeypatch.chdir("/")
    assert EngineConfig.from_yaml(tmp_path / "serve.yaml").model.path == str(tmp_path / "models" / "tiny.gguf")
