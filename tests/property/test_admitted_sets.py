"""What admission accepts, the scheduler keeps: sets of 2 to 6 loops, U from 0.1 to 1.1, under the worst releases known.

The other direction, that nothing is refused without need, is shown on small sets by exhaustive search in
test_admission.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from taktd.daemon.admission import OFF, BestEffort, admit
from taktd.daemon.schedule.job import Queue, Task
from taktd.daemon.simulation.simulation import Response, simulate

START_NS = 100_000
PERIODS_WATCHED = 8  # of the slowest loop


@dataclass(frozen=True)
class Drawn:
    tasks: tuple[Task, ...]
    dispatch_ns: int

    @property
    def span_ns(self) -> int:
        return PERIODS_WATCHED * max(task.period_ns for task in self.tasks)

    @property
    def utilization_ppm(self) -> int:
        return sum(task.cost_ns * 1_000_000 // task.period_ns for task in self.tasks)


@st.composite
def drawn_sets(draw: st.DrawFn) -> Drawn:
    """U is drawn first and dealt out among the loops, so that feasible and infeasible sets are about as frequent."""
    count = draw(st.integers(2, 6))
    target_ppm = draw(st.integers(100_000, 1_100_000))
    parts = [draw(st.integers(1, 100)) for _ in range(count)]
    jittered, constrained = draw(st.booleans()), draw(st.booleans())
    tasks = []
    for order, part in enumerate(parts):
        period = draw(st.integers(12, 400))
        cost = max(1, min(period, target_ppm * part // sum(parts) * period // 1_000_000))
        deadline = draw(st.integers(cost, period)) if constrained else period
        jitter = draw(st.integers(0, (deadline - cost) // 2)) if jittered else 0
        criticality = draw(st.integers(0, 2))
        tasks.append(Task(f"loop{order}", period, deadline, jitter, cost, criticality, order))
    return Drawn(tuple(tasks), draw(st.integers(1, 12)) if draw(st.booleans()) else 0)


def densest(task: Task, first_ns: int, span_ns: int) -> list[int]:
    """The first job comes as late as its jitter allows, each after it as early as its arrival does."""
    arrivals = range(first_ns - task.jitter_ns, first_ns + span_ns, task.period_ns)
    return [max(arrival, first_ns) for arrival in arrivals]


def sporadic(task: Task, span_ns: int, random: Random) -> list[int]:
    arrival, releases = START_NS + random.randrange(task.period_ns), []
    while arrival < START_NS + span_ns:
        late = random.choice((0, task.jitter_ns, random.randint(0, task.jitter_ns)))
        releases.append(max(arrival + late, releases[-1] if releases else 0))
        arrival += task.period_ns + random.choice((0, 0, 0, 1, random.randrange(task.period_ns)))
    return releases


def worst_patterns(drawn: Drawn) -> Iterator[list[list[int]]]:
    """All at once, behind each loop that has just begun when the others come (the blocker), and behind none."""
    for blocker in range(-1, len(drawn.tasks)):
        yield [densest(task, START_NS + (lane != blocker), drawn.span_ns) for lane, task in enumerate(drawn.tasks)]


def run(drawn: Drawn, releases: list[list[int]], told_ns: int) -> list[Response]:
    """Beside best effort that starts just before everybody comes, and whenever it may after that."""
    queues: list[Queue] = []
    asked: list[list[tuple[int, int]]] = []
    if drawn.dispatch_ns:
        queues = [Queue("best effort", (drawn.dispatch_ns,))]
        asked = [[(START_NS, 0), *((START_NS + at, 0) for at in range(1, drawn.span_ns, 7 * drawn.dispatch_ns))]]
    return simulate(drawn.tasks, releases, max_dispatch_ns=told_ns, queues=queues, queue_releases=asked)


def missed(drawn: Drawn, releases: list[list[int]], told_ns: int) -> list[Response]:
    return [each for each in run(drawn, releases, told_ns) if each.lane < len(drawn.tasks) and each.missed]


SEEN = {"sets": 0, "admitted": 0}


@settings(max_examples=600, deadline=None)
@given(drawn_sets(), st.integers(0, 2**32))
def test_no_admitted_set_misses_under_the_worst_or_random_sporadic_releases(drawn: Drawn, seed: int) -> None:
    rule = BestEffort("limits", drawn.dispatch_ns, 0) if drawn.dispatch_ns else OFF
    SEEN["sets"] += 1
    if not admit(drawn.tasks, rule).admitted:
        return
    SEEN["admitted"] += 1
    random = Random(seed)
    patterns = [*worst_patterns(drawn)]
    patterns += [[sporadic(task, drawn.span_ns, random) for task in drawn.tasks] for _ in range(3)]
    for releases in patterns:
        assert not missed(drawn, releases, drawn.dispatch_ns), releases


def test_enough_sets_were_drawn_and_enough_of_them_admitted() -> None:
    """Runs after the property: a test of sets that are all refused would show nothing."""
    if SEEN["sets"]:
        assert SEEN["sets"] >= 500
        assert SEEN["admitted"] * 5 >= SEEN["sets"], SEEN


def test_the_worst_patterns_find_the_miss_in_most_sets_that_are_refused() -> None:
    """The canary: the same releases, with sets that admission refuses for lack of time."""
    random, refused, found = Random(7), 0, 0
    while refused < 100:
        tasks = []
        for order in range(3):
            period = random.randint(12, 200)
            tasks.append(Task(f"loop{order}", period, period, 0, random.randint(1, period // 2), order=order))
        drawn = Drawn(tuple(tasks), 0)
        if drawn.utilization_ppm <= 1_100_000 and not admit(drawn.tasks, OFF).admitted:
            refused += 1
            found += any(missed(drawn, releases, 0) for releases in worst_patterns(drawn))
    assert found >= 60, found
