"""Imports Transformers' modelling code without packages that no causal language model needs.

`transformers.modeling_utils` imports the losses of object detection, which import SciPy where that is installed. The
generation code of every model imports assisted generation. Up to Transformers 5.17 that imports scikit-learn, with
SciPy and pandas. This takes 4.9 s of a first compile on a machine with an H200, half of them for compiling their
source. Both use one function. Here they are told that the package is not there, and get a function that imports it when
called.

To be removed when the oldest Transformers that is supported imports neither.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

# Functions of transformers.utils that ask for a package → the module and the function taken from it.
_LATE = {
    "is_sklearn_available": ("sklearn.metrics", "roc_curve"),
    "is_scipy_available": ("scipy.optimize", "linear_sum_assignment"),
}


# Modules that a model's code imports from Transformers, and its configuration's, whose decorators look for the model.
_MODULES = ("transformers.modeling_utils", "transformers.generation.utils")


def import_modeling_code() -> None:
    """Imports what Transformers' models share, not a model's own code, which may want those packages."""
    wanted = [name for name in _MODULES if name not in sys.modules]
    if not wanted:
        return
    import transformers.utils

    utils: Any = transformers.utils
    asked = {name: getattr(utils, name) for name in _LATE if hasattr(utils, name)}
    try:
        for name in asked:
            setattr(utils, name, _is_absent)
        for module_name in wanted:
            importlib.import_module(module_name)
    finally:
        for name, function in asked.items():
            setattr(utils, name, function)
        for key, module in list(sys.modules.items()):
            if key.partition(".")[0] == "transformers":
                _give_back(module, asked)


def _is_absent() -> bool:
    return False


def _give_back(module: ModuleType, asked: Mapping[str, Callable[[], bool]]) -> None:
    """Lets a module that was told so ask again, and call what it did not import."""
    for name in [name for name in asked if vars(module).get(name) is _is_absent]:
        package, wanted = _LATE[name]
        setattr(module, name, asked[name])
        if not hasattr(module, wanted):
            setattr(module, wanted, partial(_call, package, wanted))


def _call(package: str, function: str, *arguments: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(package), function)(*arguments, **options)
