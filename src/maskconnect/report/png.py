"""A picture as a PNG in a data URL, without an image library."""

from __future__ import annotations

import base64
import struct
import zlib

from torch import Tensor


def png(picture_CHW: Tensor) -> bytes:
    """Bytes of 1 (gray) or 3 (RGB) channels as a PNG file; of any other number of channels, only the first."""
    color = picture_CHW.shape[0] == 3
    shown = picture_CHW if color else picture_CHW[:1]
    height, width = shown.shape[1:]
    rows = shown.permute(1, 2, 0).contiguous().numpy()
    raw = b"".join(b"\0" + row.tobytes() for row in rows)  # 0: the row has no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if color else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, chunks))


def _chunk(chunk: tuple[bytes, bytes]) -> bytes:
    kind, content = chunk
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def data_address(picture_CHW: Tensor) -> str:
    """The picture as the `src` of an image."""
    return f"data:image/png;base64,{base64.b64encode(png(picture_CHW)).decode()}"
