"""The wheel: it holds every file that the product needs, and serves where there is no checkout."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import venv
import zipfile
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import yaml

from tests.hang_guard import HANG_S, until

ROOT = Path(__file__).parents[2]
PACKED = ("mllm_compile", "passes", "runtime", "pyproject.toml", "README.md", "LICENSE")
PROMPT = "Return a new list"
JSON = "application/json"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, built from a copy, as a build leaves files in its folder."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, source]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    return next(out.glob("*.whl"))


def test_the_wheel_has_every_file_of_the_package(wheel):
    expected = {
        path.relative_to(ROOT).as_posix()
        for folder, linked in (("mllm_compile", ""), ("passes", "mllm_compile/"), ("runtime", "mllm_compile/"))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected = {name if name.startswith("mllm_compile/") else f"mllm_compile/{name}" for name in expected}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("mllm_compile/")}
    assert packed >= expected, sorted(expected - packed)


def test_an_installed_wheel_compiles_generates_and_serves_without_a_checkout(wheel, tmp_path):
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    site = next(home.glob("lib/python*/site-packages"))
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    # The package's dependencies come from this environment; a .pth file does not bring its own editable install along.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    config = tmp_path / "tiny.yaml"
    sections = {"model": {"path": str(site / "mllm_compile/model/tiny")}, "compile": {"backend": "eager"}}
    config.write_text(yaml.safe_dump(sections | {"cache": {"dir": str(tmp_path / "cache")}}), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = partial(subprocess.run, cwd=tmp_path, env=environment, check=True, text=True, capture_output=True)
    python = str(home / "bin/python")

    where = run([python, "-c", "import mllm_compile; print(mllm_compile.__file__)"]).stdout
    assert where.startswith(str(site))
    generate = ["generate", str(config), "--temperature", "0", "--max-tokens", "8", "--prompt", PROMPT]
    text = run([python, "-m", "mllm_compile", *generate]).stdout.strip()
    assert text

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = [python, "-m", "mllm_compile", "serve", str(config), "--port", str(port)]
    with subprocess.Popen(serve, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as server:
        try:
            served = completion(server, port, {"prompt": PROMPT, "max_tokens": 8, "temperature": 0})
        finally:
            server.terminate()
    assert served.strip() == text


def completion(server: subprocess.Popen[bytes], port: int, body: dict[str, object]) -> str:
    """Text of a completion, from a server that may not have opened its port yet."""
    until(lambda: server.poll() is not None or answers(port), "an open port")
    request = Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": JSON})
    with urlopen(request, timeout=HANG_S) as response:
        return json.load(response)["choices"][0]["text"]


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
