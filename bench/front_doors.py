"""gRPC and ZeroMQ against bare echoes of the same sizes, in one run, interleaved.

    bench/front_doors.py [--seconds 10] [--json]

Every figure is beside what bounds it: ONNX Runtime called directly, a lane that sleeps for its answer, a bare grpcio
(aio and sync) and pyzmq echo server in a process of its own. *Minus inference* is minus the time on the device that the
replies of the same calls tell: after a pause a model runs slower than in a row, for everybody. The busy echo computes
as long as the model before it answers. Single calls are measured twice: with the client on the cores that are not the
executor's (*beside*), as a program on a robot is, and where the kernel puts it (*anywhere*). The echo servers may use
all cores, the gateway those that are not the executor's. Only ratios within one run mean anything on a shared machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import grpc
import msgpack
import numpy as np
import onnxruntime as ort
import zmq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from taktd.ipc.grpc import inference_pb2 as pb  # noqa: E402
from taktd.ipc.zmq.client import _request  # noqa: E402
from tests import models  # noqa: E402
from tests.running import Running  # noqa: E402

ROBOTS = Path(os.environ.get("TAKTD_ROBOTS", ROOT.parent / "shared/robots"))
ECHO = "/bench.Echo/Call"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
Call = Callable[[], Any]


# ---- bare echoes, each in a process of its own ----


def grpc_echo(address: str, size: int, kind: str, busy_us: float = 0) -> None:
    """Answers `size` bytes to whatever comes, after `busy_us` of computing (aio only)."""
    answer = bytes(size)
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    if kind == "sync":

        class Handler(grpc.GenericRpcHandler):
            def service(self, details: Any) -> Any:
                return grpc.unary_unary_rpc_method_handler(lambda data, context: answer)

        server = grpc.server(futures.ThreadPoolExecutor(16), handlers=(Handler(),), options=options)
        server.add_insecure_port(address)
        server.start()
        server.wait_for_termination()
        return
    import asyncio

    async def main() -> None:
        async def call(data: bytes, context: Any) -> bytes:
            until_ns = time.perf_counter_ns() + int(busy_us * 1000)
            while busy_us and time.perf_counter_ns() < until_ns:
                pass
            return answer

        server = grpc.aio.server(options=options)
        handler = grpc.unary_unary_rpc_method_handler(call)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Call": handler}),))
        server.add_insecure_port(address)
        await server.start()
        await server.wait_for_termination()

    asyncio.run(main())


def zmq_echo(address: str, size: int) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(address)
    header, tensor = bytes(200), bytes(size)
    while True:
        frames = socket.recv_multipart(copy=False)
        socket.send_multipart([frames[0], header, tensor], copy=False)


# ---- calls ----


def grpc_call(address: str, method: str, data: bytes) -> Call:
    channel = grpc.insecure_channel(
        address, options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    )
    call = channel.unary_unary(method)
    return lambda: call(data, timeout=30)


def zmq_call(address: str, frames: list[Any]) -> Call:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)

    def call() -> Any:
        socket.send_multipart(frames, copy=False)
        return socket.recv_multipart(copy=False)

    return call


def model_request(model: str, name: str, array: Any) -> bytes:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
    request.inputs.add(name=name, datatype="FP32", shape=array.shape)
    return bytes(request.SerializeToString())


def interleaved(calls: dict[str, Call], seconds: float) -> dict[str, dict[str, float]]:
    """Each call in turn, 20 at a time, until the time is over; µs. `run`: on the device, where the reply tells."""
    took: dict[str, list[int]] = {name: [] for name in calls}
    ran: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(30):
            call()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for name, call in calls.items():
            for _ in range(20):
                began = time.perf_counter_ns()
                reply = call()
                took[name].append(time.perf_counter_ns() - began)
            ran[name].append(run_us(name, reply))
    return {
        name: {
            "p50": float(np.percentile(t, 50)) / 1e3, "p99": float(np.percentile(t, 99)) / 1e3, "calls": len(t),
            "run": float(np.median(ran[name])),
        }
        for name, t in took.items()
    }  # fmt: skip


def keep_to(cores: set[int]) -> None:
    """All threads of this process, also those of gRPC and ZeroMQ; later ones inherit it."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread), cores)


def run_us(name: str, reply: Any) -> float:
    """The time on the device that a reply of ours tells; 0 for all others."""
    if "echo" in name or name == "onnxruntime":
        return 0.0
    if name.startswith("grpc"):
        return float(pb.ModelInferResponse.FromString(reply).parameters["takt_run_us"].int64_param)
    if name.startswith("zmq"):
        return float(msgpack.unpackb(reply[0].buffer)["parameters"]["takt_run_us"])
    return float(reply.run_us)


def throughput(make: Callable[[], Call], seconds: float, clients: int = 16) -> float:
    """Calls per second of so many threads, each with a channel of its own."""
    counts = [0] * clients
    until = time.monotonic() + seconds

    def work(number: int) -> None:
        call = make()
        while time.monotonic() < until:
            call()
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


# ---- all of it ----


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each of the parts")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), arguments.seconds)
    print(json.dumps(result, indent=None if arguments.json else 2))
    return 0


