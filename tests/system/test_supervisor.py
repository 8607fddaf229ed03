"""The daemon as a whole: start, attach, refusals, restarts, reload, stop."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from taktd.daemon.control_client import AnswerNo
from taktd.ipc import Busy, Denied, LimitReached, NotConnected, NotFound, TaktError
from tests import models
from tests.conftest import Start
from tests.running import Running, eventually

YAML = """\
node: {{name: cell-07}}
devices:
  cpu0: {{driver: cpu}}
models:
  id: {{path: {folder}/id.onnx}}
  policy: {{path: {folder}/mlp.onnx, allow: {{users: ["12345"]}}}}
loops:
  walk: {{model: id, device: cpu0, period: 10ms, budget: 2ms}}
  guard: {{model: policy, device: cpu0, period: 50ms, budget: 5ms, allow: {{users: ["12345"]}}}}
admission: {{on_refusal: uncertified}}
limits: {{lanes_per_uid: 8}}
"""
FREE = "admission: {on_refusal: uncertified}\n"


@pytest.fixture
def yaml(tmp_path: Path) -> str:
    models.identity(tmp_path / "id.onnx", (4,))
    models.mlp(tmp_path / "mlp.onnx", (48, 32, 12))
    return YAML.format(folder=tmp_path)


def as_user(uid: int, action: Callable[[], str]) -> str:
    """What action() says in a child that has become another user, with the group `nogroup` only."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(uid, uid, uid)
            os.write(write, action().encode())
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(child, 0)
    return said


def test_a_start_asks_for_patience_before_it_looks_at_the_models(taktd: Start, yaml: str) -> None:
    """An inspection may take longer than systemd waits for a start (TimeoutStartSec=)."""
    said = [line for text in taktd(yaml).notifications for line in text.split("\n")]
    inspecting, loading = said.index("STATUS=inspecting models"), said.index("STATUS=loading engines")
    asked = [number for number, line in enumerate(said) if line.startswith("EXTEND_TIMEOUT_USEC=")]
    assert asked, said
    assert asked[0] < inspecting < loading, said


def test_a_daemon_with_one_loop_does_not_speak_of_loops(taktd: Start, tmp_path: Path) -> None:
    models.identity(tmp_path / "id.onnx", (4,))
    head = f"devices:\n  cpu0: {{driver: cpu}}\nmodels:\n  id: {{path: {tmp_path}/id.onnx}}\n"
    running = taktd(head + "loops:\n  walk: {model: id, device: cpu0, period: 10ms, budget: 2ms}\n" + FREE)
    assert "ready: 1 loop on 1 device, " in running.log


