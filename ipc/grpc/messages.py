"""ModelInferRequest bytes → Request, Answer → ModelInferResponse bytes, with one copy of each tensor at most.

protobuf would copy raw tensors twice on the way in and twice on the way out. So `raw_input_contents` is cut out of the
serialised message by hand, as views, and only the rest is parsed by protobuf; on the way out `raw_output_contents` is
appended by hand. What one client asks again and again differs in its tensors and perhaps its id: what protobuf made of
the rest is kept (`RequestReader`), and so is the part of an answer that does not change (`_skeleton`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

from google.protobuf.message import DecodeError

from taktd.ipc.grpc import inference_pb2 as pb
from taktd.ipc.grpc.contents import raw_from_contents
from taktd.ipc.inference import (
    DTYPE_BITS,
    KEPT_MAX,
    Answer,
    KnownRequests,
    Outcome,
    Raw,
    Refusal,
    Request,
    Tensor,
    apply_parameters,
    size_bytes,
)

TENSORS_MAX: Final = 128
RANK_MAX: Final = 32
PARAMETERS_MAX: Final = 64
_ID_TAG: Final = 3 << 3 | 2
_RAW_INPUT_TAG: Final = 7 << 3 | 2
_RAW_OUTPUT_TAG: Final = bytes([6 << 3 | 2])
_STREAM_RESPONSE_TAG: Final = bytes([2 << 3 | 2])
_VARINT_BYTES_MAX: Final = 10
_FIXED: Final = {1: 8, 5: 4}  # wire type → bytes


class _Malformed(Exception):
    """Not a protobuf message."""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends)."""
    value = shift = 0
    for _ in range(_VARINT_BYTES_MAX):
        if at >= len(data):
            raise _Malformed
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _Malformed


def split(data: bytes) -> tuple[bytes, bytes, list[memoryview]]:
    """(the message without id and raw_input_contents, the id, views of the latter). Raises Refusal: no protobuf."""
    view = memoryview(data)
    kept: list[memoryview] = []
    raw: list[memoryview] = []
    request_id = b""
    end = len(data)
    at = kept_from = 0
    try:
        while at < end:
            start = at
            tag = data[at]
            if tag < 0x80:
                at += 1
            else:
                tag, at = _varint(data, at)
            kind = tag & 7
            if kind == 2:
                size, at = _varint(data, at)
                if size > end - at:
                    raise _Malformed
                if tag in (_RAW_INPUT_TAG, _ID_TAG):
                    kept.append(view[kept_from:start])
                    kept_from = at + size
                    if tag == _ID_TAG:
                        request_id = data[at:kept_from]
                    elif len(raw) < TENSORS_MAX:
                        raw.append(view[at:kept_from])
                    else:
                        raise Refusal(Outcome.INVALID, f"more than {TENSORS_MAX} raw_input_contents")
                at += size
            elif kind == 0:
                _, at = _varint(data, at)
            elif kind in _FIXED:
                at += _FIXED[kind]
            else:
                raise _Malformed
        if at != end:
            raise _Malformed
    except _Malformed:
        raise _not_a_request() from None
    if not kept:
        return data, request_id, raw
    kept.append(view[kept_from:])
    return b"".join(kept), request_id, raw


def _not_a_request() -> Refusal:
    return Refusal(Outcome.INVALID, "the message is not a ModelInferRequest: it can't be parsed as protobuf")


class RequestReader:
    """Reads requests; one that is like an earlier one but for its tensors and its id is not parsed anew."""

    def __init__(self) -> None:
        self._known = KnownRequests()

    def read(self, data: bytes, arrival_ns: int) -> Request:
        """As `request_from`."""
        head, request_id, raw = split(data)
        request = self._known.get(head, raw, arrival_ns)
        if request is None:
            request = _parsed(head, request_id, raw, 0)
            if raw:
                self._known.keep(head, request)
            request.arrive(arrival_ns)
        elif request_id:
            request.id = _text(request_id)
        return request


def request_from(data: bytes, arrival_ns: int) -> Request:
    """The request in a serialised ModelInferRequest; tensors are views of `data`. Raises Refusal."""
    return _parsed(*split(data), arrival_ns)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _not_a_request() from None


def _parsed(head: bytes, request_id: bytes, raw: list[memoryview], arrival_ns: int) -> Request:
    try:
        message = pb.ModelInferRequest.FromString(head)
    except DecodeError:
        raise _not_a_request() from None
    if len(message.inputs) > TENSORS_MAX or len(message.outputs) > TENSORS_MAX:
        found = f"{len(message.inputs)} inputs and {len(message.outputs)} outputs"
        raise Refusal(Outcome.INVALID, f"{found}; at most {TENSORS_MAX} of each are allowed")
    if raw and len(raw) != len(message.inputs):
        text = f"found {len(raw)} raw_input_contents for {len(message.inputs)} inputs; one for each is expected"
        raise Refusal(Outcome.INVALID, text)
    inputs = [_input(tensor, raw[i] if raw else None) for i, tensor in enumerate(message.inputs)]
    wanted = [_wanted(output) for output in message.outputs]
    request = Request(message.model_name, message.model_version, _text(request_id), inputs, wanted, arrival_ns)
    if message.parameters:
        if len(message.parameters) > PARAMETERS_MAX:
            count = len(message.parameters)
            raise Refusal(Outcome.INVALID, f"found {count} parameters; at most {PARAMETERS_MAX} are allowed")
        apply_parameters(request, {name: _value(given) for name, given in message.parameters.items()})
    return request


