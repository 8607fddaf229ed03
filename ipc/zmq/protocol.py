"""Frames of requests and replies: a MessagePack header, then one frame for each tensor. docs/zmq.md has the format.

What a peer sends is judged here: sizes first, then types, then meaning. Nothing is converted and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgpack

from taktd.ipc.inference import (
    KEPT_BYTES_MAX,
    KEPT_MAX,
    Answer,
    KnownRequests,
    Model,
    Outcome,
    Raw,
    Refusal,
    Request,
    Tensor,
    apply_parameters,
)

VERSION: Final = 1
HEADER_BYTES_MAX: Final = 64 << 10
TENSORS_MAX: Final = 128
RANK_MAX: Final = 32
PARAMETERS_MAX: Final = 64
ID_BYTES_MAX: Final = 128
OPERATIONS: Final = ("infer", "models", "ready")

Header = dict[str, Any]


def unpack(data: Raw) -> Header:
    """A header as a map. Raises Refusal."""
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > HEADER_BYTES_MAX:
        raise Refusal(Outcome.INVALID, f"the header has {size} bytes; at most {HEADER_BYTES_MAX} are allowed")
    try:
        header = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        raise Refusal(Outcome.INVALID, "the first frame is no MessagePack map: see docs/zmq.md") from None
    if not isinstance(header, dict):
        raise Refusal(Outcome.INVALID, f"the first frame is a {type(header).__name__}; a MessagePack map is expected")
    return header


def pack(header: Header) -> bytes:
    return bytes(msgpack.packb(header, use_bin_type=True))


def id_of(header: Header) -> Any:
    """What replies repeat: a number, text or bytes of the client's choice; None where it is none of these."""
    value = header.get("id")
    if isinstance(value, (str, bytes)) and len(value) > ID_BYTES_MAX:
        return None
    return value if isinstance(value, (int, str, bytes)) else None


def operation_of(header: Header) -> str:
    """Raises Refusal for another version or an unknown operation."""
    version = header.get("v")
    if version != VERSION:
        raise Refusal(Outcome.INVALID, f"version {str(version)[:16]!r} of the format; this taktd speaks {VERSION}")
    operation = header.get("op", "infer")
    if operation not in OPERATIONS:
        raise Refusal(Outcome.INVALID, f"operation {str(operation)[:32]!r}; there are {', '.join(OPERATIONS)}")
    return str(operation)


def _text(header: Header, key: str, required: bool = False) -> str:
    value = header.get(key, None if required else "")
    if not isinstance(value, str):
        raise Refusal(Outcome.INVALID, f'"{key}" is {_kind(value)}; text is expected')
    return value


def _list(header: Header, key: str) -> Sequence[Any]:
    value = header.get(key, ())
    if not isinstance(value, (list, tuple)) or len(value) > TENSORS_MAX:
        raise Refusal(Outcome.INVALID, f'"{key}" is {_kind(value)}; a list of at most {TENSORS_MAX} is expected')
    return value


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def request_from(header: Header, tensors: Sequence[memoryview], arrival_ns: int) -> Request:
    """The request in the frames; its tensors are the frames' memory. Raises Refusal."""
    described = _list(header, "inputs")
    if len(described) != len(tensors):
        text = f"{len(tensors)} tensor frames for {len(described)} inputs; one for each is expected"
        raise Refusal(Outcome.INVALID, text)
    inputs = [_tensor(one, data) for one, data in zip(described, tensors, strict=True)]
    wanted = _list(header, "outputs")
    if not all(isinstance(name, str) for name in wanted):
        raise Refusal(Outcome.INVALID, '"outputs" has something that is no name; a list of text is expected')
    request = Request(
        _text(header, "model", required=True), _text(header, "version"), "", inputs, list(wanted), arrival_ns
    )
    parameters = header.get("parameters", {})
    if not isinstance(parameters, dict) or len(parameters) > PARAMETERS_MAX:
        text = f'"parameters" is {_kind(parameters)}; a map of at most {PARAMETERS_MAX} is expected'
        raise Refusal(Outcome.INVALID, text)
    if not all(isinstance(name, str) for name in parameters):
        raise Refusal(Outcome.INVALID, '"parameters" has a key that is no text')
    apply_parameters(request, parameters)
    return request


def _tensor(described: Any, data: memoryview) -> Tensor:
    if not isinstance(described, dict):
        raise Refusal(Outcome.INVALID, f'an entry of "inputs" is {_kind(described)}; a map is expected')
    name, dtype = _text(described, "name", required=True), _text(described, "datatype", required=True)
    shape = described.get("shape")
    if (
        not isinstance(shape, (list, tuple))
        or len(shape) > RANK_MAX
        or not all(isinstance(d, int) and not isinstance(d, bool) and d >= 0 for d in shape)
    ):
        text = f'input "{name[:96]}": the shape is not a list of at most {RANK_MAX} numbers of 0 or more'
        raise Refusal(Outcome.INVALID, text)
    return Tensor(name, dtype, tuple(shape), data)


