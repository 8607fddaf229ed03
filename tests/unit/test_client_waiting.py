"""How the Python client waits: in event loops, in and among threads, for a signal, for the next tick."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from taktd import ipc
from tests.fakes.echo_process import echo

LONG_US = 5_000_000
WAITS = ("spin", "block", "hybrid")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with echo(tmp_path_factory.mktemp("echo")) as path:
        yield path


@pytest.fixture
def node(path: str) -> Iterator[ipc.Node]:
    with ipc.connect(path) as node:
        yield node


def test_the_descriptor_is_readable_when_a_job_has_ended(node: ipc.Node) -> None:
    with node.attach("echo") as lane:
        poller = select.poll()
        poller.register(lane.fileno(), select.POLLIN)
        for value in range(20):
            assert poller.poll(0) == []
            lane.inputs["x"] = value
            lane.submit()
            assert poller.poll(5000)
            assert lane.wait(timeout_us=0).ok
            assert lane.outputs["y"][0] == value
            with pytest.raises(ipc.NotFound):
                lane.wait(timeout_us=0)


def test_a_descriptor_that_nobody_watches_is_left_alone_until_it_is_asked_for_again(node: ipc.Node) -> None:
    with node.attach("echo") as lane:
        poller = select.poll()
        poller.register(lane.fileno(), select.POLLIN)
        lane.unwatch()
        lane.inputs["x"] = 1
        assert lane.infer(LONG_US).ok
        assert poller.poll(0) == []
        lane.fileno()
        lane.inputs["x"] = 2
        lane.submit()
        assert poller.poll(5000)
        assert lane.wait(timeout_us=0).ok
        assert lane.outputs["y"][0] == 2


def test_it_works_in_asyncio(node: ipc.Node) -> None:
    async def infer(lane: ipc.Lane, value: float) -> float:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(lane.fileno(), done.set)
        lane.inputs["x"] = value
        seq = lane.submit()
        while (reply := lane.wait(seq, 0)).pending:
            await asyncio.wait_for(done.wait(), 5)
            done.clear()
        loop.remove_reader(lane.fileno())
        assert reply.ok
        return float(lane.outputs["y"][0])

    async def both() -> list[float]:
        with node.attach("m_echo") as first, node.attach("m_echo") as second:
            return list(await asyncio.gather(infer(first, 1), infer(second, 2)))

    assert asyncio.run(both()) == [1, 2]


def test_a_lane_refuses_a_second_thread_while_one_waits(node: ipc.Node) -> None:
    with node.attach("never", wait="block") as lane:
        started = threading.Event()
        replies: list[ipc.Reply] = []

        def wait() -> None:
            seq = lane.submit()
            started.set()
            replies.append(lane.wait(seq, 300_000))

        thread = threading.Thread(target=wait)
        thread.start()
        started.wait()
        time.sleep(0.05)
        for use in (lane.submit, lane.close, lane.fileno, lane.unwatch, lane.wait):
            with pytest.raises(ipc.Busy, match="belongs to one thread"):
                use()
        thread.join()
        assert replies[0].pending


def test_lanes_of_one_node_in_several_threads(node: ipc.Node) -> None:
    failures: list[object] = []

    def work(value: float) -> None:
        try:
            for _ in range(20):
                with node.attach("m_echo", wait="hybrid") as lane:
                    lane.inputs["x"] = value
                    reply = lane.infer(LONG_US)
                    if not reply.ok or lane.outputs["y"][0] != value:
                        failures.append(reply)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_other_threads_run_while_one_waits(node: ipc.Node) -> None:
    for wait in WAITS:
        with node.attach("slow", wait=wait) as lane:
            counted = 0
            done = threading.Event()

            def count(done: threading.Event = done) -> None:
                nonlocal counted
                while not done.is_set():
                    counted += 1

            thread = threading.Thread(target=count)
            thread.start()
            before = counted
            reply = lane.infer(LONG_US)
            after = counted
            done.set()
            thread.join()
            assert reply.ok
            assert after > before + 10, wait


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As in a terminal: a shell starts what it puts in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_wait(node: ipc.Node) -> None:
    with node.attach("never") as lane:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            lane.infer(30_000_000)
        assert lane.wait(1, 0).pending


def test_ticks_keep_their_phase_and_count_what_was_missed(node: ipc.Node) -> None:
    with node.attach("echo") as lane:
        ticks = lane.ticks(2000)
        first = next(ticks)
        assert (first.index, first.missed) == (0, 0)
        for _ in range(10):
            tick = next(ticks)
            assert tick.release_ns == first.release_ns + tick.index * 2_000_000
            assert time.monotonic_ns() >= tick.release_ns
        time.sleep(0.007)
        late = next(ticks)
        assert late.missed >= 2
        assert late.index == tick.index + 1 + late.missed
        assert next(iter(lane.ticks())).index == 0
    with node.attach("m_echo") as lane, pytest.raises(ipc.InvalidInput, match="period_us"):
        lane.ticks()
