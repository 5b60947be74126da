"""Frames: a JSON header and raw arrays, length-prefixed; no other encoding is ever read.

    frame    u32 bytes that follow | u32 bytes of header | header (JSON) | arrays, one after the other, little-endian, no padding

Both lengths are bounded; what a header and its arrays mean stands with the messages (`umbp.wire` and others).
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np

from umbp.blob import Arrays, Blob
from umbp.errors import ProtocolError

FRAME_BYTES_MAX = 8 << 20  # 65,536 keys with ids, versions and sums are 3.4 MiB
HEADER_BYTES_MAX = 64 << 10
PREFIX = struct.Struct("<II")

_encoder = msgspec.json.Encoder()


class Message(msgspec.Struct, frozen=True, tag_field="op", forbid_unknown_fields=True):
    """Root of all headers."""


def encode(message: Message, *arrays: Arrays) -> bytes:
    """One frame."""
    header = _encoder.encode(message)
    blobs = [np.ascontiguousarray(array).tobytes() for array in arrays]
    return b"".join([PREFIX.pack(4 + len(header) + sum(map(len, blobs)), len(header)), header, *blobs])


def frame_bytes(prefix: bytes | bytearray | memoryview) -> int:
    """Bytes of the whole frame that starts with these 8. ProtocolError if it is larger than any frame may be."""
    body, header = PREFIX.unpack_from(prefix)
    if body > FRAME_BYTES_MAX or header > HEADER_BYTES_MAX or header + 4 > body:
        raise ProtocolError(f"a frame of {body} bytes with a header of {header} is not allowed")
    return 4 + int(body)


def decode(frame: bytes | bytearray | memoryview, decoder: msgspec.json.Decoder[Any]) -> tuple[Any, Blob]:
    """Header and arrays of a whole frame of the set of messages that this decoder knows."""
    view = memoryview(frame)
    header = PREFIX.unpack_from(view)[1]
    try:
        message = decoder.decode(view[8 : 8 + header])
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a message of this protocol: {error}") from None
    return message, Blob(view[8 + header :])
