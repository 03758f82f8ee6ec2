"""Images over HTTP: data URLs in chats, prepared by workers of the front; the engine behind it is a fake."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.media.cases import PLACE, file_of, pixels_of, png_that_says
from tests.server.harness import Answer, Server, eventually, fake_server

pytest.importorskip("PIL")
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server(settings={"images": {"domains": ["127.0.0.1"]}, "limits": {"max_model_len": 256}}) as server:
        yield server


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def messages(*urls: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "How many?"}]}]


def ask(server: Server, *urls: str, **fields: Any) -> Answer:
    return server.post(CHAT, {"messages": messages(*urls), "max_tokens": 4, "temperature": 0, **fields})


def left(server: Server) -> list[Path]:
    return list(Path("/dev/shm").glob(f"mllm-media-{server.process.pid}-*"))


def test_a_chat_with_images_is_answered(server):
    one, two = (data_url(file_of(pixels_of(seed, 32, 48))) for seed in (1, 2))
    answer = ask(server, one, two)
    assert answer.status == 200, answer.body
    # Two images of 6 tokens between two marks, 9 bytes of text and a colon.
    assert answer.json["usage"]["prompt_tokens"] == 2 * 8 + 10
    text = answer.json["choices"][0]["message"]["content"]
    assert text == ask(server, one, two).json["choices"][0]["message"]["content"]
    *events, end = ask(server, one, two, stream=True).events
    assert end is None
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == text
    eventually(lambda: not left(server))


def test_an_address_is_refused_by_name(server):
    answer = ask(server, "https://host/cat.png")
    assert answer.status == 400
    assert (
        "'https://host/cat.png' is an address, and images and sounds are fetched from 127.0.0.1 alone"
        in answer.error["message"]
    )
    assert ask(server, "/etc/passwd").error["message"].startswith("image 0: expected a data URL")
    assert ask(server, "file:///etc/passwd").status == 400


def test_an_address_of_an_allowed_host_is_its_image(server, tmp_path):
    picture = file_of(pixels_of(1, 32, 48))
    (tmp_path / "cat.png").write_bytes(picture)
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{host.server_port}"
        answer = ask(server, f"{address}/cat.png")
        missing = ask(server, f"{address}/dog.png")
        host.shutdown()
    assert answer.json["choices"] == ask(server, data_url(picture)).json["choices"]
    assert missing.status == 400
    assert "answers with status 404" in missing.error["message"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"hello", "image 0: the image is in no format that can be read"),
        (b"\x89PNG\r\n\x1a\n", "image 0: the image"),
        (b"", "image 0: the image is empty"),
        (file_of(pixels_of(1))[:90], "image 0: the image is broken or cut off"),
        (png_that_says(0, 8), "image 0: the image is broken: it begins as an image does, but its header"),
        (png_that_says(40_000, 25_000), "1,000,000,000 pixels by its header; expected at most 67,108,864"),
        (file_of(pixels_of(1, 4, 2000)), "image 0: the model's processor refuses it"),
    ],
    ids=["text", "a mark alone", "nothing", "cut off", "0 pixels", "10^9 pixels", "500 times as wide as high"],
)
def test_a_malformed_image_is_a_bad_request_of_one_line(server, data, said):
    answer = ask(server, data_url(data))
    assert answer.status == 400
    assert said in answer.error["message"] and "\n" not in answer.error["message"]
    assert not left(server)


def test_more_places_than_images_are_a_bad_request(server):
    text = {"type": "text", "text": f"{PLACE}?"}
    url = data_url(file_of(pixels_of(2, 32, 48)))
    for parts, said in (
        ([text], "the prompt's text has the token 3, which stands for images, and none was given"),
        (
            [text, {"type": "image_url", "image_url": {"url": url}}],
            "has 2 places for images (<|image_pad|>), but 1 images",
        ),
    ):
        answer = server.post(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 4})
        assert answer.status == 400
        assert said in answer.error["message"]
    answer = server.post("/v1/completions", {"prompt": f"{PLACE}?", "max_tokens": 4})
    assert answer.status == 400 and "stands for images, and none was given" in answer.error["message"]


def test_a_turned_image_and_an_animation_are_answered(server):
    images = pytest.importorskip("PIL.Image")
    turned, animated = images.Exif(), io.BytesIO()
    turned[0x0112] = 6  # to be turned by a quarter
    frames = [images.fromarray(pixels_of(seed, 32, 48)) for seed in (4, 5)]
    frames[0].save(animated, "GIF", save_all=True, append_images=frames[1:])
    for data in (file_of(pixels_of(3, 32, 48), "JPEG", exif=turned), animated.getvalue()):
        answer = ask(server, data_url(data))
        assert (answer.status, answer.json["usage"]["prompt_tokens"]) == (200, 8 + 10), answer.body


def test_a_prompt_that_is_too_long_is_refused(server):
    url = data_url(file_of(pixels_of(3, 64, 64)))
    answer = ask(server, *[url] * 16)
    assert answer.status == 400
    assert "256 of them for 16 images" in answer.error["message"]
    assert not left(server)


def test_others_go_on_beside_images(server):
    urls = [data_url(file_of(pixels_of(seed))) for seed in range(4)]
    bad = data_url(b"no image")
    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(ask, server, url) for url in [*urls, bad, *urls, bad]]
        texts = [threads.submit(server.complete) for _ in range(4)]
        assert [one.result().status for one in asked] == [200, 200, 200, 200, 400] * 2
        assert all(one.result().status == 200 for one in texts)
    eventually(lambda: not left(server))


def block(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    """An image as Anthropic's clients give it."""
    source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def message(server: Server, *content: dict[str, Any]) -> Answer:
    asked = {"messages": [{"role": "user", "content": list(content)}], "max_tokens": 4, "temperature": 0}
    return server.post("/v1/messages", asked)


