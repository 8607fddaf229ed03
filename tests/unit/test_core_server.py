"""The daemon's side of a lane, driven by a client that is nothing but mmap and struct."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taktd.ipc import _core
from tests.fakes import raw_lane as raw
from tests.fakes.raw_lane import Daemon

ENDED = 0x8000


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    it = Daemon()
    yield it
    it.close()


def finish(daemon: Daemon, job: tuple[int, ...], ended_ns: int = 200, status: int = raw.OK) -> None:
    lane, _, slot, *_ = job
    daemon.server.complete(lane, slot, status, 0, 1, 0, 0, ended_ns)


def test_header_says_where_everything_is(daemon: Daemon) -> None:
    client = daemon.add()
    h, layout = client.header, daemon.layouts[0]
    assert (h["magic"], h["version"], h["header_size"]) == (b"TAKTLANE", 1, 256)
    assert h["total_size"] == layout["total_size"] == os.fstat(layout["fd"]).st_size
    assert (h["slot_count"], h["tensor_count"], h["input_count"], h["kind"], h["area_count"]) == (4, 3, 2, 1, 2)
    assert h["ring_entries"] >= h["slot_count"]
    assert h["ring_entries"] & (h["ring_entries"] - 1) == 0
    assert (h["period_ns"], h["deadline_ns"], h["jitter_ns"], h["epoch"]) == (1_000_000, 1_000_000, 7, 3)
    assert client.map[h["name_offset"] : h["name_offset"] + 5] == b"walk\0"
    assert client.map[h["model_name_offset"] : h["model_name_offset"] + 4] == b"go1\0"
    page = os.sysconf("SC_PAGESIZE")
    for key in ("cursors_offset", "submit_ring_offset", "completion_ring_offset", "slots_offset", "slot_stride"):
        assert h[key] % page == 0
        assert h[key] == layout[key]  # type: ignore[literal-required]


def test_tensor_table_matches_the_layout(daemon: Daemon) -> None:
    client = daemon.add()
    layout = daemon.layouts[0]
    spans = []
    for i, tensor in enumerate([*layout["inputs"], *layout["outputs"]]):
        name, dtype, rank, *rest = raw.TENSOR.unpack_from(client.map, client.header["tensor_table_offset"] + 192 * i)
        assert name.rstrip(b"\0").decode() == tensor["name"]
        assert (dtype, tuple(rest[:rank])) == (tensor["dtype"], tensor["dims"])
        first, size, second = rest[8:]
        assert size == tensor["bytes"]
        assert tensor["offset"] == (first if i < 2 else [first, second])
        assert i >= 2 or first == second
        spans += [(first, size)] if i < 2 else [(first, size), (second, size)]
    spans.sort()
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= layout["slot_stride"]


def test_lane_memory_is_sealed_and_private(daemon: Daemon) -> None:
    daemon.add()
    fd = daemon.layouts[0]["fd"]
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    for size in (0, daemon.layouts[0]["total_size"] + 4096):
        with pytest.raises(OSError, match="Operation not permitted"):
            os.ftruncate(fd, size)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([("x", 8, (1,))], "no strings"),
        ([("x", 99, (1,))], "dtype 99"),
        ([("x" * 96, 1, (1,))], "96 bytes"),
        ([("x", 1, (1,) * 9)], "9 dimensions"),
        ([("x", 1, (0,))], "at least 1"),
        ([("x", 1, (2**40, 2**40))], "larger than"),
        ([("x", 1, (2**33,))] * 3, "would need"),
        ([(str(i), 1, (1,)) for i in range(200)], "200 inputs"),
    ],
)
def test_impossible_tensors_are_refused_by_name(inputs: list[tuple[str, int, tuple[int, ...]]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _core.create_lane("a", "b", 1, inputs, [("y", 1, (1,))])


def test_four_bit_tensors_are_packed() -> None:
    layout = _core.create_lane("a", "b", 2, [("x", 22, (3,))], [("y", 21, (4, 4))])
    os.close(layout["fd"])
    assert [t["bytes"] for t in [*layout["inputs"], *layout["outputs"]]] == [2, 8]


def test_layout_survives_json_and_a_wrong_size_does_not(daemon: Daemon) -> None:
    daemon.add()
    daemon.server.remove(0, None)
    daemon.layouts[0] = json.loads(json.dumps(daemon.layouts[0]))
    daemon.serve(0, recover=False)
    daemon.server.remove(0, None)
    daemon.layouts[0]["total_size"] += 1
    with pytest.raises(ValueError, match="another version"):
        daemon.serve(0, recover=False)


def test_unsealed_memory_is_refused(daemon: Daemon) -> None:
    daemon.add()
    daemon.server.remove(0, None)
    memfd = os.memfd_create("foreign", 0)
    os.ftruncate(memfd, daemon.layouts[0]["total_size"])
    with pytest.raises(PermissionError):
        daemon.server.add(0, memfd, os.dup(daemon.ends[0][1]), daemon.layouts[0], 0, area=0, recover=False)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(memfd)  # owned by add, also when it fails


def test_job_goes_round(daemon: Daemon) -> None:
    client = daemon.add()
    client.submit(submitted_ns=100)
    [job] = daemon.server.poll(150)
    assert job == (0, 1, 0, 0, 150, 0)  # the ring was empty when it was added, so 100 is not believed
    daemon.server.begin(0, 0, 160)
    daemon.server.complete(0, 0, raw.OK, 8, 1, 0, 0, 190)
    [done] = client.completions()
    assert done == {
        "sequence": 1, "slot": 0, "status": 0, "flags": 8, "path": 1, "cause": 0, "area": 0, "taken_ns": 150,
        "started_ns": 160, "ended_ns": 190, "deadline_ns": 150 + 1_000_000, "cause_detail": 0, "epoch": 3,
    }  # fmt: skip
    assert client.u64(raw.SUBMIT_HEAD) == 1
    with pytest.raises(ValueError, match="no job is pending"):
        daemon.server.complete(0, 0, raw.OK, 0, 1, 0, 0, 190)


def test_release_is_honest_about_queueing_and_safe_against_lies(daemon: Daemon) -> None:
    client = daemon.add()
    base = _core.now()
    for lie, told in ((-50, 0), (30, 30), (10**9, 100), (2**63, 100)):
        daemon.server.poll(base)  # found empty
        client.submit(submitted_ns=base + lie)
        [job] = daemon.server.poll(base + 100)
        assert job[4] == base + told
        finish(daemon, job)
        base += 1000


def test_late_is_judged_here(daemon: Daemon) -> None:
    client = daemon.add()
    for deadline, ended, flags in ((1000, 1000, 0), (1000, 1001, 1)):
        client.submit(deadline_ns=deadline)
        [job] = daemon.server.poll(500)
        daemon.server.begin(0, job[2], 600)
        finish(daemon, job, ended)
        assert client.completions()[0]["flags"] == flags
    client.submit()
    [job] = daemon.server.poll(500)
    daemon.server.begin(0, job[2], 600, 700)  # the scheduler's nominal deadline
    finish(daemon, job, 701)
    [done] = client.completions()
    assert (done["flags"], done["deadline_ns"]) == (1, 700)
    client.submit()
    [job] = daemon.server.poll(500)
    daemon.server.complete(0, job[2], raw.EXPIRED, 0, 0, 3, 0, 900, 800)
    [done] = client.completions()
    assert (done["status"], done["flags"], done["deadline_ns"], done["cause"]) == (raw.EXPIRED, 0, 800, 3)


def test_cancel_consumes_no_sequence_number(daemon: Daemon) -> None:
    client = daemon.add()
    client.submit()
    client.put(1, 77, flags=2)
    client.submit()
    client.put(1, 0, flags=2 | 64)  # a cancel with unknown flags is nothing at all
    jobs = daemon.server.poll(10)
    assert [(job[1], job[2], job[5]) for job in jobs] == [(1, 0, 0), (1, 0, 2), (2, 1, 0)]
    assert client.u64(raw.SUBMIT_HEAD) == 4


def test_outputs_have_two_areas(daemon: Daemon) -> None:
    client = daemon.add()
    base = daemon.server.slot_address(0, 0, 0, 0) - client.slot_offset(0)
    for slot in range(4):
        first, second = daemon.layouts[0]["outputs"][0]["offset"]
        assert daemon.server.slot_address(0, slot, 2, 0) - base == client.slot_offset(slot) + first
        assert daemon.server.slot_address(0, slot, 2, 1) - base == client.slot_offset(slot) + second
        assert daemon.server.slot_address(0, slot, 1, 0) == daemon.server.slot_address(0, slot, 1, 1)
    ctypes.memmove(daemon.server.slot_address(0, 3, 2, 1), b"moved!", 6)
    at = client.slot_offset(3) + daemon.layouts[0]["outputs"][0]["offset"][1]
    assert client.map[at : at + 6] == b"moved!"
    for wrong in ((1, 0, 0, 0), (0, 4, 0, 0), (0, 0, 3, 0), (0, 0, 0, 2)):
        with pytest.raises(ValueError, match="lane"):
            daemon.server.slot_address(*wrong)


def test_shapes_are_copied_once_and_judged(daemon: Daemon) -> None:
    client = daemon.add(kind=raw.MODEL, dynamic=True)
    client.set_shapes(0, [(2, 8), (1,)])
    client.submit(flags=1)
    [job] = daemon.server.poll(10)
    client.set_shapes(0, [(3, 9), (5,)])  # too late to matter
    assert daemon.server.shapes(0, 0) == ((2, 8), (1,))
    with pytest.raises(ValueError, match="declared are 0 to 5"):
        daemon.server.set_output_shapes(0, 0, [(6,)])
    daemon.server.set_output_shapes(0, 0, [(4,)])
    finish(daemon, job)
    assert client.completions()[0]["flags"] == 16
    assert client.shape(0, 2) == (4,)
    for shapes in ([(4, 8), (1,)], [(-1, 8), (1,)], [(3, 8, 1), (1,)], [(2**62, 2**62), (1,)]):
        client.set_shapes(1, shapes)
        client.submit(slot=1, flags=1)
        assert daemon.server.poll(20) == []
        assert client.completions()[0]["status"] == raw.INVALID
    client.submit(slot=2)
    assert daemon.server.poll(30)[0][2] == 2
    assert daemon.server.shapes(0, 2) == ((3, 8), (2,))


@pytest.mark.parametrize(
    ("deadline", "flags", "rest"),
    [(2**63, 0, b""), (2**64 - 1, 0, b""), (0, 4, b""), (0, 1 << 31, b""), (0, 1, b""), (0, 0, b"\0" * 31 + b"x")],
)
def test_impossible_entry_completes_invalid(daemon: Daemon, deadline: int, flags: int, rest: bytes) -> None:
    client = daemon.add()
    client.sequence = 1
    client.put(1, 2, deadline, 0, flags, rest)
    assert daemon.server.poll(10) == []
    [done] = client.completions()
    assert (done["sequence"], done["slot"], done["status"], done["path"]) == (1, 2, raw.INVALID, 0)
    client.submit(slot=2)
    assert len(daemon.server.poll(20)) == 1
    assert client.u32(raw.LANE_STATE) == 0


@pytest.mark.parametrize(
    ("sequence", "slot", "reason"),
    [(2, 4, 2), (2, 2**32 - 1, 2), (2, 0, 3), (1, 1, 4), (3, 1, 4), (0, 1, 4), (2**64 - 1, 1, 4)],
)
def test_broken_protocol_ends_the_lane_alone(daemon: Daemon, sequence: int, slot: int, reason: int) -> None:
    client, other = daemon.add(0), daemon.add(1)
    client.submit()
    [job] = daemon.server.poll(10)
    client.put(sequence, slot)
    client.put(sequence + 1 & 2**64 - 1, 1)
    other.submit()
    ended, fine = sorted(daemon.server.poll(20))
    assert ended == (0, 0, 0, reason, 20, ENDED)
    assert fine[:2] == (1, 1)
    assert (client.u32(raw.LANE_STATE), client.u32(raw.DETACH_REASON)) == (1, reason)
    assert daemon.server.poll(30) == []
    assert daemon.server.remove(0, raw.DETACHED) == 1
    replies = [(d["sequence"], d["slot"], d["status"]) for d in client.completions()]
    assert replies == [(0, 2**32 - 1, raw.DETACHED), (job[1], job[2], raw.DETACHED)]
    count = daemon.count()
    assert (count["submitted"], count["detached"]) == (1, 1)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_every_cursor_value_is_judged(taken: int) -> None:
    """FAULTS 11, all head and tail combinations: at most a ring's worth ahead is a tail, all else ends the lane."""
    entries = 8
    values = {*range(20), 2**63 - 1, 2**63, 2**64 - 1, *(2**64 - i for i in range(1, 12)), 2**32, 2**32 + taken}
    for tail in sorted(values):
        daemon = Daemon()
        client = daemon.add()
        assert client.header["ring_entries"] == entries
        for _ in range(taken):
            client.submit()
            [job] = daemon.server.poll(1)
            finish(daemon, job)
        for i in range(entries):  # the ring holds cancels: harmless whatever the tail says
            at = client.header["submit_ring_offset"] + i * 64
            raw.SUBMISSION.pack_into(client.map, at, 5, 0, 0, 0, 2, b"")
        client.u64(raw.SUBMIT_TAIL, tail)
        for cursor in (raw.SUBMIT_HEAD, raw.COMPLETION_HEAD, raw.COMPLETION_TAIL):  # not ours to read back
            client.u64(cursor, tail * 31 % 2**64)
        jobs = daemon.server.poll(2)
        ahead = (tail - taken) % 2**64
        if ahead > entries:
            assert [job[3:] for job in jobs] == [(1, 2, ENDED)]
        else:
            assert len(jobs) == ahead
            assert all(job[5] == 2 for job in jobs)
        daemon.close()


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_garbage_entries_never_hurt_anyone_else(data: st.DataObject) -> None:
    daemon = Daemon()
    hostile, honest = daemon.add(0), daemon.add(1)
    honest_done = 0
    for now in range(1, 12):
        words = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 2**63, 2**64 - 1]), min_size=8, max_size=8))
        at = hostile.header["submit_ring_offset"] + hostile.tail % hostile.header["ring_entries"] * 64
        hostile.words[at // 8 : at // 8 + 8] = memoryview(b"".join(w.to_bytes(8, "little") for w in words)).cast("Q")
        hostile.tail += data.draw(st.sampled_from([0, 1, 1, 1, 2, 8, 9, 2**63]))
        hostile.u64(raw.SUBMIT_TAIL, hostile.tail % 2**64)
        honest.submit()
        for job in daemon.server.poll(now):
            if job[5] == ENDED:
                daemon.server.remove(job[0], raw.DETACHED)
            elif not job[5] & 2:
                finish(daemon, job)
        honest_done += len(honest.completions())
        assert honest_done == now
    count = daemon.count(0)
    assert count["submitted"] == count["ok"] + count["invalid"] + count["detached"]
    assert daemon.count(1)["ok"] == 11
    daemon.close()


def test_one_lane_cannot_fill_a_poll(daemon: Daemon) -> None:
    flood, honest = daemon.add(0, slots=64), daemon.add(1)
    for _ in range(64):
        flood.submit()
    honest.submit()
    assert {job[0] for job in daemon.server.poll(1)} == {0, 1}
    taken = sum(len(daemon.server.poll(now)) for now in range(2, 10))
    assert taken == 64 - 16


def test_removed_lane_drops_or_answers(daemon: Daemon) -> None:
    for status, key in ((None, "orphaned"), (raw.LOST, "lost")):
        client = daemon.add()
        before = daemon.count()[key]  # type: ignore[literal-required]
        for _ in range(3):
            client.submit()
        daemon.server.poll(1)
        assert daemon.server.remove(0, status) == 3
        assert daemon.count()[key] - before == 3  # type: ignore[literal-required]
        statuses = [d["status"] for d in client.completions()]
        assert statuses == ([] if status is None else [raw.LOST] * 3) + [raw.DETACHED]
        assert (client.u32(raw.LANE_STATE), client.u32(raw.DETACH_REASON)) == (1, 5)
    with pytest.raises(ValueError, match="not served"):
        daemon.server.remove(0, None)


def test_lane_numbers_are_checked(daemon: Daemon) -> None:
    daemon.add()
    with pytest.raises(OSError, match="busy") as busy:
        daemon.serve(0, recover=False)
    assert busy.value.errno == errno.EBUSY
    daemon.layouts[8], daemon.ends[8] = daemon.layouts[0], tuple(os.dup(fd) for fd in daemon.ends[0])  # type: ignore[assignment]
    with pytest.raises(OSError, match="range"):
        daemon.serve(8, recover=False)
    for wrong in ((0, 0, 8, 0, 1, 0, 0, 1), (0, 0, 0, 0, 5, 0, 0, 1), (0, 0, 0, 0, 1, 8, 0, 1)):
        daemon.clients[0].submit()
        daemon.server.poll(1)
        with pytest.raises(ValueError, match=r"closed sets|no job"):
            daemon.server.complete(*wrong)
        daemon.server.complete(0, daemon.clients[0].sequence - 1, 0, 0, 1, 0, 0, 1)


def test_holes_give_zeros_and_hurt_nobody_else(daemon: Daemon) -> None:
    """FAULTS 12: everything that the client has is punched out while a job runs, header and cursors included."""
    client, other = daemon.add(0), daemon.add(1)
    client.submit()
    [job] = daemon.server.poll(1)
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_int64(daemon.layouts[0]["total_size"])
    assert libc.fallocate(daemon.layouts[0]["fd"], 3, ctypes.c_int64(0), size) == 0  # KEEP_SIZE | PUNCH_HOLE
    ctypes.memset(daemon.server.slot_address(0, 0, 2, 0), 7, 20)
    finish(daemon, job)
    assert client.completions()[0]["sequence"] == 1
    other.submit()
    ended = [job for job in daemon.server.poll(2) if job[5] == ENDED]
    assert [job[3] for job in ended] == [1]  # its tail went back to zero
    assert client.u32(raw.LANE_STATE) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_memory_cannot_be_reopened_by_another_user(daemon: Daemon) -> None:
    daemon.add()
    path = f"/proc/{os.getpid()}/fd/{daemon.layouts[0]['fd']}"
    os.close(os.open(path, os.O_RDWR))
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            os.open(f"/proc/self/fd/{daemon.layouts[0]['fd']}", os.O_RDWR)
        except PermissionError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_epoch_that_changes_nothing_here_is_said_by_the_next_completion(daemon: Daemon) -> None:
    client = daemon.add()
    client.submit()
    (job,) = daemon.server.poll(100)
    daemon.server.set_epoch(9)
    finish(daemon, job)
    assert client.completions()[0]["epoch"] == 9
