"""Types of taktd.ipc._core, the C core of the lanes.

Times are int nanoseconds of CLOCK_MONOTONIC. Numbers of statuses, flags, paths, causes, kinds and dtypes are those of
takt.h. System failures raise OSError with their errno; a value that can't be right raises ValueError.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

class TensorLayout(TypedDict):
    """One tensor of a lane. `offset` is relative to the slot: an int for inputs, [area 0, area 1] for outputs."""

    name: str
    dtype: int
    dims: tuple[int, ...]
    bytes: int
    offset: Any

class LaneLayout(TypedDict):
    """What create_lane made. JSON makes lists of its tuples; Server.add takes it back in either form, `fd` ignored."""

    fd: int
    total_size: int
    slot_count: int
    slot_stride: int
    slots_offset: int
    cursors_offset: int
    submit_ring_offset: int
    completion_ring_offset: int
    ring_entries: int
    shapes_offset_in_slot: int
    kind: int
    trigger: int
    period_ns: int
    deadline_ns: int
    jitter_ns: int
    epoch: int
    name: str
    model: str
    dynamic: bool
    inputs: list[TensorLayout]
    outputs: list[TensorLayout]

class Histogram(TypedDict):
    """Durations. Bucket (upper_ns, count) holds those up to upper_ns; empty buckets are left out; at most 1/64 wide."""

    count: int
    sum_ns: int
    max_ns: int
    buckets: list[tuple[int, int]]

class Statistics(TypedDict):
    """One block: submitted = ok + expired + … + detached + orphaned + what is pending."""

    submitted: int
    ok: int
    expired: int
    refused: int
    invalid: int
    failed: int
    lost: int
    cancelled: int
    detached: int
    late: int
    early: int
    overrun: int
    stand_in: int
    orphaned: int
    misses: dict[str, int]
    queue_us: Histogram
    run_us: Histogram
    total_us: Histogram

def now() -> int:
    """CLOCK_MONOTONIC."""

def create_lane(
    name: str,
    model: str,
    kind: int,
    inputs: Sequence[tuple[str, int, Sequence[int]]],
    outputs: Sequence[tuple[str, int, Sequence[int]]],
    *,
    slot_count: int = 4,
    dynamic: bool = False,
    period_ns: int = 0,
    deadline_ns: int = 0,
    jitter_ns: int = 0,
    epoch: int = 0,
    trigger: int = 0,
) -> LaneLayout:
    """Make the sealed memory of a lane; tensors are (name, ONNX dtype, maximum dims). The caller owns `fd`."""

def wake_pair() -> tuple[int, int]:
    """The two ends of a lane's wake-up descriptor: (daemon's, client's)."""

def create_ledger(lanes: int) -> int:
    """Memory for what was taken and done on up to `lanes` lanes (at most 4096)."""

def create_stats(blocks: int) -> int:
    """Memory for statistics, one block per loop or model (at most 8192)."""

def create_journal(records: int) -> int:
    """Memory for a record ring; `records` is a power of two."""

def stats_read(fd: int, block: int) -> Statistics:
    """Read one block, from any process, without disturbing its writer."""

def journal_read(fd: int, cursor: int) -> tuple[bytes, int, int]:
    """Up to 4096 records from `cursor` on (0 at first): (records, next cursor, records lost because overwritten).

    A record is 40 bytes, struct "<QHHIQQQ": t_ns, kind, lane, aux, a, b, number (1, 2, 3, …).
    """

def lock_memory() -> int:
    """mlockall for what is and will be touched; 0 or an errno."""

def realtime(priority: int, core: int) -> None:
    """SCHED_FIFO for the calling thread (0: leave it) on one core (-1: leave it)."""

class Server:
    """The lanes that one executor serves. Belongs to one thread; only `wait` releases the GIL."""

    def __init__(self, ledger_fd: int, stats_fd: int, journal_fd: int, control_fd: int) -> None:
        """Map the three files. The descriptors stay the caller's; control_fd (-1: none) must stay open."""

    def add(
        self, lane: int, memfd: int, wake_fd: int, layout: LaneLayout, stats_block: int, *, area: int, recover: bool
    ) -> int:
        """Serve a lane; returns the address of its memory. Owns both descriptors from here on, also on failure.

        recover: go on from the ledger (a successor); a completion that was recorded but perhaps not published is
        published now. Otherwise the ledger's entry is reset.
        """

    def remove(self, lane: int, status: int | None) -> int:
        """End a lane and unmap it. Pending jobs complete with `status` (None: the client is gone, nobody is told).

        Returns their number.
        """

    def unfinished(self, lane: int) -> list[tuple[int, int, int, int]]:
        """Jobs taken and not completed: (sequence, slot, deadline_ns as judged, release_ns)."""

    def slot_address(self, lane: int, slot: int, tensor_index: int, area: int) -> int:
        """Address of a tensor; inputs come first in tensor_index, and have one place whatever the area."""

    def poll(self, now_ns: int) -> list[tuple[int, int, int, int, int, int]]:
        """New entries of all lanes, at most 64: (lane, sequence, slot, deadline_ns, release_ns, flags).

        deadline_ns is as submitted (0: the loop's own, or none). flags: 1 shapes; 2 cancel, then sequence names the
        job and slot is 0; 0x8000 the lane was ended because its client broke the protocol, then deadline_ns is the
        reason (1 cursor, 2 slot, 3 slot pending, 4 sequence): call remove().
        """

    def shapes(self, lane: int, slot: int) -> tuple[tuple[int, ...], ...]:
        """Actual shapes of the inputs, as validated by poll; the declared ones where the job carried none."""

    def set_output_shapes(self, lane: int, slot: int, shapes: Sequence[Sequence[int]]) -> None:
        """Actual shapes of all outputs of a job on a lane with dynamic shapes; call before complete()."""

    def begin(self, lane: int, slot: int, now_ns: int, deadline_ns: int = 0) -> None:
        """Record that a job starts, and the absolute deadline it is judged by (0: as recorded when it was taken)."""

    def complete(
        self,
        lane: int,
        slot: int,
        status: int,
        flags: int,
        path: int,
        cause: int,
        cause_detail: int,
        ended_ns: int,
        deadline_ns: int = 0,
    ) -> None:
        """End a job: ledger, completion, wake-up, statistics. Sets `late` itself; flags may be overrun, stand-in, early.

        deadline_ns: as in begin(), for jobs that never began.
        """

    def wait(self, until_ns: int, spin_until_ns: int) -> int:
        """Block until something happens: 1 submissions, 2 control readable, 4 time-out, 8 a client hung up; or-ed.

        Spins until spin_until_ns, then sleeps until until_ns (0: for ever). 0: a signal came.
        """

    def slept_ns(self) -> int:
        """Total time spent asleep in wait()."""

    def record(self, kind: int, lane: int, aux: int, a: int, b: int, t_ns: int) -> None:
        """Write one journal record; never waits, overwrites the oldest."""
