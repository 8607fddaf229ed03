"""The Python client against an echo daemon in a process of its own: attaching, jobs, tensors, the end.

Its waits, in event loops and among threads: test_client_waiting.py.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from taktd import ipc
from taktd.ipc import _core, client, errors
from tests.fakes.echo_process import echo, end_daemon, start_daemon

LONG_US = 5_000_000
WAITS = ("spin", "block", "hybrid")
Start = Callable[..., tuple[str, "subprocess.Popen[bytes]"]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with echo(tmp_path_factory.mktemp("echo")) as path:
        yield path


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[Start]:
    """Starts daemons that the test may harm."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> tuple[str, subprocess.Popen[bytes]]:
        path = f"{tmp_path}/{len(started)}.sock"
        started.append(start_daemon(path, *options))
        return path, started[-1]

    yield start
    for daemon in started:
        daemon.send_signal(signal.SIGCONT)
        end_daemon(daemon)


@pytest.fixture
def node(path: str) -> Iterator[ipc.Node]:
    with ipc.connect(path) as node:
        yield node


# Connecting and attaching ------------------------------------------------------------------------------------------


def test_an_absent_daemon_is_named_with_every_path_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TAKTD_SOCKET", "TAKTD_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere/xdg")
    with pytest.raises(ipc.NotConnected, match=r"/nowhere/xdg/taktd/lanes\.sock.*/run/taktd/lanes\.sock.*is taktd run"):
        ipc.connect()
    monkeypatch.setenv("TAKTD_RUNTIME_DIR", "/nowhere/runtime")
    with pytest.raises(ipc.NotConnected, match=r"at /nowhere/runtime/lanes\.sock \("):
        ipc.connect()
    monkeypatch.setenv("TAKTD_SOCKET", "/nowhere/socket")
    with pytest.raises(ipc.NotConnected, match=r"at /nowhere/socket \("):
        ipc.connect()


