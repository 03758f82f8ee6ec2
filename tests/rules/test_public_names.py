"""The names that `mllm_compile` itself offers."""

import subprocess
import sys

import pytest

import mllm_compile


def test_every_public_name_is_there():
    for name in mllm_compile.__all__:
        assert getattr(mllm_compile, name) is not None


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        mllm_compile.Engin  # noqa: B018


@pytest.mark.parametrize(
    ("name", "ours"), [("LLM", "Engine"), ("AsyncLLMEngine", "AsyncEngine"), ("EngineArgs", "Engine")]
)
def test_a_name_of_vllms_is_answered_with_ours(name, ours):
    with pytest.raises(ImportError, match=f"mllm_compile has no {name}; .*: from mllm_compile import {ours} "):
        exec(f"from mllm_compile import {name}")
    assert hasattr(mllm_compile, ours)


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, mllm_compile; print([m for m in ('torch', 'numpy', 'pydantic', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_engine_imports_torch_when_it_starts_beside_its_ranks():
    code = "import sys; from mllm_compile import AsyncEngine, Engine; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
