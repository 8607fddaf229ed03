"""FAULTS 4, 5 and 16: executors that are killed or stopped at random instants, hot swaps, a wall clock that jumps.

Tests judge order, outcome and accounting; bench/failover.py has the times. Each random test prints its seed, and
TAKTD_SEED runs it again. The canary breaks the daemon's accounting and must be noticed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest

from taktd.daemon.control_client import AnswerNo
from tests import models
from tests.chance import seed
from tests.conftest import Start
from tests.running import Running, eventually
from tests.system.test_go1_walk import ROBOTS, STEP_S, STEPS_PER_ACTION, Go1
from tests.system.test_handover import ANSWER_US, BACK_S, Walking, home_again, kill, service, swap, yaml

ROBOT = pytest.mark.skipif(
    not (ROBOTS / "go1" / "policy.onnx").is_file(), reason=f"no robot policies in {ROBOTS} (set TAKTD_ROBOTS)"
)
slow = pytest.mark.slow


def chance() -> random.Random:
    return random.Random(seed())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.identity(tmp_path / "id.onnx", (4,))
    models.mlp(tmp_path / "one.onnx", seed=1)
    models.mlp(tmp_path / "two.onnx", seed=2)
    return tmp_path


def at_home(running: Running) -> int:
    """The primary's pid, once it serves and its stand-in is in line."""
    stands: list[int] = []

    def settled() -> bool:
        executors = {e["device"]: e for e in running.ask("status")["executors"]}
        home = executors["cpu0"]
        # A pid that has just been killed is told until the supervisor has heard of it.
        alive = home["pid"] is not None and psutil.pid_exists(home["pid"])
        stands[:] = [home["pid"]] if alive and home["served_by"] == "cpu0" and executors["cpu1"]["ready"] else []
        return bool(stands)

    eventually(settled, BACK_S, "the primary serves and its stand-in is ready")
    return stands[0]


def hurt(running: Running, walking: Walking, times: int, number: int, random_: random.Random, switch: str) -> None:
    for _ in range(times):
        pid = at_home(running)
        time.sleep(random_.random() * 0.2)
        before, deaths = walking.journal["ok", "stand-in"], running.executor()["switches"].get(switch, 0)
        os.kill(pid, number)
        eventually(lambda b=before: walking.journal["ok", "stand-in"] > b, 10, "the stand-in answers")
        eventually(lambda d=deaths: running.executor()["switches"].get(switch, 0) > d, 10, switch)
    home_again(running, walking)


def in_line(running: Running) -> tuple[str, int]:
    """Who serves the loop, and its pid, once somebody else is ready to take it over."""
    found: list[tuple[str, int]] = []

    def settled() -> bool:
        executors = {e["device"]: e for e in running.ask("status")["executors"]}
        by = executors["cpu0"]["served_by"]
        pids = {device: e["pid"] for device, e in executors.items() if e["pid"] and psutil.pid_exists(e["pid"])}
        ready = all(e["state"] == "ready" for e in executors.values()) and not executors["cpu0"]["changing"]
        found[:] = [(by, pids[by])] if ready and len(pids) == 2 and by in pids else []
        return bool(found)

    eventually(settled, BACK_S, "one serves, the other is in line")
    return found[0]


@pytest.mark.parametrize("times", [8, pytest.param(100, marks=[slow, pytest.mark.timeout(900)])])
def test_kills_at_random_instants_lose_and_double_nothing(taktd: Start, folder: Path, times: int) -> None:
    """Of whoever serves, primary or stand-in, as soon as the other one can take over."""
    random_ = chance()
    running = taktd(yaml(folder).replace("period: 10ms", "period: 1ms").replace("budget: 2ms, fallback", "fallback"))
    with Walking(running, every_s=0) as walking:
        for _ in range(times):
            by, pid = in_line(running)
            other = "primary" if by == "cpu1" else "stand-in"
            time.sleep(random_.random() * 0.1)
            before = walking.journal["ok", other]
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            eventually(lambda b=before, o=other: walking.journal["ok", o] > b, 10, f"the {other} answers")
        home_again(running, walking)
    walking.reconcile()
    statuses = {status for status, _ in walking.journal}
    assert statuses <= {"ok", "expired", "lost"}
    assert sum(n for (status, _), n in walking.journal.items() if status == "lost") <= times


def test_a_stopped_primary_is_fenced_and_its_jobs_answered(taktd: Start, folder: Path) -> None:
    random_ = chance()
    running = taktd(yaml(folder))
    with Walking(running) as walking:
        hurt(running, walking, 2, signal.SIGSTOP, random_, "hung")
    walking.reconcile()


# ---- the robot ----


