"""Pictures in every mode of docs/tasks.md, one case for each row of its table, written by Pillow or by hand."""

import struct
import zlib

import numpy as np
from PIL import Image

RAMP = np.linspace(0, 1, 12).reshape(3, 4)  # the picture, from black to white
BYTES, WORDS = (np.round(RAMP * top).astype(kind) for top, kind in ((255, np.uint8), (65535, np.uint16)))
FLOATS = RAMP.astype(np.float32)
GREY = Image.fromarray(BYTES)
REFUSED = None


def by_pillow(image, **options):
    return lambda path: image.save(path, **options)


def colour_of_16_bits(path):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + np.repeat(row, 3).astype(">u2").tobytes() for row in WORDS)
    header = struct.pack(">IIBBBBB", 4, 3, 16, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts))


def portable(kind, top, bands=1):
    """A PGM or PPM file with this maximum."""
    numbers = np.repeat(np.round(RAMP * top), bands).astype("u1" if top < 256 else ">u2")
    return lambda path: path.write_bytes(b"%s 4 3 %d\n" % (kind, top) + numbers.tobytes())


def with_tag(array, tag, value):
    """A TIFF file with another value of a tag."""

    def write(path):
        Image.fromarray(array).save(path)
        data = path.read_bytes()
        at = data.index(struct.pack("<HHI", tag, 3, 1)) + 8
        path.write_bytes(data[:at] + struct.pack("<H", value) + data[at + 2 :])

    return write


def turned(array):
    """Stored on its side, with the orientation that says so."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return by_pillow(Image.fromarray(np.ascontiguousarray(np.rot90(array))), exif=exif, quality=100)


def transparent(path):
    image = GREY.convert("RGBA")
    image.putpixel((0, 0), (9, 9, 9, 0))
    image.save(path)


# Row of the table -> cases: suffix, how the file is written, and the largest error of a channel, or that it is refused.
HALF, EXACT, JPEG = 0.5 / 255 + 1e-7, 0.5 / 65535 + 1e-7, 0.02
CASES = {
    "8 bits per channel, grey or RGB": [
        *((suffix, by_pillow(GREY), HALF) for suffix in ("png", "bmp", "pgm", "tif", "tiff")),
        *((suffix, by_pillow(GREY.convert("RGB")), HALF) for suffix in ("png", "bmp", "ppm", "tif")),
        *((suffix, by_pillow(GREY, quality=100), JPEG) for suffix in ("jpg", "jpeg")),
        ("tif", with_tag(255 - BYTES, 262, 0), HALF),  # 0 is white
    ],
    "8-bit palette, CMYK or YCbCr": [
        ("png", by_pillow(GREY.convert("P")), HALF),
        ("jpg", by_pillow(GREY.convert("CMYK"), quality=100), JPEG),
        ("tif", by_pillow(GREY.convert("YCbCr")), JPEG),
    ],
    "1 bit": [("png", by_pillow(Image.fromarray(RAMP > 0.5)), 0.5), ("tif", by_pillow(GREY.convert("1")), 1.0)],
    "16-bit grey PNG or TIFF": [
        *((suffix, by_pillow(Image.fromarray(WORDS)), EXACT) for suffix in ("png", "tif")),
        ("tif", by_pillow(Image.fromarray(WORDS.astype(">u2"))), EXACT),
    ],
    "16-bit RGB PNG": [("png", colour_of_16_bits, 1 / 255)],
    "PGM and PPM": [
        ("pgm", portable(b"P5", 100), 0.5 / 100 + HALF),
        ("pgm", portable(b"P5", 1023), 0.5 / 1023 + EXACT),
        ("pgm", portable(b"P5", 65535), EXACT),
        ("ppm", portable(b"P6", 65535, 3), HALF),
    ],
    "float TIFF from 0 to 1": [("tif", by_pillow(Image.fromarray(FLOATS)), 1e-7)],
    "float TIFF with other values": [
        ("tif", by_pillow(Image.fromarray(values)), REFUSED)
        for values in (FLOATS * 255, FLOATS - 0.5, np.where(RAMP > 0.5, np.float32(np.nan), FLOATS))
    ],
    "32-bit integer TIFF": [("tif", by_pillow(Image.fromarray(WORDS.astype(np.int32))), REFUSED)],
    "12-bit TIFF": [("tif", with_tag(WORDS, 258, 12), REFUSED)],
    "16-bit or float TIFF in which 0 is white": [
        ("tif", with_tag(values, 262, 0), REFUSED) for values in (WORDS, FLOATS)
    ],
    "LAB TIFF": [("tif", by_pillow(Image.frombytes("LAB", (4, 3), bytes(36))), REFUSED)],
    "orientation in EXIF": [
        ("png", turned(BYTES), HALF),
        ("tif", turned(BYTES), HALF),
        ("png", turned(WORDS), EXACT),
        ("jpg", turned(BYTES), JPEG),
    ],
    "opaque alpha channel": [("png", by_pillow(GREY.convert(mode)), HALF) for mode in ("LA", "RGBA")],
    "transparent pixels": [
        ("png", transparent, REFUSED),
        ("png", by_pillow(GREY, transparency=0), REFUSED),
        ("png", by_pillow(Image.fromarray(WORDS), transparency=0), REFUSED),
    ],
    "several pages or frames": [
        ("tif", by_pillow(GREY, save_all=True, append_images=[GREY]), REFUSED),
        ("png", by_pillow(GREY, save_all=True, append_images=[Image.fromarray(255 - BYTES)]), REFUSED),
        ("jpg", by_pillow(GREY.convert("RGB"), format="MPO", save_all=True, append_images=[GREY], quality=100), JPEG),
    ],
    "another format, whatever its name": [
        ("png", by_pillow(GREY, format=form), REFUSED) for form in ("GIF", "WEBP", "EPS")
    ],
}
