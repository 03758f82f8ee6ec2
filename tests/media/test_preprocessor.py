"""Images through a worker: what becomes of them, what is refused, and that nothing of it stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest

from mllm_compile.errors import MllmError, RequestError
from mllm_compile.media import preprocessor as preprocessor_module
from mllm_compile.media import segment, workers
from mllm_compile.media.sources import read_items
from mllm_compile.runtime.media.request import RequestMedia
from tests.media.cases import IMAGE_ID, PLACE, TOWER, VIDEO_ID, VIDEO_PLACE, file_of, make_preprocessor, pixels_of


def segments():
    return {path.name for path in Path("/dev/shm").glob(f"mllm-media-{os.getpid()}-*")}


def prepare(preprocessor, text, *images, **data):
    return preprocessor.prepare(text, read_items({"image": list(images)} | data, local_paths=True), True)


def refusal(preprocessor, text, *images, **data):
    with pytest.raises(RequestError) as error:
        prepare(preprocessor, text, *images, **data)
    return str(error.value)


def expected_patches(pixels):
    """Qwen's patches of 8 pixels, 2 by 2 of them together, of an image that needs no scaling."""
    scaled = (pixels.astype(np.float32) / 255 - MEAN) / STD
    height, width = pixels.shape[0] // 16, pixels.shape[1] // 16
    blocks = scaled.reshape(height, 2, 8, width, 2, 8, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return np.repeat(blocks[:, :, :, :, :, None], 2, axis=5).reshape(height * width * 4, -1)


MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)  # CLIP's, the processor's default
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


