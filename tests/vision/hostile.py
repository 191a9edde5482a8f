"""Image files that must be refused: truncated, huge, of other types, or damaged."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from kvant.vision.image_file import MAX_FILE_BYTES
from vision.tiny import encode_image, make_image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9"/></svg>'


def list_hostile_files() -> list[tuple[str, bytes]]:
    """Return names and contents of files that no image processor should see."""
    return [*_list_truncated(), *_list_huge(), *_list_other_types(), *_list_damaged()]


def _list_truncated() -> Iterator[tuple[str, bytes]]:
    for name in FORMATS:
        file = encode_image(make_image(1, 200, 150), name)
        for share in (0.02, 0.1, 0.3, 0.5, 0.8):
            yield f"{name} cut to {share:.0%}", file[: max(5, int(share * len(file)))]


def _list_huge() -> Iterator[tuple[str, bytes]]:
    for side in (6001, 20_000, 65_535, (1 << 31) - 1):
        yield f"PNG of {side} pixels a side", make_png(side, side, b"")
    yield "PNG of one long row", make_png((1 << 31) - 1, 1, b"")
    yield "PNG whose pixels inflate", make_png(7000, 7000, zlib.compress(bytes(10 << 20), 9))
    jpeg = bytearray(encode_image(make_image(1), "JPEG"))
    frame = next(i for i in range(len(jpeg)) if jpeg[i] == 0xFF and jpeg[i + 1] in (0xC0, 0xC2))
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65_535, 65_535)
    yield "JPEG of 65535 pixels a side", bytes(jpeg)
    gif = bytearray(encode_image(make_image(1), "GIF"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    yield "GIF of 65535 pixels a side", bytes(gif)
    yield "GIF that is cleared to a huge screen", make_gif((13_000, 13_000), (1, 1), disposal=2)
    yield "GIF whose frame is larger than its screen", make_gif((1, 1), (13_000, 13_000))
    for kind, payload in (
        (b"VP8X", bytes(4) + b"\xff\x3f\x00" + b"\xff\x3f\x00"),
        (b"VP8L", b"\x2f" + struct.pack("<I", 0x3FFF | 0x3FFF << 14) + bytes(8)),
        (b"VP8 ", b"\x00\x00\x00\x9d\x01\x2a" + struct.pack("<HH", 0x3FFF, 0x3FFF) + bytes(8)),
    ):
        yield f"WebP of 16384 pixels a side, {kind!r}", make_webp(kind, payload)
    yield "file over the limit of bytes", bytes(MAX_FILE_BYTES + 1)


def _list_other_types() -> Iterator[tuple[str, bytes]]:
    image = make_image(1)
    for name in ("BMP", "TIFF", "ICO", "PPM", "PCX", "TGA"):
        yield name, encode_image(image, name)
    yield "SVG", SVG
    yield "SVG with an XML header", b'<?xml version="1.0"?>' + SVG
    yield "HTML", b"<!doctype html><img src='http://example.com/a.png'>"
    yield "PDF", b"%PDF-1.7\n1 0 obj\n"
    yield "EPS", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    yield "zip", b"PK\x03\x04" + bytes(60)
    yield "gzip", b"\x1f\x8b\x08" + bytes(60)
    yield "ELF", b"\x7fELF" + bytes(60)
    yield "text", b"What is in this image?"
    yield "zeros", bytes(1000)
    yield "nothing", b""


def _list_damaged() -> Iterator[tuple[str, bytes]]:
    yield "PNG of 0 x 0", make_png(0, 0, zlib.compress(b""))
    yield "PNG of 0 x 9", make_png(0, 9, zlib.compress(bytes(9)))
    yield "PNG without pixels", make_png(9, 9, b"")
    yield "PNG whose pixels are no zlib stream", make_png(9, 9, b"pixels")
    yield "PNG of color type 9", make_png(9, 9, zlib.compress(bytes(400)), color_type=9)
    png = encode_image(make_image(1))
    yield "PNG with a wrong checksum", png[:29] + bytes(4) + png[33:]
    yield "PNG header alone", png[:8]
    text = b"Comment\0\0" + zlib.compress(bytes(80 << 20), 9)
    yield "PNG whose text inflates", png[:33] + make_chunk(b"zTXt", text) + png[33:]
    profile = b"a\0\0" + zlib.compress(bytes(80 << 20), 9)
    yield "PNG whose profile inflates", png[:33] + make_chunk(b"iCCP", profile) + png[33:50]
    yield "JPEG marker alone", b"\xff\xd8\xff"
    yield "JPEG without a frame", b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" + bytes(40) + b"\xff\xd9"
    yield "GIF without a frame", b"GIF89a" + struct.pack("<HH", 9, 9) + b"\x00\x00\x00;"
    yield "GIF of 0 x 0", b"GIF89a" + bytes(7) + b";"
    yield "RIFF of sound", b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(40)
    yield "WebP without a payload", make_webp(b"VP8L", b"")


def make_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def make_png(width: int, height: int, pixels: bytes, color_type: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    chunks = make_chunk(b"IHDR", header) + make_chunk(b"IDAT", pixels) + make_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def make_gif(screen: tuple[int, int], frame: tuple[int, int], disposal: int = 0) -> bytes:
    control = b"!\xf9\x04" + bytes([disposal << 2, 0, 0, 0, 0])
    comment = b"!\xfe\x03abc\0"
    image = b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02D\x01\0"
    header = b"GIF89a" + struct.pack("<HH", *screen) + b"\x80\0\0" + bytes(6)
    return header + comment + control + image + b";"


def make_webp(kind: bytes, payload: bytes) -> bytes:
    chunk = kind + struct.pack("<I", len(payload)) + payload
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk
