"""What clients of the gateway and of HTTP see of a change: other versions, models and doors, on a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import helper
from tritonclient.utils import InferenceServerException

from taktd.ipc.zmq.client import Client
from tests import models
from tests.conftest import Start
from tests.running import Running, eventually

YAML = """\
devices: {{cpu0: {{driver: cpu}}}}
models:
  id: {{path: {folder}/store/id, version: latest}}
{more}
loops: {{walk: {{model: id, device: cpu0, period: 100ms, budget: 5ms, probation: 0s}}}}
admission: {{on_refusal: uncertified}}
http: {{listen: "unix:{folder}/{http}.sock"}}
grpc:
  - {{listen: "unix:{folder}/{grpc}.sock"}}
zmq: {{}}
"""


def text(folder: Path, more: str = "", grpc: str = "grpc", http: str = "http") -> str:
    return YAML.format(folder=folder, more=more, grpc=grpc, http=http)


def negated(path: Path, width: int = 4) -> Path:
    """y = -x."""
    x, y = (models.value(name, models.FP32, (1, width)) for name in "xy")
    return models.save(path, [helper.make_node("Neg", ["x"], ["y"])], [x], [y])


@pytest.fixture
def running(taktd: Start, tmp_path: Path) -> Running:
    models.identity(tmp_path / "store/id/1/model.onnx", (1, 4))
    models.identity(tmp_path / "other.onnx", (1, 2))
    running = taktd(text(tmp_path))
    for file in (negated(tmp_path / "neg.onnx"), negated(tmp_path / "wide.onnx", 5)):
        assert running.taktctl("model", "add", "id", str(file)).returncode == 0
    return running


@pytest.fixture
def client(running: Running, tmp_path: Path) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"unix:{tmp_path}/grpc.sock") as client:
        yield client


def asked(
    client: triton.InferenceServerClient, width: int = 4, name: str = "id", version: str = ""
) -> tuple[float, str]:
    """The first number of the answer to ones, and the version that it says it is of."""
    given = triton.InferInput("x", [1, width], "FP32")
    given.set_data_from_numpy(np.ones((1, width), np.float32))
    answer = client.infer(name, [given], model_version=version)
    return float(answer.as_numpy("y")[0, 0]), answer.get_response().model_version


def test_an_activated_version_answers_by_its_number_on_the_same_connection(
    running: Running, client: triton.InferenceServerClient, tmp_path: Path
) -> None:
    gateway = running.ask("status")["gateway"]["pid"]
    with (
        Client(f"ipc://{running.runtime}/zmq.sock") as zmq,
        running.connect() as node,
        node.attach("id", kind="model") as lane,
    ):
        assert asked(client) == (1, "1")
        assert lane.infer(timeout_us=5e6).ok
        for number, sign in ((2, -1), (1, 1)):
            done = running.taktctl("model", "activate", "id", str(number))
            assert done.returncode == 0, done.stderr
            assert asked(client) == (sign, str(number))
            assert asked(client, version=str(number)) == (sign, str(number))
            with pytest.raises(InferenceServerException, match=f"version {number} is served"):
                asked(client, version=str(3 - number))
            assert client.get_model_metadata("id").versions == [str(number)]
            assert float(zmq.infer("id", {"x": np.ones((1, 4), np.float32)})["y"][0, 0]) == sign
            lane.inputs["x"][:] = 1
            assert lane.infer(timeout_us=5e6).ok
            assert float(lane.outputs["y"][0, 0]) == sign
        assert running.ask("status")["gateway"]["pid"] == gateway


def test_a_version_with_other_tensors_is_described_and_served_anew(
    running: Running, client: triton.InferenceServerClient
) -> None:
    assert asked(client) == (1, "1")
    done = running.taktctl("model", "activate", "id", "3")
    assert done.returncode == 0, done.stderr
    [described] = client.get_model_metadata("id").inputs
    assert list(described.shape) == [1, 5]
    assert asked(client, width=5) == (-1, "3")
    with pytest.raises(InferenceServerException, match="shape"):
        asked(client, width=4)


def test_models_come_and_go_with_a_reload(
    running: Running, client: triton.InferenceServerClient, tmp_path: Path
) -> None:
    with pytest.raises(InferenceServerException, match="no model is called 'other'"):
        asked(client, width=2, name="other")
    running.file.write_text(text(tmp_path, f"  other: {{path: {tmp_path}/other.onnx}}"))
    running.ask("reload")
    assert asked(client, width=2, name="other") == (1, "1")
    running.file.write_text(text(tmp_path))
    running.ask("reload")
    with pytest.raises(InferenceServerException, match="no model is called 'other'"):
        asked(client, width=2, name="other")
    assert asked(client) == (1, "1")


def page(path: Path) -> int:
    import http.client
    import socket

    connection = http.client.HTTPConnection("taktd")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request("GET", "/health/ready")
    return connection.getresponse().status


def test_doors_move_with_a_reload_and_loops_do_not_notice(running: Running, tmp_path: Path) -> None:
    with running.connect() as node, node.attach("walk") as lane:
        assert lane.infer(timeout_us=5e6).ok
        gateway = running.ask("status")["gateway"]["pid"]
        running.remember_family()
        running.file.write_text(text(tmp_path, grpc="elsewhere", http="there"))
        running.ask("reload")
        eventually(lambda: running.ask("status")["ready"] and (tmp_path / "elsewhere.sock").exists(), 30, "it listens")
        assert running.ask("status")["gateway"]["pid"] != gateway
        with triton.InferenceServerClient(f"unix:{tmp_path}/elsewhere.sock") as client:
            eventually(lambda: client.is_server_ready(), 30)
            assert asked(client) == (1, "1")
        eventually(lambda: (tmp_path / "there.sock").exists(), 10)
        assert page(tmp_path / "there.sock") == 200
        assert not (tmp_path / "grpc.sock").exists()
        assert not (tmp_path / "http.sock").exists()
        assert lane.infer(timeout_us=5e6).ok
        assert running.loop("walk")["switches"] == {"start": 1}


def test_front_doors_are_switched_off_and_on_by_a_reload(running: Running, tmp_path: Path) -> None:
    running.remember_family()
    full = running.file.read_text()
    off = full[: full.index("http:")]
    running.file.write_text(off + "grpc: off\nzmq: off\n")
    running.ask("reload")
    eventually(lambda: running.ask("status")["gateway"]["pid"] is None, 10, "the gateway has ended")
    status = running.ask("status")
    assert status["ready"]
    assert [door["name"] for door in status["doors"]] == ["lanes", "control"]
    running.file.write_text(full)
    running.ask("reload")
    with triton.InferenceServerClient(f"unix:{tmp_path}/grpc.sock") as client:
        eventually(lambda: (tmp_path / "grpc.sock").exists() and client.is_server_ready(), 30, "it is there again")
        assert asked(client) == (1, "1")