def _value(parameter: pb.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


def _input(tensor: pb.ModelInferRequest.InferInputTensor, raw: memoryview | None) -> Tensor:
    if tensor.parameters:
        _refuse_shared_memory(tensor.name, tensor.parameters)
    shape = tuple(tensor.shape)
    if len(shape) > RANK_MAX or any(d < 0 for d in shape):
        found = f"{list(shape[:RANK_MAX])}{'…' if len(shape) > RANK_MAX else ''}"
        text = (
            f'input "{tensor.name[:96]}": found shape {found}; at most {RANK_MAX} dimensions of 0 or more are allowed'
        )
        raise Refusal(Outcome.INVALID, text)
    data: Raw
    if raw is None:
        data = raw_from_contents(tensor)
    else:
        if tensor.HasField("contents"):
            text = f'input "{tensor.name[:96]}" has contents and raw_input_contents; one of them is expected'
            raise Refusal(Outcome.INVALID, text)
        data = raw
    return Tensor(tensor.name, tensor.datatype, shape, data)


def _wanted(output: pb.ModelInferRequest.InferRequestedOutputTensor) -> str:
    if output.parameters:
        _refuse_shared_memory(output.name, output.parameters)
        if "classification" in output.parameters and _value(output.parameters["classification"]):
            text = f'output "{output.name[:96]}": classification is not there; sort the numbers in the client'
            raise Refusal(Outcome.UNSUPPORTED, text)
    return output.name


def _refuse_shared_memory(name: str, parameters: Iterable[str]) -> None:
    if any(parameter.startswith("shared_memory_") for parameter in parameters):
        raise Refusal(
            Outcome.UNSUPPORTED,
            f'tensor "{name[:96]}": shared memory by name is not there; a program on this machine attaches a lane '
            "(taktd.ipc.connect, takt.h), which needs no copy at all",
        )


# ---- answers ----


def encode(answer: Answer, request_id: str) -> bytes:
    """The serialised ModelInferResponse; copies each tensor once."""
    return b"".join(_pieces(answer, request_id))


def encode_in_stream(answer: Answer, request_id: str) -> bytes:
    """The same inside a ModelStreamInferResponse."""
    pieces = _pieces(answer, request_id)
    size = sum(piece.nbytes if isinstance(piece, memoryview) else len(piece) for piece in pieces)
    return b"".join([_STREAM_RESPONSE_TAG, _packed(size), *pieces])


def _pieces(answer: Answer, request_id: str) -> list[Raw]:
    outputs = answer.outputs
    shapes = tuple([(tensor.name, tensor.dtype, tensor.shape) for tensor in outputs])
    head, tags = _skeleton(answer.model.name, answer.model.version, answer.path, answer.cause, answer.late, shapes)
    pieces: list[Raw] = [
        head, _counted(b"takt_queued_us", answer.queued_ns // 1000), _counted(b"takt_run_us", answer.run_ns // 1000)
    ]  # fmt: skip
    if request_id:
        encoded = request_id.encode()
        pieces += [bytes((_ID_TAG,)) + _packed(len(encoded)), encoded]
    for tag, tensor in zip(tags, outputs, strict=True):
        pieces += [tag, tensor.data]
    return pieces


@lru_cache(KEPT_MAX)
def _skeleton(
    model: str, version: str, path: str, cause: str, late: bool, outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
) -> tuple[bytes, list[bytes]]:
    """What answers of one model have in common: (the message without times, id and tensors, what precedes each tensor).

    The fields of a protobuf message may come in any order.
    """
    message = pb.ModelInferResponse(model_name=model, model_version=version)
    message.parameters["takt_path"].string_param = path
    message.parameters["takt_cause"].string_param = cause
    if late:
        message.parameters["takt_late"].bool_param = True
    tags = []
    for name, dtype, shape in outputs:
        message.outputs.add(name=name, datatype=dtype, shape=shape)
        tags.append(_RAW_OUTPUT_TAG + _packed(size_bytes(DTYPE_BITS[dtype], shape)))
    return bytes(message.SerializeToString()), tags


def _counted(name: bytes, value: int) -> bytes:
    """An entry of `parameters`: a name of less than 100 bytes, int64_param."""
    number = _packed(value)
    size = len(name) + len(number)
    # entry {1: name, 2: parameter {2: number}}
    return b"".join((
        bytes((4 << 3 | 2, size + 5, 1 << 3 | 2, len(name))), name,
        bytes((2 << 3 | 2, len(number) + 1, 2 << 3)), number,
    ))  # fmt: skip


def _packed(value: int) -> bytes:
    """A varint."""
    packed = bytearray()
    while value > 0x7F:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)
    return bytes(packed)


def stream_refusal(refusal: Refusal, request_id: str, model: str) -> bytes:
    """What a stream says instead of an answer: the sentence, and the status where programs look for it."""
    message = pb.ModelStreamInferResponse(error_message=f"[{refusal.outcome.code}] {refusal}")
    message.infer_response.id = request_id
    message.infer_response.model_name = model
    parameters = message.infer_response.parameters
    parameters["takt_status"].string_param = refusal.outcome.status
    parameters["takt_code"].string_param = refusal.outcome.code
    parameters["takt_cause"].string_param = refusal.cause
    return bytes(message.SerializeToString())
