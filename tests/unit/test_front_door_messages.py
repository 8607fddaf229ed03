"""What requests become and what answers look like on the wire, with the parts that are kept from one to the next."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest

from taktd.ipc.grpc import inference_pb2 as pb
from taktd.ipc.grpc import messages
from taktd.ipc.inference import KEPT_BYTES_MAX, KEPT_MAX, Answer, Model, Outcome, Refusal, Tensor
from taktd.ipc.zmq import protocol

MODEL = Model("m", "3", "onnx", (), (), dynamic=False)


def answer(us: int = 5, late: bool = False, cause: str = "", rows: int = 1) -> Answer:
    outputs = [
        Tensor("y", "FP32", (rows, 2), memoryview(bytes(range(8 * rows)))), Tensor("z", "INT8", (0,), memoryview(b"")),
    ]  # fmt: skip
    return Answer(MODEL, outputs, "primary", cause, late, us * 1000, 2 * us * 1000)


@pytest.mark.parametrize("us", [0, 1, 127, 128, 16_384, 10**6, 2**40])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("request_id", ["", "7", "é" * 200])
def test_an_answer_over_grpc_is_the_message_that_protobuf_would_make(us: int, late: bool, request_id: str) -> None:
    given = answer(us, late, "blocked" if late else "")
    expected = pb.ModelInferResponse(model_name="m", model_version="3", id=request_id)
    expected.parameters["takt_path"].string_param = "primary"
    expected.parameters["takt_cause"].string_param = given.cause
    expected.parameters["takt_queued_us"].int64_param = us
    expected.parameters["takt_run_us"].int64_param = 2 * us
    if late:
        expected.parameters["takt_late"].bool_param = True
    for tensor in given.outputs:
        expected.outputs.add(name=tensor.name, datatype=tensor.dtype, shape=tensor.shape)
        expected.raw_output_contents.append(bytes(tensor.data))
    assert pb.ModelInferResponse.FromString(messages.encode(given, request_id)) == expected
    streamed = pb.ModelStreamInferResponse.FromString(messages.encode_in_stream(given, request_id))
    assert (streamed.error_message, streamed.infer_response) == ("", expected)


def test_what_is_kept_of_an_answer_is_kept_for_its_shape() -> None:
    for rows in (1, 3, 1, 2):
        reply = pb.ModelInferResponse.FromString(messages.encode(answer(rows=rows), ""))
        assert list(reply.outputs[0].shape) == [rows, 2]
        assert reply.raw_output_contents[0] == bytes(range(8 * rows))


@pytest.mark.parametrize("request_id", [0, 7, 300, 2**40, "seven", b"\0\1", None])
@pytest.mark.parametrize("late", [False, True])
def test_a_reply_over_zeromq_says_everything(request_id: Any, late: bool) -> None:
    head, *tensors = protocol.reply(answer(300, late), request_id)
    assert msgpack.unpackb(head) == {
        "v": 1, "id": request_id, "status": "ok", "model": "m", "version": "3",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, 2]}, {"name": "z", "datatype": "INT8", "shape": [0]},
        ],
        "parameters": {
            "takt_path": "primary", "takt_cause": "", "takt_queued_us": 300, "takt_run_us": 600, "takt_late": late,
        },
    }  # fmt: skip
    assert tensors == [bytes(range(8)), b""]


def grpc_request(**parameters: int) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"1234"])
    made.inputs.add(name="x", datatype="FP32", shape=[1])
    for name, value in parameters.items():
        made.parameters[name].int64_param = value
    return made


def test_a_request_like_an_earlier_one_has_its_own_tensors_id_and_deadline() -> None:
    reader = messages.RequestReader()
    given = grpc_request(timeout=5, takt_max_age_us=9, priority=3)
    for number, raw in enumerate((b"1234", b"5678", b"90ab")):
        given.id, given.raw_input_contents[0] = str(number), raw
        read = reader.read(given.SerializeToString(), 1_000 * number)
        assert (read.id, bytes(read.inputs[0].data)) == (str(number), raw)
        assert (read.deadline_ns, read.max_age_ns, read.priority) == (1_000 * number + 5_000, 9_000, 3)
        assert read == messages.request_from(given.SerializeToString(), 1_000 * number)


def test_one_tensor_more_or_less_is_noticed_in_a_request_like_an_earlier_one() -> None:
    reader = messages.RequestReader()
    given = grpc_request()
    reader.read(given.SerializeToString(), 0)
    given.raw_input_contents.append(b"more")
    with pytest.raises(Refusal, match="found 2 raw_input_contents for 1 inputs"):
        reader.read(given.SerializeToString(), 0)
    del given.raw_input_contents[:]
    assert reader.read(given.SerializeToString(), 0).inputs[0].data == b""


def test_what_readers_keep_is_bounded() -> None:
    grpc_reader, zmq_reader = messages.RequestReader(), protocol.RequestReader()
    for number in range(3 * KEPT_MAX):
        grpc_reader.read(grpc_request(takt_deadline_us=number + 1).SerializeToString(), 0)
        header = {"v": 1, "id": 1, "model": f"m{number}", "inputs": []}
        zmq_reader.read(msgpack.packb(header), header, [], 0)
    assert len(grpc_reader._known) <= KEPT_MAX
    assert len(zmq_reader._known) <= KEPT_MAX


def test_what_is_too_long_to_keep_is_read_anew_each_time() -> None:
    grpc_reader, zmq_reader = messages.RequestReader(), protocol.RequestReader()
    given = grpc_request()
    given.model_name = "m" * KEPT_BYTES_MAX
    header = {"v": 1, "id": 1, "model": given.model_name, "inputs": []}
    for _ in range(2):
        assert grpc_reader.read(given.SerializeToString(), 0).model == given.model_name
        assert zmq_reader.remembered(msgpack.packb(header), [], 0) is None
        assert zmq_reader.read(msgpack.packb(header), header, [], 0).model == given.model_name
    assert len(grpc_reader._known) == len(zmq_reader._known) == 0


def test_a_header_is_remembered_without_its_id_and_only_where_it_begins_as_recommended() -> None:
    reader = protocol.RequestReader()
    tensors = [memoryview(b"1234")]
    body = {"model": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}], "parameters": {"timeout": 7}}
    first = {"v": 1, "id": 5, **body}
    assert reader.remembered(msgpack.packb(first), tensors, 0) is None
    reader.read(msgpack.packb(first), first, tensors, 0)
    for request_id in (0, 127, 128, 70_000, 2**33):
        found = reader.remembered(msgpack.packb({"v": 1, "id": request_id, **body}), tensors, 100)
        assert found is not None
        assert (found[0], found[1].model, found[1].deadline_ns) == (request_id, "m", 7_100)
    for other in ({"id": 5, "v": 1, **body}, {"v": 1, "id": "5", **body}, {"v": 1, "id": 5, **body, "version": "2"}):
        assert reader.remembered(msgpack.packb(other), tensors, 0) is None
    assert reader.remembered(msgpack.packb(first), [*tensors, *tensors], 0) is None


def test_outcomes_have_one_status_and_one_code() -> None:
    assert {o.code for o in Outcome if o.status in ("failed", "lost", "detached")} == {"UNAVAILABLE"}
    assert len({o.value for o in Outcome}) == len(Outcome)


def test_tensors_are_views_of_what_came_and_are_copied_once_into_what_goes() -> None:
    """The lane's slot and the socket's own buffers are the other ends of these two copies."""
    given = grpc_request()
    given.raw_input_contents[0] = bytes(600_000)
    data = given.SerializeToString()
    assert messages.RequestReader().read(data, 0).inputs[0].data.obj is data
    frame = bytearray(600_000)
    header = {"v": 1, "id": 5, "model": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}]}
    read = protocol.RequestReader().read(msgpack.packb(header), header, [memoryview(frame)], 0)
    assert read.inputs[0].data.obj is frame

    slot = memoryview(bytearray(600_000))
    given_back = Answer(MODEL, [Tensor("y", "INT8", (600_000,), slot)], "primary", "", False, 1, 1)
    for encode in (messages.encode, messages.encode_in_stream):
        assert copied_bytes(encode, given_back, "7") < 1_200_000
    assert copied_bytes(protocol.reply, given_back, 7) < 1_200_000


def copied_bytes(encode: Any, given: Answer, request_id: Any) -> int:
    """The most memory that was in use beyond what there was before."""
    encode(given, request_id)  # what is kept from one to the next
    tracemalloc.start()
    try:
        encode(given, request_id)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
