"""Files to pixels: images, and one clear reason for each refusal."""

from __future__ import annotations

import io

import numpy as np
import pytest

from mllm_compile.media.decode import Refused, decode
from tests.media.cases import file_of, pixels_of, png_that_says

Images = pytest.importorskip("PIL.Image")


def saved(image, kind="PNG", **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_a_lossless_file_gives_its_pixels(kind):
    pixels = pixels_of(1)
    assert np.array_equal(decode(file_of(pixels, kind)), pixels)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_a_lossy_file_gives_nearly_its_pixels(kind):
    pixels = np.full((32, 48, 3), (200, 40, 90), np.uint8)
    assert np.abs(decode(file_of(pixels, kind)).astype(int) - pixels).max() < 12


def test_an_image_is_turned_as_its_exif_data_says():
    image = Images.fromarray(pixels_of(2))
    exif = Images.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to the right
    assert np.array_equal(decode(saved(image, exif=exif)), np.rot90(pixels_of(2), -1))


def test_of_an_animation_the_first_frame_is_the_image():
    frames = [Images.fromarray(np.full((16, 16, 3), grey, np.uint8)) for grey in (10, 200)]
    for kind in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert (decode(data) == 10).all()


def test_transparency_is_laid_on_white():
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[:4] = (10, 20, 30, 255)
    found = decode(saved(Images.fromarray(pixels)))
    assert (found[:4] == (10, 20, 30)).all() and (found[4:] == 255).all()


def test_sixteen_bits_of_grey_become_eight():
    grey = np.array([[0, 0x80FF], [0xFFFF, 0x0100]], np.uint16)
    assert decode(saved(Images.fromarray(grey)))[..., 0].tolist() == [[0, 0x80], [0xFF, 1]]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"hello, world", "is in no format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is in no format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is in no format"),
        (png_that_says(100_000, 100_000), "10,000,000,000 pixels by its header; expected at most 67,108,864"),
        (png_that_says(40_000, 25_000), "1,000,000,000 pixels by its header"),
        (png_that_says(64, 64), "broken or cut off"),
    ],
    ids=["text", "svg", "eps", "10^10 pixels", "10^9 pixels", "no data"],
)
def test_a_file_without_an_image_is_refused(data, reason):
    with pytest.raises(Refused, match=reason):
        decode(data)


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (0, 0)])
def test_an_image_without_a_pixel_is_refused(size):
    with pytest.raises(Refused):
        decode(png_that_says(*size))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_truncated_file_is_refused(kind, part):
    data = file_of(pixels_of(3, 64, 64), kind)
    with pytest.raises(Refused, match=r"broken|no format"):
        decode(data[: int(len(data) * part)])


def test_damage_of_any_kind_gives_pixels_or_a_refusal():
    rng = np.random.default_rng(0)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        data = np.frombuffer(file_of(pixels_of(4, 24, 24), kind), np.uint8)
        for _ in range(40):
            damaged = data.copy()
            damaged[rng.integers(0, len(data), 4)] = rng.integers(0, 256, 4)
            try:
                assert decode(damaged.tobytes()).shape[2] == 3
            except Refused as refusal:
                assert str(refusal)


def test_pixels_of_32_bits_are_refused():
    data = saved(Images.fromarray(np.zeros((4, 4), np.float32)), "TIFF")
    with pytest.raises(Refused, match=r"32 bits .* expected 8 or 16"):
        decode(data)
