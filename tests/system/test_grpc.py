"""gRPC with the clients people have: tritonclient (sync, aio, stream), generated stubs, grpc_health, reflection."""

from __future__ import annotations

import asyncio
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from onnx import TensorProto
from tritonclient.utils import InferenceServerException

from taktd.ipc.grpc import inference_pb2 as pb
from taktd.ipc.grpc import inference_pb2_grpc
from tests import models
from tests.running import Running, eventually, serving

YAML = """\
node: {{name: cell-07}}
devices: {{cpu0: {{driver: cpu}}, cpu1: {{driver: cpu}}, sim0: {{driver: sim, cost: 5ms}}}}
models:
  policy: {{path: {folder}/mlp.onnx, device: cpu0}}
  id: {{path: {folder}/id.onnx}}
  batch: {{path: {folder}/batch.onnx, shapes: {{obs: [16, 48]}}}}
  bf16: {{path: {folder}/bf16.onnx}}
  scalar: {{path: {folder}/scalar.onnx}}
  slow: {{path: {folder}/slow.onnx}}
  chatter: {{path: {folder}/chatter.onnx, shapes: {{x: [64]}}}}
  5ms: {{path: {folder}/id.onnx, device: sim0}}
  several: {{path: {folder}/batch.onnx, device: sim0, batching: {{max_batch: 4}}}}
loops: {{walk: {{model: policy, device: cpu1, period: 100ms, budget: 2ms}}}}
admission: {{on_refusal: uncertified}}
grpc:
  - {{rights: infer}}
  - {{listen: "unix:{folder}/admin.sock", rights: admin, mode: "0600"}}
  - {{listen: "unix:{folder}/observe.sock", rights: observe}}
limits: {{message: 8MiB, jobs_per_uid: 64, gateway_lanes: 4}}
"""
FP32 = TensorProto.FLOAT


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("grpc")
    models.mlp(folder / "mlp.onnx")
    models.mlp(folder / "batch.onnx", batch="n", seed=2)
    models.identity(folder / "id.onnx", (1, 4))
    models.identity(folder / "bf16.onnx", (3,), TensorProto.BFLOAT16)
    models.identity(folder / "scalar.onnx", ())
    models.identity(folder / "chatter.onnx", ("n",))
    models.slow(folder / "slow.onnx")
    with serving(folder, YAML.format(folder=folder)) as running:
        yield running


@pytest.fixture
def client(served: Running) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"unix:{served.runtime}/grpc.sock") as client:
        yield client


@pytest.fixture
def channel(served: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"unix:{served.runtime}/grpc.sock") as channel:
        yield channel


def tensor(name: str, array: np.ndarray[Any, Any], dtype: str = "FP32") -> triton.InferInput:
    given = triton.InferInput(name, list(array.shape), dtype)
    given.set_data_from_numpy(array)
    return given