class Walk:
    """The Go1 in real time, in a thread of its own, on whatever answers its loop."""

    def __init__(self, running: Running) -> None:
        self.running, self.robot = running, Go1()
        self.answered = self.missed = 0
        self.lowest = 1.0
        self.error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with self.running.connect() as node, node.attach("walk", timeout_us=ANSWER_US) as lane:
                for _ in lane.ticks(period_us=STEP_S * STEPS_PER_ACTION * 1e6):
                    if self._over.is_set():
                        return
                    lane.inputs["obs"][0, :] = self.robot.observe()
                    if lane.infer(timeout_us=ANSWER_US).ok:
                        action = lane.outputs["continuous_actions"][0].copy()
                        self.answered += 1
                    else:
                        action = self.robot.last_action
                        self.missed += 1
                    self.robot.act(action)
                    self.lowest = min(self.lowest, self.robot.uprightness)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Walk:
        self._thread.start()
        eventually(lambda: self.answered > 20 or self.error is not None, 20, "it walks")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def judge(self) -> None:
        assert self.error is None, self.error
        assert self.lowest > 0.9, "it has fallen"
        simulated_s = (self.answered + self.missed) * STEP_S * STEPS_PER_ACTION
        assert float(self.robot.data.qpos[0]) / simulated_s > 0.6, "it has not come along"


@contextmanager
def walking_robot(taktd: Start, tmp_path: Path) -> Iterator[tuple[Running, Walk, tuple[str, str]]]:
    policy = onnx.load(str(ROBOTS / "go1" / "policy.onnx"))
    texts = []
    models.identity(tmp_path / "id.onnx", (4,))
    for name in ("one", "two"):
        policy.doc_string = name
        onnx.save(policy, str(tmp_path / f"{name}.onnx"))
        text = yaml(tmp_path).replace("one.onnx", f"{name}.onnx").replace("period: 10ms", "period: 20ms")
        texts.append(text.replace("budget: 2ms, fallback", "fallback"))
    running = taktd(texts[0])
    with Walk(running) as walk:
        yield running, walk, (texts[0], texts[1])
    walk.judge()


@ROBOT
@pytest.mark.parametrize("times", [2, pytest.param(8, marks=[slow, pytest.mark.timeout(400)])])
def test_the_robot_walks_on_through_kills_of_its_primary(taktd: Start, tmp_path: Path, times: int) -> None:
    random_ = chance()
    with walking_robot(taktd, tmp_path) as (running, walk, _):
        for _ in range(times):
            pid = at_home(running)
            time.sleep(random_.random() * 0.5)
            missed = walk.missed
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: service(running)[1] == "stand-in", 10)
            assert walk.missed <= missed + 5
        at_home(running)
    assert running.loop("walk")["switches"]["died"] == times


@ROBOT
@pytest.mark.parametrize("times", [2, pytest.param(8, marks=[slow, pytest.mark.timeout(400)])])
def test_the_robot_walks_on_through_hot_swaps_of_its_policy(taktd: Start, tmp_path: Path, times: int) -> None:
    with walking_robot(taktd, tmp_path) as (running, _, texts):
        for number in range(times):
            swap(running, texts[(number + 1) % 2])
    assert running.loop("walk")["switches"] == {"start": 1, "handover": times}
    assert running.loop("walk")["statistics"]["misses"].get("handover", 0) == 0


# ---- swaps leave nothing behind ----

SIMULATED = """\
devices: {{sim0: {{driver: sim, cost: {cost}}}}}
models: {{id: {{path: {folder}/id.onnx}}}}
loops: {{walk: {{model: id, device: sim0, period: 20ms, budget: 5ms, probation: 0s}}}}
admission: {{on_refusal: uncertified}}
"""


def held(running: Running) -> tuple[int, int, int, int]:
    """Descriptors, its children's threads, processes, and bytes of the supervisor and its executors together."""
    root = psutil.Process(running.process.pid)
    family = [root, *root.children(recursive=True)]
    return (
        running.descriptors(), sum(p.num_threads() for p in family[1:]), len(family),
        sum(p.memory_info().rss for p in family),
    )  # fmt: skip


@pytest.mark.parametrize("times", [50, pytest.param(500, marks=[slow, pytest.mark.timeout(3000)])])
def test_hot_swaps_on_a_simulated_device_leave_nothing_behind(taktd: Start, folder: Path, times: int) -> None:
    texts = [SIMULATED.format(folder=folder, cost=cost) for cost in ("300us", "400us")]
    running = taktd(texts[0])
    with Walking(running) as walking:
        for number in range(4):
            swap(running, texts[(number + 1) % 2])
        eventually(lambda: not running.executor("sim0")["changing"], 10)
        before, threads = held(running), psutil.Process(running.process.pid).num_threads()
        for number in range(times - 4):
            swap(running, texts[(number + 1) % 2])
        eventually(lambda: held(running)[:3] == before[:3], 20, "descriptors, threads and processes are as before")
        after = held(running)
        assert after[3] <= before[3] * 1.02 + (4 << 20), (before, after)
        # The event loop's pool may still fill up to its size: a thread whenever all others have something to do.
        assert psutil.Process(running.process.pid).num_threads() <= threads + min(32, (os.cpu_count() or 1) + 4)
    walking.reconcile()
    told = running.loop("walk")
    assert told["switches"] == {"start": 1, "handover": times}
    assert told["statistics"]["misses"].get("handover", 0) == 0


