"""The witness tells a core that stood still from a run that took too long, with real threads and a real scheduler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from taktd.daemon.execution.rights import Rights
from taktd.daemon.execution.witness import is_guest, open_witness
from tests.real_time import may_have_real_time

# What a hypervisor does to a core, a thread of the highest priority does to everything else on it.
SCENE = """
import json, os, sys, threading
from taktd.ipc import _core

core, tries = max(os.sched_getaffinity(0)), 20
os.sched_setaffinity(0, [core])
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(60))
witness = _core.Witness(61, [core])

def compute(until_ns):
    while _core.now() < until_ns:
        pass

def thief():
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(62))
    while go.acquire() and not over:
        compute(_core.now() + 4_000_000)
        done.release()

go, done, over = threading.Semaphore(0), threading.Semaphore(0), []
threading.Thread(target=thief, daemon=True).start()
found = {"stolen": [], "long": [], "short": []}
for _ in range(tries):
    begun = _core.now()
    witness.expect(begun + 200_000)
    go.release()
    done.acquire()
    found["stolen"].append(witness.absent_ns(_core.now()))
    begun = _core.now()
    witness.expect(begun + 200_000)
    compute(begun + 4_000_000)
    witness.over()
    found["long"].append(witness.absent_ns(_core.now()))
    begun = _core.now()
    witness.expect(begun + 50_000_000)
    compute(begun + 100_000)
    witness.over()
    found["short"].append(witness.absent_ns(_core.now()))
print(json.dumps(found))
"""


@pytest.mark.skipif(not may_have_real_time(), reason="SCHED_FIFO is not permitted here: the witness needs a priority")
def test_a_core_that_stood_still_is_told_from_a_run_that_took_too_long() -> None:
    told = subprocess.run([sys.executable, "-c", SCENE], capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(told.stdout)
    # Each is asked in 20 tries: this machine's own hypervisor may stop the core in some of them.
    assert sum(absent_ns >= 2_000_000 for absent_ns in found["stolen"]) >= 15, found
    assert sum(absent_ns < 2_000_000 for absent_ns in found["long"]) >= 15, found
    assert not any(found["short"]), found


def test_without_a_hypervisor_or_a_core_of_its_own_there_is_no_witness(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    cpuinfo = tmp_path / "proc" / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse2\n")
    assert not is_guest(tmp_path)
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse2 hypervisor\n")
    assert is_guest(tmp_path)
    assert open_witness(Rights("other", 0, [1])) is None
    assert open_witness(Rights("fifo", 80, [0, 1])) is None


@pytest.mark.skipif(not may_have_real_time(), reason="SCHED_FIFO is not permitted here: the witness needs a priority")
def test_a_witness_ends_with_whoever_needs_it() -> None:
    """A server keeps its witness; the one that measuring used is gone when measuring is over."""
    code = (
        "import os; from taktd.daemon.execution.dispatch_cost import dispatch_cost_ns; from taktd.ipc import _core\n"
        "threads = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = threads(); witness = _core.Witness(1, [max(os.sched_getaffinity(0))]); during = threads()\n"
        "dispatch_cost_ns(witness); del witness; print(during - before, threads() - before)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == ["1", "0"]