def test_attach_infer_detach(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    with running.connect() as node:
        assert {loop["name"] for loop in node.loops()} == {"walk", "guard"}
        assert {model["name"] for model in node.models()} == {"id", "policy"}
        for name in ("walk", "id"):
            with node.attach(name) as lane:
                lane.inputs["x"][:] = [1, 2, 3, 4]
                reply = lane.infer()
                assert reply.status == "ok"
                np.testing.assert_array_equal(lane.outputs["y"], [1, 2, 3, 4])
    assert running.loop("walk")["statistics"]["ok"] == 1
    assert running.stop() == 0


def test_ready_says_what_is_served(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    ready = next(text for text in running.notifications if "READY=1" in text)
    assert f"MAINPID={running.process.pid}" in ready
    assert "2 loops" in ready
    status = running.ask("status")
    assert status["ready"]
    assert [e["device"] for e in status["executors"]] == ["cpu0"]
    assert psutil.pid_exists(status["executors"][0]["pid"])
    assert {loop["name"] for loop in status["loops"]} == {"walk", "guard"}


def test_the_sockets_are_for_everybody_whatever_the_umask(taktd: Start, yaml: str) -> None:
    before = os.umask(0o077)
    try:
        running = taktd(yaml)
    finally:
        os.umask(before)
    for name in ("lanes.sock", "control.sock"):
        assert stat.S_IMODE((running.runtime / name).stat().st_mode) == 0o666
    assert stat.S_IMODE(running.runtime.stat().st_mode) == 0o755
    assert stat.S_IMODE(running.state.stat().st_mode) == 0o750


def test_a_loop_has_one_client(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    with running.connect() as first, running.connect() as second:
        lane = first.attach("walk")
        with pytest.raises(Busy, match=r"walk is taken by .*pid"):
            second.attach("walk")
        lane.close()
        with second.attach("walk") as other:
            other.inputs["x"][:] = 7
            assert other.infer().ok


def test_nothing_of_one_client_is_seen_by_the_next(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    with running.connect() as node:
        with node.attach("walk") as lane:
            for _ in range(8):
                lane.inputs["x"][:] = 42
                lane.infer()
        with node.attach("walk") as lane:
            assert not lane.inputs["x"].any()
            assert lane.infer().ok
            assert not lane.outputs["y"].any()


def test_unknown_names_are_refused_with_what_there_is(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    with running.connect() as node:
        with pytest.raises(NotFound, match="did you mean walk"):
            node.attach("wlak")
        with pytest.raises(NotFound, match="walk, guard"):
            node.attach("zzzzz")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")
def test_rights(taktd: Start, yaml: str, tmp_path: Path) -> None:
    running = taktd(yaml)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_mode & 0o005 != 0o005 and folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)

    def attach() -> str:
        said = []
        node = running.connect()
        for name in ("walk", "guard", "id", "policy"):
            try:
                node.attach(name).close()
                said.append(f"{name} yes")
            except Denied as error:
                said.append(f"{name} no: {error}")
        return "\n".join(said)

    def control() -> str:
        said = [str(running.ask("status")["ready"])]
        try:
            running.ask("reload")
        except AnswerNo as error:
            said.append(str(error))
        return "\n".join(said)

    stranger = as_user(23456, attach)
    assert [line.partition(":")[0] for line in stranger.splitlines()] == ["walk no", "guard no", "id no", "policy no"]
    assert "uid 23456" in stranger
    assert "loops.guard.allow" in stranger
    assert as_user(12345, attach).splitlines()[1::2] == ["guard yes", "policy yes"]
    assert as_user(23456, control) == "True\nreload is not allowed for uid 23456"


def test_limits_are_charged_and_given_back(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    with running.connect() as node:
        lanes = [node.attach("id") for _ in range(8)]
        with pytest.raises(LimitReached, match=r"limits\.lanes_per_uid"):
            node.attach("id")
        lanes.pop().close()
        lanes.append(node.attach("id"))
        for lane in lanes:
            lane.inputs["x"][:] = 1
            assert lane.infer().ok
    with running.connect() as node:
        assert len([node.attach("id") for _ in range(8)]) == 8


# ---- death ----


def test_an_executor_that_is_killed_is_replaced_and_clients_go_on(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    with running.connect() as node, node.attach("walk") as loop, node.attach("id") as model:
        for lane in (loop, model):
            lane.inputs["x"][:] = 1
            assert lane.infer().ok
        before = running.executor()
        os.kill(before["pid"], signal.SIGKILL)
        loop.inputs["x"][:] = 2
        first = loop.infer(timeout_us=30_000_000)
        assert first.status in ("ok", "lost", "expired"), first.status
        for value, lane in ((3, loop), (4, model)):
            lane.inputs["x"][:] = value
            reply = lane.infer(timeout_us=30_000_000)
            # The submission itself may have waited for the new executor beyond its deadline.
            if reply.status == "expired":
                lane.inputs["x"][:] = value
                reply = lane.infer(timeout_us=30_000_000)
            assert reply.ok, reply.status
            assert lane.outputs["y"][0] == value
        after = running.executor()
        assert after["restarts"] == before["restarts"] + 1
        assert after["pid"] != before["pid"]
        assert running.ask("status")["ready"]


def alive(pid: int | None) -> bool:
    """Nobody, or a process that runs. Between an answer and this look it may die: ask again."""
    try:
        return pid is None or psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_status_never_names_a_dead_pid(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    for _ in range(3):
        pid = running.executor()["pid"]
        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 30
        while True:
            executor = running.executor()
            if executor["ready"] and executor["pid"] != pid:
                break
            eventually(lambda: alive(running.executor()["pid"]), 5, "status names a dead pid")
            assert running.taktctl("status").returncode == 1 or running.executor()["ready"]
            assert time.monotonic() < until
    assert running.executor()["restarts"] == 3


def test_an_executor_that_dies_while_a_client_is_replaced_clears_the_lane(taktd: Start, yaml: str) -> None:
    """The swap for a fresh lane and the executor's death cross each other: the loop is free again all the same."""
    running = taktd(yaml)
    for _ in range(5):
        with running.connect() as node, node.attach("walk") as lane:
            lane.inputs["x"][:] = 1
            assert lane.infer(timeout_us=30_000_000).status in ("ok", "expired")
            os.kill(running.executor()["pid"], signal.SIGKILL)
        with running.connect() as node, node.attach("walk", timeout_us=30_000_000) as lane:
            eventually(lambda: running.executor()["ready"], 30)
            assert not lane.inputs["x"].any()
            lane.inputs["x"][:] = 5
            assert lane.infer(timeout_us=30_000_000).ok


def test_a_client_that_is_killed_frees_its_loop(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    code = (
        f"from taktd.ipc import connect\nlane = connect({running.lanes_socket!r}).attach('walk')\n"
        "print('attached', flush=True)\n"
        "while True:\n    lane.inputs['x'][:] = 1\n    lane.infer()\n"
    )
    for _ in range(3):
        client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        assert client.stdout.readline() == "attached\n"
        client.kill()
        client.wait()
        client.stdout.close()
        eventually(lambda: not running.loop("walk")["attached"], 2.0, "the loop is free")
        with running.connect() as node, node.attach("walk") as lane:
            assert lane.infer().status in ("ok", "expired")


# ---- the folder ----


def test_a_second_daemon_on_the_same_folder_refuses(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    second = subprocess.run(
        [sys.executable, "-m", "taktd.daemon", "--config", str(running.file)],
        env=running.environment | {"NOTIFY_SOCKET": ""}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert second.returncode == 1
    assert f"pid {running.process.pid}" in second.stderr
    assert "TAKTD_RUNTIME_DIR" in second.stderr
    with running.connect() as node:
        assert node.attach("walk").infer().ok


def test_what_a_killed_daemon_left_does_not_block_the_next(taktd: Start, yaml: str) -> None:
    running = taktd(yaml + "grace: 1s\n")
    running.process.kill()
    running.process.wait()
    assert (running.runtime / "lanes.sock").exists()
    eventually(lambda: not [p for p in running._family.values() if p.is_running()], 5.0, "executors end by themselves")
    with pytest.raises(NotConnected):
        running.connect()
    running.start().await_ready()
    with running.connect() as node:
        assert node.attach("walk").infer().ok


def test_stop_with_a_job_running_and_clients_waiting(taktd: Start, tmp_path: Path) -> None:
    models.slow(tmp_path / "slow.onnx", size=512, layers=16)
    running = taktd(f"devices: {{cpu0: {{driver: cpu}}}}\nmodels: {{slow: {{path: {tmp_path}/slow.onnx}}}}\n")
    ends: list[str] = []

    def client() -> None:
        with running.connect() as node, node.attach("slow", wait="block") as lane:
            try:
                while (reply := lane.infer(timeout_us=20_000_000)).status == "ok":
                    pass
                ends.append(reply.status)
            except TaktError as error:
                ends.append(type(error).__name__)

    threads = [threading.Thread(target=client) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: running.ask("models")["models"][0]["statistics"]["ok"] > 3)
    assert running.stop() == 0
    for thread in threads:
        thread.join(5)
    assert len(ends) == 3
    assert set(ends) <= {"detached", "Detached", "NotConnected"}


def test_sigterm_while_it_still_starts(taktd: Start, yaml: str) -> None:
    for moment in (0.1, 0.6, 1.2):
        running = taktd(yaml, name=f"at{moment}", wait=False)
        time.sleep(moment)
        running.process.send_signal(signal.SIGTERM)
        # Before the interpreter has installed a handler the signal itself ends it.
        assert running.stop() in (0, -signal.SIGTERM)


# ---- models that can't be served ----


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "missing"),
        (b"", "no ONNX model|no graph"),
        (b"\xff" * 100, "no ONNX model"),
        (b"version https://git-lfs", "no ONNX"),
    ],
)
def test_a_broken_model_is_refused_at_start(tmp_path: Path, taktd: Start, content: bytes | None, what: str) -> None:
    if content is not None:
        (tmp_path / "m.onnx").write_bytes(content)
    running = taktd(f"devices: {{c: {{driver: cpu}}}}\nmodels: {{broken: {{path: {tmp_path}/m.onnx}}}}\n", wait=False)
    assert running.process.wait(30) == 78
    assert "model broken" in running.log
    assert str(tmp_path / "m.onnx") in running.log
    assert re.search(what, running.log), running.log


# ---- reload ----


def hang_up(running: Running) -> str:
    before = len(running.log)
    running.process.send_signal(signal.SIGHUP)
    running.await_notification("RELOADING=1", 10)
    running.await_notification("READY=1", 10)
    eventually(lambda: re.search("reload: |refused", running.log[before:]) is not None)
    return running.log[before:]


def test_reload(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    assert "nothing has changed" in hang_up(running)
    running.file.write_text(yaml.replace("lanes_per_uid: 8", "lanes_per_uid: 2"))
    assert "limits.lanes_per_uid" in hang_up(running)
    assert running.ask("status")["epoch"] == 2
    with running.connect() as node:
        held = [node.attach("id"), node.attach("id")]
        with pytest.raises(LimitReached):
            held.append(node.attach("id"))
    running.file.write_text(
        yaml.replace("period: 10ms", "period: 20ms").replace("lanes_per_uid: 8", "lanes_per_uid: 3")
    )
    assert "loops.walk.period" in hang_up(running)
    assert running.ask("status")["epoch"] == 3
    assert running.loop("walk")["period_ns"] == 20_000_000
    running.file.write_text("loops: [")
    assert f"{running.file}:1" in hang_up(running)
    status = running.ask("status")
    assert status["epoch"] == 3
    assert status["ready"]
    assert running.loop("walk")["period_ns"] == 20_000_000


# ---- taktctl ----


def test_taktctl(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    status = running.taktctl_json("status")
    assert {"ready", "epoch", "executors", "loops"} <= set(status)
    assert {"device", "role", "pid", "ready", "restarts"} <= set(status["executors"][0])
    assert {"name", "model", "device", "attached", "jobs", "late"} <= set(status["loops"][0])
    assert running.taktctl("status").returncode == 0
    assert {m["name"] for m in running.taktctl_json("models")["models"]} == {"id", "policy"}
    assert {loop["name"] for loop in running.taktctl_json("loops")["loops"]} == {"walk", "guard"}
    costs = running.taktctl("costs", "--json")
    (running.folder / "costs.json").write_text(costs.stdout)
    checked = running.taktctl("check", str(running.file), "--costs", str(running.folder / "costs.json"), "--json")
    assert checked.returncode in (0, 1), checked.stderr
    for command in ("status", "models", "loops", "costs"):
        assert running.taktctl(command).returncode == 0
        assert running.taktctl(command, "--nope").returncode == 2
    (running.runtime / "lanes.sock").unlink()
    assert running.taktctl("status", "--json").returncode == 1
    running.stop()
    gone = running.taktctl("status")
    assert gone.returncode == 3
    assert str(running.runtime) in gone.stderr


def test_a_second_start_measures_nothing_again(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    first = running.ask("costs")
    running.stop()
    running.start().await_ready()
    assert running.ask("costs") == first
    running.stop()
    shutil.rmtree(running.state)
    running.start().await_ready()
    assert running.ask("costs") != first


def test_damaged_caches_are_not_used(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    first = running.ask("costs")
    running.stop()
    files = [*running.state.rglob("*.json")]
    assert len(files) == 4
    for number, file in enumerate(files):
        data = bytearray(file.read_bytes())
        file.write_bytes(data[: len(data) // 2] if number % 2 else data[:40] + b"7" + data[41:])
    running.start().await_ready()
    assert running.ask("models")["models"]
    assert running.ask("costs") != first


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_an_ordinary_user_runs_it_without_certificate(tmp_path: Path, yaml: str) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    for path in [tmp_path, *tmp_path.parents]:
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o055)
    try:
        subprocess.run([sys.executable, "-c", ""], user=23456, group=65534, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this Python is not there for other users")
    running = Running(folder, yaml)
    os.chown(folder, 23456, 65534)
    os.chown(folder / "notify", 23456, 65534)
    try:
        # No root, no real-time limits, no capabilities.
        limits = ["prlimit", "--rtprio=0", "--memlock=65536"]
        user = ["setpriv", "--reuid=23456", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
        wrapper = [*limits, *user]
        running.start(wrapper).await_ready()
        status = running.ask("status")
        assert status["ready"]
        assert not status["certified"]
        executor = status["executors"][0]
        assert executor["rights"]["policy"] == "other"
        assert "real-time rights" in executor["not_certified"]
        with running.connect() as node, node.attach("walk") as lane:
            assert lane.infer().status in ("ok", "expired")
    finally:
        running.close()
