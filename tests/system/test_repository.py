"""RepositoryModelLoad and RepositoryModelUnload as tritonclient sends them, on a real daemon with a model store."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import helper
from tritonclient.utils import InferenceServerException

from taktd.ipc.grpc import inference_pb2 as pb
from taktd.ipc.grpc import inference_pb2_grpc
from taktd.ipc.zmq import Client, ZmqRefused
from tests import models
from tests.running import Running, eventually, serving
from tests.system.test_grpc import code_of

YAML = """\
devices: {{cpu0: {{driver: cpu}}}}
models:
  id: {{path: {folder}/store/id, version: latest}}
  pinned: {{path: {folder}/store/pinned, version: 1}}
  file: {{path: {folder}/file.onnx}}
  slow: {{path: {folder}/slow.onnx}}
loops: {{walk: {{model: id, period: 100ms, budget: 5ms, probation: 0s}}}}
admission: {{on_refusal: uncertified}}
grpc:
  - {{rights: infer}}
  - {{listen: "unix:{folder}/admin.sock", rights: admin}}
zmq: {{}}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("repository")
    x, y = (models.value(name, models.FP32, (1, 4)) for name in "xy")
    for name in ("id", "pinned"):
        models.identity(folder / f"store/{name}/1/model.onnx", (1, 4))
    models.identity(folder / "file.onnx", (1, 4))
    models.slow(folder / "slow.onnx")
    negated = models.save(folder / "neg.onnx", [helper.make_node("Neg", ["x"], ["y"])], [x], [y])
    with serving(folder, YAML.format(folder=folder)) as running:
        for name in ("id", "pinned"):
            assert running.taktctl("model", "add", name, str(negated)).returncode == 0
        yield running


@pytest.fixture
def admin(served: Running) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"unix:{served.folder}/admin.sock") as client:
        yield client


def asked(client: triton.InferenceServerClient, name: str = "id") -> tuple[float, str]:
    """The first number of the answer to ones, and the version that gave it."""
    given = triton.InferInput("x", [1, 4], "FP32")
    given.set_data_from_numpy(np.ones((1, 4), np.float32))
    answer = client.infer(name, [given])
    return float(answer.as_numpy("y")[0, 0]), answer.get_response().model_version


def config(*versions: Any, **more: Any) -> str:
    return json.dumps({"version_policy": {"specific": {"versions": list(versions)}}, **more})


def load_refused(client: triton.InferenceServerClient, name: str, **how: Any) -> tuple[str, str]:
    return code_of(lambda: client.load_model(name, **how))


def test_load_makes_the_version_active_that_the_client_names_while_the_loop_goes_on(
    served: Running, admin: triton.InferenceServerClient
) -> None:
    with served.connect() as node, node.attach("walk") as lane:
        lane.inputs["x"] = 1
        assert lane.infer(timeout_us=5e6).ok
        for versions, sign in (((2,), -1), (("1",), 1)):
            admin.load_model("id", config=config(*versions))
            assert asked(admin) == (sign, str(versions[0]))
            lane.inputs["x"] = 1
            assert lane.infer(timeout_us=5e6).ok
            assert lane.outputs["y"][0, 0] == sign
    with grpc.insecure_channel(f"unix:{served.folder}/admin.sock") as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        for number in (2, 1):
            request = pb.RepositoryModelLoadRequest(model_name="id")
            request.parameters["version"].int64_param = number
            stub.RepositoryModelLoad(request)
            assert asked(admin)[1] == str(number)
        request.repository_name = "elsewhere"
        assert code_of(lambda: stub.RepositoryModelLoad(request))[0] == "NOT_FOUND"
    shown = {m["name"]: m["serving"] for m in served.ask("model.list")["models"]}
    assert shown["id"] == 1


def test_load_without_a_version_is_no_change(admin: triton.InferenceServerClient) -> None:
    for name in ("id", "file", "pinned"):
        before = asked(admin, name)
        admin.load_model(name)
        admin.load_model(name, config="{}")
        assert asked(admin, name) == before


