"""Valid forms of an image, and the reasons of refusals. Nothing is decoded here."""

from __future__ import annotations

import base64
import os
from dataclasses import replace

import numpy as np
import pytest

from mllm_compile.errors import RequestError
from mllm_compile.media import sources
from mllm_compile.media.file_sources import Source
from mllm_compile.media.messages import has_media, take_media
from mllm_compile.media.sources import read_image, read_items
from tests.media.cases import pixels_of


def image(given, local_paths=True):
    return read_image(given, "image 0", local_paths=local_paths).frames[0]


def refusal(given, **options):
    with pytest.raises(RequestError) as error:
        image(given, **options)
    return str(error.value)


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_bytes_a_data_url_and_a_path_are_the_same_file(tmp_path):
    path = tmp_path / "cat.png"
    path.write_bytes(b"image")
    assert image(b"image") == image(data_url(b"image")) == image(path) == image(str(path)) == Source(b"image")


def test_an_array_and_a_pil_image_are_pixels():
    images = pytest.importorskip("PIL.Image")
    pixels = pixels_of(0, 4, 6)
    assert image(pixels) == image(images.fromarray(pixels)) == Source(pixels.tobytes(), (4, 6))


def test_an_address_waits_for_being_fetched():
    for url in ("http://host/cat.png", "HTTPS://host/cat.png"):
        for local_paths in (True, False):
            assert image(url, local_paths) == Source(b"", url=url)


def test_a_path_is_read_for_callers_in_this_process_alone(tmp_path):
    path = tmp_path / "cat.png"
    path.write_bytes(b"image")
    assert "expected a data URL" in refusal(str(path), local_paths=False)


def test_a_path_to_no_file_says_why(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "No such file" in refusal(tmp_path / "none.png")
    assert "cannot be read" in refusal(tmp_path)
    assert "no regular file" in refusal(tmp_path / "pipe")
    assert "cannot be read" in refusal("a\0b")


def test_a_malformed_data_url_says_what_is_expected():
    assert "expected data:image/…;base64,…" in refusal("data:image/png,abc")
    assert "expected data:image/…;base64,…" in refusal(data_url(b"x", "text/html"))
    assert "no base64" in refusal("data:image/png;base64,a*b=")
    assert "no base64" in refusal("data:image/png;base64,é")
    assert "empty" in refusal("data:image/png;base64,")


def test_a_file_is_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "IMAGE_FILE", replace(sources.IMAGE_FILE, most=1000))
    (tmp_path / "big").write_bytes(bytes(1001))
    for given in (bytes(1001), tmp_path / "big"):
        assert "expected at most 1,000" in refusal(given)
    assert "expected an image of at most 1,000 bytes" in refusal(data_url(bytes(9000)))


def test_pixels_are_bounded():
    huge = np.broadcast_to(np.zeros((), np.uint8), (1 << 15, 1 << 15, 3))
    assert "32,768 × 32,768" in refusal(huge)
    assert "without a pixel" in refusal(np.zeros((0, 4, 3), np.uint8))


def test_an_array_of_another_form_is_refused():
    for array in (np.zeros((4, 4), np.uint8), np.zeros((3, 4, 4), np.uint8), np.zeros((4, 4, 3), np.float32)):
        assert "expected an array [height, width, 3] of uint8" in refusal(array)
    for given in (None, 7, object(), {}):
        assert "expected a PIL image" in refusal(given)


def test_multi_modal_data_has_images_and_videos():
    items = read_items({"image": [b"a", b"b"], "video": pixels_of(0)[None]}, local_paths=True)
    assert [(item.kind, item.where, len(item.frames)) for item in items] == [
        ("image", "image 0", 1),
        ("image", "image 1", 1),
        ("video", "video 0", 1),
    ]
    assert not read_items({"image": [], "video": None}, local_paths=True)
    for given, said in (([b"a"], "expected {'image'"), ({"embeds": b"a"}, "got 'embeds'")):
        with pytest.raises(RequestError, match=said):
            read_items(given, local_paths=True)


def test_a_video_is_frames_and_their_times():
    frames = np.stack([pixels_of(n) for n in range(3)])
    for given in (frames, list(frames), (frames, {"fps": 2.0, "frames_indices": [0, 4, 8]}), [frames], [list(frames)]):
        (item,) = read_items({"video": given}, local_paths=True)
        assert len(item.frames) == 3
    assert len(read_items({"video": [frames, frames]}, local_paths=True)) == 2
    for given, said in (
        ([], "1 to 768 frames, got 0"),
        (np.zeros((0, 4, 4, 3), np.uint8), "1 to 768 frames, got 0"),
        ("cat.mp4", "Video files are not read"),
        (b"mp4", "Video files are not read"),
        ((frames, {"rate": 2}), "got 'rate'"),
        ((frames, {"fps": 0}), "fps: expected positive"),
        ((frames, {"frames_indices": [0, -1]}), "frames_indices: expected"),
    ):
        with pytest.raises(RequestError, match=said):
            read_items({"video": given}, local_paths=True)


def test_items_are_bounded(monkeypatch):
    with pytest.raises(RequestError, match="at most 64 images, videos and sounds in a prompt, got 65"):
        read_items({"image": [b"a"] * 65}, local_paths=True)
    monkeypatch.setattr(sources, "MAX_PROMPT_PIXELS", 100)
    with pytest.raises(RequestError, match="have 1,536 pixels; expected at most 100"):
        read_items({"image": pixels_of(0)}, local_paths=True)


def test_parts_of_messages_become_items_and_places():
    url = data_url(b"one")
    messages = [
        {"role": "system", "content": "Look."},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
                {"type": "text", "text": "and"},
                {"type": "image", "image": pixels_of(1)},
                {"type": "image_url", "image_url": url},
                {"type": "video", "video": pixels_of(0)[None]},
            ],
        },
    ]
    found, items = take_media(messages, local_paths=True)
    assert found[0] == messages[0]
    assert found[1]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "and"},
        {"type": "image"},
        {"type": "image"},
        {"type": "video"},
    ]
    assert [(item.where, item.frames[0].data) for item in items[:3]] == [
        ("image 0", b"one"),
        ("image 1", pixels_of(1).tobytes()),
        ("image 2", b"one"),
    ]
    assert messages[1]["content"][0]["type"] == "image_url"  # a caller's own are left alone


def test_messages_without_images_stay_as_they_are():
    for messages in ([{"role": "user", "content": "hi"}], [{"content": [{"type": "text"}]}], None, "hi", [7], [[]]):
        assert take_media(messages, local_paths=True) == (messages, [])
        assert not has_media(messages)


def test_a_part_without_its_image_is_refused():
    for part, said in (
        ({"type": "image_url"}, "but no image"),
        ({"type": "image_url", "image_url": {}}, "but no image"),
        ({"type": "image_url", "image_url": {"url": data_url(b"x"), "detail": "low"}}, "detail: expected auto or high"),
        ({"type": "video_url", "video_url": {"url": "http://host/v.mp4"}}, "video files are not read"),
        ({"type": "image_url", "image_url": {"url": "s3://host/cat.png"}}, "never fetched"),
    ):
        with pytest.raises(RequestError, match=said):
            take_media([{"role": "user", "content": [part]}], local_paths=True)


def test_images_of_a_chat_are_counted_before_one_is_read():
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,***"}}
    with pytest.raises(RequestError, match="at most 64 images, videos and sounds in a prompt, got 10000"):
        take_media([{"role": "user", "content": [part] * 10_000}], local_paths=False)