def observation(seed: int = 1, rows: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((rows, 48)).astype(np.float32)


def direct(path: Path, feed: dict[str, Any]) -> list[Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return list(ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feed))


def code_of(action: Callable[[], object]) -> tuple[str, str]:
    """(status code, message) of a refused call."""
    with pytest.raises((InferenceServerException, grpc.RpcError)) as refused:
        action()
    error: Any = refused.value
    if isinstance(error, InferenceServerException):
        return str(error.status()).removeprefix("StatusCode."), error.message()
    return error.code().name, error.details()


# ---- tritonclient, as it is ----


def test_server_and_models_say_what_they_are(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    about = client.get_server_metadata()
    assert about.name == "taktd"
    assert not [e for e in about.extensions if "shared_memory" in e], "only what is there"
    assert client.is_model_ready("policy")
    metadata = client.get_model_metadata("batch")
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("obs", "FP32", [-1, 48])]
    config = client.get_model_config("policy").config
    assert config.input[0].name == "obs"
    assert list(config.input[0].dims) == [1, 48]
    index = {m.name: m.state for m in client.get_model_repository_index().models}
    assert index["policy"] == "READY"
    assert len(index) == 9


def test_results_are_bit_equal_to_onnx_runtime(client: triton.InferenceServerClient, served: Running) -> None:
    for seed in range(20):
        obs = observation(seed)
        result = client.infer("policy", [tensor("obs", obs)], request_id=str(seed))
        expected = direct(served.folder / "mlp.onnx", {"obs": obs})[0]
        np.testing.assert_array_equal(result.as_numpy("actions"), expected)
        assert result.get_response().id == str(seed)
        parameters = result.get_response().parameters
        assert parameters["takt_path"].string_param == "primary"
        assert parameters["takt_run_us"].int64_param > 0
        assert parameters["takt_queued_us"].int64_param >= 0


def test_shapes_within_the_declared_maximum(client: triton.InferenceServerClient, served: Running) -> None:
    for rows in (1, 16, 3, 7, 3, 16):
        obs = observation(rows, rows)
        actions = client.infer("batch", [tensor("obs", obs)]).as_numpy("actions")
        assert actions.shape == (rows, 12)
        np.testing.assert_allclose(actions, direct(served.folder / "batch.onnx", {"obs": obs})[0], rtol=1e-5)
    code, text = code_of(lambda: client.infer("batch", [tensor("obs", observation(1, 17))]))
    assert code == "INVALID_ARGUMENT"
    assert "[17, 48]" in text
    assert "[16, 48]" in text


def test_zero_size_and_scalar_tensors(client: triton.InferenceServerClient) -> None:
    assert client.infer("chatter", [tensor("x", np.zeros(0, np.float32))]).as_numpy("y").shape == (0,)
    result = client.infer("scalar", [tensor("x", np.array(2.5, np.float32))])
    assert result.as_numpy("y") == np.float32(2.5)


def test_bf16_travels_raw(channel: grpc.Channel) -> None:
    stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    raw = np.array([0x3F80, 0x7F80, 0x0001], np.uint16).tobytes()
    request = pb.ModelInferRequest(model_name="bf16", raw_input_contents=[raw])
    request.inputs.add(name="x", datatype="BF16", shape=[3])
    reply = stub.ModelInfer(request)
    assert reply.raw_output_contents[0] == raw
    assert reply.outputs[0].datatype == "BF16"


def test_typed_contents_and_duplicate_use(channel: grpc.Channel) -> None:
    stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    request = pb.ModelInferRequest(model_name="id")
    given = request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    given.contents.fp32_contents.extend([1, 2, 3, 4])
    assert np.frombuffer(stub.ModelInfer(request).raw_output_contents[0], np.float32).tolist() == [1, 2, 3, 4]
    request.raw_input_contents.append(bytes(16))
    code, text = code_of(lambda: stub.ModelInfer(request))
    assert code == "INVALID_ARGUMENT"
    assert "contents and raw_input_contents" in text
    del request.raw_input_contents[:]
    given.contents.int_contents.append(1)
    assert code_of(lambda: stub.ModelInfer(request))[0] == "INVALID_ARGUMENT"


def test_asynchronous_calls(client: triton.InferenceServerClient) -> None:
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for seed in range(30):
        client.async_infer(
            "policy", [tensor("obs", observation(seed))], lambda result, error: results.put((result, error))
        )
    answers = [results.get(timeout=20) for _ in range(30)]
    assert all(error is None for _, error in answers)


def test_aio_client(served: Running) -> None:
    async def go() -> int:
        async with triton_aio.InferenceServerClient(f"unix:{served.runtime}/grpc.sock") as client:
            assert await client.is_model_ready("policy")
            jobs = [client.infer("policy", [tensor("obs", observation(seed))]) for seed in range(40)]
            return len([r for r in await asyncio.gather(*jobs) if r.as_numpy("actions").shape == (1, 12)])

    assert asyncio.run(go()) == 40


def test_stream_answers_in_order_and_goes_on_after_a_refusal(client: triton.InferenceServerClient) -> None:
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: results.put((result, error)))
    for number in range(20):
        client.async_stream_infer(
            "policy" if number != 7 else "polcy", [tensor("obs", observation())], request_id=str(number)
        )
    answers = [results.get(timeout=20) for _ in range(20)]
    client.stop_stream()
    assert [r.get_response().id for r, _ in answers[:7]] == [str(n) for n in range(7)]
    assert "did you mean policy" in str(answers[7][1])
    assert [r.get_response().id for r, _ in answers[8:]] == [str(n) for n in range(8, 20)]


