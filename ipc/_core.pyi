"""Types of taktd.ipc._core, the C core of the lanes.

Times are int nanoseconds of CLOCK_MONOTONIC. Numbers of statuses, flags, paths, causes, kinds and dtypes are those of
takt.h. System failures raise OSError with their errno; a value that can't be right raises ValueError.
"""

from collections.abc import Sequence
from typing import Any, TypedDict, final, type_check_only

@type_check_only
class TensorLayout(TypedDict):
    """One tensor of a lane. `offset` is relative to the slot: an int for inputs, [area 0, area 1] for outputs."""

    name: str
    dtype: int
    dims: tuple[int, ...]
    bytes: int
    offset: Any

@type_check_only
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

@type_check_only
class Histogram(TypedDict):
    """Durations. Bucket (upper_ns, count) holds those up to upper_ns; empty buckets are left out; at most 1/64 wide."""

    count: int
    sum_ns: int
    max_ns: int
    buckets: list[tuple[int, int]]

@type_check_only
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
    batched_jobs: int  # in dispatches of two jobs or more; batched_run_ns: as run_us counts it, once for each job
    batched_run_ns: int
    batches: list[tuple[int, int, int]]  # (largest size, dispatches, ns): 2 to 16 apart, then up to 32, …, 256, more
    misses: dict[str, int]
    queue_us: Histogram
    run_us: Histogram
    total_us: Histogram

@type_check_only
class Succession(TypedDict):
    """Who serves a ledger. Members are ids above 0; 0 is nobody."""

    owner: int
    successor: int
    release_asked: int
    fenced: int
    """The member that was sent SIGKILL because it hung; 0 again once it is succeeded."""
    since_ns: int
    """When the owner took over; how it did: "clean", "died" or "hung" (said of its predecessor), "" never yet."""
    how: str
    takeovers: int
    fences: int
    progress: int
    run_started_ns: int
    """When the running job began; 0: none is running, as far as the owner has said."""
    run_budget_ns: int

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

def succession_set(ledger_fd: int, successor: int, /) -> None:
    """Who may serve the ledger next: a member's id, 0: nobody. Takes effect when the owner releases it or dies."""

def succession_ask_release(ledger_fd: int, member: int, /) -> None:
    """Ask the owner to hand over, by "asked" in successions(); nothing happens unless `member` owns the ledger."""

def succession_state(ledger_fd: int, /) -> Succession:
    """What the ledger says about its owner; from any process, disturbs nobody."""

def lock_memory() -> int:
    """mlockall for what is and will be touched; 0 or an errno."""

def realtime(priority: int, core: int) -> None:
    """SCHED_FIFO for the calling thread (0: leave it) on one core (-1: leave it)."""

def thread_cpu_ns() -> int:
    """Time that the calling thread has had a core (CLOCK_THREAD_CPUTIME_ID), where the kernel knows without what a
    hypervisor took."""

def switched_out() -> int:
    """How often the calling thread has lost its core against its will."""

@final
class Witness:
    """A thread that sees its core stand still, as under a hypervisor that gives it away: a timer goes off late.

    For runs of a thread that is pinned to the same single core at a lower FIFO priority.
    """

    def __init__(self, priority: int, cores: Sequence[int]) -> None:
        """Start it, SCHED_FIFO. OSError where that is not permitted."""

    def expect(self, due_ns: int) -> None:
        """A run begins that should be over at due_ns; replaces what was expected before. A system call."""

    def absent_ns(self, now_ns: int) -> int:
        """How long the core stood still from the expected moment on; 0 where that is no more than a wake-up takes.

        Of the last run. What was over before the expected moment is not seen.
        """

    def over(self) -> None:
        """The run is over: no more looking."""

