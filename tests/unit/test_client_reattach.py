"""A Python client whose lane comes back by itself (`reattach`): by `inputs`, `infer`, `submit`, nothing lost unsaid."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from taktd import ipc
from tests.fakes.echo_process import end_daemon, start_daemon

LONG_US = 5_000_000


class Daemon:
    """One that can be started again at the same place."""

    def __init__(self, folder: Path) -> None:
        self.path = f"{folder}/lanes.sock"
        self.running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.running = start_daemon(self.path)

    def kill(self) -> None:
        assert self.running is not None
        self.running.kill()
        self.running.wait()
        end_daemon(self.running)
        Path(self.path).unlink()
        self.running = None

    def again(self) -> None:
        self.kill()
        self.start()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    daemon.start()
    yield daemon
    if daemon.running is not None:
        end_daemon(daemon.running)


def told_of_one(use: Callable[[], Any]) -> Any:
    """A killed daemon's lane takes one job more: that one is lost, which Detached tells. The next try goes on."""
    with pytest.raises(ipc.Detached):
        use()
    return use()


def test_infer_goes_on_with_what_was_written_for_it(daemon: Daemon) -> None:
    with ipc.connect(daemon.path) as node, node.attach("echo", reattach=True) as lane:
        lane.inputs["x"][:] = 1
        assert lane.infer(LONG_US).ok
        lane.inputs["x"][:] = 2
        daemon.again()
        reply = told_of_one(lambda: lane.infer(LONG_US))
        assert (reply.ok, reply.sequence) == (True, 1)
        assert lane.outputs["y"].tolist() == [2] * 4
        lane.inputs["x"][:] = 3
        assert lane.infer(LONG_US).sequence == 2
        assert lane.outputs["y"].tolist() == [3] * 4


def test_submit_does_so_too(daemon: Daemon) -> None:
    with ipc.connect(daemon.path) as node, node.attach("m_echo", reattach=True) as lane:
        for turn in range(3):
            lane.inputs["x"][:] = turn
            daemon.again()
            sequence = told_of_one(lambda: lane.wait(lane.submit(), LONG_US)).sequence
            assert (sequence, lane.outputs["y"].tolist()) == (1, [turn] * 4)
            lane.inputs["x"][:] = 10 + turn
            assert lane.wait(lane.submit(), LONG_US).sequence == 2
            assert lane.outputs["y"].tolist() == [10 + turn] * 4


def test_a_job_that_is_lost_with_the_lane_is_told_of_once(daemon: Daemon) -> None:
    with ipc.connect(daemon.path) as node, node.attach("m_never", reattach=True) as lane:
        lane.submit()
        daemon.again()
        with pytest.raises(ipc.Detached):
            lane.wait(lane.submit(), LONG_US)
        assert lane.submit() == 1, "and then it goes on"
        lane.cancel(1)
        assert lane.wait(1, LONG_US).status == "cancelled"


def test_whoever_has_waited_in_vain_is_not_told_twice(daemon: Daemon) -> None:
    with ipc.connect(daemon.path) as node, node.attach("never", reattach=True) as lane:
        lost = lane.submit()
        daemon.again()
        with pytest.raises(ipc.Detached):
            lane.wait(lost, LONG_US)
        lane.cancel(lane.submit())


def test_the_lane_that_ended_is_not_given_back_in_place_of_the_new_one(daemon: Daemon) -> None:
    """A daemon that was started anew gives the same numbers again; so does one that has ended a lane itself."""
    with ipc.connect(daemon.path) as node, node.attach("echo", reattach=True) as lane:
        daemon.again()
        told_of_one(lambda: lane.infer(LONG_US))
        for sequence in (2, 3):
            assert lane.infer(LONG_US).sequence == sequence
        with pytest.raises(ipc.Busy):
            node.attach("echo")


def test_a_lane_that_the_daemon_ends_at_each_job_is_told_of_at_each(daemon: Daemon) -> None:
    with ipc.connect(daemon.path) as node, node.attach("end", reattach=True) as lane:
        for _ in range(3):
            lane.inputs["x"][:] = 1
            with pytest.raises(ipc.Detached, match="has ended"):
                lane.infer(LONG_US)


def test_while_there_is_no_daemon_each_try_says_so_and_the_inputs_are_kept(daemon: Daemon) -> None:
    with ipc.connect(daemon.path) as node, node.attach("echo", reattach=True) as lane:
        lane.inputs["x"][:] = 7
        daemon.kill()
        with pytest.raises(ipc.Detached, match="the daemon has gone"):
            lane.infer(LONG_US)
        with pytest.raises(ipc.Detached, match="there is no other one yet"):
            lane.infer(LONG_US)
        with pytest.raises(ipc.Detached, match="asked for again in"):
            lane.submit()
        daemon.start()
        while True:
            try:
                reply = lane.infer(LONG_US)
                break
            except ipc.Detached as error:
                assert "again in" in str(error) or "no other one" in str(error)  # noqa: PT017
        assert reply.ok
        assert lane.outputs["y"].tolist() == [7] * 4


def test_without_being_asked_for_it_a_lane_stays_ended(daemon: Daemon) -> None:
    with ipc.connect(daemon.path) as node, node.attach("echo") as lane:
        daemon.again()
        for _ in range(2):
            with pytest.raises(ipc.Detached):
                lane.infer(LONG_US)
            with pytest.raises(ipc.Detached):
                lane.submit()


def test_a_closed_lane_does_not_come_back(daemon: Daemon) -> None:
    with ipc.connect(daemon.path) as node:
        lane = node.attach("echo", reattach=True)
        lane.close()
        for use in (lane.infer, lane.submit):
            with pytest.raises(ipc.Detached):
                use()


def test_shapes_come_along(daemon: Daemon) -> None:
    with ipc.connect(daemon.path) as node, node.attach("m_dynamic", reattach=True) as lane:
        lane.set_shape("x", (2, 4))
        lane.inputs["x"][:] = np.arange(8, dtype=np.float32).reshape(2, 4)
        daemon.again()
        assert told_of_one(lambda: lane.infer(LONG_US)).ok
        assert lane.inputs["x"].shape == (2, 4)
