"""The bytes of an image's file to pixels, by Pillow; in a worker, as files come from strangers.

An image is turned as its EXIF data says, transparency becomes white, and sixteen bits of grey become eight. An
animation's first frame is the image, as in vLLM. The header is checked before anything is decoded.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np

from mllm_compile.media.limits import MAX_PIXELS

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats that need no other program, and whose readers are fuzzed by many: no EPS, PSD, PDF.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_BEGINNINGS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_NAMES = "PNG, JPEG, WebP, GIF, BMP, TIFF or PPM"


class Refused(Exception):
    """The reason why there are no pixels, in words that follow the image's name."""


def decode(data: bytes) -> np.ndarray:
    """Pixels [height, width, 3] uint8 of a file.

    Raises:
        Refused: it is no image, a broken one, or too large.
    """
    from PIL import Image, UnidentifiedImageError

    Image.init()
    Image.MAX_IMAGE_PIXELS = None  # checked here, by one bound
    try:
        with warnings.catch_warnings(action="ignore"):  # about metadata
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        if data.startswith(_BEGINNINGS):
            raise Refused(
                "is broken: it begins as an image does, but its header is cut off, or says that it has no pixel. Save "
                "it again"
            ) from None
        raise Refused(
            f"is in no format that can be read; expected a file in {_NAMES}. It begins {data[:8]!r}"
        ) from None
    except (OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise Refused(f"has a broken header ({_reason(error)}). Save it again") from None
    width, height = image.size
    if width < 1 or height < 1:
        raise Refused(f"is {width} × {height}, without a pixel. Give another image")
    if width * height > MAX_PIXELS:
        raise Refused(
            f"is {width:,} × {height:,}, {width * height:,} pixels by its header; expected at most {MAX_PIXELS:,}. "
            "Scale it down"
        )
    try:
        with warnings.catch_warnings(action="ignore"):
            return rgb_of(image)
    except MemoryError:
        raise
    except Refused:
        raise
    except Exception as error:  # readers of formats raise whatever a broken file leads them to
        raise Refused(f"is broken or cut off: its pixels cannot be read ({_reason(error)}). Save it again") from None


def rgb_of(image: Image) -> np.ndarray:
    """Pixels [height, width, 3] uint8 of a PIL image, whose file is read if it was not yet.

    Raises:
        Refused: its mode has no meaning in eight bits.
    """
    from PIL import Image as Images
    from PIL import ImageOps

    image.load()
    if image.mode in ("I", "F"):
        raise Refused(f"has pixels of 32 bits (mode {image.mode}); expected 8 or 16. Save it with 8")
    if image.mode.startswith("I;16"):
        orientation = image.getexif()
        eight = Images.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
        eight.info["exif"] = orientation.tobytes()
        image = eight
    image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Images.new("RGBA", image.size, (255, 255, 255, 255))
        image = Images.alpha_composite(white, image)
    return np.array(image.convert("RGB"))


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
