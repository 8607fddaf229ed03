"""The messages on lanes.sock, byte by byte as docs/wire.md has them: packing, unpacking, nothing else.

One SOCK_SEQPACKET message each: a 16-byte header and a body of fixed fields, with JSON or text behind them where noted.
Called by lane_door.py. A message of a client is untrusted: everything here either returns checked values or raises
Malformed.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

WIRE_VERSION: Final = 1
MESSAGE_BYTES_MAX: Final = 8192
MAGIC: Final = 0x31544B54  # "TKT1" read as little-endian u32

HEADER: Final = struct.Struct("<IHHIi")  # magic, type, reserved, request_id, code
HELLO: Final = struct.Struct("<II64s")  # min_version, max_version, client
WELCOME: Final = struct.Struct("<II64s")  # version, pid, node
ATTACH: Final = struct.Struct("<II64s")  # kind, wait_mode, name
ATTACHED: Final = struct.Struct("<QQQQ")  # lane_id, total_size, memfd_bytes, token
CLAIM: Final = struct.Struct("<QQ")  # lane_id, token
LANE_ID: Final = struct.Struct("<Q")
LIST: Final = struct.Struct("<II")  # kind, offset
LISTING: Final = struct.Struct("<II")  # total, next_offset
assert HEADER.size == 16
assert HELLO.size == WELCOME.size == ATTACH.size == 72


class Type(IntEnum):
    HELLO = 1
    WELCOME = 2
    ATTACH = 3
    ATTACHED = 4
    DETACH = 5
    DETACHED = 6
    LIST = 7
    LISTING = 8
    ERROR = 9
    LANE_ENDED = 10
    CLAIM = 11
    CLAIMED = 12


class Kind(IntEnum):
    """What is attached or listed."""

    ANY = 0
    LOOP = 1
    MODEL = 2


class Malformed(Exception):
    """A message that is not of this protocol; the connection ends."""


@dataclass(frozen=True)
class Request:
    """One message of a client. fields: what the body's struct holds, names as str."""

    type: Type
    request_id: int
    fields: tuple[Any, ...]


_BODIES: Final = {Type.HELLO: HELLO, Type.ATTACH: ATTACH, Type.DETACH: LANE_ID, Type.LIST: LIST, Type.CLAIM: CLAIM}


def _text(raw: bytes) -> str:
    name, _, rest = raw.partition(b"\0")
    if len(name) == len(raw) or rest.strip(b"\0"):
        raise Malformed("a name that is not NUL-terminated, or has bytes behind the NUL")
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise Malformed("a name that is not UTF-8") from None


def unpack(data: bytes) -> Request:
    """Check and take apart a client's message."""
    if len(data) < HEADER.size:
        raise Malformed(f"{len(data)} bytes; a message has at least {HEADER.size}")
    magic, kind, reserved, request_id, _ = HEADER.unpack_from(data)
    if magic != MAGIC or reserved:
        raise Malformed("not a message of taktd's lane protocol")
    body = _BODIES.get(kind)
    if body is None:
        raise Malformed(f"message type {kind}; clients send {', '.join(t.name for t in _BODIES)}")
    if len(data) != HEADER.size + body.size:
        raise Malformed(f"{Type(kind).name} of {len(data)} bytes; it has {HEADER.size + body.size}")
    fields = body.unpack_from(data, HEADER.size)
    return Request(Type(kind), request_id, tuple(_text(f) if isinstance(f, bytes) else f for f in fields))


def _pack(kind: Type, request_id: int, body: bytes, code: int = 0) -> bytes:
    return HEADER.pack(MAGIC, kind, 0, request_id, code) + body


def welcome(request_id: int, pid: int, node: str) -> bytes:
    return _pack(Type.WELCOME, request_id, WELCOME.pack(WIRE_VERSION, pid, node.encode()))


def attached(request_id: int, lane_id: int, total_size: int, token: int, local_answer: bytes = b"") -> bytes:
    """local_answer: what the client answers itself after the deadline, as fallback.local_answer() packs it."""
    return _pack(Type.ATTACHED, request_id, ATTACHED.pack(lane_id, total_size, total_size, token) + local_answer)


def claimed(request_id: int, lane_id: int) -> bytes:
    return _pack(Type.CLAIMED, request_id, LANE_ID.pack(lane_id))


def detached(request_id: int) -> bytes:
    return _pack(Type.DETACHED, request_id, b"")


def error(request_id: int, errno: int, text: str) -> bytes:
    """errno positive; text is cut to what fits."""
    body = text.encode()[: MESSAGE_BYTES_MAX - HEADER.size].decode("utf-8", "ignore").encode()
    return _pack(Type.ERROR, request_id, body, -errno)


def lane_ended(lane_id: int, text: str) -> bytes:
    return _pack(Type.LANE_ENDED, 0, LANE_ID.pack(lane_id) + text.encode()[:1024])


def listing(request_id: int, objects: list[dict[str, Any]], offset: int) -> bytes:
    """As many objects from offset on as fit; next_offset is 0 when these were the last."""
    room = MESSAGE_BYTES_MAX - HEADER.size - LISTING.size - 2
    parts: list[str] = []
    index = offset
    while index < len(objects):
        part = json.dumps(objects[index], separators=(",", ":"), ensure_ascii=False)
        size = len(part.encode()) + 1
        if size > room and not parts:
            # One thing with very many tensors: say that it is there, and leave its tensors to the lane's header.
            part = json.dumps({"name": objects[index]["name"]}, separators=(",", ":"), ensure_ascii=False)
            size = len(part.encode()) + 1
        if size > room:
            break
        parts.append(part)
        room -= size
        index += 1
    following = index if index < len(objects) else 0
    body = LISTING.pack(len(objects), following) + ("[" + ",".join(parts) + "]").encode()
    return _pack(Type.LISTING, request_id, body)