def measure(folder: Path, seconds: float) -> dict[str, Any]:
    policy, name, shape = go1(folder)
    cores = os.sched_getaffinity(0)
    models.identity(folder / "id.onnx", (1, 3, 224, 224))
    running = Running(folder, YAML.format(policy=policy, folder=folder, core=max(cores)))
    running.start().await_ready()
    children: list[Any] = []
    spawn = mp.get_context("spawn")
    try:
        obs = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        image = np.zeros((1, 3, 224, 224), np.float32)
        session = ort.InferenceSession(str(policy), _one_thread(), providers=["CPUExecutionProvider"])
        small, large = model_request("policy", name, obs), model_request("id", "x", image)
        warm = grpc_call(f"unix:{running.runtime}/grpc.sock", METHOD, small)
        reply_bytes = len(warm())
        busy_us = float(np.median([run_us("grpc", warm()) for _ in range(200)]))
        large_bytes = len(grpc_call(f"unix:{running.runtime}/grpc.sock", METHOD, large)())
        for target, *args in (
            (grpc_echo, f"unix:{folder}/aio", reply_bytes, "aio"),
            (grpc_echo, f"unix:{folder}/sync", reply_bytes, "sync"),
            (grpc_echo, f"unix:{folder}/busy", reply_bytes, "aio", busy_us),
            (grpc_echo, f"unix:{folder}/big", large_bytes, "aio"), (zmq_echo, f"ipc://{folder}/zecho", 48),
            (zmq_echo, f"ipc://{folder}/zbig", image.nbytes),
        ):  # fmt: skip
            child = spawn.Process(target=target, args=args, daemon=True)
            child.start()
            children.append(child)
        wait_for([folder / n for n in ("aio", "sync", "busy", "big", "zecho", "zbig")])
        frames = {
            "small": _request(1, "policy", {name: obs}, {}, (), {}),
            "large": _request(1, "id", {"x": image}, {}, (), {})
        }  # fmt: skip
        grpc_at, zmq_at = f"unix:{running.runtime}/grpc.sock", f"ipc://{running.runtime}/zmq.sock"
        echo = {name: f"unix:{folder}/{name}" for name in ("aio", "sync", "busy", "big")}
        calls: dict[str, Call] = {
            "onnxruntime": lambda: session.run(None, {name: obs}),
            "grpc": grpc_call(grpc_at, METHOD, small),
            "grpc_echo_aio": grpc_call(echo["aio"], ECHO, small),
            "grpc_echo_sync": grpc_call(echo["sync"], ECHO, small),
            "zmq": zmq_call(zmq_at, frames["small"]),
            "zmq_echo": zmq_call(f"ipc://{folder}/zecho", frames["small"]),
            "grpc_602k": grpc_call(grpc_at, METHOD, large),
            "grpc_echo_602k": grpc_call(echo["big"], ECHO, large),
            "zmq_602k": zmq_call(zmq_at, frames["large"]),
            "zmq_echo_602k": zmq_call(f"ipc://{folder}/zbig", frames["large"]),
        }
        with running.connect() as node, node.attach("policy", wait="block", kind="model") as lane:
            calls["lane"] = lambda: (lane.inputs, lane.infer())[1]
            latency = {}
            for where, allowed in (("beside", cores - {max(cores)} or cores), ("anywhere", cores)):
                keep_to(allowed)
                latency[where] = interleaved(calls, seconds)
        rates = {"grpc": 0.0, "grpc_echo_aio": 0.0, "grpc_echo_sync": 0.0, "grpc_echo_busy": 0.0}
        for _ in range(2):
            for key, address, method in (
                ("grpc", grpc_at, METHOD), ("grpc_echo_aio", f"unix:{folder}/aio", ECHO),
                ("grpc_echo_sync", f"unix:{folder}/sync", ECHO), ("grpc_echo_busy", f"unix:{folder}/busy", ECHO),
            ):  # fmt: skip
                rates[key] += throughput(lambda a=address, m=method: grpc_call(a, m, small), seconds / 6) / 2  # type: ignore[misc]
        memory = running.ask("status")["gateway"]
        return {
            "latency_us": latency, "ratios": ratios(latency, rates), "calls_per_s_16_clients": rates,
            "gateway_rss_mib": memory["rss_bytes"] / 2**20, "gateway_answered": memory["answered"],
        }  # fmt: skip
    finally:
        for child in children:
            child.kill()
        running.close()


def ratios(latency: dict[str, dict[str, dict[str, float]]], rates: dict[str, float]) -> dict[str, float]:
    compared = (("grpc", "grpc_echo_aio"), ("grpc", "grpc_echo_sync"), ("zmq", "zmq_echo"),
                ("grpc_602k", "grpc_echo_602k"), ("zmq_602k", "zmq_echo_602k"))  # fmt: skip
    return {
        **{f"{ours} minus inference / {echo}, {where}": round((us[ours]["p50"] - us[ours]["run"]) / us[echo]["p50"], 2)
           for where, us in latency.items() for ours, echo in compared},
        **{f"throughput of 16 / {kind} echo": round(rates["grpc"] / rates[f"grpc_echo_{kind}"], 2)
           for kind in ("aio", "sync", "busy")},
    }  # fmt: skip


YAML = """\
devices: {{cpu0: {{driver: cpu, cores: [{core}], best_effort: {{max_dispatch: 500us, share: 0.2}}}}}}
models:
  policy: {{path: {policy}}}
  id: {{path: {folder}/id.onnx}}
admission: {{on_refusal: uncertified}}
grpc: {{rights: infer}}
zmq: {{events_high_water: 100}}
"""


def go1(folder: Path) -> tuple[Path, str, tuple[int, ...]]:
    """The Go1 walking policy, or one of its size where it is not here: file, input, shape."""
    found = sorted((ROBOTS / "go1").rglob("*.onnx"))
    path = found[0] if found else models.mlp(folder / "mlp.onnx")
    first = ort.InferenceSession(str(path), _one_thread(), providers=["CPUExecutionProvider"]).get_inputs()[0]
    return path, first.name, tuple(d if isinstance(d, int) else 1 for d in first.shape)


def _one_thread() -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return options


def wait_for(paths: list[Path]) -> None:
    until = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        if time.monotonic() > until:
            raise TimeoutError(f"no echo server at {[str(p) for p in paths if not p.exists()]}")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