@final
class Server:
    """The lanes that one executor serves. Belongs to one thread; only `wait` releases the GIL."""

    def __init__(self, ledger_fd: int, stats_fd: int, journal_fd: int, control_fd: int) -> None:
        """Map the three files. The descriptors stay the caller's; control_fd (-1: none) must stay open."""

    def add(
        self,
        lane: int,
        memfd: int,
        wake_fd: int,
        layout: LaneLayout,
        stats_block: int,
        *,
        area: int,
        recover: bool,
        dormant: bool = False,
    ) -> int:
        """Serve a lane; returns the address of its memory. Owns both descriptors from here on, also on failure.

        recover: go on from the ledger (a successor); a completion that was recorded but perhaps not published is
        published now. Otherwise the ledger's entry is reset. If the ledger speaks of another memory than this memfd,
        it is reset in any case.
        dormant: map it only (addresses are valid, bind what you like); ledger and client's memory stay another
        executor's until activate(). `lane` and `stats_block` belong to the ledger that the number falls into.
        """

    def open_ledger(self, ledger_fd: int, stats_fd: int) -> tuple[int, int]:
        """A further ledger: (its id, number of its first lane here). Ledger 0, from lane 0 on, is __init__'s.

        Lane i of the ledger is lane first + i of this Server. The descriptors stay the caller's; there is no closing:
        a ledger stays mapped as long as the Server lives. At most 8.
        """

    def activate(self, lane: int) -> int:
        """A dormant lane is ours from now on: recovered from the ledger as add() says, then polled. Call unfinished().

        Returns the number of unfinished jobs. Only the ledger's owner may do this.
        """

    def release(self, lane: int) -> int:
        """Back to dormant: nothing is completed, taken jobs stay in the ledger; returns their number."""

    def set_area(self, lane: int, area: int) -> None:
        """The output area that completions name from now on. For dormant lanes."""

    def set_budget(self, lane: int, budget_ns: int) -> None:
        """How long a run that begin() announces with this lane (last) may take before it counts as hung, at most 2^62.

        0 (at first): not known, then 1 s. Give the cost of the largest batch.
        """

    def join(self, ledger: int, member: int, priority: int, cores: Sequence[int], hang_after_ns: int) -> None:
        """Start the thread that waits for our turn to own the ledger, as `member` (> 0); see successions().

        priority 0: SCHED_OTHER; no cores: as here. While another member owns it and we are its successor: if it has
        outstanding work and shows no progress for hang_after_ns, plus the budget of the job that it is running, it is
        killed by the pidfd that set_pidfd gave us. An owner is pinged before that and answers from wait() or poll().
        """

    def leave(self, ledger: int) -> None:
        """End that thread; hands the ledger over first if we own it. Also done when the Server goes."""

    def set_hang_after(self, ledger: int, hang_after_ns: int) -> None:
        """Change what join() was given, e.g. when a loop with another deadline is added."""

    def set_pidfd(self, ledger: int, member: int, pidfd: int) -> None:
        """How to fence a member when it hangs; owns pidfd (-1: forget the member). At most 16 members."""

    def successions(self) -> list[tuple[int, str]]:
        """News since the last call, (ledger, what); wait() returns 16 when there are any.

        "clean", "died", "hung": the ledger is ours, its owner before us released it, died, or was killed by us or
        another member because it hung. activate() its lanes. "asked": the supervisor asks us for hand_over().
        """

    def set_control(self, control_fd: int) -> None:
        """Another supervisor's socket for wait() to look at, -1: none. Before the old one is closed; stays ours."""

    def hand_over(self, ledger: int) -> None:
        """Release all lanes of a ledger that we own, then the ledger itself, to its successor. Between two runs."""

    def remove(self, lane: int, status: int | None) -> int:
        """End a lane and unmap it. Pending jobs complete with `status` (None: the client is gone, nobody is told).

        Returns their number. A dormant lane is only unmapped: ledger and client don't notice.
        """

    def unfinished(self, lane: int) -> list[tuple[int, int, int, int]]:
        """Jobs taken and not completed: (sequence, slot, deadline_ns as judged, release_ns)."""

    def slot_address(self, lane: int, slot: int, tensor_index: int, area: int) -> int:
        """Address of a tensor; inputs come first in tensor_index, and have one place whatever the area."""

    def poll(self, now_ns: int) -> list[tuple[int, int, int, int, int, int]]:
        """New entries of all lanes, at most 64: (lane, sequence, slot, deadline_ns, release_ns, flags).

        deadline_ns is as submitted (0: the loop's own, or none). flags: 1 shapes; 2 cancel, then sequence names the
        job and slot is 0; 0x8000 the lane was ended because its client broke the protocol, then deadline_ns is the
        reason (1 cursor, 2 slot, 3 slot pending, 4 sequence): call remove(). 0x4000 the watch has answered this job as
        expired; if it came during the run, the job itself was handed out just before. 0x2000, beside the others: a
        job that came together with something else than jobs; the caller records it (keep_record).
        """

    def shapes(self, lane: int, slot: int) -> tuple[tuple[int, ...], ...]:
        """Actual shapes of the inputs, as validated by poll; the declared ones where the job carried none."""

    def set_output_shapes(self, lane: int, slot: int, shapes: Sequence[Sequence[int]]) -> None:
        """Actual shapes of all outputs of a job on a lane with dynamic shapes; call before complete()."""

    def begin(
        self,
        lane: int,
        slot: int,
        now_ns: int,
        deadline_ns: int = 0,
        next_arrival_ns: int = 0,
        more: int = 0,
        cost_ns: int = 0,
    ) -> None:
        """Record that a job starts, and the absolute deadline it is judged by (0: as recorded when it was taken).

        Until end() the server may be the watch's: call nothing else, but begin() for further jobs of the same run after
        more=1. next_arrival_ns: before which the lane's loop has no further nominal arrival (0: no loop). cost_ns: what
        the run was reckoned with (0: not known), for the watch to name who is to blame.
        """

    def end(self) -> int:
        """The run is over; returns when it ended."""

    def batched(self, lane: int, size: int, run_ns: int) -> None:
        """Count a dispatch of size jobs together, one of them of this lane, in the statistics; size: 2 or more."""

    def expect(self, lane: int, slot: int, hopeless_ns: int) -> None:
        """A queued job that has not started by then can't make its deadline (0: never mind): for the watch."""

    def set_epoch(self, epoch: int) -> None:
        """Completions say this epoch from now on: a configuration was applied that changes nothing here."""

    def keep_record(self, on: bool) -> None:
        """From now on poll() writes each job that it hands out into the journal: daemon/recording/record.py.

        Those with flag 0x2000 it does not: the order among them and what came with them is the caller's to keep.
        """

    def beats(self, lane: int, phase_ns: int) -> None:
        """A clock loop's beats are at phase_ns + k periods: so the watch knows by when its inputs are too late."""

    def runs_late(self, lane: int) -> None:
        """Jobs of this lane are run however late they are: the watch answers none of them."""

    def set_witness(self, witness: Witness) -> None:
        """From now on `begin` tells the witness when most runs of that cost are over. The server keeps it."""

    def watch(self, priority: int, cores: Sequence[int]) -> None:
        """Start the thread that answers hopeless jobs in long runs. priority 0: SCHED_OTHER; no cores: as here."""

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
        """End a job: ledger, completion, wake-up, statistics. `late` is set here; flags: overrun, stand-in, early,
        not finite.

        deadline_ns: as in begin(), for jobs that never began.
        """

    def wait(self, until_ns: int, spin_until_ns: int) -> int:
        """Block until something happens: 1 submissions, 2 control readable, 4 time-out, 8 a client hung up,
        16 successions(); or-ed.

        Spins until spin_until_ns, then sleeps until until_ns (0: for ever). 0: a signal came.
        """

    def slept_ns(self) -> int:
        """Total time spent asleep in wait()."""

    def spins(self, lane: int) -> bool:
        """Whether the lane's client says that it spins while it waits: a hint, the client can write it."""

    def record(self, kind: int, lane: int, aux: int, a: int, b: int, t_ns: int) -> None:
        """Write one journal record; never waits, overwrites the oldest."""

