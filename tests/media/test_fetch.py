"""Images by their addresses: from hosts that are allowed, within bounds, and from no others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mllm_compile import EngineConfig
from mllm_compile.errors import ConfigError, RequestError
from mllm_compile.media import fetch, file_sources
from mllm_compile.media.fetch import fetched
from mllm_compile.media.file_sources import Source
from mllm_compile.media.sources import read_image, read_video
from tests.hang_guard import HANG_S

HERE = ("127.0.0.1",)


class _Host(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.partition("?")[0]
        if name == "/moved":
            self.send_response(302)
            self.send_header("Location", self.path.partition("?")[2])
            self.end_headers()
        elif name in ("/head", "/chunk"):
            self._drip(name)
        else:
            self._give(name)

    def _give(self, name: str) -> None:
        self.send_response(200 if name in ("/cat.png", "/large", "/slow") else 404)
        self.end_headers()
        if name == "/cat.png":
            self.wfile.write(b"image" + self.path.encode())
        if name == "/large":
            self.wfile.write(bytes(3000))
        while name == "/slow":
            try:
                self.wfile.write(b"x")
            except OSError:
                return
            time.sleep(0.05)

    def _drip(self, name: str) -> None:
        """Gives a byte of a head, or of the size of a chunk, now and then."""
        begin = {"/head": b"x: ", "/chunk": b"transfer-encoding: chunked\r\n\r\n1;"}[name]
        self.wfile.write(b"HTTP/1.1 200 OK\r\n" + begin)
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b"a")
                time.sleep(0.05)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Host)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def files(given, domains=HERE):
    item = read_image(given, "image 0", local_paths=False)
    return [frame.data for one in fetched([item], domains) for frame in one.frames]


def refusal(given, domains=HERE):
    with pytest.raises(RequestError) as error:
        files(given, domains)
    return str(error.value)


def test_an_allowed_hosts_images_are_fetched_in_their_order(host):
    assert files(f"{host}/cat.png?a=1") == [b"image/cat.png?a=1"]
    urls = [f"{host}/cat.png?{n}" for n in range(5)]
    video = read_video([*urls[:3], b"bytes", *urls[3:]], "video 0", local_paths=False)
    (item,) = fetched([video], HERE)
    wanted = [f"image/cat.png?{n}".encode() for n in range(5)]
    assert [frame.data for frame in item.frames] == [*wanted[:3], b"bytes", *wanted[3:]]
    assert all(frame == Source(frame.data) for frame in item.frames)


def test_no_address_is_fetched_unless_its_host_is_allowed(host):
    assert "is an address, and none is fetched" in refusal(f"{host}/cat.png", ())
    of_others = refusal(f"{host}/cat.png", ("b.example", "a.example"))
    assert "images and sounds are fetched from a.example, b.example alone" in of_others
    assert "media.allowed_domains" in of_others


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1@b.example/cat.png",
        "http://127.0.0.1\\@b.example/cat.png",
        "http://127.0.0.1:port/cat.png",
        "http://127.0.0.1:9999999/cat.png",
        "http:///cat.png",
        "http://127.0.0.1/a cat.png",
        "http://[127.0.0.1/cat.png",
    ],
)
def test_an_ambiguous_address_is_refused(url):
    assert "is no" in refusal(url)


def test_other_kinds_of_addresses_are_never_fetched():
    for url in ("file:///etc/passwd", "s3://bucket/cat.png", "ftp://127.0.0.1/cat.png"):
        assert "of a kind that is never fetched" in refusal(url)


def test_an_answer_leads_to_allowed_hosts_alone(host):
    assert files(f"{host}/moved?{host}/cat.png") == [b"image/cat.png"]
    assert "'http://localhost/cat.png' is an address" in refusal(f"{host}/moved?http://localhost/cat.png")
    assert "is no plain address over http or https" in refusal(f"{host}/moved?ftp://127.0.0.1/cat.png")


def test_a_missing_or_large_or_slow_address_costs_its_request_alone(host, monkeypatch):
    assert "answers with status 404" in refusal(f"{host}/dog.png")
    monkeypatch.setattr(file_sources, "IMAGE_FILE", replace(file_sources.IMAGE_FILE, most=2000))
    assert "expected at most 2,000" in refusal(f"{host}/large")
    monkeypatch.setattr(fetch, "MAX_FETCH_SECONDS", 0.2)
    for way in ("slow", "head", "chunk", f"moved?{host}/head"):
        assert "it takes more than 0.2 s" in refusal(f"{host}/{way}")
    assert "cannot be fetched" in refusal("http://127.0.0.1:1/cat.png")


def test_a_fetch_ends_where_the_system_does_not_answer_and_many_have_one_time_together(host, monkeypatch):
    monkeypatch.setattr(fetch, "_GRACE_S", 0.0)
    monkeypatch.setattr(fetch, "MAX_PROMPT_FETCH_SECONDS", 0.2)
    answers = threading.Event()
    monkeypatch.setattr(fetch.HTTPConnection, "connect", lambda _: answers.wait(HANG_S) and None)
    try:
        assert "all files of the prompt more than 0.2 s" in refusal(f"{host}/cat.png")
    finally:
        answers.set()


@pytest.mark.parametrize("domain", ["https://a.example", "a.example/images", "a.example:80", "", "*"])
def test_a_config_names_hosts(domain):
    with pytest.raises(ConfigError, match=r"media\.allowed_domains"):
        EngineConfig.from_dict({"model": {"path": "x"}, "media": {"allowed_domains": [domain]}})


def test_a_configs_hosts_are_in_small_letters():
    config = EngineConfig.from_dict({"model": {"path": "x"}, "media": {"allowed_domains": ["A.Example", "127.0.0.1"]}})
    assert config.media.allowed_domains == ("a.example", "127.0.0.1")
