"""Where and how a server listens: TLS, a Unix socket, behind a proxy's path, and how much a body may have."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mllm_compile.errors import ConfigError
from mllm_compile.server.options import ServeOptions, bytes_of
from mllm_compile.server.serve import run_server
from tests.hang_guard import HANG_S
from tests.server.harness import fake_server

BODY = json.dumps({"prompt": "def", "max_tokens": 3, "stream": True}).encode()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"], check=True, capture_output=True)
    return cert, key


class UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=HANG_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(HANG_S)
        self.sock.connect(str(self._path))


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection.request(method, path, body)
    response = connection.getresponse()
    return response.status, response.read()


def test_it_speaks_tls(certificate):
    cert, key = certificate
    with fake_server({"ssl_certfile": str(cert), "ssl_keyfile": str(key)}, waits=False) as server:
        assert f"listening at https://127.0.0.1:{server.port}" in server.said
        context = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=HANG_S)
        status, body = ask(connection, "POST", "/v1/completions", BODY)
        assert status == 200 and body.endswith(b"data: [DONE]\n\n")
        assert ask(connection, "GET", "/ready")[0] == 200  # the connection is kept
        assert connection.sock.version() in ("TLSv1.2", "TLSv1.3")
        plain = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(plain, "GET", "/ready")
        assert ask(connection, "GET", "/ready")[0] == 200
        assert server.end() == 0


def test_a_certificate_that_cannot_be_used_is_told_before_anything_starts(certificate, tmp_path):
    cert, key = certificate
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "text").write_text("no certificate")
    for wrong in (
        {"ssl_certfile": "no/such/file"},
        {"ssl_certfile": str(cert)},
        {"ssl_certfile": str(tmp_path / "text"), "ssl_keyfile": str(key)},
        {"ssl_certfile": str(cert), "ssl_keyfile": str(locked)},
        {"ssl_certfile": str(tmp_path), "ssl_keyfile": str(key)},
    ):
        with pytest.raises(ConfigError, match=r"--ssl-certfile, --ssl-keyfile: .* cannot be used"):
            run_server(ServeOptions(model="fake", port=0, **wrong))
    with pytest.raises(ConfigError, match="--ssl-keyfile: expected it beside --ssl-certfile"):
        ServeOptions(model="fake", ssl_keyfile=str(key))


def test_it_listens_at_a_unix_socket_and_removes_it(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # of a server that was killed
    with fake_server({"uds": str(path)}, waits=False) as server:
        connection = UnixConnection(path)
        status, body = ask(connection, "POST", "/v1/completions", BODY)
        assert status == 200 and body.endswith(b"data: [DONE]\n\n")
        connection.request("GET", "/metrics", headers={"host": "any.name.at.all", "origin": "http://any.name.at.all"})
        assert connection.getresponse().read().startswith(b"# HELP")
        with pytest.raises(ConfigError, match=r"--uds: .* cannot be listened at"):
            run_server(ServeOptions(model="fake", uds=str(path)))
        assert ask(connection, "GET", "/ready")[0] == 200, "another server takes it not away"
        assert "warning" not in server.said
        assert server.end() == 0
    assert not path.exists()


@pytest.mark.parametrize("name", ["x" * 200, "no/such/folder/socket", "file"])
def test_a_path_that_can_hold_no_socket_is_told(tmp_path, name):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=r"--uds: .* cannot be listened at"):
        run_server(ServeOptions(model="fake", uds=str(tmp_path / name)))
    assert (tmp_path / "file").read_text() == "kept"


@pytest.fixture(scope="module")
def behind() -> Iterator[Any]:
    with fake_server({"root_path": "/llm/a", "most_body_bytes": 2048, "api_keys": ["k"]}) as server:
        yield server


@pytest.mark.parametrize("prefix", ["", "/llm/a"])
def test_a_proxys_path_may_be_there_or_not(behind, prefix):
    key = {"authorization": "Bearer k"}
    assert behind.get(f"{prefix}/ready").status == 200
    assert behind.get(f"{prefix}/v1/models").status == 401
    assert behind.get(f"{prefix}/v1/models", headers=key).json["data"][0]["id"] == "fake"
    assert behind.get(f"{prefix}/v1/models/fake", headers=key).json["id"] == "fake"
    assert behind.get(f"{prefix}/", headers=key).headers["content-type"].startswith("text/html")
    assert behind.post(f"{prefix}/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=key).status == 200
    assert behind.get("/llm/b/v1/models", headers=key).status == 404
    assert behind.get("/llm/ab/v1/models", headers=key).status == 404
    assert behind.get("/llm/a", headers=key).status == 200


def test_a_body_has_as_much_as_the_server_is_told(behind):
    key = {"authorization": "Bearer k"}
    for size, status in ((2048, 200), (2049, 413)):
        body = json.dumps({"prompt": "x", "max_tokens": 1, "user": ""})
        body = body.replace('"user": ""', f'"user": "{"x" * (size - len(body))}"').encode()
        assert len(body) == size
        answer = behind.ask("POST", "/v1/completions", body, key)
        assert answer.status == status
    assert "larger than 2,048 bytes; the server's --max-body sets the bound" in answer.error["message"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"root_path": "llm"}, "--root-path: expected a path such as /llm"),
        ({"root_path": "/llm/"}, "without a / at its end"),
        ({"root_path": "/a?b"}, "--root-path"),
        ({"most_body_bytes": 10}, "--max-body: expected from 1K to 256M, got 10 bytes"),
        ({"most_body_bytes": 1 << 40}, "--max-body"),
        ({"uds": ""}, "--uds: expected the path"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        ServeOptions(model="fake", **given)


@pytest.mark.parametrize(("text", "size"), [("65536", 65536), ("512K", 1 << 19), ("16M", 1 << 24), ("1m", 1 << 20)])
def test_sizes_have_units(text, size):
    assert bytes_of("--max-body", text) == size


@pytest.mark.parametrize("text", ["", "M", "-1", "1.5M", "10G", "٣M", "1" * 30])
def test_a_malformed_size_is_refused(text):
    with pytest.raises(ConfigError, match="--max-body: expected a size"):
        bytes_of("--max-body", text)