def test_what_cannot_be_loaded_is_refused_with_the_way_that_there_is(admin: triton.InferenceServerClient) -> None:
    for name, how, code, words in (
        ("nobody", {}, "NOT_FOUND", "no model is called"),
        ("id", {"config": config(9)}, "NOT_FOUND", "there are 1, 2"),
        ("file", {"config": config(2)}, "NOT_FOUND", "version: latest"),
        ("pinned", {"config": config(2)}, "INVALID_ARGUMENT", "pinned to version 1"),
        ("id", {"config": config(1, 2)}, "UNIMPLEMENTED", "one version"),
        ("id", {"config": config(1, max_batch_size=8)}, "UNIMPLEMENTED", "max_batch_size"),
        ("id", {"config": '{"version_policy": {"latest": {"num_versions": 2}}}'}, "UNIMPLEMENTED", "one version"),
        ("id", {"config": config(0)}, "INVALID_ARGUMENT", "from 1"),
        ("id", {"config": config(True)}, "INVALID_ARGUMENT", "from 1"),
        ("id", {"config": "[" * 60000}, "INVALID_ARGUMENT", "not JSON"),
        ("id", {"config": '{"name": "file"}'}, "INVALID_ARGUMENT", "id is to be loaded"),
        ("id", {"config": "{}", "files": {"file:1/model.onnx": b"x"}}, "UNIMPLEMENTED", "taktctl model add"),
    ):
        found, text = load_refused(admin, name, **how)
        assert (found, words in text) == (code, True), (name, how, found, text)
    assert code_of(lambda: admin.unload_model("nobody"))[0] == "NOT_FOUND"
    assert asked(admin)[1] == "1"


def test_only_a_listener_with_the_right_to_it_loads_and_unloads(served: Running) -> None:
    with triton.InferenceServerClient(f"unix:{served.runtime}/grpc.sock") as client:
        for change in (lambda: client.load_model("id"), lambda: client.unload_model("id")):
            code, text = code_of(change)
            assert (code, "rights: admin" in text) == ("PERMISSION_DENIED", True)
        assert asked(client)[1] == "1"


def test_an_unloaded_model_is_not_there_for_the_front_doors_and_there_for_its_loop(
    served: Running, admin: triton.InferenceServerClient
) -> None:
    assert asked(admin)[1] == "1"
    admin.unload_model("id")
    assert not admin.is_model_ready("id")
    index = {m.name: (m.state, m.reason) for m in admin.get_model_repository_index().models}
    assert index["id"] == ("UNAVAILABLE", "unloaded")
    assert index["file"] == ("READY", "")
    with pytest.raises(InferenceServerException, match="load it again") as refused:
        asked(admin)
    assert refused.value.status() == "StatusCode.NOT_FOUND"
    with Client(f"ipc://{served.runtime}/zmq.sock") as zmq:
        with pytest.raises(ZmqRefused, match="load it again"):
            zmq.infer("id", x=np.ones((1, 4), np.float32))
        assert [m["ready"] for m in zmq.models() if m["name"] == "id"] == [False]
    with served.connect() as node, node.attach("walk") as lane:
        assert lane.infer(timeout_us=5e6).ok
    # A gateway that dies does not bring it back.
    gateway = served.ask("status")["gateway"]
    assert gateway["unloaded"] == ["id"]
    os.kill(gateway["pid"], 9)
    eventually(lambda: served.ask("status")["gateway"]["pid"] not in (None, gateway["pid"]))
    eventually(lambda: served.ask("status")["gateway"]["ready"])
    served.remember_family()
    with triton.InferenceServerClient(f"unix:{served.folder}/admin.sock") as client:
        assert not client.is_model_ready("id")
        assert client.is_server_ready()
        client.load_model("id")
        assert client.is_model_ready("id")
        assert asked(client)[1] == "1"


def test_unload_waits_for_the_requests_that_there_are(admin: triton.InferenceServerClient) -> None:
    given = triton.InferInput("x", [512, 512], "FP32")
    given.set_data_from_numpy(np.ones((512, 512), np.float32))
    admin.infer("slow", [given])
    ended: list[object] = []
    done = threading.Event()

    def answered(result: object, error: object) -> None:
        ended.append(error)
        if len(ended) == 20:
            done.set()

    for _ in range(20):
        admin.async_infer("slow", [given], answered)
    # In flight or refused because it was too late for them; none is broken off.
    admin.unload_model("slow")
    assert done.wait(30)
    assert {error.status() for error in ended if error is not None} <= {"StatusCode.NOT_FOUND"}  # type: ignore[attr-defined]
    admin.load_model("slow")
    admin.infer("slow", [given])