# ---- nor do loads that fail ----

STORED = """\
devices: {{cpu0: {{driver: cpu}}}}
models: {{id: {{path: {folder}/id.onnx{verify}}}}}
loops: {{walk: {{model: id, device: cpu0, period: 20ms, budget: 5ms, on_late: run, probation: 0s}}}}
admission: {{on_refusal: uncertified}}
"""


@pytest.mark.parametrize("times", [10, pytest.param(200, marks=[slow, pytest.mark.timeout(3000)])])
def test_loads_that_fail_leave_nothing_behind(taktd: Start, folder: Path, times: int) -> None:
    """FAULTS: 200 failing loads. An executor is started for each, loads, and is turned away by verification."""
    np.savez(folder / "wrong.npz", x=np.ones((1, 4), np.float32), y=np.full((1, 4), 2, np.float32))
    good = STORED.format(folder=folder, verify="")
    bad = STORED.format(folder=folder, verify=f", verify: {{samples: {folder}/wrong.npz}}")
    running = taktd(good)
    first = running.executor("cpu0")
    with Walking(running) as walking:
        for number in range(times):
            with pytest.raises(AnswerNo, match="does not compute what the model says"):
                swap(running, bad)
            if number == times // 4:
                before, threads = held(running), psutil.Process(running.process.pid).num_threads()
        eventually(lambda: held(running)[:3] == before[:3], 20, "descriptors, threads and processes are as before")
        after = held(running)
        assert after[3] <= before[3] * 1.02 + (4 << 20), (before, after)
        assert psutil.Process(running.process.pid).num_threads() <= threads + min(32, (os.cpu_count() or 1) + 4)
        last = running.executor("cpu0")
        assert (last["pid"], last["restarts"], last["error"]) == (first["pid"], 0, "")
        swap(running, good.replace("budget: 5ms", "budget: 6ms"))
    walking.reconcile()
    assert running.loop("walk")["switches"] == {"start": 1, "handover": 1}
    assert not list(running.folder.rglob("*.tmp"))


# ---- a wall clock that jumps ----

CLOCK = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Seconds to add, read anew at each call: a jump between two calls is what a step of the clock looks like. */
static long offset(void)
{
    FILE *file = fopen(getenv("CLOCK_OFFSET"), "r");
    long seconds = 0;

    if (file) {
        if (fscanf(file, "%ld", &seconds) != 1)
            seconds = 0;
        fclose(file);
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int rc = (int)syscall(SYS_clock_gettime, clock, now);

    if (rc == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return rc;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec precise;

    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec precise;

    clock_gettime(CLOCK_REALTIME, &precise);
    if (now)
        *now = precise.tv_sec;
    return precise.tv_sec;
}
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs cc")
def test_steps_of_the_wall_clock_are_not_noticed(taktd: Start, folder: Path) -> None:
    """FAULTS 16, for the daemon and its executors: CLOCK_REALTIME jumps by an hour, forth and back."""
    (folder / "clock.c").write_text(CLOCK)
    library, offset = folder / "clock.so", folder / "offset"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, folder / "clock.c"], check=True)
    offset.write_text("0")
    running = taktd(yaml(folder), environment={"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)})
    maps = Path(f"/proc/{running.executor()['pid']}/maps").read_text()
    assert "clock.so" in maps, "the executor lives by the wall clock that jumps"
    with Walking(running) as walking:
        for seconds in (3600, -3600, 7200, 0):
            offset.write_text(str(seconds))
            before = walking.journal["ok", "primary"]
            eventually(lambda b=before: walking.journal["ok", "primary"] > b + 20, 10)
            assert service(running) == ("cpu0", "primary")
        kill(running, "cpu0")
        offset.write_text("-3600")
        home_again(running, walking)
    walking.reconcile()
    told = running.loop("walk")
    assert told["switches"].get("hung", 0) == 0
    assert told["statistics"]["total"]["sum_us"] < 1e6 * 60
    assert told["statistics"]["run"]["p999_us"] < 1e6


# ---- the canary ----

BROKEN = """\
from taktd.ipc import _core

honest = _core.stats_read

def stats_read(fd, block):
    read = honest(fd, block)
    if read["ok"] > 10:
        read["ok"] -= 1
    return read

_core.stats_read = stats_read
"""


def test_broken_accounting_does_not_pass(taktd: Start, folder: Path) -> None:
    """The canary: one answer that the daemon does not count, one that comes twice, one that is missing."""
    (folder / "sitecustomize.py").write_text(BROKEN)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    running = taktd(yaml(folder), environment={"PYTHONPATH": path})
    with Walking(running) as walking:
        eventually(lambda: walking.journal["ok", "primary"] > 20, 10)
    with pytest.raises(AssertionError, match="ok"):
        walking.reconcile()
    for forged in ([*walking.sequences, walking.sequences[-1]], walking.sequences[:5] + walking.sequences[6:]):
        walking.sequences = forged
        with pytest.raises(AssertionError):
            walking.reconcile()
