"""What a dispatch costs besides the engine: taking a job, deciding, answering. Measured on this machine, under the
rights the executor has, through the very calls it makes around a run; it goes into every C that admission reckons with.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Final

from taktd.daemon.recording.record import Recorder
from taktd.daemon.schedule.job import START, Task
from taktd.daemon.scheduler import Scheduler
from taktd.engines.measure import Measurement
from taktd.ipc import _core

__all__ = ["dispatch_cost_ns"]

RUNS: Final = 2000
SETTLE_RUNS: Final = 200  # until caches and branch predictors know the path
ENTRY: Final = struct.Struct("<QQQII32x")  # a submission, docs/wire.md
FP32: Final = 1
LOOP: Final = 1
PERIOD_NS: Final = 1_000_000_000  # so long that no job expires, whoever takes the core away meanwhile
TAIL_PPM: Final = 999_000


def dispatch_cost_ns(witness: _core.Witness | None = None) -> int:
    """ns at p99.9 of a job without an engine, from the look at the ring to the kept books."""
    files = [_core.create_ledger(1), _core.create_stats(1), _core.create_journal(1024)]
    server = _core.Server(files[0], files[1], files[2], -1)
    layout = _core.create_lane("dispatch", "none", LOOP, [("x", FP32, (1,))], [("y", FP32, (1,))], period_ns=PERIOD_NS)
    ours, theirs = _core.wake_pair()
    memory = mmap.mmap(layout["fd"], layout["total_size"])
    server.add(0, layout["fd"], ours, layout, 0, area=0, recover=False)
    server.keep_record(True)
    if witness is not None:
        server.set_witness(witness)
    scheduler = Scheduler()
    scheduler.add_loop(0, Task("dispatch", PERIOD_NS, PERIOD_NS, cost_ns=PERIOD_NS // 4))
    recorder = Recorder(server.record)
    times: list[int] = []
    for sequence in range(1, SETTLE_RUNS + RUNS + 1):
        slot = (sequence - 1) % layout["slot_count"]
        at = layout["submit_ring_offset"] + (sequence - 1) % layout["ring_entries"] * ENTRY.size
        ENTRY.pack_into(memory, at, sequence, 0, _core.now(), slot, 0)
        struct.pack_into("<Q", memory, layout["cursors_offset"], sequence)
        times.append(_one_dispatch(server, scheduler, recorder))
    del server
    for descriptor in (*files, theirs):
        os.close(descriptor)
    return Measurement(tuple(sorted(times[SETTLE_RUNS:])), 0).quantile_ns(TAIL_PPM)


def _one_dispatch(server: _core.Server, scheduler: Scheduler, recorder: Recorder) -> int:
    begun_ns = _core.now()
    ((lane, sequence, slot, deadline_ns, release_ns, _),) = server.poll(begun_ns)
    job = scheduler.submit(lane, sequence, slot, release_ns, deadline_ns, begun_ns)
    server.expect(lane, slot, job.latest_start_ns)
    action = scheduler.decide(begun_ns)
    assert action.kind == START
    server.begin(lane, slot, begun_ns, job.deadline_ns, job.arrival_ns + PERIOD_NS, 0, job.cost_ns)
    ended_ns = server.end()
    server.complete(lane, slot, 0, 0, 1, 0, 0, ended_ns, job.deadline_ns)
    recorder.started(action.jobs, begun_ns)
    scheduler.finish(ended_ns)
    recorder.finish(ended_ns)
    scheduler.decide(ended_ns)
    return _core.now() - begun_ns
