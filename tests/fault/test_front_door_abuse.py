"""FAULTS 13, 15 and 17 at the front doors: overload, floods, huge, slow and endless messages, garbage, clients that go.

Asserted is order and accounting.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import msgpack
import numpy as np
import psutil
import pytest
import zmq

from taktd.ipc.grpc import inference_pb2 as pb
from taktd.ipc.grpc import inference_pb2_grpc
from tests import models
from tests.chance import seed
from tests.running import Running, eventually, serving

YAML = """\
devices: {{cpu0: {{driver: cpu}}, cpu1: {{driver: cpu}}, sim0: {{driver: sim, cost: 5ms}}}}
models:
  id: {{path: {folder}/id.onnx, device: cpu0}}
  slow: {{path: {folder}/slow.onnx, device: cpu0}}
  5ms: {{path: {folder}/id.onnx, device: sim0}}
loops:
  walk: {{model: id, device: cpu1, period: 50ms, budget: 2ms}}
  beside: {{model: id, device: cpu0, period: 200ms, budget: 5ms}}
admission: {{on_refusal: uncertified}}
grpc: {{rights: infer}}
zmq: {{}}
limits: {{message: 4MiB, jobs: 40, jobs_per_uid: 20, job_memory: 64MiB, gateway_lanes: 2}}
"""
MIB = 1 << 20
STREAMS = int(os.environ.get("TAKTD_STREAMS", "20000"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("abuse")
    models.identity(folder / "id.onnx", (1, 4))
    models.slow(folder / "slow.onnx")
    with serving(folder, YAML.format(folder=folder)) as running:
        yield running


def request(model: str = "id") -> pb.ModelInferRequest:
    shape = [512, 512] if model == "slow" else [1, 4]
    made = pb.ModelInferRequest(model_name=model, raw_input_contents=[np.ones(shape, np.float32).tobytes()])
    made.inputs.add(name="x", datatype="FP32", shape=shape)
    return made


def gateway(served: Running) -> dict[str, Any]:
    found: dict[str, Any] = served.ask("status")["gateway"]
    return found


def rss_bytes(served: Running) -> int:
    return int(psutil.Process(gateway(served)["pid"]).memory_info().rss)


def works(served: Running) -> None:
    with grpc.insecure_channel(f"unix:{served.runtime}/grpc.sock") as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ModelInfer(request(), timeout=30).outputs[0].name == "y"


def nothing_is_held(served: Running) -> bool:
    now = gateway(served)
    return now["jobs"] == now["job_memory"] == now["waiting"] == 0


def missed(served: Running, loop: str, before: dict[str, Any]) -> dict[str, int]:
    """The loop's misses by cause since it had these statistics."""
    now = served.loop(loop)["statistics"]["misses"]
    return {cause: count - before["misses"][cause] for cause, count in now.items() if count > before["misses"][cause]}


THE_MACHINES = {"machine", "wakeup"}  # a core that was taken away, or came late


def test_overload_is_refused_early_and_accounted_for_while_a_loop_goes_on(served: Running) -> None:
    before = served.loop("walk")["statistics"]
    outcomes: Counter[str] = Counter()
    with grpc.insecure_channel(f"unix:{served.runtime}/grpc.sock") as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        with served.connect() as node, node.attach("walk") as lane:
            calls = [stub.ModelInfer.future(request("5ms"), timeout=60) for _ in range(100)]
            for tick in lane.ticks():
                assert lane.infer(timeout_us=5_000_000).status in ("ok", "expired")
                if tick.index >= 20:
                    break
        for call in calls:
            outcomes[call.code().name] += 1
            assert call.code() is not grpc.StatusCode.UNAVAILABLE, call.details()
            if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                assert "limits." in call.details() or "Concurrent RPC limit" in call.details()
    assert outcomes["OK"] + outcomes["RESOURCE_EXHAUSTED"] == 100, outcomes
    assert outcomes["OK"] >= 20
    assert outcomes["RESOURCE_EXHAUSTED"] >= 20
    after = served.loop("walk")["statistics"]
    ended = sum(after[s] - before[s] for s in ("ok", "expired", "refused", "failed", "lost", "cancelled", "orphaned"))
    assert ended == after["submitted"] - before["submitted"]
    assert set(missed(served, "walk", before)) <= THE_MACHINES
    eventually(lambda: nothing_is_held(served))


def test_a_huge_message_costs_no_memory(served: Running) -> None:
    works(served)
    before = rss_bytes(served)
    with grpc.insecure_channel(f"unix:{served.runtime}/grpc.sock") as channel:
        raw = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for size in (256 * MIB, 1024 * MIB):
            with pytest.raises(grpc.RpcError) as refused:
                raw(bytes(size), timeout=120)
            assert refused.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    assert rss_bytes(served) - before < 64 * MIB
    works(served)


