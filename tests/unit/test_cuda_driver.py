"""What a CUDA device has beyond every device: faults, capture, launch, the probe, selection."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from taktd.drivers import _cuda
from taktd.drivers.cuda import CudaDevice
from taktd.drivers.cuda_fault import HINTS, KINDS, fault_of
from taktd.drivers.cuda_memory import DirectMemory
from taktd.drivers.cuda_probe import CudaInfo, probe
from taktd.drivers.cuda_selection import select, twins_among
from taktd.drivers.fault import DeviceFault, FaultKind
from taktd.engines.gpu import open_gpu
from tests.fakes.cuda import simulated
from tests.fakes.cuda.simulated import Simulated

SECOND = 1_000_000_000


@pytest.fixture
def device(fake_cuda: Simulated) -> Iterator[CudaDevice]:
    opened = CudaDevice(0, lambda _: DirectMemory())
    yield opened
    fake_cuda.heal()
    opened.close()


@pytest.mark.parametrize(
    ("code", "kind", "sticky"),
    [
        (2, FaultKind.OUT_OF_MEMORY, False),
        (214, FaultKind.ECC, True),
        (700, FaultKind.LAUNCH_FAILED, True),
        (702, FaultKind.LAUNCH_TIMEOUT, True),
        (719, FaultKind.LAUNCH_FAILED, True),
        (803, FaultKind.DRIVER_MISMATCH, False),
        (304, FaultKind.DEVICE_BUSY, False),
        (721, FaultKind.LAUNCH_FAILED, True),
        (810, FaultKind.DEVICE_LOST, True),
        (801, FaultKind.NOT_SUPPORTED, False),
        (999, FaultKind.DEVICE_LOST, True),
        (1, FaultKind.INVALID_USE, False),
        (_cuda.TIMED_OUT, FaultKind.LAUNCH_TIMEOUT, True),
    ],
)
def test_a_code_becomes_one_kind(device: CudaDevice, code: int, kind: FaultKind, sticky: bool) -> None:
    fault = fault_of(_cuda.Error("cuGraphLaunch", code))
    assert (fault.kind, fault.sticky, fault.code) == (kind, sticky, code)
    assert "cuGraphLaunch" in str(fault)


def test_every_kind_has_a_hint_and_every_code_a_kind() -> None:
    assert set(HINTS) == set(FaultKind)
    assert all(isinstance(kind, FaultKind) for kind, _ in KINDS.values())


@pytest.mark.parametrize(("mem_ops", "completion"), [(1, "flag"), (0, "event")])
def test_a_graph_completes_by_flag_or_by_event(
    device: CudaDevice, fake_cuda: Simulated, mem_ops: int, completion: str
) -> None:
    fake_cuda.control.mem_ops = mem_ops
    block, host, stream = device.allocate(64), device.allocate_host(64), device.stream()

    def work() -> None:
        stream.fill(block.address, 3, 64)
        stream.copy(host.host_address, block.address, 64)

    graph = stream.capture(work, timeout_ns=SECOND)
    assert graph.completion == completion
    mark = fake_cuda.mark()
    graph.launch()
    assert ctypes.string_at(host.host_address, 2) == b"\3\3"
    counts = fake_cuda.counts_since(mark)
    assert counts.pop("cuGraphLaunch") == 1
    assert set(counts) <= {"cuStreamQuery", "cuEventRecord", "cuEventQuery"}
    for thing in (graph, block, host, stream):
        thing.close()
    assert {k: v for k, v in fake_cuda.live().items() if v} == {"context": 1}


def test_where_capture_is_missing_the_stream_stays_usable(device: CudaDevice, fake_cuda: Simulated) -> None:
    fake_cuda.control.capture = 0
    stream, block = device.stream(), device.allocate(64)
    with pytest.raises(DeviceFault) as caught:
        stream.capture(lambda: stream.fill(block.address, 1, 64), timeout_ns=SECOND)
    assert caught.value.kind is FaultKind.NOT_SUPPORTED
    stream.fill(block.address, 1, 64)
    stream.synchronize(SECOND)
    assert fake_cuda.live()["graph"] == fake_cuda.live()["pinned"] == 0


def test_work_that_fails_ends_the_capture(device: CudaDevice, fake_cuda: Simulated) -> None:
    stream = device.stream()

    def work() -> None:
        raise KeyError("ours")

    with pytest.raises(KeyError):
        stream.capture(work, timeout_ns=SECOND)
    stream.synchronize(SECOND)
    assert fake_cuda.live()["graph"] == fake_cuda.live()["pinned"] == 0, "neither the graph nor its flag"


def test_a_hanging_launch_ends_in_time(device: CudaDevice, fake_cuda: Simulated) -> None:
    stream, block = device.stream(), device.allocate(64)
    graphs = [
        stream.capture(lambda: stream.fill(block.address, 1, 64), timeout_ns=2_000_000, by_flag=by_flag)
        for by_flag in (True, False)
    ]
    fake_cuda.control.hang = 1
    for graph in graphs:
        with pytest.raises(_cuda.Error) as caught:
            graph.launch()
        assert caught.value.args[1] == _cuda.TIMED_OUT


@pytest.mark.parametrize("by_flag", [True, False])
@pytest.mark.parametrize("error", [simulated.ECC, simulated.LAUNCH_TIMEOUT, simulated.UNKNOWN])
def test_an_error_on_the_device_is_seen_by_the_launch(
    device: CudaDevice, fake_cuda: Simulated, error: int, by_flag: bool
) -> None:
    stream, block = device.stream(), device.allocate(64)
    graph = stream.capture(lambda: stream.fill(block.address, 1, 64), timeout_ns=SECOND, by_flag=by_flag)
    fake_cuda.inject("execute", error, times=1)
    for _ in range(2):
        with pytest.raises(_cuda.Error) as caught:
            graph.launch()
        assert fault_of(caught.value).sticky


def test_device_time_is_the_devices(device: CudaDevice) -> None:
    stream, block = device.stream(), device.allocate(64)
    assert stream.timed(lambda: stream.fill(block.address, 1, 64), SECOND) == 4000


def test_the_context_spins_and_the_event_of_a_launch_carries_no_time(device: CudaDevice, fake_cuda: Simulated) -> None:
    """Both are what makes a wait short: a thread that does not sleep, an event without a time stamp."""
    library, flags = simulated.load(), ctypes.c_uint()
    assert library.cuCtxGetFlags(ctypes.byref(flags)) == 0
    assert flags.value == 1 | 8, "CU_CTX_SCHED_SPIN and CU_CTX_MAP_HOST"
    stream, block = device.stream(), device.allocate(64)
    graph = stream.capture(lambda: stream.fill(block.address, 1, 64), timeout_ns=SECOND, by_flag=False)
    graph.launch()
    with pytest.raises(_cuda.Error) as caught:
        _cuda.elapsed_ns(graph._event, graph._event)
    assert caught.value.args == ("cuEventElapsedTime", 400)


def test_urgency_becomes_priority(device: CudaDevice) -> None:
    assert [device.stream(u).priority for u in (0, 1, 5, 9)] == [0, -1, -5, -5]


@pytest.mark.parametrize("error", [ImportError("numpy.core.multiarray failed to import"), AttributeError("_ARRAY_API")])
def test_a_pycuda_that_does_not_fit_is_done_without_and_said(
    fake_cuda: Simulated, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A distribution's, built for its own numpy."""

    class Broken:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name.startswith("pycuda"):
                raise error

    for name in [name for name in sys.modules if name.split(".")[0] == "pycuda"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    opened = CudaDevice(0)
    assert f"memory by libcuda (pycuda can't be used: {type(error).__name__}: {error})" in opened.identity.runtime
    opened.allocate(64).close()
    opened.close()


# Probe and selection ------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Child processes find the simulated driver."""
    for name, value in simulated.environment(tmp_path, devices=2).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_the_probe_lists_devices_that_work(elsewhere: Path) -> None:
    found = probe()
    assert [(d.index, d.fault, d.compute) for d in found] == [(0, "", (8, 9)), (1, "", (8, 9))]
    assert len({d.uuid for d in found}) == 2


def test_devices_are_counted_by_their_pci_address_as_nvidia_smi_does(elsewhere: Path) -> None:
    """CUDA's own order is the fastest first."""
    assert [d.pci for d in probe()] == ["0000:01:00.0", "0000:02:00.0"]


def test_a_card_that_says_nothing_hides_no_other(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe("1")  # makes the control page
    Simulated(elsewhere).inject("cuDeviceGetName", simulated.UNKNOWN, times=1)
    silent, other = probe("1")
    assert (silent.name, silent.fault_kind, other.fault) == ("unknown card", "device-lost", "")


def test_what_the_probe_finds_is_raised_before_the_card_is_opened(
    elsewhere: Path, fake_cuda: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe("0")
    Simulated(elsewhere).inject("execute", simulated.ECC)
    with pytest.raises(DeviceFault, match=r"index 0.*ECC") as caught:
        open_gpu("0")
    assert (caught.value.kind, caught.value.sticky) == (FaultKind.ECC, False)
    assert fake_cuda.live()["context"] == 0


def test_the_probe_survives_a_driver_that_crashes(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_CRASH", "1")
    with pytest.raises(DeviceFault) as caught:
        probe()
    assert caught.value.kind is FaultKind.DRIVER_MISMATCH
    assert "SIG" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "kind"), [(803, FaultKind.DRIVER_MISMATCH), (100, FaultKind.NO_DEVICE), (999, FaultKind.DEVICE_LOST)]
)
def test_the_probe_says_why_the_driver_does_not_start(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: FaultKind
) -> None:
    monkeypatch.setenv("FAKE_CUDA_INIT_ERROR", str(code))
    with pytest.raises(DeviceFault) as caught:
        probe()
    assert (caught.value.kind, caught.value.code) == (kind, code)
    assert caught.value.hint
    assert str(caught.value).count(caught.value.hint) == 1


def test_without_a_driver_the_probe_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    if subprocess.run(["/bin/sh", "-c", "ldconfig -p | grep -q libcuda.so.1"], check=False).returncode == 0:
        pytest.skip("this machine has a CUDA driver")
    with pytest.raises(DeviceFault) as caught:
        probe()
    assert caught.value.kind is FaultKind.DRIVER_MISSING
    assert "libcuda.so.1" in str(caught.value)


def info(index: int, last: str) -> CudaInfo:
    uuid = f"GPU-0a1b2c3d-1111-2222-3333-4444444444{last}"
    return CudaInfo(index, "Card", uuid, f"0000:0{index + 1}:00.0", 1 << 30, (8, 9), False, "")


TWO = [info(0, "aa"), info(1, "bb")]


@pytest.mark.parametrize(
    "wanted",
    [
        "1",
        "GPU-0a1b2c3d-1111-2222-3333-4444444444bb",
        "0A1B2C3D-1111-2222-3333-4444444444BB",
        "02:00.0",
        "00000000:02:00.0",
        "MIG-0a1b2c3d-1111-2222-3333-4444444444bb",
    ],
)
def test_a_device_is_found_by_index_uuid_and_pci(wanted: str) -> None:
    assert select(TWO, wanted).index == 1


@pytest.mark.parametrize("wanted", ["2", "GPU-ffffffff", "0a1b", "0a1b2c3d", "05:00.0", "nonsense", ""])
def test_what_is_not_there_is_answered_with_what_is(wanted: str) -> None:
    with pytest.raises(DeviceFault) as caught:
        select(TWO, wanted)
    assert caught.value.kind is FaultKind.NO_DEVICE
    assert all(d.uuid in str(caught.value) for d in TWO)


def test_two_names_for_one_gpu_are_refused() -> None:
    opened = {"gpu0": TWO[0]}
    for selector in ("0", TWO[0].uuid, "0000:01:00.0"):
        said = twins_among(opened, {"left": selector})
        assert "devices left and gpu0 are the same GPU" in said
        assert TWO[0].uuid in said
    assert twins_among({"gpu0": TWO[0], "left": TWO[0]}, {"gpu0": "0", "left": TWO[0].uuid})
    assert twins_among(opened, {"gpu0": "0", "right": TWO[1].uuid}) == ""
    assert twins_among({}, {"gpu0": "0", "left": "0"}) == "", "nobody has opened a card yet"