class RequestReader:
    """Reads requests for inference; one whose header is like an earlier one's but for its id is not parsed anew.

    That takes a header that begins with `v` and `id`, as docs/zmq.md recommends; others are read as well.
    """

    def __init__(self) -> None:
        self._known = KnownRequests()

    def remembered(self, head: Raw, tensors: Sequence[memoryview], arrival_ns: int) -> tuple[Any, Request] | None:
        """(id, the request) where one like it was read before."""
        cut = _without_id(head)
        if cut is None:
            return None
        request = self._known.get(cut[1], tensors, arrival_ns)
        return None if request is None else (cut[0], request)

    def read(self, head: Raw, header: Header, tensors: Sequence[memoryview], arrival_ns: int) -> Request:
        """As `request_from`; header is the content of head."""
        request = request_from(header, tensors, 0)
        cut = _without_id(head)
        if cut is not None and len(header) == head[0] & 0x0F:  # no key twice
            self._known.keep(cut[1], request)
        request.arrive(arrival_ns)
        return request


_BEGINNING: Final = b"\xa1v" + bytes([VERSION]) + b"\xa2id"
_ID_AT: Final = 1 + len(_BEGINNING)
_NUMBERS: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}  # MessagePack's unsigned integers: their bytes


def _without_id(header: Raw) -> tuple[Any, bytes] | None:
    """(id, the header without it); None where it is not a small map that begins with v and an id that is a number."""
    if len(header) > KEPT_BYTES_MAX:
        return None
    head = bytes(header)
    if len(head) <= _ID_AT or head[0] & 0xF0 != 0x80 or head[1:_ID_AT] != _BEGINNING:
        return None
    first, end = head[_ID_AT], _ID_AT + 1
    if first < 0x80:
        return first, head[:1] + head[end:]
    size = _NUMBERS.get(first, 0)
    if not size or len(head) < end + size:
        return None
    return int.from_bytes(head[end : end + size], "big"), head[:1] + head[end + size :]


# ---- replies ----


def reply(answer: Answer, request_id: Any) -> list[Raw]:
    """Header and tensors; each tensor is copied once, since its slot is reused."""
    outputs = answer.outputs
    shapes = tuple([(tensor.name, tensor.dtype, tensor.shape) for tensor in outputs])
    pack_one = msgpack.packb
    header = b"".join((
        _reply_start(answer.model.name, answer.model.version, answer.path, answer.cause, answer.late, shapes),
        pack_one(answer.queued_ns // 1000), _RUN_US, pack_one(answer.run_ns // 1000), _ID, pack_one(request_id),
    ))  # fmt: skip
    return [header, *(bytes(t.data) for t in outputs)]


_QUEUED_US: Final = bytes(msgpack.packb("takt_queued_us"))
_RUN_US: Final = bytes(msgpack.packb("takt_run_us"))
_ID: Final = bytes(msgpack.packb("id"))


@lru_cache(KEPT_MAX)
def _reply_start(
    model: str, version: str, path: str, cause: str, late: bool, outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
) -> bytes:
    """What replies of one model have in common, up to the value of takt_queued_us."""
    packer = msgpack.Packer(use_bin_type=True, autoreset=False)
    packer.pack_map_header(7)
    about = [{"name": name, "datatype": dtype, "shape": list(shape)} for name, dtype, shape in outputs]
    whole = {"v": VERSION, "status": "ok", "model": model, "version": version, "outputs": about}
    for key, value in whole.items():
        packer.pack(key)
        packer.pack(value)
    packer.pack("parameters")
    packer.pack_map_header(5)
    for key, value in {"takt_path": path, "takt_cause": cause, "takt_late": late}.items():
        packer.pack(key)
        packer.pack(value)
    return bytes(packer.bytes()) + _QUEUED_US


def refusal_reply(refusal: Refusal, request_id: Any) -> list[Raw]:
    """Status of the lanes' closed set, code as in gRPC, and a sentence."""
    header = {
        "v": VERSION, "id": request_id, "status": refusal.outcome.status, "code": refusal.outcome.code,
        "message": str(refusal), "cause": refusal.cause,
    }  # fmt: skip
    return [pack(header)]


def models_reply(models: Sequence[Model], request_id: Any) -> list[Raw]:
    listed = [
        {
            "name": m.name, "version": m.version, "ready": m.ready, "reason": m.reason,
            **{
                side: [{"name": s.name, "datatype": s.dtype, "shape": s.shape} for s in specs]
                for side, specs in (("inputs", m.inputs), ("outputs", m.outputs))
            },
        }
        for m in models
    ]  # fmt: skip
    return [pack({"v": VERSION, "id": request_id, "status": "ok", "models": listed})]


def ready_reply(live: bool, ready: bool, node: str, version: str, request_id: Any) -> list[Raw]:
    header = {
        "v": VERSION, "id": request_id, "status": "ok", "live": live, "ready": ready, "node": node, "taktd": version,
    }  # fmt: skip
    return [pack(header)]
