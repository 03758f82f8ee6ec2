"""A home folder in a path, and one of nobody's."""

from __future__ import annotations

import pytest

from mllm_compile.cli.generate import _read
from mllm_compile.config.sources import config_or_runtime
from mllm_compile.errors import ConfigError, RequestError
from mllm_compile.files.cache_folders import auto_cache_dir
from mllm_compile.files.user_path import is_homeless, user_path

NOBODYS = "~nobody-here/m"


def test_a_home_folder_stands_for_its_mark(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/m") == tmp_path / "m"
    assert not is_homeless("~/m") and not is_homeless("./~nobody-here")


def test_a_home_of_nobodys_is_an_error_wherever_a_path_is_given(monkeypatch):
    with pytest.raises(ConfigError, match=r"^~nobody-here/m: there is no such file or folder"):
        config_or_runtime(NOBODYS)
    with pytest.raises(ConfigError, match=r"^~nobody-here/m\.yaml: there is no such file"):
        config_or_runtime(f"{NOBODYS}.yaml")
    with pytest.raises(RequestError, match="cannot be read"):
        _read(NOBODYS, "{")
    monkeypatch.setenv("MLLM_COMPILE_CACHE", NOBODYS)
    with pytest.raises(
        ConfigError, match=r"^\$MLLM_COMPILE_CACHE leads to '~nobody-here/m', and there is no such home"
    ):
        auto_cache_dir()