def test_a_prompt_has_its_items_places_and_tensors(preprocessor):
    first, second = pixels_of(1, 32, 48), pixels_of(2, 64, 32)
    prompt = prepare(preprocessor, f"a{PLACE}bc{PLACE}d", first, file_of(second))
    places = [n for n, token in enumerate(prompt.prompt_token_ids) if token == IMAGE_ID]
    assert np.flatnonzero(prompt.is_feature).tolist() == places == [*range(2, 8), *range(12, 20)]
    assert [(item.kind, item.start, item.length) for item in prompt.items] == [("image", 2, 6), ("image", 12, 8)]
    for item, pixels in zip(prompt.items, (first, second), strict=True):
        assert item.tensors["image_grid_thw"].tolist() == [[1, pixels.shape[0] // 8, pixels.shape[1] // 8]]
        np.testing.assert_allclose(item.tensors["pixel_values"], expected_patches(pixels), atol=1e-5)
    assert not segments()


def test_a_digest_is_of_pixels(preprocessor):
    pixels = pixels_of(3)
    digest = prepare(preprocessor, PLACE, pixels).items[0].digest
    assert len(digest) == 32
    assert prepare(preprocessor, f"other text{PLACE}", file_of(pixels)).items[0].digest == digest
    assert prepare(preprocessor, PLACE, pixels_of(4)).items[0].digest != digest
    turned = np.ascontiguousarray(pixels.reshape(pixels.shape[1], pixels.shape[0], 3))  # the same bytes, another form
    assert prepare(preprocessor, PLACE, turned).items[0].digest != digest


def test_images_and_places_are_as_many(preprocessor):
    picture = pixels_of(5)
    assert "has 1 places for images (<|image_pad|>), but 2 images were given" in refusal(
        preprocessor, PLACE, picture, picture
    )
    assert "has 2 places for images (<|image_pad|>), but 1 images were given" in refusal(
        preprocessor, PLACE + PLACE, picture
    )
    assert "has 0 places" in refusal(preprocessor, "no place", picture)


def test_a_prompt_that_is_too_long_says_what_images_take(preprocessor):
    said = refusal(preprocessor, "a" * 200 + PLACE * 4, *[pixels_of(6, 64, 64)] * 4)
    assert "has 272 tokens, 64 of them for 4 images, videos or sounds, but the model's context is 256 tokens" in said
    assert not segments()


def test_a_broken_image_is_named(preprocessor):
    whole = file_of(pixels_of(7))
    assert refusal(preprocessor, PLACE * 2, whole, whole[:90]).startswith("image 1: the image is broken or cut off")
    assert refusal(preprocessor, PLACE, b"hello").startswith("image 0: the image is in no format that can be read")
    assert prepare(preprocessor, PLACE, whole).items  # the same workers go on


def test_an_image_that_the_processor_refuses_is_named(preprocessor):
    assert "image 0: the model's processor refuses it (absolute aspect ratio" in refusal(
        preprocessor, PLACE, pixels_of(8, 4, 2000)
    )


def test_a_video_needs_torchvision_or_frames_of_one_size(preprocessor):
    pytest.importorskip("PIL")
    text = PLACE.replace("image", "video")
    frames = [pixels_of(9, 32, 32), pixels_of(9, 16, 32)]
    assert "video 0, frame 1: the frame is 32 × 16; expected 32 × 32" in refusal(preprocessor, text, video=frames)
    try:
        import torchvision  # noqa: F401
    except ImportError:
        assert "torchvision, which is not installed" in refusal(preprocessor, text, video=frames[:1] * 2)


def test_a_videos_frames_are_told_apart_by_their_times(preprocessor):
    """Two frames at a time, each behind its time; in a chat, by an array or by images, the features are the same."""
    pytest.importorskip("torchvision")
    frames = np.stack([pixels_of(seed, 32, 48) for seed in range(4)])
    prompt = prepare(preprocessor, f"a{VIDEO_PLACE}b", video=(frames, {"fps": 2.0}))
    (item,) = prompt.items
    assert (item.kind, item.tensors["video_grid_thw"].tolist()) == ("video", [[2, 4, 6]])
    assert [prompt.prompt_token_ids.count(token) for token in (VIDEO_ID, IMAGE_ID)] == [12, 0]
    media = RequestMedia.of(
        TOWER,
        prompt.prompt_token_ids,
        prompt.is_feature,
        [(item.start, item.length, item.digest, item.tensors)],
    )
    assert [image.end - image.start for image in media.images] == [6, 6]
    assert media.images[0].end < media.images[1].start, "its time is between them"
    files = [file_of(frame) for frame in frames]
    again = prepare(preprocessor, f"a{VIDEO_PLACE}b", video=(files, {"fps": 2.0}))
    assert again.prompt_token_ids == prompt.prompt_token_ids and again.items[0].digest == item.digest
    assert prepare(preprocessor, VIDEO_PLACE, video=(frames, {"fps": 1.0})).items[0].digest != item.digest


def test_text_alone_is_served_by_name(files):
    plain = {name: data for name, data in files.items() if not name.startswith("preprocessor")}
    assert refusal(make_preprocessor(plain), PLACE, pixels_of(0)).startswith("tiny takes text alone")
    assert refusal(make_preprocessor(files, why_not="it has none"), PLACE, b"x") == "tiny: it has none. Leave them out."


def test_without_pillow_the_extra_is_named(files, monkeypatch):
    monkeypatch.setattr(preprocessor_module, "find_spec", lambda name: None)
    assert "pip install 'mllm-compile[images]'" in refusal(make_preprocessor(files), PLACE, b"x")


def test_after_the_end_of_a_worker_another_one_answers(preprocessor):
    assert prepare(preprocessor, PLACE, pixels_of(0)).items
    (process,) = preprocessor._workers._processes
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    assert prepare(preprocessor, PLACE, pixels_of(0)).items
    assert not segments()


def test_a_request_that_is_given_up_leaves_no_memory(preprocessor):
    shared = preprocessor.prepare_shared(PLACE, read_items({"image": pixels_of(0)}, local_paths=True), True)
    assert segments() == {shared.segment}
    del shared
    assert not segments()


def test_memory_can_be_taken_once(preprocessor):
    shared = preprocessor.prepare_shared(PLACE, read_items({"image": pixels_of(0)}, local_paths=True), True)
    prompt = shared.take()
    with pytest.raises(MllmError, match="not in shared memory any more"):
        shared.take()
    assert prompt.items[0].tensors["pixel_values"].sum() != 0  # it lives as long as its tensors


def test_tensors_that_do_not_fit_are_refused(preprocessor, monkeypatch):
    monkeypatch.setattr(workers, "MAX_TENSOR_BYTES", 4096)
    assert "become more than" in refusal(preprocessor, PLACE, pixels_of(0))
    assert not segments()


def test_segments_of_processes_that_are_gone_are_removed():
    left = Path("/dev/shm/mllm-media-999999999-abc")
    left.write_bytes(b"x")
    own = segment.Segment(100)
    segment.remove_left_segments()
    assert not left.exists()
    assert segments() == {own.name}
    own.remove()
    own.remove()
    assert not segments()


# A process that makes two segments, tells their names, and waits.
_OWNER = """
import sys
from mllm_compile.media.segment import Segment
made = [Segment(100), Segment(100)]
print(*(one.name for one in made), flush=True)
sys.stdin.read()
"""


def test_segments_belong_to_the_holder_of_their_lock_whatever_its_number():
    """Containers that share /dev/shm have process numbers of their own: another's is not to be found here."""
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdin=PIPE, stdout=PIPE, text=True) as owner:
        names = owner.stdout.readline().split()
        paths = [segment._FOLDER / name for name in names]
        lock = segment._lock_of(names[0].rpartition("-")[0])
        code = "from mllm_compile.media.segment import remove_left_segments as remove; remove()"
        elsewhere = [sys.executable, "-c", code]
        if shutil.which("unshare") and subprocess.run([*_NAMESPACE, "true"], capture_output=True).returncode == 0:
            elsewhere = [*_NAMESPACE, *elsewhere]
        subprocess.run(elsewhere, check=True)
        assert all(path.exists() for path in (*paths, lock))
        owner.kill()
        owner.wait()
    segment.remove_left_segments()
    assert not any(path.exists() for path in (*paths, lock))


_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]
