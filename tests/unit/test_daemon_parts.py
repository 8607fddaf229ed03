"""The supervisor's parts that need no process: limits, folders, messages to systemd, rights, the executor's life."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from taktd.daemon import runtime_folder
from taktd.daemon.child_process import child_environment
from taktd.daemon.config.configuration import Allow, Limits, load
from taktd.daemon.doors.control_door import ControlDoor
from taktd.daemon.doors.peers import Peer, peer_of, rule_of
from taktd.daemon.handover import reload
from taktd.daemon.limits import Charges, LimitExceeded
from taktd.daemon.notify import Notifier
from taktd.daemon.supervision.kept_process import TRANSITIONS, Event, State

# ---- limits ----


def test_a_charge_fits_or_changes_nothing() -> None:
    charges = Charges(Limits(lanes=3, lanes_per_uid=2))
    charges.charge("lanes", 1, 2)
    with pytest.raises(LimitExceeded, match=r"uid 1: 2 held, 1 more wanted, 2 allowed.*limits\.lanes_per_uid"):
        charges.charge("lanes", 1)
    charges.charge("lanes", 2)
    with pytest.raises(LimitExceeded, match=r"all clients: 3 held.*limits\.lanes "):
        charges.charge("lanes", 3)
    assert [charges.held("lanes", uid) for uid in (1, 2, 3)] == [2, 1, 0]
    charges.release("lanes", 1, 2)
    charges.release("lanes", 2)
    assert charges.held("lanes") == 0


def test_more_is_never_given_back_than_was_taken() -> None:
    charges = Charges(Limits())
    with pytest.raises(AssertionError):
        charges.release("connections", 1)


def test_new_limits_hold_for_new_charges() -> None:
    charges = Charges(Limits(connections_per_uid=2))
    charges.charge("connections", 1, 2)
    charges.limits = Limits(connections_per_uid=1)
    with pytest.raises(LimitExceeded):
        charges.charge("connections", 1)
    charges.release("connections", 1, 2)
    charges.charge("connections", 1)


# ---- control.sock ----


def test_an_operation_that_a_broken_disk_ends_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def broken(request: dict[str, Any]) -> dict[str, Any]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/store/active.json")

    async def ask() -> list[dict[str, Any]]:
        door = ControlDoor(tmp_path / "c", {"status": broken}, {}, None)
        reader, writer = await asyncio.open_unix_connection(tmp_path / "c")
        answers = []
        for _ in range(2):  # the conversation goes on
            writer.write(b'{"op": "status"}\n')
            answers.append(json.loads(await reader.readline()))
        writer.close()
        await door.close()
        return answers

    for answer in asyncio.run(ask()):
        assert answer["ok"] is False
        assert answer["error"]["what"] == "status failed: input/output error (/store/active.json)"
    assert "status failed" in capsys.readouterr().err


# ---- folders ----


@pytest.mark.parametrize(
    ("environment", "uid", "folder"),
    [
        ({"RUNTIME_DIRECTORY": "/run/a:/run/b", "TAKTD_RUNTIME_DIR": "/x"}, 0, "/run/a"),
        ({"TAKTD_RUNTIME_DIR": "/x", "XDG_RUNTIME_DIR": "/run/user/5"}, 5, "/x"),
        ({"XDG_RUNTIME_DIR": "/run/user/5"}, 5, "/run/user/5/taktd"),
        ({"XDG_RUNTIME_DIR": "/run/user/0"}, 0, "/run/taktd"),
    ],
)
def test_the_runtime_folder(environment: dict[str, str], uid: int, folder: str) -> None:
    assert runtime_folder.runtime_folder(environment, uid) == Path(folder)


def test_without_any_runtime_folder_it_says_what_to_set() -> None:
    with pytest.raises(runtime_folder.FolderRefused, match="TAKTD_RUNTIME_DIR"):
        runtime_folder.runtime_folder({}, 5)


@pytest.mark.parametrize(
    ("environment", "uid", "folder"),
    [
        ({"STATE_DIRECTORY": "/var/lib/a"}, 5, "/var/lib/a"),
        ({"TAKTD_STATE_DIR": "/x"}, 5, "/x"),
        ({}, 0, "/var/lib/taktd"),
        ({"XDG_STATE_HOME": "/h/s"}, 5, "/h/s/taktd"),
        ({"HOME": "/h"}, 5, "/h/.local/state/taktd"),
    ],
)
def test_the_state_folder(environment: dict[str, str], uid: int, folder: str) -> None:
    assert runtime_folder.state_folder(environment, uid) == Path(folder)


def test_clients_look_where_the_daemon_is(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    environment = {"TAKTD_RUNTIME_DIR": str(first), "XDG_RUNTIME_DIR": str(second)}
    assert runtime_folder.lane_socket_path(environment) == first / "lanes.sock"
    (second / "taktd").mkdir(parents=True)
    (second / "taktd/lanes.sock").touch()
    assert runtime_folder.control_socket_path(environment) == second / "taktd/control.sock"
    assert runtime_folder.lane_socket_path(environment | {"TAKTD_SOCKET": "/s"}) == Path("/s")


def test_a_folder_that_everybody_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(runtime_folder.FolderRefused, match="chmod o-w"):
        runtime_folder.make_folder(tmp_path, 0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 4242, 4242)
    with pytest.raises(runtime_folder.FolderRefused, match="uid 4242"):
        runtime_folder.make_folder(tmp_path, 0o755)


def test_the_lock_is_one_and_names_its_holder(tmp_path: Path) -> None:
    lock = runtime_folder.lock_folder(tmp_path)
    with pytest.raises(runtime_folder.AlreadyRunning) as running:
        runtime_folder.lock_folder(tmp_path)
    assert running.value.pid == os.getpid()
    lock.close()
    runtime_folder.lock_folder(tmp_path).close()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(runtime_folder.FolderRefused, match="107"):
        runtime_folder.listen(tmp_path / ("x" * 120), socket.SOCK_STREAM, 1)


# ---- systemd ----


def test_notifications(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"})
        assert notifier.watchdog_ns == 3_000_000_000
        notifier.ready("fine")
        notifier.reloading(5_000)
        notifier.feed_watchdog()
        notifier.stopping("bye")
        notifier.extend(30)
        said = [manager.recv(1000).decode() for _ in range(5)]
        notifier.close()
    assert said[0].split("\n") == ["READY=1", "STATUS=fine", f"MAINPID={os.getpid()}"]
    assert said[1] == "RELOADING=1\nMONOTONIC_USEC=5"
    assert said[2:] == ["WATCHDOG=1", "STOPPING=1\nSTATUS=bye", "EXTEND_TIMEOUT_USEC=30000000"]


def test_without_systemd_nothing_is_said(tmp_path: Path) -> None:
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "nobody")}, {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}):
        notifier = Notifier(environment)
        notifier.ready("fine")
        assert notifier.watchdog_ns == 0
        notifier.close()


def test_children_get_no_notify_socket_and_no_telemetry() -> None:
    child = child_environment(
        {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "LISTEN_FDS": "2", "A": "b", "PYTHONPATH": "src"}
    )
    assert child["ORT_DISABLE_TELEMETRY"] == "1"
    assert child["PYTHONPATH"] == os.path.abspath("src")
    assert child["A"] == "b"
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS"} & set(child)


# ---- rights ----


def test_rules() -> None:
    rule = rule_of(Allow(users=("root", "4711", "no-such-user"), groups=("no-such-group",)))
    assert rule.unknown == ("user no-such-user", "group no-such-group")
    assert rule.admits(Peer(1, 4711, frozenset()), own_uid=9)
    assert rule.admits(Peer(1, 0, frozenset()), own_uid=9)
    assert rule.admits(Peer(1, 9, frozenset()), own_uid=9)
    assert not rule.admits(Peer(1, 4712, frozenset({4711})), own_uid=9)
    assert rule_of(Allow(groups=("root",))).admits(Peer(1, 5, frozenset({7, 0})), own_uid=9)


def test_the_kernel_says_who_a_peer_is() -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        peer = peer_of(a)
    assert (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
    assert peer.groups >= {os.getegid()}


# ---- the executor's life ----

IMPOSSIBLE = {
    (State.STOPPED, Event.READY), (State.STOPPED, Event.DIED),
    (State.STARTING, Event.START),
    (State.READY, Event.START), (State.READY, Event.READY),
    (State.PAUSING, Event.READY), (State.PAUSING, Event.DIED),
    (State.DRAINING, Event.START),
    *((state, Event.ADOPTED) for state in State if state is not State.STOPPED),
}  # fmt: skip


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_event_in_every_state_has_one_meaning_or_none(state: State, event: Event) -> None:
    assert ((state, event) in TRANSITIONS) != ((state, event) in IMPOSSIBLE)


def test_a_drained_executor_is_never_started_again() -> None:
    assert TRANSITIONS[State.DRAINING, Event.DIED] is State.STOPPED
    assert TRANSITIONS[State.PAUSING, Event.DRAIN] is State.STOPPED


# ---- reload ----

YAML = """\
devices: {c: {driver: cpu}}
models: {m: {path: m.onnx}}
loops:
  a: {model: m, period: 1ms}
  b: {model: m, period: 2ms}
"""


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("period: 1ms}", "period: 1ms, allow: {users: [x]}}", ("loops", "a", "allow", "users")),
        ("devices", "limits: {lanes: 5}\ndevices", ("limits", "lanes")),
        ("period: 2ms", "period: 3ms", ("loops", "b", "period")),
        ("path: m.onnx", "path: n.onnx", ("models", "m", "path")),
        ("  b: {model: m, period: 2ms}\n", "", ("loops", "b")),
        ("driver: cpu", "driver: cpu, cores: [1]", ("devices", "c", "cores")),
    ],
)
def test_what_changed(tmp_path: Path, old: str, new: str, path: tuple[str, ...]) -> None:
    file = tmp_path / "taktd.yaml"
    file.write_text(YAML)
    before = load(file)
    file.write_text(YAML.replace(old, new))
    changed = reload.differences(before, load(file))
    assert path in changed
    assert reload.differences(before, before) == []


def test_the_order_of_loops_is_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "taktd.yaml"
    file.write_text(YAML)
    before = load(file)
    lines = YAML.splitlines()
    file.write_text("\n".join([*lines[:3], lines[4], lines[3]]))
    assert reload.differences(before, load(file)) == [("loops", "order")]