# ---- client: used by taktd.ipc.client only ----

STATUSES: dict[str, int]
PATHS: dict[str, int]
CAUSES: dict[str, int]
DTYPES: dict[str, int]
DTYPE_BITS: dict[int, int]
WIRE: dict[str, int]
"""Sizes ("takt_header") and offsets ("takt_header.version") of everything in wire version 1, in bytes."""

def tick_next(index: int, release_ns: int, period_ns: int, /) -> tuple[int, int, int]:
    """Sleep until the next beat; returns (index, release_ns, missed). release_ns 0: the first one, at once."""

@final
class Reply:
    """Outcome of one job. Times ending in _ns are CLOCK_MONOTONIC (0: none), those ending in _us are durations."""

    @property
    def status(self) -> str:
        """ "ok", "expired", "refused", "invalid", "failed", "lost", "cancelled", "detached", "pending"."""
    @property
    def status_code(self) -> int: ...
    @property
    def ok(self) -> bool:
        """Answered, in time or not: look at `late` too."""
    @property
    def pending(self) -> bool:
        """The wait timed out; the job goes on."""
    @property
    def late(self) -> bool: ...
    @property
    def overrun(self) -> bool: ...
    @property
    def stand_in(self) -> bool: ...
    @property
    def early(self) -> bool: ...
    @property
    def not_finite(self) -> bool:
        """An output has NaN or infinity in it, and its model's configuration says `flag`."""
    @property
    def path(self) -> str:
        """ "primary", "stand-in", "hold", "constant"; "" where nothing answered."""
    @property
    def cause(self) -> str:
        """Why a deadline was missed; "" for none."""
    @property
    def cause_detail(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def area(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def submitted_ns(self) -> int: ...
    @property
    def taken_ns(self) -> int: ...
    @property
    def started_ns(self) -> int: ...
    @property
    def ended_ns(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...
    @property
    def queued_us(self) -> float: ...
    @property
    def run_us(self) -> float: ...
    @property
    def total_us(self) -> float: ...

@final
class ClientLane:
    """An attached lane. Raises the exceptions of taktd.ipc.errors."""

    def infer(self, deadline_ns: int, timeout_ns: int, /) -> Reply: ...
    def wait(self, sequence: int, timeout_ns: int, /) -> Reply: ...
    def submit(self, deadline_ns: int, /) -> int: ...
    def repeat(self) -> int: ...
    def cancel(self, sequence: int, /) -> None: ...
    def next_slot(self) -> int: ...
    def last_place(self) -> int: ...
    def fileno(self) -> int: ...
    def unwatch(self) -> None: ...
    def pending(self) -> int: ...
    def memfd(self) -> int: ...
    def local_fd(self) -> int: ...
    def output_shape(self, index: int, /) -> tuple[int, ...]: ...
    def set_shape(self, name: str, dims: tuple[int, ...], /) -> None: ...
    def describe(self) -> dict[str, Any]: ...
    def detach(self) -> None: ...

@final
class ClientNode:
    """A connection to lanes.sock. Raises the exceptions of taktd.ipc.errors."""

    def __new__(cls, path: str | None = None, timeout_ns: int = 0) -> ClientNode: ...
    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def pid(self) -> int: ...
    def attach(self, name: str, kind: int, wait_mode: int, timeout_ns: int, /) -> ClientLane: ...
    def list(self, kind: int, /) -> str: ...
    def close(self) -> None: ...