def test_statistics_are_filled(client: triton.InferenceServerClient) -> None:
    client.infer("id", [tensor("x", np.ones((1, 4), np.float32))])
    before = client.get_inference_statistics("id").model_stats[0]
    assert abs(before.last_inference / 1000 - time.time()) < 60
    for _ in range(5):
        client.infer("id", [tensor("x", np.ones((1, 4), np.float32))])
    after = client.get_inference_statistics("id").model_stats[0]
    assert after.inference_stats.success.count == before.inference_stats.success.count + 5
    assert after.last_inference >= before.last_inference
    assert after.inference_stats.queue.count == after.inference_stats.compute_infer.count
    assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns
    assert len(client.get_inference_statistics().model_stats) == 9
    assert [batch.batch_size for batch in after.batch_stats] == [1]
    assert after.batch_stats[0].compute_infer == after.inference_stats.compute_infer
    assert after.execution_count == after.inference_count


def test_statistics_say_how_many_ran_together(client: triton.InferenceServerClient) -> None:
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for seed in range(40):
        client.async_infer(
            "several", [tensor("obs", observation(seed))], lambda result, error: results.put((result, error))
        )
    answers = [results.get(timeout=20) for _ in range(40)]
    assert [error for _, error in answers if error is not None] == []
    found = client.get_inference_statistics("several").model_stats[0]
    ran = {batch.batch_size: batch.compute_infer for batch in found.batch_stats}
    assert max(ran) > 1
    assert max(ran) <= 4
    assert sum(size * part.count for size, part in ran.items()) == found.inference_count == 40
    assert sum(part.count for part in ran.values()) == found.execution_count < 40
    assert sum(size * part.ns for size, part in ran.items()) == found.inference_stats.compute_infer.ns
    assert all(part.ns > 0 for part in ran.values())


# ---- deadlines, cancelling, priority ----


def test_the_smaller_deadline_wins_and_is_named(client: triton.InferenceServerClient) -> None:
    slow = [tensor("x", np.ones((512, 512), np.float32))]
    client.infer("slow", slow)
    began = time.monotonic()
    assert code_of(lambda: client.infer("slow", slow, client_timeout=20, timeout=200))[0] == "DEADLINE_EXCEEDED"
    assert code_of(lambda: client.infer("slow", slow, client_timeout=0.0002))[0] == "DEADLINE_EXCEEDED"
    assert code_of(lambda: client.infer("slow", slow, parameters={"takt_deadline_us": 1}))[0] == "DEADLINE_EXCEEDED"
    assert time.monotonic() - began < 10


def test_a_deadline_fires_while_another_job_runs(client: triton.InferenceServerClient) -> None:
    """Not when that one ends: Triton server issue 7512."""
    slow, policy = [tensor("x", np.ones((512, 512), np.float32))], [tensor("obs", observation())]
    ends: list[float] = []
    refused: list[tuple[float, str]] = []
    blockers = [
        threading.Thread(target=lambda: ends.append(client.infer("slow", slow) and time.monotonic())) for _ in range(20)
    ]
    for thread in blockers:
        thread.start()
    while any(thread.is_alive() for thread in blockers):
        try:
            client.infer("policy", policy, timeout=3000)
        except InferenceServerException as error:
            refused.append((time.monotonic(), error.status()))
    assert refused
    assert refused[0][0] < max(ends)
    assert {status for _, status in refused} == {"StatusCode.DEADLINE_EXCEEDED"}


def test_whoever_has_priority_is_taken_before_those_who_wait(client: triton.InferenceServerClient) -> None:
    """Where the machine holds up the sending until all are served there is nobody to overtake: then once more."""
    given = [tensor("x", np.ones((1, 4), np.float32))]

    def overtaken() -> dict[str, int]:
        """How many of 50 who came before are answered after each of the two."""
        order: queue.Queue[tuple[str, Any]] = queue.Queue()

        def ended(name: str) -> Callable[[Any, Any], None]:
            return lambda result, error: order.put((name, error))

        # 12 slots in the lanes, the others wait.
        for _ in range(50):
            client.async_infer("5ms", given, ended("patient"))
        client.async_infer("5ms", given, ended("second"), priority=2)
        client.async_infer("5ms", given, ended("first"), priority=1)
        answers = [order.get(timeout=60) for _ in range(52)]
        assert {error for _, error in answers} == {None}
        names = [name for name, _ in answers]
        return {name: names[names.index(name) :].count("patient") for name in ("first", "second")}

    rounds = []
    while not rounds or (len(rounds) < 10 and min(rounds[-1].values()) < 10):
        rounds.append(overtaken())
    assert min(rounds[-1].values()) >= 10, rounds