def test_the_environment_leads_to_a_daemon(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAKTD_SOCKET", raising=False)
    monkeypatch.setenv("TAKTD_RUNTIME_DIR", str(Path(path).parent))
    with ipc.connect() as node:
        assert node.path == path
        assert node.name == "echo-node"
        assert node.pid > 0


def test_a_dead_socket_is_told_from_an_absent_one(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{tmp_path}/dead")
    with pytest.raises(ipc.NotConnected, match="Connection refused"):
        ipc.connect(tmp_path / "dead")


def test_loops_and_models_are_listed_over_several_pages(node: ipc.Node) -> None:
    assert [loop["name"] for loop in node.loops()] == [
        "echo", "one", "image", "slow", "never", "fail", "end", "denied",
    ]  # fmt: skip
    assert [model["name"] for model in node.models()] == ["m_echo", "m_dynamic", "m_all", "m_never"]


def test_attaching_what_is_not_there_or_not_allowed(node: ipc.Node) -> None:
    with pytest.raises(ipc.NotFound, match="walk"):
        node.attach("walk")
    with pytest.raises(ipc.NotFound):
        node.attach("m_echo", kind="loop")
    with pytest.raises(ipc.Denied, match="denied"):
        node.attach("denied")
    with pytest.raises(ipc.InvalidInput, match="spin"):
        node.attach("echo", wait="often")
    with pytest.raises(ipc.InvalidInput, match="model"):
        node.attach("echo", kind="lane")
    with pytest.raises(ipc.InvalidInput):
        node.attach("x" * 64)
    with pytest.raises(ipc.InvalidInput):
        node.attach("echo", timeout_us=-1)


def test_a_loop_has_one_client_and_a_model_any_number(path: str, node: ipc.Node) -> None:
    with ipc.connect(path) as other:
        with node.attach("echo"):
            with pytest.raises(ipc.Busy, match="taken"):
                other.attach("echo")
            with other.attach("m_echo") as first, node.attach("m_echo") as second:
                assert first.infer(LONG_US).ok
                assert second.infer(LONG_US).ok
        other.attach("echo").close()


def test_attach_waits_for_a_daemon_that_boots(own_daemon: Start) -> None:
    path, _ = own_daemon("--boot-ms", "300")
    with ipc.connect(path) as node:
        with pytest.raises(ipc.NotConnected, match="booting"):
            node.attach("echo", timeout_us=0)
        with node.attach("echo") as lane:
            assert lane.infer(LONG_US).ok


def test_a_lane_says_what_it_is(node: ipc.Node) -> None:
    with node.attach("echo") as lane:
        assert (lane.name, lane.model, lane.kind, lane.slot_count) == ("echo", "echo", "loop", 4)
        assert (lane.period_ns, lane.deadline_ns, lane.dynamic) == (1_000_000, 1_000_000, False)
        assert lane.input_specs == {"x": ("FP32", (4,))}
        assert lane.output_specs == {"y": ("FP32", (4,))}
        assert "echo" in repr(lane)


# Jobs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", WAITS)
def test_what_goes_in_comes_out(node: ipc.Node, wait: str) -> None:
    with node.attach("echo", wait=wait) as lane:
        for number in range(1, 101):
            lane.inputs["x"][:] = (number, 2, 3, 4)
            reply = lane.infer(LONG_US)
            assert reply.ok, reply
            assert reply.sequence == number
            assert lane.outputs["y"].tolist() == [number, 2, 3, 4]
        assert lane.pending == 0


def test_a_reply_tells_its_times_and_its_path(node: ipc.Node) -> None:
    with node.attach("echo") as lane:
        before = time.monotonic_ns()
        reply = lane.infer(LONG_US)
        assert isinstance(reply, ipc.Reply)
        assert (reply.status, reply.status_code, reply.path, reply.cause) == ("ok", 0, "primary", "")
        assert (reply.ok, reply.pending, reply.early, reply.overrun, reply.stand_in) == (True, False) + 3 * (False,)
        assert before <= reply.submitted_ns <= reply.started_ns <= reply.ended_ns <= time.monotonic_ns()
        assert reply.queued_us + reply.run_us == pytest.approx(reply.total_us)
        assert reply.late == (reply.ended_ns > reply.deadline_ns)
        assert "ok" in repr(reply)


def test_the_last_outputs_stay_until_the_next_reply(node: ipc.Node) -> None:
    with node.attach("echo") as lane:
        lane.inputs["x"] = 1
        lane.infer(LONG_US)
        outputs = lane.outputs["y"]
        sequences = []
        for value in (2, 3, 4):
            lane.inputs["x"] = value
            sequences.append(lane.submit())
        with pytest.raises(ipc.Busy, match="no free slot"):
            _ = lane.inputs
        with pytest.raises(ipc.Busy):
            lane.submit()
        assert outputs.tolist() == [1] * 4
        assert lane.wait(sequences[2], LONG_US).sequence == sequences[2]
        assert lane.outputs["y"].tolist() == [4] * 4
        assert [lane.wait(timeout_us=LONG_US).sequence for _ in range(2)] == sequences[:2]
        with pytest.raises(ipc.NotFound):
            lane.wait(sequences[0])
        with pytest.raises(ipc.NotFound):
            lane.wait()


def test_there_are_no_outputs_before_the_first_reply(node: ipc.Node) -> None:
    with node.attach("echo") as lane, pytest.raises(ipc.NotFound, match="no reply yet"):
        _ = lane.outputs


@pytest.mark.parametrize("wait", WAITS)
def test_a_time_out_leaves_the_job_pending(node: ipc.Node, wait: str) -> None:
    with node.attach("slow", wait=wait) as lane:  # answers after 30 ms
        lane.inputs["x"] = 7
        began = time.monotonic()
        reply = lane.infer(2000)
        assert (reply.status, reply.pending, reply.ok, reply.path) == ("pending", True, False, "")
        assert time.monotonic() - began >= 0.002
        assert lane.pending == 1
        late = lane.wait(reply.sequence, LONG_US)
        assert late.ok
        assert late.late
        assert lane.outputs["y"].tolist() == [7] * 4


def test_the_default_time_out_is_at_least_20_ms(node: ipc.Node) -> None:
    with node.attach("never") as lane:
        began = time.monotonic()
        assert lane.infer().pending
        assert time.monotonic() - began >= 0.02


def test_replies_that_nobody_wanted_any_more_free_their_slots(node: ipc.Node) -> None:
    with node.attach("slow") as lane:
        for _ in range(4):
            assert lane.infer(0).pending
        with pytest.raises(ipc.Busy, match="4 of its 4 are pending"):
            _ = lane.inputs
        while lane.pending:
            time.sleep(0.001)
        lane.inputs["x"] = 5
        with pytest.raises(ipc.NotFound):
            lane.wait(1, 0)
        assert lane.wait(2, 0).ok


def test_a_job_can_be_cancelled(node: ipc.Node) -> None:
    with node.attach("m_never") as lane:
        first, second = lane.submit(), lane.submit()
        lane.cancel(second)
        assert lane.wait(second, LONG_US).status == "cancelled"
        assert lane.wait(first, 0).pending
        with pytest.raises(ipc.NotFound):
            lane.cancel(second)


def test_a_repeated_input_is_a_copy_as_old_as_the_first(node: ipc.Node) -> None:
    with node.attach("echo") as lane:
        with pytest.raises(ipc.NotFound, match="submit one first"):
            lane.repeat()
        lane.inputs["x"][:] = [1, 2, 3, 4]
        first = lane.wait(lane.submit(), timeout_us=LONG_US)
        lane.inputs["x"][:] = 9  # being written, and not to be sent
        for _ in range(2 * lane.slot_count):
            again = lane.wait(lane.repeat(), timeout_us=LONG_US)
            assert again.ok
            assert again.submitted_ns == first.submitted_ns < again.started_ns
            np.testing.assert_array_equal(lane.outputs["y"], [1, 2, 3, 4])
        np.testing.assert_array_equal(lane.inputs["x"], [9] * 4)
        assert lane.infer(timeout_us=LONG_US).submitted_ns > first.submitted_ns
        np.testing.assert_array_equal(lane.outputs["y"], [9] * 4)


def test_nothing_is_repeated_without_a_free_slot(node: ipc.Node) -> None:
    with node.attach("m_never") as lane:
        lane.submit()
        lane.repeat()
        lane.repeat()
        with pytest.raises(ipc.Busy, match="3 of its 3 are pending"):
            lane.repeat()


def test_only_a_clocked_loop_has_the_daemons_beats(node: ipc.Node) -> None:
    with node.attach("echo") as lane:
        assert lane.trigger == "client"
        with pytest.raises(ipc.InvalidInput, match="triggered by its client"):
            lane.beats()


def test_a_failing_engine_is_a_status_not_an_exception(node: ipc.Node) -> None:
    with node.attach("fail") as lane:
        reply = lane.infer(LONG_US)
        assert (reply.status, reply.ok, reply.path) == ("failed", False, "")


def test_a_deadline_of_its_own_is_judged(node: ipc.Node) -> None:
    with node.attach("m_echo") as lane:
        deadline_ns = time.monotonic_ns() + 10**9
        reply = lane.infer(LONG_US, deadline_ns=deadline_ns)
        assert reply.deadline_ns == deadline_ns
        assert not reply.late
        assert lane.infer(LONG_US).deadline_ns == 0


# Tensors -----------------------------------------------------------------------------------------------------------


def test_every_dtype_passes_bit_for_bit(node: ipc.Node) -> None:
    rng = np.random.default_rng(1)
    with node.attach("m_all", wait="block") as lane:
        assert {spec[0] for spec in lane.input_specs.values()} == set(_core.DTYPES)
        sent = {}
        for name, tensor in lane.inputs.items():
            raw = rng.integers(0, 2 if "bool" in name else 256, tensor.nbytes, np.uint8)
            tensor[...] = raw.view(tensor.dtype).reshape(tensor.shape)
            sent[name] = raw.tobytes()
        assert lane.infer(LONG_US).ok
        assert {name: tensor.tobytes() for name, tensor in lane.outputs.items()} == sent
        assert lane.inputs["t_bf16"].dtype == np.uint16
        assert lane.inputs["t_int4"].shape == (8,)  # 15 elements, two per byte


def test_actual_shapes_on_a_model_lane(node: ipc.Node) -> None:
    with node.attach("m_dynamic") as lane:
        assert lane.inputs["x"].shape == (8, 4)
        for rows in (3, 8, 0, 1):
            lane.set_shape("x", (rows, 2))
            lane.inputs["x"][:] = np.arange(rows * 2).reshape(rows, 2)
            lane.inputs["k"][:] = (rows, -1)
            assert lane.infer(LONG_US).ok
            assert lane.outputs["y"].tolist() == np.arange(rows * 2).reshape(rows, 2).tolist()
            assert lane.outputs["k"].tolist() == [rows, -1]
            assert (lane.output_shape("y"), lane.output_shape("k")) == ((rows, 2), (2,))
        for wrong in ((9, 4), (8,), (-1, 4), (1,) * 9):
            with pytest.raises(ipc.InvalidInput, match="at most 8 x 4"):
                lane.set_shape("x", wrong)
        with pytest.raises(ipc.NotFound):
            lane.set_shape("z", (1, 1))
    with node.attach("echo") as lane, pytest.raises(ipc.InvalidInput, match="fixed shapes"):
        lane.set_shape("x", (2,))


def test_set_inputs_checks_before_it_copies(node: ipc.Node) -> None:
    with node.attach("echo") as lane:
        lane.set_inputs(x=np.full(4, 2, np.float32))
        for wrong, text in (
            (np.zeros(4), r"input \"x\" of \"echo\": expected float32 \(4,\), found float64 \(4,\)"),
            (np.zeros(5, np.float32), r"expected float32 \(4,\), found float32 \(5,\)"),
        ):
            with pytest.raises(ipc.InvalidInput, match=text):
                lane.set_inputs(x=wrong)
        with pytest.raises(ipc.InvalidInput, match='no input "z"; it has "x"'):
            lane.set_inputs(z=np.zeros(4, np.float32))
        assert lane.infer(LONG_US).ok
        assert lane.outputs["y"].tolist() == [2] * 4


def test_tensors_are_written_into_never_replaced(node: ipc.Node) -> None:
    with node.attach("echo") as lane:
        inputs = lane.inputs
        address = inputs["x"].ctypes.data
        inputs["x"] = [1, 2, 3, 4]
        assert inputs["x"].ctypes.data == address
        with pytest.raises(ValueError, match="broadcast"):
            inputs["x"] = np.zeros(3)
        with pytest.raises(KeyError):
            inputs["z"] = 1
        for change in (inputs.clear, inputs.popitem, lambda: inputs.pop("x"), lambda: inputs.update(x=1)):
            with pytest.raises(TypeError, match="write into them"):
                change()
        with pytest.raises(TypeError, match="write into them"):
            del inputs["x"]


def test_views_outlive_their_lane(node: ipc.Node) -> None:
    lane = node.attach("echo")
    lane.inputs["x"] = 3
    assert lane.infer(LONG_US).ok
    outputs = lane.outputs["y"]
    lane.close()
    lane.close()
    del lane
    gc.collect()
    assert outputs.tolist() == [3] * 4
    outputs[:] = 1


# The end -----------------------------------------------------------------------------------------------------------


def test_a_lane_that_the_daemon_ends_says_why(node: ipc.Node) -> None:
    with node.attach("end") as lane:
        with pytest.raises(ipc.Detached, match="the operator wanted it; attach again"):
            lane.infer(LONG_US)
        with pytest.raises(ipc.Detached):
            _ = lane.inputs
        with pytest.raises(ipc.Detached):
            lane.submit()
    node.attach("end").close()


@pytest.mark.parametrize("wait", WAITS)
def test_a_killed_daemon_ends_a_long_wait(own_daemon: Start, wait: str) -> None:
    path, daemon = own_daemon()
    node = ipc.connect(path)
    lane = node.attach("never", wait=wait)
    threading.Timer(0.1, daemon.kill).start()
    with pytest.raises(ipc.Detached, match="the daemon has gone"):
        lane.infer(30_000_000)
    with pytest.raises(ipc.NotConnected):
        node.loops()
    lane.close()
    node.close()


def test_a_stopped_daemon_does_not_block_its_client(own_daemon: Start) -> None:
    path, daemon = own_daemon()
    with ipc.connect(path) as node, node.attach("echo") as lane:
        assert lane.infer(LONG_US).ok
        daemon.send_signal(signal.SIGSTOP)
        assert [lane.infer().status for _ in range(3)] == ["pending"] * 3
        with pytest.raises(ipc.Busy):
            lane.infer()
        daemon.send_signal(signal.SIGCONT)
        assert [lane.wait(seq, LONG_US).status for seq in (2, 3, 4)] == ["ok"] * 3
        assert lane.infer(LONG_US).ok


def test_what_was_closed_says_so(path: str) -> None:
    node = ipc.connect(path)
    lane = node.attach("echo")
    lane.close()
    with pytest.raises(ipc.Detached, match="was detached"):
        lane.infer()
    lane = node.attach("echo")
    node.close()
    node.close()
    with pytest.raises(ipc.NotConnected, match="was closed"):
        node.attach("echo")
    with pytest.raises(ipc.Detached, match="connection was closed"):
        lane.submit()
    lane.close()


def test_a_dropped_lane_is_given_back(node: ipc.Node) -> None:
    for _ in range(3):
        node.attach("echo")
        gc.collect()


def test_attaching_and_closing_leaves_no_descriptors(node: ipc.Node) -> None:
    def open_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    node.attach("echo").close()
    before = open_descriptors()
    for _ in range(100):
        with node.attach("echo") as lane:
            lane.infer(LONG_US)
    gc.collect()
    assert open_descriptors() == before


# Names -------------------------------------------------------------------------------------------------------------


def test_every_errno_of_the_core_is_one_of_ours() -> None:
    for code in errors._BY_ERRNO:
        error = errors.from_errno(code, "text")
        assert isinstance(error, ipc.TaktError)
        assert type(error) is not ipc.TaktError
        assert (str(error), error.errno) == ("text", code)
    assert type(errors.from_errno(99999, "text")) is ipc.TaktError


def test_the_numbers_in_python_are_the_cores() -> None:
    assert client._NUMPY.keys() == _core.DTYPES.keys()
    for name, number in _core.DTYPES.items():
        assert np.dtype(client._NUMPY[name]).itemsize == (_core.DTYPE_BITS[number] + 7) // 8


@pytest.mark.parametrize(("q", "expected"), [(0.001, 10), (0.5, 10), (0.51, 20), (0.99, 20), (0.991, 30), (1.0, 30)])
def test_percentiles_are_nearest_rank(q: float, expected: int) -> None:
    hist = {"count": 100, "sum_ns": 0, "buckets": [(10, 50), (20, 49), (30, 1)]}
    assert ipc.percentile(hist, q) == expected  # type: ignore[arg-type]


def test_percentiles_of_nothing_and_of_nonsense() -> None:
    assert ipc.percentile({"count": 0, "sum_ns": 0, "buckets": []}, 0.5) == 0
    for q in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="quantile"):
            ipc.percentile({"count": 0, "sum_ns": 0, "buckets": []}, q)


def test_a_tensor_that_is_not_there_is_a_key_error_that_lists_those_that_are() -> None:
    tensors = ipc.Tensors({"obs": np.zeros(3, np.float32)})
    with pytest.raises(KeyError) as caught:
        tensors["observation"] = [1, 2, 3]
    assert str(caught.value) == "no tensor is called 'observation' here; there are 'obs'"
    assert tensors.get("observation") is None
