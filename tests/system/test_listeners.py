"""Listeners' owner, group and mode: who gets as far as asking. And a gateway that is stopped while it starts."""

from __future__ import annotations

import grp
import os
import pwd
import signal
import socket
import stat
from pathlib import Path

import grpc
import pytest

from taktd.daemon.runtime_folder import CONTROL_SOCKET, EXECUTORS_SOCKET, LANES_SOCKET
from taktd.ipc.grpc import inference_pb2 as pb
from taktd.ipc.grpc import inference_pb2_grpc
from tests import models
from tests.conftest import Start
from tests.running import Running, eventually
from tests.system.test_supervisor import as_user

NOBODY, NOGROUP, STRANGER = 65534, 65534, 23456
BASE = """\
devices: {{cpu0: {{driver: cpu}}}}
models: {{id: {{path: {folder}/id.onnx}}}}
admission: {{on_refusal: uncertified}}
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away and to become other users")


def configured(folder: Path, grpc: str) -> str:
    models.identity(folder / "id.onnx", (1, 4))
    return BASE.format(folder=folder) + f"grpc:\n{grpc.format(folder=folder)}"


def gateway_of(running: Running) -> dict[str, object]:
    found: dict[str, object] = running.ask("status")["gateway"]
    return found


@needs_root
def test_a_listener_belongs_to_whom_the_configuration_says_and_nobody_else_gets_in(
    taktd: Start, tmp_path: Path
) -> None:
    owner, group = pwd.getpwuid(NOBODY).pw_name, grp.getgrgid(NOGROUP).gr_name
    running = taktd(configured(
        tmp_path,
        f'  - {{{{listen: "unix:{{folder}}/owned.sock", owner: {owner}, mode: "0600"}}}}\n'
        f'  - {{{{listen: "unix:{{folder}}/group.sock", group: {group}, mode: "0660"}}}}\n'
        '  - {{listen: "unix:{folder}/all.sock", mode: "0666"}}\n',
    ))  # fmt: skip
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.stat().st_mode & 0o005 != 0o005 and parent.is_relative_to("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o055)

    def about(name: str) -> tuple[int, int, int]:
        found = (tmp_path / name).stat()
        return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)

    eventually(lambda: bool(gateway_of(running)["ready"]))
    assert about("owned.sock")[::2] == (NOBODY, 0o600)
    assert about("group.sock") == (0, NOGROUP, 0o660)
    assert about("all.sock")[::2] == (0, 0o666)

    def enter() -> str:
        said = []
        for name in ("owned", "group", "all"):
            with socket.socket(socket.AF_UNIX) as client:
                said.append(str(client.connect_ex(f"{tmp_path}/{name}.sock") == 0))
        return " ".join(said)

    assert as_user(NOBODY, enter) == "True True True"
    assert as_user(STRANGER, enter) == "False True True", "it has the group nogroup"


@needs_root
def test_an_owner_that_nobody_is_called_is_said_and_costs_no_loop(taktd: Start, tmp_path: Path) -> None:
    running = taktd(configured(tmp_path, '  - {{listen: "unix:{folder}/a.sock", owner: nobody-is-called-so}}\n'))
    assert "nobody here is called" in str(gateway_of(running)["error"])
    with running.connect() as node, node.attach("id") as lane:
        assert lane.infer(timeout_us=5e6).ok


def test_a_gateway_that_is_stopped_while_it_starts_ends_without_a_complaint(taktd: Start, tmp_path: Path) -> None:
    running = taktd(configured(tmp_path, '  - {{listen: "unix:{folder}/a.sock"}}\n'))

    def ended(number: signal.Signals) -> None:
        """As soon as there is one."""
        before = gateway_of(running)["pid"]
        assert isinstance(before, int)
        os.kill(before, number)
        eventually(lambda: gateway_of(running)["pid"] not in (None, before), within_s=30)

    for _ in range(3):
        eventually(lambda: bool(gateway_of(running)["ready"]), within_s=30)
        running.remember_family()
        ended(signal.SIGKILL)
        ended(signal.SIGTERM)
    eventually(lambda: bool(gateway_of(running)["ready"]), within_s=30)
    ended(signal.SIGKILL)
    assert running.stop() == 0
    assert "Traceback" not in running.log, running.log
    assert "InvalidStateError" not in running.log


@pytest.mark.parametrize("door", ["grpc", "zmq", "events"])
def test_a_socket_that_somebody_listens_at_is_left_to_him_and_a_dead_one_is_replaced(tmp_path: Path, door: str) -> None:
    models.identity(tmp_path / "id.onnx", (1, 4))
    running = Running(tmp_path, BASE.format(folder=tmp_path) + "grpc: {}\nzmq: {}\n")
    running.runtime.mkdir()
    file = running.runtime / f"{door}.sock"
    try:
        with socket.socket(socket.AF_UNIX) as somebody:
            somebody.bind(str(file))
            somebody.listen()
            inode = file.stat().st_ino
            running.start().await_ready()
            eventually(lambda: "somebody listens at" in running.log, within_s=60)
            with running.connect() as node, node.attach("id") as lane:
                assert lane.infer(timeout_us=5e6).ok
            with socket.socket(socket.AF_UNIX) as visitor:
                visitor.connect(str(file))
            assert file.stat().st_ino == inode
        # His end leaves the file behind.
        eventually(lambda: bool(gateway_of(running)["ready"]), within_s=60)
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.connect(str(file))
        running.remember_family()
        assert running.stop() == 0
    finally:
        running.close()


def test_loopback_may_be_open_to_this_machine(taktd: Start, tmp_path: Path) -> None:
    running = taktd(configured(tmp_path, '  - {{listen: "127.0.0.1:0", insecure: loopback}}\n'))
    eventually(lambda: bool(gateway_of(running)["ready"]))
    (address,) = (door["address"] for door in running.ask("status")["doors"] if door["name"] == "grpc")
    request = pb.ModelInferRequest(model_name="id", raw_input_contents=[bytes(16)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    with grpc.insecure_channel(address) as channel:
        reply = inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20)
    assert reply.raw_output_contents[0] == bytes(16)


def test_sockets_of_a_taktd_that_lost_its_power_are_in_nobodys_way_and_go_with_the_next_stop(
    taktd: Start, tmp_path: Path
) -> None:
    running = taktd(configured(tmp_path, '  - {{listen: "unix:"}}\n') + "zmq: {}\n")
    assert running.stop() == 0
    for name in (LANES_SOCKET, CONTROL_SOCKET, EXECUTORS_SOCKET, "grpc.sock", "zmq.sock", "events.sock"):
        with socket.socket(socket.AF_UNIX) as left_over:
            left_over.bind(str(running.runtime / name))
    running.start().await_ready()
    doors = running.ask("status")["doors"]
    assert len(doors) >= 3
    assert all(door["serving"] for door in doors), doors
    assert running.stop() == 0
    assert list(running.runtime.glob("*.sock")) == []
