"""No room but mllm_compile/model/ knows an architecture: no branch on a model type or a class name anywhere else.

The tables of a file format that names architectures itself are apart.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import mllm_compile

PACKAGE = Path(mllm_compile.__file__).parent
# A file format's own names: tables of tensors, keys and regexes.
TABLES = {"gguf/architectures.py", "gguf/pre_tokenizers.py", "gguf/tokenizer.py"}
# Names of architectures that are also plain words, which other code may compare with.
PLAIN_WORDS = {"align", "auto", "bark", "bit", "git", "led", "time", "van"}


def sources() -> list[Path]:
    """Every module outside of models/ (symbolic links are followed)."""
    rooms = [PACKAGE, PACKAGE / "passes", PACKAGE / "runtime"]
    files = {path for room in rooms for path in room.resolve().rglob("*.py")}
    models = (PACKAGE / "models").resolve()
    tables = {(PACKAGE / name).resolve() for name in TABLES}
    return sorted(path for path in files - tables if models not in path.parents)


@cache
def architectures() -> frozenset[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = {*CONFIG_MAPPING_NAMES.values(), *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    return frozenset({*CONFIG_MAPPING_NAMES, *classes} - PLAIN_WORDS)


def branches(tree: ast.AST) -> Iterator[str]:
    """Code that compares with an architecture's name, looks one up, or imports a model's own module."""
    for node in ast.walk(tree):
        words: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            words = [node.left, *node.comparators]
            asked = {n.attr for word in words for n in ast.walk(word) if isinstance(n, ast.Attribute)}
            if asked & {"model_type", "architectures"} and any(_strings(word) for word in words):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.MatchValue | ast.Dict):
            words = [node.value] if isinstance(node, ast.MatchValue) else [key for key in node.keys if key]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith", "get"):
                words = list(node.args)
        elif isinstance(node, ast.ImportFrom) and re.match(r"transformers\.models\.(?!auto\b)", node.module or ""):
            yield f"line {node.lineno}: imports {node.module}"
        for name in sorted({string for word in words for string in _strings(word)} & architectures()):
            yield f"line {getattr(node, 'lineno', 0)}: names {name!r}"


def _strings(tree: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def test_no_module_branches_on_an_architecture():
    found = {
        str(path): reasons
        for path in sources()
        if (reasons := list(branches(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert not found


def test_sources_come_from_all_rooms():
    names = {path.parent.name for path in sources()}
    assert {"mllm_compile", "passes", "runtime", "attention", "cli"} <= names


@pytest.mark.parametrize(
    "code",
    [
        "if config.model_type == 'anything': pass",
        "if kind in ('qwen3', 'x'): pass",
        "if type(model).__name__ == 'LlamaForCausalLM': pass",
        "match kind:\n    case 'gemma2': pass",
        "table = {'mistral': 1}",
        "if name.startswith('llama'): pass",
        "from transformers.models.qwen3 import Qwen3Config",
    ],
)
def test_a_branch_would_be_found(code):
    assert list(branches(ast.parse(code)))


@pytest.mark.parametrize("code", ["model_type = config.model_type", "if model_type not in CONFIG_MAPPING_NAMES: pass"])
def test_naming_the_type_in_a_message_or_asking_transformers_is_no_branch(code):
    assert not list(branches(ast.parse(code)))
