"""The key: the same whatever has nothing to do with what is compiled, another one for each factor, which is named."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mllm_compile
from mllm_compile.compiler import build
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.compiler.target import find_target
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.errors import CheckpointError
from mllm_compile.runtime.ops import OPS
from mllm_compile.store.explain import Change, changes, miss_note
from mllm_compile.store.key import _SHAPING_ROOMS, _attention, _sources, changed_parts, key_of
from tests.config.resolving import CPU, H200, resolved
from tests.tiny_model import TINY, tiny_config

CACHE = Path("/nonexistent")


def factors(**sections) -> dict[str, str]:
    return dict(find_target(tiny_config(CACHE, **sections)).factors)


def changed_factors(**sections) -> list[str]:
    return [change.factor for change in changes(factors(**sections), factors())]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(TINY, tmp_path / "another name")
    return tmp_path / "another name"


def test_a_key_does_not_depend_on_paths_and_file_times(model):
    for path in model.rglob("*"):
        os.utime(path, (0, 0))
    here, there = find_target(tiny_config(CACHE)), find_target(tiny_config(CACHE, model={"path": str(model)}))
    assert there.factors == here.factors
    assert there.folder == here.folder


def test_an_output_folder_is_absolute_as_compilers_have_folders_of_their_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert find_target(tiny_config(CACHE), CompileOptions(output=Path("out"))).folder == tmp_path / "out"


def test_a_key_does_not_depend_on_the_environment_the_process_or_the_folder_it_runs_in(tmp_path):
    code = (
        "from pathlib import Path; from mllm_compile.compiler.target import find_target;"
        "from tests.tiny_model import tiny_config; print(find_target(tiny_config(Path('/nonexistent'))).folder)"
    )
    noise = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2", "TZ": "Asia/Tokyo", "LC_ALL": "C", "HOME": str(tmp_path)}
    root = Path(__file__).parents[2]
    environment = os.environ | noise | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, check=True
    )
    assert done.stdout.strip() == str(find_target(tiny_config(CACHE)).folder)


def test_a_key_does_not_depend_on_the_order_of_the_factors():
    now = factors()
    assert key_of(dict(reversed(now.items()))) == key_of(now)


def test_sizes_of_batches_memory_and_seeds_are_no_factors():
    runtime = {"max_running_requests": 3, "max_model_len": 64, "page_size": 8, "seed": 5, "enable_prefix_cache": False}
    assert changed_factors(runtime=runtime) == []


def test_each_choice_of_a_config_that_shapes_the_runtime_is_a_factor_of_its_own():
    assert changed_factors(model={"dtype": "bfloat16"}) == ["dtype"]
    assert changed_factors(compile={"backend": "eager"}) == ["backend"]
    assert changed_factors(model={"load_format": "dummy"}) == ["weights"]
    assert changed_factors(runtime={"max_num_batched_tokens": 16384}) == ["max traced tokens"]


def test_places_for_adapters_are_a_factor_and_the_adapters_are_none():
    places = {"max_adapters": 2, "max_rank": 8}
    assert changed_factors(lora=places) == ["lora"]
    assert factors(lora=places | {"adapters": {"sql": "/adapters/sql"}}) == factors(lora=places)
    assert factors(lora=places | {"targets": ["q_proj"]})["lora"] == "2 adapters, rank 8, q_proj"


def test_a_pass_that_is_left_out_is_named():
    (change,) = changes(factors(compile={"disable_passes": ["pack_projections"]}), factors())
    assert change == Change("passes", "-", "without pack_projections")


def test_another_config_and_other_weights_are_factors(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert changed_factors(model={"path": str(model)}) == ["model config"]
    weights = load_file(model / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.ones(2)}, model / "model.safetensors")
    assert changed_factors(model={"path": str(model)}) == ["model config", "weights"]


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("config.json", "model config: "),
        ("generation_config.json", r"text: generation_config\.json "),
    ],
)
def test_a_text_that_changes_while_it_is_compiled_ends_the_compile(model, tmp_path, monkeypatch, name, factor):
    """Else the runtime would be under the key of the old text, and serve the new one."""
    content = json.loads((model / name).read_text())
    whole = build._export_text

    def exported(*args):
        (model / name).write_text(json.dumps(content | {"rms_norm_eps": 0.5}))
        whole(*args)

    monkeypatch.setattr(build, "_export_text", exported)
    config = tiny_config(tmp_path / "cache", model={"path": str(model)}, compile={"backend": "eager"})
    with pytest.raises(CheckpointError, match=rf"has changed while it was compiled \({factor}"):
        load_or_compile(config)
    assert not any(path.name == "manifest.json" for path in (tmp_path / "cache").rglob("*"))


def test_the_code_of_a_model_is_a_factor_where_it_is_run(model):
    (model / "modeling.py").write_text("x = 1")
    assert changed_factors(model={"path": str(model)}) == []
    first = factors(model={"path": str(model), "trust_remote_code": True})
    (model / "modeling.py").write_text("x = 2")
    (change,) = changes(factors(model={"path": str(model), "trust_remote_code": True}), first)
    assert change.factor == "model code"
    assert change.then.startswith("modeling.py ")


@pytest.mark.parametrize(
    ("now", "then", "expected"),
    [
        ("a.py 1, b.py 2", "a.py 1, b.py 3", ("b.py 2", "b.py 3")),
        ("a.py 1, b.py 2", "a.py 1", ("b.py 2", "-")),
        ("2.13", "2.12", ("2.13", "2.12")),
        ("a, b", "b, a", ("a, b", "b, a")),
    ],
)
def test_of_a_value_with_parts_only_the_changed_ones_are_shown(now, then, expected):
    assert changed_parts(now, then) == expected


def test_a_miss_says_what_changed_from_what_to_what():
    class Nearest:
        factors = {"torch": "2.12", "dtype": "float32"}  # noqa: RUF012

    assert miss_note({"torch": "2.13", "dtype": "float32"}, Nearest()) == (
        "since the nearest runtime changed torch: 2.12 -> 2.13"
    )
    assert miss_note({"torch": "2.13"}, None) == "nothing was compiled for this model yet"


def test_the_decode_kernel_is_a_part_of_attention_where_there_is_a_choice():
    def attention_of(*without: str, backend: str = "inductor", cascades: bool = False, **sizes: int) -> str:
        keys = {"max_model_len": 4096, "max_running_requests": 256, "cascade_attention": cascades, "without": without}
        return _attention(resolved(H200, compile={"backend": backend}, runtime=keys | sizes))

    assert attention_of("hopper_decode") == attention_of() + ", no Hopper kernels"
    assert attention_of(cascades=True) == attention_of() + ", cascades"
    assert attention_of(max_model_len=16384) == attention_of() + ", long requests"
    assert attention_of(max_running_requests=1025) == attention_of() + ", many requests"
    assert attention_of("hopper_decode", max_model_len=16384) == attention_of("hopper_decode")
    assert attention_of("split_decode") == attention_of() + ", decodes by FlashInfer"
    assert (
        attention_of("split_decode", backend="eager") == attention_of(backend="eager") == attention_of("split_decode")
    )


@pytest.mark.parametrize("device", [H200, CPU])
def test_whether_steps_are_deterministic_is_a_factor_where_torch_attends_too(device):
    """On a GPU recurrences are compiled otherwise, and on both prompts over latents are not expanded."""

    def attention_of(device, **runtime) -> str:
        return _attention(resolved(device, runtime={"attention_backend": "torch"} | runtime))

    assert attention_of(device, deterministic=True) == attention_of(device) + ", deterministic"


# Rooms that a compile goes through without leaving a trace in what it makes, and why.
NOT_SHAPING = {
    "__init__": "names",
    "version": "a factor",
    "errors": "messages",
    "config": "what it resolves to are factors",
    "files": "how files are read and written",
    "media": "how images come in",
    "passes": "a factor of its own",
    "process": "progress, threads and processes",
    "report": "what people read",
    "store": "how a runtime is stored, which FORMAT_VERSION counts",
    "text": "tokenizer and templates, likewise",
    "runtime/config_sections": "what runs pieces",
    "runtime/cuda_graph": "what runs pieces",
    "runtime/device": "where pieces run",
    "runtime/files/disk_space": "messages",
    "runtime/errors": "messages",
    "runtime/forward_batch": "what runs between pieces",
    "runtime/forward_context": "what runs between pieces",
    "runtime/graph_mode": "what runs pieces",
    "runtime/files/json_data": "how files are read",
    "runtime/files/memory_file": "how bytes become files",
    "runtime/memory_pool": "where KV lies",
    "runtime/speculation": "what drafts; kernels that do are checked against it",
    "runtime/model_runner": "what runs pieces",
    "runtime/files/regular_file": "how files are read",
    "runtime/runner_config": "what runs pieces",
    "runtime/schedule": "which requests are in a step",
    "runtime/short_repr": "messages",
    "runtime/step": "what runs pieces",
    "runtime/ubatch": "what runs pieces",
    "runtime/unknown_names": "messages",
}
PACKAGE = Path(mllm_compile.__file__).parent


def imported_for_a_compile() -> set[str]:
    """Modules that a compile imports, directly or not, at the top or in a function: `room/module`."""
    seen: set[str] = set()
    new = {f"runtime/ops/{name.replace('.', '/')}" for name in OPS.values()}
    new |= {"compiler/build", "compiler/early_pieces", "inductor/server", "inductor/compile_piece"}
    while new:
        module = new.pop()
        path = PACKAGE / f"{module}.py"
        path = path if path.exists() else PACKAGE / module / "__init__.py"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if len(tree.body) <= 1:  # a folder's docstring
            continue
        seen.add(module)
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                found = name.removeprefix("mllm_compile.").replace(".", "/")
                is_module = (PACKAGE / f"{found}.py").exists() or (PACKAGE / found / "__init__.py").exists()
                if name.startswith("mllm_compile.") and is_module:
                    new |= {found} - seen
    return seen


def test_every_module_that_a_compile_imports_is_a_source_of_the_key_or_is_known_to_shape_nothing():
    sources = {part.split(" ")[0] for part in _sources().split(", ")}
    modules = imported_for_a_compile()
    assert {"inductor/patches/shared_host_code", "inductor/build_in_fork", "kernels/cuda", "passes/pipeline"} <= modules
    unknown = {
        module
        for module in modules
        if not {f"{module}.py", f"{module}/__init__.py"} & sources
        and not any(module == room or module.startswith(f"{room}/") for room in NOT_SHAPING)
    }
    assert unknown == set(), "a room of _SHAPING_ROOMS in store/key.py, or a line with a reason here"


@pytest.mark.parametrize("room", _SHAPING_ROOMS)
def test_one_byte_more_in_any_source_of_a_room_is_a_miss(room, tmp_path, monkeypatch):
    (tmp_path / room).parent.mkdir(parents=True, exist_ok=True)
    if (PACKAGE / room).is_dir():
        shutil.copytree(PACKAGE / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(PACKAGE / f"{room}.py", tmp_path / f"{room}.py")
    monkeypatch.setattr("mllm_compile.store.key.__file__", str(tmp_path / "store" / "key.py"))
    plain = _sources.__wrapped__()
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".cpp", ".h")]
    assert files
    for path in files:
        before = path.read_bytes()
        path.write_bytes(before + b" ")
        assert _sources.__wrapped__() != plain, path
        path.write_bytes(before)


def test_what_python_and_editors_leave_in_folders_shapes_nothing(tmp_path, monkeypatch):
    (tmp_path / "kernels" / "__pycache__").mkdir(parents=True)
    (tmp_path / "kernels" / "piece.py").write_text("")
    monkeypatch.setattr("mllm_compile.store.key.__file__", str(tmp_path / "store" / "key.py"))
    plain = _sources.__wrapped__()
    for name in ("__pycache__/piece.cpython-311.pyc", "piece.py~", ".piece.py.swp"):
        (tmp_path / "kernels" / name).write_text("x")
    assert _sources.__wrapped__() == plain
