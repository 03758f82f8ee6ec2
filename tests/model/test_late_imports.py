"""Transformers' imports for other kinds of models come with their first call, and not with a causal language model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.fresh_process import fresh_process

FAKES = {
    "sklearn/__init__.py": "__version__ = '1.0'",
    "sklearn/metrics.py": "def roc_curve(matches, scores): return ('curve', matches, scores)",
    "scipy/__init__.py": "__version__ = '1.0'",
    "scipy/optimize.py": "def linear_sum_assignment(costs): return ('assignment', costs)",
}
LATE = "from mllm_compile.model.late_imports import import_modeling_code as load; load()"
PLAIN = "import transformers.modeling_utils"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Runs Python where both packages seem to be installed, and modelling code was not imported; its output."""
    packages = tmp_path_factory.mktemp("packages")
    for name, text in FAKES.items():
        path = packages / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    # torch modules that modelling code imports take longer than that code.
    imports = "import torch._dynamo, torch.distributed.tensor, transformers"
    with fresh_process(imports, {"PYTHONPATH": str(packages)}) as process:
        yield lambda *lines: process.run("\n".join(lines)).strip()


IMPORTED = "import sys; print(sorted({'sklearn.metrics', 'scipy.optimize'} & set(sys.modules)))"


def test_a_package_comes_when_it_is_called(run):
    assert "scipy.optimize" in run(PLAIN, IMPORTED)
    assert run(LATE, IMPORTED) == "[]"
    uses = "import transformers.loss.loss_for_object_detection as loss"
    calls = "print(loss.is_scipy_available(), loss.linear_sum_assignment(3))"
    assert run(LATE, uses, calls, IMPORTED).splitlines() == ["True ('assignment', 3)", "['scipy.optimize']"]


def test_a_module_that_imports_with_the_model_is_told_the_truth(run):
    """As of a model's own code, behind modeling_utils."""
    assert run(LATE, "from transformers.utils import is_scipy_available; print(is_scipy_available())") == "True"


def test_whoever_has_imported_it_before_keeps_what_there_is(run):
    assert "scipy.optimize" in run(PLAIN, LATE, IMPORTED)


@pytest.mark.parametrize("behind", ["transformers.modeling_utils", "transformers.generation.utils"])
def test_what_older_versions_import_for_assisted_generation_comes_late_too(run, behind):
    """As transformers 5.17 has it in candidate_generator.py, which generation.utils imports."""
    older = [
        "import importlib, sys, types",
        "older = types.ModuleType('transformers.older'); sys.modules[older.__name__] = older",
        "code = '''from transformers.utils import is_sklearn_available",
        "if is_sklearn_available():",
        "    from sklearn.metrics import roc_curve'''",
        "real = importlib.import_module",
        "def import_module(name, package=None):",
        f"    return exec(code, vars(older)) if name == {behind!r} else real(name, package)",
        "importlib.import_module = import_module",
    ]
    answer = "print('sklearn.metrics' in sys.modules, older.is_sklearn_available(), older.roc_curve(1, 2))"
    assert run(*older, f"importlib.import_module({behind!r})", answer) == "True True ('curve', 1, 2)"
    assert run(*older, LATE, answer) == "False True ('curve', 1, 2)"
