"""The simulated CUDA driver keeps the promises that tests of our code lean on."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from taktd.drivers import _cuda
from tests.fakes.cuda import simulated
from tests.fakes.cuda.simulated import Simulated

SIZE = 4096
SECOND = 1_000_000_000


@pytest.fixture
def fake(fake_cuda: Simulated) -> Iterator[Simulated]:
    _cuda.load()
    _cuda.init()
    _cuda.retain(0, True)
    yield fake_cuda
    fake_cuda.heal()
    _cuda.release(0)


def text(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def test_a_copy_without_a_synchronisation_has_not_happened(fake: Simulated) -> None:
    stream, device, host = _cuda.create_stream(0), _cuda.allocate(SIZE), _cuda.allocate_pinned(SIZE)
    ctypes.memset(host, 7, SIZE)
    back = _cuda.allocate_pinned(SIZE)
    _cuda.copy(device, host, SIZE, stream)
    _cuda.copy(back, device, SIZE, stream)
    assert text(back, SIZE) != bytes([7]) * SIZE
    _cuda.synchronize(stream, SECOND)
    assert text(back, SIZE) == bytes([7]) * SIZE
    _cuda.deallocate(device)
    _cuda.deallocate_pinned(host)
    _cuda.deallocate_pinned(back)
    _cuda.destroy_stream(stream)
    assert {k: v for k, v in fake.live().items() if v} == {"context": 1}


def test_a_query_is_not_ready_first(fake: Simulated) -> None:
    stream, device = _cuda.create_stream(0), _cuda.allocate(SIZE)
    assert _cuda.query(stream)
    _cuda.fill(device, 1, SIZE, stream)
    assert not _cuda.query(stream)
    assert _cuda.query(stream)


def test_device_memory_is_no_host_memory(fake: Simulated) -> None:
    """Its addresses have a bit that no address of a process has."""
    assert _cuda.allocate(SIZE) >> 62 == 1


def test_memory_is_limited(fake: Simulated) -> None:
    fake.control.memory_bytes = 1 << 20
    _cuda.allocate(1 << 19)
    with pytest.raises(_cuda.Error) as caught:
        _cuda.allocate((1 << 19) + 1)
    assert caught.value.args == ("cuMemAlloc", simulated.OUT_OF_MEMORY)
    assert _cuda.memory_info() == (1 << 19, 1 << 20)


def test_a_copy_from_freed_memory_breaks_the_context(fake: Simulated) -> None:
    stream, device, host = _cuda.create_stream(0), _cuda.allocate(SIZE), _cuda.allocate_pinned(SIZE)
    _cuda.copy(host, device + 8, SIZE, stream)
    with pytest.raises(_cuda.Error) as caught:
        _cuda.synchronize(stream, SECOND)
    assert caught.value.args[1] == simulated.ILLEGAL_ADDRESS
    with pytest.raises(_cuda.Error) as caught:
        _cuda.allocate(SIZE)
    assert caught.value.args[1] == simulated.ILLEGAL_ADDRESS, "the error is sticky"


def test_a_graph_runs_its_list_at_each_launch(fake: Simulated) -> None:
    stream, device, host = _cuda.create_stream(-3), _cuda.allocate(SIZE), _cuda.allocate_pinned(SIZE)
    _cuda.begin_capture(stream)
    _cuda.copy(device, host, SIZE, stream)
    _cuda.fill(device, 9, 1, stream)
    _cuda.copy(host, device, SIZE, stream)
    graph = _cuda.end_capture(stream)
    assert _cuda.graph_nodes(graph) == 3
    exec_, event = _cuda.instantiate(graph), _cuda.create_event(False)
    launch = _cuda.Launch(exec_, stream, event, 0, SECOND)
    for _ in range(2):
        ctypes.memset(host, 1, SIZE)
        mark = fake.mark()
        launch()
        assert text(host, 2) == b"\x09\x01"
        assert fake.counts_since(mark)["cuGraphLaunch"] == 1
    assert _cuda.stream_priority(stream) == -3
    _cuda.destroy_graph(graph)


def test_a_captured_stream_refuses_to_be_waited_for(fake: Simulated) -> None:
    stream = _cuda.create_stream(0)
    _cuda.begin_capture(stream)
    with pytest.raises(_cuda.Error) as caught:
        _cuda.synchronize(stream, SECOND)
    assert caught.value.args[1] == 900
    with pytest.raises(_cuda.Error) as caught:
        _cuda.end_capture(stream)
    assert caught.value.args[1] == 901


def test_pageable_memory_cannot_be_captured(fake: Simulated) -> None:
    stream, device = _cuda.create_stream(0), _cuda.allocate(64)
    pageable = ctypes.create_string_buffer(64)
    _cuda.begin_capture(stream)
    with pytest.raises(_cuda.Error):
        _cuda.copy(device, ctypes.addressof(pageable), 64, stream)
    with pytest.raises(_cuda.Error):
        _cuda.end_capture(stream)


def test_a_flag_is_written_by_the_stream(fake: Simulated) -> None:
    stream, flag = _cuda.create_stream(0), _cuda.allocate_pinned(64)
    _cuda.begin_capture(stream)
    _cuda.write_value(stream, _cuda.device_address(flag), 1)
    graph = _cuda.end_capture(stream)
    launch = _cuda.Launch(_cuda.instantiate(graph), stream, 0, flag, SECOND)
    _cuda.destroy_graph(graph)
    launch()
    assert text(flag, 4) == b"\x01\0\0\0"


def test_time_is_virtual(fake: Simulated) -> None:
    stream, device = _cuda.create_stream(0), _cuda.allocate(1 << 20)
    start, end = _cuda.create_event(True), _cuda.create_event(True)
    _cuda.record(start, stream)
    _cuda.fill(device, 0, 1 << 20, stream)
    _cuda.record(end, stream)
    _cuda.synchronize(stream, SECOND)
    assert _cuda.elapsed_ns(start, end) == 4000


@pytest.mark.parametrize("error", [simulated.ECC, simulated.LAUNCH_TIMEOUT, simulated.LAUNCH_FAILED])
def test_what_fails_on_the_device_shows_at_the_wait_and_sticks(fake: Simulated, error: int) -> None:
    stream, device = _cuda.create_stream(0), _cuda.allocate(SIZE)
    fake.inject("execute", error, times=1)
    _cuda.fill(device, 0, SIZE, stream)
    for _ in range(2):
        with pytest.raises(_cuda.Error) as caught:
            _cuda.synchronize(stream, SECOND)
        assert caught.value.args[1] == error


def test_a_device_that_hangs_does_not_hang_us(fake: Simulated) -> None:
    stream, device = _cuda.create_stream(0), _cuda.allocate(SIZE)
    fake.control.hang = 1
    _cuda.fill(device, 0, SIZE, stream)
    with pytest.raises(_cuda.Error) as caught:
        _cuda.synchronize(stream, 1_000_000)
    assert caught.value.args[1] == _cuda.TIMED_OUT


def test_what_dies_with_its_context_is_counted_as_leaked(fake: Simulated) -> None:
    before = fake.leaked()
    _cuda.allocate(SIZE)
    _cuda.release(0)
    assert fake.leaked() > before
    _cuda.retain(0, True)


def test_other_processes_are_controlled_and_watched_through_files(fake_cuda: Simulated, tmp_path: Path) -> None:
    load = "from taktd.drivers import _cuda\n_cuda.load()\n_cuda.init()\n"
    code = f"import os\n{load}print(os.getpid(), _cuda.device_count())"
    variables = simulated.environment(tmp_path, devices=3)
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    pid, devices = done.stdout.split()
    assert devices == "3"
    shared = Simulated(tmp_path)
    assert shared.control.devices == 3
    assert shared.observed(int(pid)).traced > 0
    shared.control.init_error = simulated.MISMATCH
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert "803" in done.stderr