def test_a_cancelled_call_frees_its_job(served: Running, channel: grpc.Channel) -> None:
    stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    request = pb.ModelInferRequest(model_name="slow", raw_input_contents=[np.ones((512, 512), np.float32).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[512, 512])
    calls = [stub.ModelInfer.future(request) for _ in range(40)]
    for call in calls[1:]:
        call.cancel()
    calls[0].result(timeout=30)
    eventually(lambda: served.ask("status")["gateway"]["jobs"] == 0)
    assert served.ask("status")["gateway"]["job_memory"] == 0


def test_the_input_may_be_too_old(client: triton.InferenceServerClient) -> None:
    code, _ = code_of(lambda: client.infer("policy", [tensor("obs", observation())], parameters={"takt_max_age_us": 1}))
    assert code == "DEADLINE_EXCEEDED"
    client.infer("policy", [tensor("obs", observation())], parameters={"takt_max_age_us": 10_000_000}, priority=1)


# ---- rights ----


def test_listeners_have_their_rights(served: Running) -> None:
    with triton.InferenceServerClient(f"unix:{served.folder}/observe.sock") as watcher:
        assert watcher.is_server_ready()
        code, text = code_of(lambda: watcher.infer("policy", [tensor("obs", observation())]))
        assert code == "PERMISSION_DENIED"
        assert "observe" in text
    with triton.InferenceServerClient(f"unix:{served.runtime}/grpc.sock") as client:
        assert code_of(lambda: client.load_model("policy"))[0] == "PERMISSION_DENIED"
    assert stat.S_IMODE((served.folder / "admin.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE((served.runtime / "grpc.sock").stat().st_mode) == 0o660


def test_what_is_not_there_names_the_way_that_is(client: triton.InferenceServerClient) -> None:
    for call in (client.get_system_shared_memory_status, client.get_cuda_shared_memory_status,
                 lambda: client.register_system_shared_memory("a", "/a", 4)):  # fmt: skip
        code, text = code_of(call)
        assert code == "UNIMPLEMENTED"
        assert "lane" in text
    assert code_of(client.get_trace_settings)[0] == "UNIMPLEMENTED"
    assert code_of(client.get_log_settings)[0] == "UNIMPLEMENTED"
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    given = tensor("obs", observation())
    given.set_shared_memory("region", 192)
    code, text = code_of(lambda: client.infer("policy", [given]))
    assert (code, "lane" in text) == ("UNIMPLEMENTED", True)


# ---- health, reflection ----


def test_standard_health_and_reflection(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", "inference.GRPCInferenceService"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert code_of(lambda: stub.Check(health_pb2.HealthCheckRequest(service="x")))[0] == "NOT_FOUND"
    database = ProtoReflectionDescriptorDatabase(channel)
    assert "inference.GRPCInferenceService" in database.get_services()
    assert database.FindFileContainingSymbol("inference.ModelInferRequest").name == "inference.proto"


# ---- wrong input ----


def wrong(change: Callable[[pb.ModelInferRequest], object]) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="id", raw_input_contents=[bytes(16)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    change(request)
    return request


WRONG: list[tuple[Callable[[pb.ModelInferRequest], object], str, str]] = [
    (lambda r: setattr(r, "model_name", "idd"), "NOT_FOUND", "did you mean id"),
    (lambda r: setattr(r, "model_version", "9"), "NOT_FOUND", "version 1 is served"),
    (lambda r: setattr(r.inputs[0], "name", "z"), "INVALID_ARGUMENT", '"z" does not exist'),
    (lambda r: setattr(r.inputs[0], "datatype", "INT64"), "INVALID_ARGUMENT", "FP32 is expected"),
    (lambda r: setattr(r.inputs[0], "datatype", "BYTES"), "INVALID_ARGUMENT", "FP32 is expected"),
    (lambda r: r.inputs[0].shape.append(1), "INVALID_ARGUMENT", "[1, 4] is expected"),
    (lambda r: r.inputs[0].shape.__setitem__(0, -1), "INVALID_ARGUMENT", "0 or more"),
    (lambda r: r.inputs[0].shape.__setitem__(0, 2**62), "INVALID_ARGUMENT", "[1, 4] is expected"),
    (lambda r: r.inputs[0].shape.extend([1] * 100), "INVALID_ARGUMENT", "32 dimensions"),
    (lambda r: r.raw_input_contents.__setitem__(0, b"abc"), "INVALID_ARGUMENT", "found 3 bytes; 16 are expected"),
    (lambda r: r.raw_input_contents.append(b""), "INVALID_ARGUMENT", "2 raw_input_contents for 1"),
    (lambda r: r.inputs.__delitem__(0), "INVALID_ARGUMENT", "1 raw_input_contents for 0"),
    (lambda r: (r.inputs.add().CopyFrom(r.inputs[0]), r.raw_input_contents.append(b"")), "INVALID_ARGUMENT", "2 times"),
    (lambda r: r.outputs.add(name="q"), "INVALID_ARGUMENT", '"q" does not exist'),
    (lambda r: (r.outputs.add(name="y"), r.outputs.add(name="y")), "INVALID_ARGUMENT", "twice"),
    (lambda r: setattr(r.parameters["timeout"], "string_param", "soon"), "INVALID_ARGUMENT", "integer is expected"),
    (lambda r: setattr(r.parameters["timeout"], "int64_param", -1), "INVALID_ARGUMENT", "found -1"),
    (lambda r: setattr(r.parameters["priority"], "double_param", 1.0), "INVALID_ARGUMENT", "integer is expected"),
    (lambda r: setattr(r.parameters["takt_deadline_us"], "int64_param", 0), "DEADLINE_EXCEEDED", "passed"),
    (lambda r: setattr(r.parameters["takt_wish"], "int64_param", 0), "INVALID_ARGUMENT", "does not exist"),
    (lambda r: setattr(r.parameters["sequence_id"], "int64_param", 4), "UNIMPLEMENTED", "no state"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_input_is_refused_with_what_was_expected(channel: grpc.Channel, number: int) -> None:
    change, expected, words = WRONG[number]
    stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    code, text = code_of(lambda: stub.ModelInfer(wrong(change)))
    assert (code, words in text) == (expected, True), text


def test_messages_over_the_limit_name_the_limit_and_the_way_around(client: triton.InferenceServerClient) -> None:
    given = [tensor("x", np.zeros((1, 3 << 20), np.float32))]
    code, text = code_of(lambda: client.infer("id", given))
    assert code == "RESOURCE_EXHAUSTED"
    assert "8388608" in text
    assert "lane" in text
    code, _ = code_of(lambda: client.infer("id", [tensor("x", np.zeros((1, 5 << 20), np.float32))]))
    assert code == "RESOURCE_EXHAUSTED"


def test_compressed_messages_are_refused(client: triton.InferenceServerClient) -> None:
    code, _ = code_of(
        lambda: client.infer("id", [tensor("x", np.zeros((1, 4), np.float32))], compression_algorithm="gzip")
    )
    assert code == "UNIMPLEMENTED"


# ---- the gateway's death ----


def test_the_gateway_dies_and_no_loop_notices(served: Running) -> None:
    gateway = served.ask("status")["gateway"]
    with served.connect() as node, node.attach("walk") as lane:
        os.kill(gateway["pid"], 9)
        statuses = set()
        for tick in lane.ticks():
            statuses.add(lane.infer(timeout_us=2_000_000).status)
            if tick.index >= 20:
                break
        assert statuses <= {"ok", "expired"}
    eventually(lambda: served.ask("status")["ready"], within_s=30)
    after = served.ask("status")["gateway"]
    assert after["pid"] != gateway["pid"]
    assert after["restarts"] == gateway["restarts"] + 1
    served.remember_family()
    with triton.InferenceServerClient(f"unix:{served.runtime}/grpc.sock") as client:
        assert client.infer("policy", [tensor("obs", observation())]).as_numpy("actions").shape == (1, 12)
