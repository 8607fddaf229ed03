"""Front doors over TCP: gRPC with mutual TLS, ZeroMQ with CURVE keys; whoever has no key stays outside."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgpack
import numpy as np
import pytest
import zmq
from zmq import auth

from taktd.ipc.grpc import inference_pb2 as pb
from taktd.ipc.grpc import inference_pb2_grpc
from tests import models
from tests.running import Running, serving

YAML = """\
devices: {{cpu0: {{driver: cpu}}}}
models: {{id: {{path: {folder}/id.onnx}}, big: {{path: {folder}/big.onnx}}}}
limits: {{job_memory_per_uid: 2KiB}}
admission: {{on_refusal: uncertified}}
grpc:
  - listen: "127.0.0.1:{grpc}"
    tls: {{certificate: {folder}/server.pem, key: {folder}/server.key, clients: {folder}/ca.pem}}
zmq:
  listen: "tcp://127.0.0.1:{zmq}"
  curve: {{secret_key: {folder}/zmq.key_secret, clients: {folder}/clients}}
"""

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def certificates(folder: Path) -> None:
    """An authority, a server's certificate for localhost, a client's for robot-7."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=cell CA")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name, subject in (("server", "/CN=localhost"), ("client", "/CN=robot-7")):
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.pem", "-days", "2", "-extfile", "names")  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("tcp")
    models.identity(folder / "id.onnx", (1, 4))
    models.identity(folder / "big.onnx", (1, 1024))
    certificates(folder)
    (folder / "clients").mkdir()
    auth.create_certificates(folder, "zmq")
    auth.create_certificates(folder / "clients", "robot")
    with serving(folder, YAML.format(folder=folder, grpc=free_port(), zmq=free_port())) as running:
        yield running


def address(served: Running, name: str) -> str:
    doors = served.ask("status")["doors"]
    return str(next(door["address"] for door in doors if door["name"] == name and door["path"] is None))


def test_grpc_lets_in_whom_the_authority_signed(served: Running) -> None:
    root, key, chain = ((served.folder / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem"))
    request = pb.ModelInferRequest(model_name="id", raw_input_contents=[bytes(16)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    target = address(served, "grpc")
    with grpc.secure_channel(target, grpc.ssl_channel_credentials(root, key, chain)) as channel:
        assert inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20).id == ""
    for outsider in (grpc.secure_channel(target, grpc.ssl_channel_credentials(root)), grpc.insecure_channel(target)):
        with outsider as channel, pytest.raises(grpc.RpcError) as refused:
            inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=3)
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def test_jobs_are_charged_to_the_subject_of_the_certificate(served: Running) -> None:
    root, key, chain = ((served.folder / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem"))
    request = pb.ModelInferRequest(model_name="big", raw_input_contents=[bytes(4096)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1024])
    with grpc.secure_channel(address(served, "grpc"), grpc.ssl_channel_credentials(root, key, chain)) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "for certificate robot-7: 0 bytes held, 4096 more wanted, 2048 allowed" in refused.value.details()
        assert "limits.job_memory_per_uid" in refused.value.details()


def test_zmq_lets_in_whose_key_is_there(served: Running, tmp_path: Path) -> None:
    server, _ = auth.load_certificate(served.folder / "zmq.key")
    auth.create_certificates(tmp_path, "stranger")
    context = zmq.Context()

    def ask(keys: Path) -> Any:
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.RCVTIMEO, 3000)
        dealer.curve_publickey, dealer.curve_secretkey = auth.load_certificate(keys)
        dealer.curve_serverkey = server
        dealer.connect(address(served, "zmq"))
        header = {"v": 1, "id": 1, "model": "id", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4]}]}
        dealer.send_multipart([msgpack.packb(header), np.zeros(4, np.float32).tobytes()])
        return msgpack.unpackb(dealer.recv_multipart()[0])

    assert ask(served.folder / "clients/robot.key_secret")["status"] == "ok"
    with pytest.raises(zmq.Again):
        ask(tmp_path / "stranger.key_secret")
    context.destroy(0)