def test_garbage_and_a_byte_at_a_time(served: Running) -> None:
    slow = socket.socket(socket.AF_UNIX)
    slow.connect(f"{served.runtime}/grpc.sock")
    chance = np.random.default_rng(seed())
    for number in range(50):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(f"{served.runtime}/grpc.sock")
            preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if number % 2 else b""
            try:
                raw.sendall(preface + chance.bytes(int(chance.integers(1, 2000))))
                slow.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[number % 24 : number % 24 + 1])
            except OSError:
                pass  # hung up on: right
        if number % 10 == 0:
            works(served)
    slow.close()
    works(served)


@pytest.mark.parametrize(
    ("waves", "patience_s"),
    [(1, 5.0), pytest.param(STREAMS // 500, 0.5, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["once", "again and again"],
)
def test_a_flood_of_streams_is_bounded(served: Running, waves: int, patience_s: float) -> None:
    async def flood() -> int:
        """How many of 500 streams were answered; the others wait for those to end, or are refused."""
        async with grpc.aio.insecure_channel(f"unix:{served.runtime}/grpc.sock") as channel:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            streams = [stub.ModelStreamInfer() for _ in range(500)]

            async def one(stream: Any) -> bool:
                await stream.write(request())
                return bool((await stream.read()).infer_response.outputs)

            answers = await asyncio.gather(
                *(asyncio.wait_for(one(stream), patience_s) for stream in streams), return_exceptions=True
            )
            for stream in streams:
                stream.cancel()
        return sum(answer is True for answer in answers)

    before = rss_bytes(served)
    answered = [asyncio.run(flood()) for _ in range(waves)]
    assert max(answered) >= 1
    assert max(answered) <= 40
    assert rss_bytes(served) - before < 64 * MIB
    eventually(lambda: nothing_is_held(served))
    works(served)


def test_a_stream_that_is_not_read_holds_no_more_than_its_share(served: Running) -> None:
    async def deaf() -> int:
        async with grpc.aio.insecure_channel(
            f"unix:{served.runtime}/grpc.sock", options=[("grpc.http2.lookahead_bytes", 1024)]
        ) as channel:
            stream = inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            written = 0
            try:
                for _ in range(20_000):
                    await asyncio.wait_for(stream.write(request()), 1.0)
                    written += 1
            except asyncio.TimeoutError:
                pass
            held = gateway(served)
            assert held["jobs"] <= 20
            stream.cancel()
            return written

    asyncio.run(deaf())
    eventually(lambda: nothing_is_held(served))
    works(served)


def test_clients_that_vanish_leave_nothing(served: Running) -> None:
    process = psutil.Process(gateway(served)["pid"])

    def vanish() -> None:
        channel = grpc.insecure_channel(
            f"unix:{served.runtime}/grpc.sock", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = [stub.ModelInfer.future(request("slow")) for _ in range(5)]
        grpc.channel_ready_future(channel).result(20)
        channel.close()
        assert len(calls) == 5

    def four_vanish() -> None:
        threads = [threading.Thread(target=vanish) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    four_vanish()  # brings the lanes that stay
    eventually(lambda: nothing_is_held(served), within_s=30)
    works(served)
    descriptors = process.num_fds()
    for _ in range(10):
        four_vanish()
    eventually(lambda: nothing_is_held(served), within_s=30)
    eventually(lambda: process.num_fds() <= descriptors + 4, within_s=30)
    works(served)


# ---- ZeroMQ ----


def zmtp(served: Running) -> socket.socket:
    """A peer that has said who it is, byte by byte as ZMTP 3.0 has it: a DEALER."""
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(f"{served.runtime}/zmq.sock")  # with a time-out it would not wait for a place in the backlog
    raw.settimeout(30)
    raw.sendall(b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\5READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    raw.sendall(b"\4" + bytes([len(ready)]) + ready)
    return raw


def test_a_message_without_an_end_costs_its_sender_the_connection_and_nobody_a_loop(served: Running) -> None:
    """libzmq bounds a frame, and not how many there are in a message."""
    works(served)
    before = gateway(served)
    frame = b"\3" + MIB.to_bytes(8, "big") + bytes(MIB)  # more to come, long
    with served.connect() as node, node.attach("walk") as lane:
        raw = zmtp(served)

        def send_without_end() -> None:
            for _ in range(4096):
                raw.sendall(frame)

        with raw, pytest.raises(OSError, match=r"(?i)pipe|reset"):
            send_without_end()
        assert lane.infer(timeout_us=5_000_000).status in ("ok", "expired")
    eventually(lambda: gateway(served)["pid"] not in (None, before["pid"]), within_s=30)
    eventually(lambda: gateway(served)["ready"], within_s=30)
    served.remember_family()
    assert gateway(served)["restarts"] == before["restarts"] + 1
    assert "its limits come to" in served.log
    works(served)


def test_questions_without_end_from_clients_that_read_nothing_leave_the_others_served(served: Running) -> None:
    before = rss_bytes(served)
    context = zmq.Context()
    asks = msgpack.packb({"v": 1, "id": 1, "op": "ready"})
    clients = []
    for _ in range(8):
        client = context.socket(zmq.DEALER)
        client.set(zmq.RCVHWM, 1)
        client.connect(f"ipc://{served.runtime}/zmq.sock")
        clients.append(client)
    sent = 0
    for number in range(20_000):
        try:
            clients[number % len(clients)].send(asks, zmq.NOBLOCK)
            sent += 1
        except zmq.Again:
            pass
        if number % 5_000 == 0:
            works(served)
    assert sent > 2_000
    works(served)
    context.destroy(0)
    eventually(lambda: gateway(served)["zmq_connections"] == 0)
    assert rss_bytes(served) - before < 64 * MIB


def test_connections_that_come_and_go_leave_nothing(served: Running) -> None:
    works(served)
    process = psutil.Process(gateway(served)["pid"])
    descriptors = process.num_fds()
    for number in range(300):
        raw = zmtp(served)
        if number % 3:
            raw.sendall(b"\0\1x")  # half a thought
        raw.close()
    eventually(lambda: process.num_fds() <= descriptors + 4, within_s=30)
    eventually(lambda: gateway(served)["zmq_connections"] == 0)
    works(served)


def test_twice_what_the_device_can_do_is_answered_or_refused_with_a_reason_and_the_loop_on_it_keeps_its_deadlines(
    served: Running,
) -> None:
    """FAULTS 15 with deadlines: nobody waits for a refusal until the queue before him is empty."""
    outcomes: Counter[str] = Counter()
    of_loop = served.loop("beside")["statistics"]
    before = next(m for m in served.ask("models")["models"] if m["name"] == "slow")["statistics"]
    wanted = request("slow")
    wanted.parameters["takt_deadline_us"].int64_param = 60_000
    with grpc.insecure_channel(f"unix:{served.runtime}/grpc.sock") as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(request("slow"))

        def client() -> None:
            for _ in range(40):
                call = stub.ModelInfer.future(wanted, timeout=60)
                outcomes[call.code().name] += 1
                if call.code() is not grpc.StatusCode.OK:
                    assert call.details()
                    assert dict(call.trailing_metadata())["takt_status"] in ("expired", "refused")

        threads = [threading.Thread(target=client) for _ in range(16)]
        with served.connect() as node, node.attach("beside") as lane:
            for thread in threads:
                thread.start()
            for _ in lane.ticks():
                assert lane.infer(timeout_us=5_000_000).status in ("ok", "expired")
                if not any(thread.is_alive() for thread in threads):
                    break
        for thread in threads:
            thread.join()
    assert sum(outcomes.values()) == 640
    assert outcomes["OK"] + outcomes["DEADLINE_EXCEEDED"] + outcomes["RESOURCE_EXHAUSTED"] == 640, outcomes
    assert outcomes["OK"] > 0
    eventually(lambda: nothing_is_held(served))
    after = next(m for m in served.ask("models")["models"] if m["name"] == "slow")["statistics"]
    assert after["ok"] - before["ok"] == outcomes["OK"] + 1
    assert set(missed(served, "beside", of_loop)) <= THE_MACHINES


# ---- for hours ----


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("door", ["zmq", "grpc"])
def test_memory_is_flat_however_many_requests_there_were(served: Running, door: str) -> None:
    """TAKTD_REQUESTS: how many over each door. A twentieth of a million unless it is set."""
    wanted = int(os.environ.get("TAKTD_REQUESTS", "50000"))
    ask = {"zmq": zmq_requests, "grpc": grpc_requests}[door]
    answered = gateway(served)["answered"]
    resident = [rss_bytes(served)]
    began = time.monotonic()
    for _ in range(10):
        ask(served, wanted // 10)
        resident.append(rss_bytes(served))
    took_s = time.monotonic() - began
    told = " ".join(f"{after / MIB:.2f}" for after in resident)
    print(f"{wanted} requests over {door} in {took_s:.0f} s; MiB of the gateway before and after each tenth: {told}")
    assert resident[-1] - resident[1] < 4 * MIB, "after the first tenth it grows no more"
    eventually(lambda: gateway(served)["answered"] - answered >= wanted)
    assert nothing_is_held(served)


def zmq_requests(served: Running, number: int, at_a_time: int = 16) -> None:
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.connect(f"ipc://{served.runtime}/zmq.sock")
    tensor = bytes(16)
    about = [{"name": "x", "datatype": "FP32", "shape": [1, 4]}]
    sent = got = 0
    while got < number:
        while sent < number and sent - got < at_a_time:
            client.send_multipart([msgpack.packb({"v": 1, "id": sent, "model": "id", "inputs": about}), tensor])
            sent += 1
        head, *_ = client.recv_multipart()
        assert msgpack.unpackb(head)["status"] == "ok"
        got += 1
    context.destroy(0)


def grpc_requests(served: Running, number: int, at_a_time: int = 8) -> None:
    with grpc.insecure_channel(f"unix:{served.runtime}/grpc.sock") as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        wanted = request()
        pending = [stub.ModelInfer.future(wanted) for _ in range(at_a_time)]
        for count in range(number):
            pending[count % at_a_time].result(60)
            pending[count % at_a_time] = stub.ModelInfer.future(wanted)
        for call in pending:
            call.result(60)