def respond(server: Server, *content: dict[str, Any]) -> Answer:
    asked = {"input": [{"role": "user", "content": list(content)}], "max_output_tokens": 4, "temperature": 0}
    return server.post("/v1/responses", asked)


def test_the_other_interfaces_take_images_the_same_way(server):
    files = [file_of(pixels_of(seed, 32, 48)) for seed in (1, 2)]
    expected = ask(server, *map(data_url, files)).json
    told = message(server, *map(block, files), {"type": "text", "text": "How many?"})
    assert told.status == 200, told.body
    usage = told.json["usage"]
    assert told.json["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected["usage"]["prompt_tokens"]
    parts: list[dict[str, Any]] = [{"type": "input_image", "image_url": data_url(one)} for one in files]
    parts[0]["detail"] = "auto"
    told = respond(server, *parts, {"type": "input_text", "text": "How many?"})
    assert told.status == 200, told.body
    (answer,) = told.json["output"]
    assert answer["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert told.json["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    eventually(lambda: not left(server))


def test_their_images_are_refused_in_their_own_shapes(server):
    url = {"type": "image", "source": {"type": "url", "url": "https://host/cat.png"}}
    for content, says in (
        (url, "'https://host/cat.png' is an address, and images and sounds are fetched from"),
        (block(b"hello"), "image 0: the image is in no format that can be read"),
        (block(b"hello", "application/pdf"), "expected the source of an image to be"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "expected the source of an image to be"),
        ({"type": "document"}, "expected blocks of type text, got str 'document'"),
    ):
        answer = message(server, content)
        assert (answer.status, answer.json["type"]) == (400, "error"), answer.body
        assert says in answer.json["error"]["message"]
    image = {"type": "input_image", "image_url": data_url(b"hello")}
    for content, says in (
        ({**image, "image_url": "https://host/cat.png"}, "is an address, and images and sounds are fetched from"),
        (image, "image 0: the image is in no format that can be read"),
        ({**image, "detail": "low"}, "detail: expected auto or high, got str 'low'"),
        ({"type": "input_image", "file_id": "f"}, "expected an input_image with image_url"),
        ({"type": "input_file"}, "expected parts of text or input_image"),
    ):
        answer = respond(server, content)
        assert answer.status == 400, answer.body
        assert says in answer.error["message"]


def test_a_result_of_a_tool_may_be_an_image(server):
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block(file_of(pixels_of(5, 32, 48)))]}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    asked = {"messages": [{"role": "user", "content": "Look."}, *turns], "max_tokens": 4}
    answer = server.post("/v1/messages", asked)
    assert answer.status == 200, answer.body
    assert answer.json["usage"]["input_tokens"] > 8


def video(*frames: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "video", "video": list(frames)}, {"type": "text", "text": "What?"}]
    return [{"role": "user", "content": parts}]


def test_a_video_is_its_frames(server):
    pytest.importorskip("torchvision")
    frames = [data_url(file_of(pixels_of(seed, 32, 48))) for seed in range(4)]
    answer = server.post(CHAT, {"messages": video(*frames), "max_tokens": 4, "temperature": 0})
    assert answer.status == 200, answer.body
    assert answer.json["usage"]["prompt_tokens"] > 12, "two pairs of frames of 6 tokens each, and their times"
    eventually(lambda: not left(server))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "video", "video": []}, "video 0: expected 1 to 768 frames, got 0"),
        ({"type": "video", "video": "https://host/cat.mp4"}, "Video files are not read: give frames"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}, "video files are not read"),
        ({"type": "video", "video": ["https://host/1.png"]}, "video 0, frame 0: 'https://host/1.png' is an address"),
    ],
)
def test_a_malformed_video_is_a_bad_request(server, part, said):
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4})
    assert answer.status == 400
    assert said in answer.error["message"]


def test_images_are_no_business_of_tokenize(server):
    answer = server.post("/tokenize", {"messages": messages(data_url(b"x"))})
    assert answer.status == 400
    assert "expected texts" in answer.error["message"]
    asked = {"messages": [{"role": "user", "content": [block(b"x")]}]}
    answer = server.post("/v1/messages/count_tokens", asked)
    assert (answer.status, answer.json["type"]) == (400, "error")
    assert "expected texts" in answer.json["error"]["message"]


def test_a_server_of_text_refuses_images():
    with fake_server() as server:
        answer = ask(server, data_url(file_of(pixels_of(0))))
        assert answer.status == 400
        assert "takes text alone" in answer.error["message"]
        answers = (message(server, block(b"x")), respond(server, {"type": "input_image", "image_url": data_url(b"x")}))
        for answer in answers:
            assert answer.status == 400
            assert "takes text alone" in answer.error["message"]
