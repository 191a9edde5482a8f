"""Read image files that clients send: PNG, JPEG, WebP, and the first frame of a GIF.

A file is refused by its size and by the dimensions in its header, before any pixel is decoded.
Decoding is left to Pillow. Transparent images lie on white; 16-bit ones are scaled to 8 bits.
"""

from __future__ import annotations

import base64
import binascii
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from kvant.errors import PromptError
from kvant.platform.sizes import format_size

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGES = 64  # per prompt
MAX_FILE_BYTES = 20 << 20
MAX_PIXELS = 36_000_000  # of an image
MAX_PROMPT_PIXELS = 144_000_000  # of all images of a prompt
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
FORMAT_NAMES = "PNG, JPEG, WebP or GIF"
MISSING_PILLOW = "images need Pillow: pip install 'kvant[vision]'"
DATA_URL_PREFIX = "data:image/"

ImageSource = Any  # the bytes of a file, a data URL, or an image of Pillow


def read_image(source: ImageSource, max_pixels: int = MAX_PIXELS) -> Image:
    """Return an image in RGB, upright; raise PromptError if it is invalid or exceeds a limit."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise PromptError(MISSING_PILLOW) from error
    if isinstance(source, str):
        source = read_data_url(source)
    try:
        if isinstance(source, Image.Image):
            _check_dimensions(source.size, max_pixels)
            return _convert(source)
        _check_file(source)
        if (size := _read_header(source)) is not None:  # Pillow allocates when it opens these
            _check_dimensions(size, max_pixels)
        with Image.open(BytesIO(source), formats=FORMATS) as image:
            _check_dimensions(image.size, max_pixels)
            return _convert(image)
    except PromptError:
        raise
    except Image.DecompressionBombError:
        raise _make_size_error("more", max_pixels) from None
    except UnidentifiedImageError:
        raise PromptError(
            f"an image file that is not {FORMAT_NAMES}, or is corrupt: convert it to one of these"
        ) from None
    except Exception as error:  # decoders may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise PromptError(
            f"an image file that cannot be decoded ({reason}): send a whole, valid file"
        ) from None


def read_data_url(url: str) -> bytes:
    """Return the bytes of a data URL with an image in base64; no other URL is fetched."""
    if not url.startswith(DATA_URL_PREFIX):
        raise PromptError(
            f"an image URL that begins with {url[:16]!r}: only data URLs are read, such as "
            "data:image/png;base64,...; no URL is fetched"
        )
    header, separator, data = url.partition(",")
    if not separator or not header.endswith(";base64"):
        raise PromptError("a data URL of an image needs base64: data:image/png;base64,...")
    if len(data) * 3 // 4 > MAX_FILE_BYTES + 2:
        raise _make_file_size_error(len(data) * 3 // 4)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError(
            f"an image that is not valid base64 ({error}): encode the bytes of the file"
        ) from None


def _convert(image: Image) -> Image:
    """Return an image upright and in RGB."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # Pillow would clip all values above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _check_file(source: Any) -> None:
    if not isinstance(source, bytes):
        raise PromptError(
            f"an image of type {type(source).__name__}: give the bytes of a file, a data URL, or "
            "an image of Pillow"
        )
    if len(source) > MAX_FILE_BYTES:
        raise _make_file_size_error(len(source))


def _make_file_size_error(nbytes: int) -> PromptError:
    return PromptError(
        f"an image file of {format_size(nbytes)}: at most {format_size(MAX_FILE_BYTES)} are "
        "allowed; scale it down"
    )


def _check_dimensions(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise _make_size_error(f"{width} x {height}", max_pixels)
    if not (width and height):
        raise PromptError(f"an image of {width} x {height} pixels: it is empty, leave it out")


def _make_size_error(pixels: str, max_pixels: int) -> PromptError:
    rest = "" if max_pixels == MAX_PIXELS else f", of {MAX_PROMPT_PIXELS:,} for all of a prompt"
    return PromptError(
        f"an image of {pixels} pixels: at most {max_pixels:,} are allowed{rest}; scale it down"
    )


def _read_header(file: bytes) -> tuple[int, int] | None:
    """Return the dimensions in the header of a WebP or GIF file; None for other files."""
    if file[:4] == b"RIFF" and file[8:12] == b"WEBP" and len(file) >= 30:
        return _read_webp_header(file)
    if file[:4] == b"GIF8" and len(file) >= 13:
        return _read_gif_header(file)
    return None


def _read_webp_header(file: bytes) -> tuple[int, int]:
    """Return the size of the canvas.

    byte   0      4      8      12     16     20
           RIFF | size | WEBP | kind | size | payload
    kind   VP8X  width - 1 and height - 1, 24 bits each, at payload + 4
           VP8L  width - 1 and height - 1, 14 bits each, at payload + 1
           VP8   width and height, 14 bits each of two 16-bit words, at payload + 6
    """
    kind = file[12:16]
    if kind == b"VP8X":
        return (
            1 + int.from_bytes(file[24:27], "little"),
            1 + int.from_bytes(file[27:30], "little"),
        )
    if kind == b"VP8L":
        bits = int.from_bytes(file[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    words = int.from_bytes(file[26:28], "little"), int.from_bytes(file[28:30], "little")
    return words[0] & 0x3FFF, words[1] & 0x3FFF


def _read_gif_header(file: bytes) -> tuple[int, int]:
    """Return the size that holds the screen and the first frame.

    byte   0        6       8        10      11           13
           GIF89a | width | height | flags | background | colors, blocks
    block  "!" label, sub-blocks of a length and data, 0
           "," left, top, width and height of a frame
    """

    def read_word(position: int) -> int:
        return int.from_bytes(file[position : position + 2], "little")

    width, height, position = read_word(6), read_word(8), 13
    if file[10] & 0x80:
        position += 3 << ((file[10] & 7) + 1)
    while file[position : position + 1] == b"!":
        position += 2
        while position < len(file) and file[position]:
            position += 1 + file[position]
        position += 1
    if file[position : position + 1] == b",":
        width = max(width, read_word(position + 1) + read_word(position + 5))
        height = max(height, read_word(position + 3) + read_word(position + 7))
    return width, height
