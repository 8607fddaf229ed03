"""The contract from outside: costs, admission, best effort, lateness, the daemon's beat, and the record of it all."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from taktd.ipc import Detached, Lane, LimitReached, NotFound, Reply
from tests import models
from tests.conftest import Start
from tests.running import Running, eventually

MS = 1_000_000
LONG_US = 20_000_000
CONFIGURATION_REFUSED = 78

HEAD = """\
node: {{name: cell-07}}
devices: {{cpu0: {{driver: cpu{best_effort}}}}}
models:
  id: {{path: {folder}/id.onnx}}
  work: {{path: {folder}/work.onnx}}
"""


@pytest.fixture
def head(tmp_path: Path) -> str:
    models.identity(tmp_path / "id.onnx", (4,))
    models.slow(tmp_path / "work.onnx", 256, 4)
    return HEAD.format(folder=tmp_path, best_effort="")


def until(lane: Lane, wanted: int, seconds: float) -> list[Reply]:
    """The first replies of a clocked loop."""
    end = time.monotonic() + seconds
    found: list[Reply] = []
    for reply in lane.beats():
        found.append(reply)
        if len(found) == wanted:
            break
        assert time.monotonic() < end, found
    return found


def collect(lane: Lane, seen: Counter[str]) -> None:
    """Whatever has been answered by now."""
    while True:
        try:
            status = lane.wait(timeout_us=0).status
        except NotFound:
            return
        if status == "pending":
            return
        seen[status] += 1


# ---- costs ----


@pytest.mark.long
def test_measured_costs_are_stored_shown_and_read_again(taktd: Start, head: str, tmp_path: Path) -> None:
    state = {"TAKTD_STATE_DIR": str(tmp_path / "state")}
    yaml = head + "loops: {walk: {model: id, period: 20ms}}\nadmission: {on_refusal: uncertified}\n"
    first = taktd(yaml, name="first", environment=state)
    measured = {m["name"]: m["measured"] for m in first.taktctl_json("models")["models"]}
    costs = first.taktctl_json("costs")
    cost_ns = first.loop("walk")["cost_ns"]
    assert first.stop() == 0
    times = measured["id"]["1"]
    assert 0 < times["p50_ns"] <= times["p99_ns"] <= times["p999_ns"] <= times["max_ns"]
    assert costs["devices"]["cpu0"]["models"]["id"]["batches"] == measured["id"]
    assert costs["devices"]["cpu0"]["driver"] == "cpu"
    dispatch_ns = costs["devices"]["cpu0"]["dispatch_ns"]
    assert cost_ns == -(-times["p999_ns"] * 13 // 10) + dispatch_ns

    again = taktd(yaml, name="again", environment=state)
    assert {m["name"]: m["measured"] for m in again.taktctl_json("models")["models"]} == measured
    assert again.loop("walk")["cost_ns"] == cost_ns

    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs))
    checked = again.taktctl_json("check", str(again.file), "--costs", str(file))
    assert checked["admitted"]
    assert checked["devices"]["cpu0"]["loops"][0]["cost_ns"] == cost_ns
    simulated = again.taktctl_json("simulate", str(again.file), "--costs", str(file), "--seconds", "2")
    assert simulated["misses"] == 0


def test_a_budget_below_the_median_is_refused_and_one_below_p99_is_warned_about(
    taktd: Start, head: str, tmp_path: Path
) -> None:
    state = {"TAKTD_STATE_DIR": str(tmp_path / "state")}
    line = "loops: {{walk: {{model: work, period: 500ms{}}}}}\nadmission: {{on_refusal: uncertified}}\n"
    first = taktd(head + line.format(""), name="first", environment=state)
    times = next(m["measured"]["1"] for m in first.taktctl_json("models")["models"] if m["name"] == "work")
    assert first.stop() == 0
    too_small, small = (f", budget: {times[name] - 1}ns" for name in ("p50_ns", "p99_ns"))
    refused = taktd(head + line.format(too_small), name="refused", wait=False, environment=state)
    assert refused.process.wait(60) == CONFIGURATION_REFUSED
    assert "loops.walk.budget:" in refused.log
    assert "is less than the model work takes in the middle" in refused.log
    warned = taktd(head + line.format(small), name="warned", environment=state)
    assert "is less than the p99 of work" in warned.log
    assert warned.loop("walk")["cost_ns"] == times["p99_ns"] - 1


# ---- admission ----

TOO_MUCH = """\
loops:
  walk: {{model: id, period: 20ms, budget: 8ms}}
  look: {{model: id, period: 20ms, budget: 8ms, criticality: soft}}
  talk: {{model: id, period: 20ms, budget: 8ms, criticality: hard}}
admission: {{on_refusal: {policy}}}
"""


def test_what_does_not_fit_is_refused_with_the_reason(taktd: Start, head: str) -> None:
    running = taktd(head + TOO_MUCH.format(policy="refuse"), wait=False)
    assert running.process.wait(60) == CONFIGURATION_REFUSED
    for part in ("20ms after the worst start", "1 × walk (8ms)", "1 × talk (8ms)", "need 4ms more than there is"):
        assert part in running.log, running.log


def test_the_least_critical_loop_is_shed_and_named(taktd: Start, head: str) -> None:
    running = taktd(head + TOO_MUCH.format(policy="shed"))
    served = {loop["name"]: loop["not_served"] for loop in running.ask("loops")["loops"]}
    assert served["walk"] is None
    assert served["talk"] is None
    assert "need" in served["look"]
    with running.connect() as node:
        with pytest.raises(LimitReached, match="look was not admitted"):
            node.attach("look")
        with node.attach("talk") as lane:
            assert lane.infer(LONG_US).ok


def test_uncertified_runs_all_of_it_and_claims_nothing(taktd: Start, head: str) -> None:
    running = taktd(head + TOO_MUCH.format(policy="uncertified"))
    status = running.ask("status")
    assert (status["live"], status["ready"], status["certified"]) == (True, True, False)
    assert "not admitted" in running.executor()["not_certified"]
    with running.connect() as node, node.attach("look") as lane:
        assert lane.infer(LONG_US).ok


# ---- best effort ----


def test_a_model_that_no_gap_can_hold_is_refused_with_the_numbers(taktd: Start, tmp_path: Path) -> None:
    models.identity(tmp_path / "id.onnx", (4,))
    models.slow(tmp_path / "work.onnx", 512, 8)
    yaml = HEAD.format(folder=tmp_path, best_effort=", best_effort: off")
    yaml += "  aside: {path: " + f"{tmp_path}/id.onnx" + "}\n"
    yaml += "loops: {walk: {model: id, period: 2ms, budget: 1ms}}\nadmission: {on_refusal: uncertified}\n"
    running = taktd(yaml)
    with running.connect() as node:
        with pytest.raises(LimitReached, match=r"work can't run as best effort.*shorter than 2ms.*walk"):
            node.attach("work")
        with node.attach("aside") as lane:
            assert lane.infer(LONG_US).ok


# ---- lateness ----


@pytest.mark.long
def test_an_answer_comes_when_the_deadline_is_lost_not_when_the_running_job_ends(taktd: Start, tmp_path: Path) -> None:
    """Given A, which runs for most of a second, and B, which has 10 ms: B hears of it while A still runs."""
    models.identity(tmp_path / "id.onnx", (4,))
    models.slow(tmp_path / "work.onnx", 512, 90)
    running = taktd(HEAD.format(folder=tmp_path, best_effort=""))
    with running.connect() as node, node.attach("work", wait="block") as a, node.attach("id", wait="block") as b:
        assert b.infer(LONG_US).ok
        for _ in range(5):  # where the machine keeps this test from running meanwhile, A is over before B comes
            first = a.submit()
            time.sleep(0.02)  # A has to be inside its engine; how long it was in there, its reply says
            deadline_ns = time.monotonic_ns() + 10 * MS
            reply = b.infer(LONG_US, deadline_ns=deadline_ns)
            answered_ns = time.monotonic_ns()
            long = a.wait(first, LONG_US)
            if reply.status == "expired" and answered_ns < long.ended_ns:
                break
    assert reply.status == "expired"
    assert reply.cause == "blocked_by"
    assert reply.deadline_ns == deadline_ns
    assert long.started_ns < deadline_ns < reply.ended_ns < answered_ns < long.ended_ns
    replayed(running, tmp_path)


@pytest.mark.long
def test_a_broken_promise_of_m_in_k_is_told_each_time_it_breaks(taktd: Start, head: str, tmp_path: Path) -> None:
    """At least two of any three: jobs whose deadline is over when they come break it, those without one mend it."""
    yaml = head + "loops: {walk: {model: id, period: 10s, mk: [2, 3]}}\nadmission: {on_refusal: uncertified}\n"
    running = taktd(yaml)

    def told(kept: int) -> int:
        return running.log.count(f"warning: loop walk: {kept} of the last 3 jobs in time, promised 2; at ")

    with running.connect() as node, node.attach("walk", wait="block") as lane:
        for breaks in (1, 2):
            for _ in range(3):  # told when the second is lost, and not again as long as it stays broken
                assert lane.infer(LONG_US, deadline_ns=time.monotonic_ns() - MS).status == "expired"
            eventually(lambda n=breaks: told(1) == n, 20, "the alarm")
            for _ in range(3):
                assert lane.infer(LONG_US).ok
        assert (told(0), told(1)) == (0, 2)
    replayed(running, tmp_path)


# ---- the daemon's beat ----

BEATS = """\
loops:
  beat: {{model: id, period: 20ms, trigger: clock, phase: 3ms, max_age: 30ms, on_stale: {on_stale}}}
admission: {{on_refusal: uncertified}}
"""


def test_a_clocked_loop_answers_once_a_period_with_the_newest_input(taktd: Start, head: str) -> None:
    running = taktd(head + BEATS.format(on_stale="skip"))
    with running.connect() as node, node.attach("beat") as lane:
        for _ in range(5):  # a beat may come between two of the three
            for number in range(3):
                lane.inputs["x"][:] = number
                lane.submit()
            (reply,) = until(lane, 1, 20)
            assert reply.ok
            if lane.outputs["y"].tolist() == [2] * 4:
                break
        else:
            pytest.fail("five beats, and none took the newest of its three inputs")
        assert (reply.started_ns - 3 * MS) % (20 * MS) < 19 * MS
        starts = [reply.started_ns]
        for number in range(10, 15):
            lane.inputs["x"][:] = number
            lane.submit()
            (reply,) = until(lane, 1, 20)
            if reply.ok:
                assert lane.outputs["y"].tolist() == [number] * 4
                starts.append(reply.started_ns)
        periods = [(start - 3 * MS) // (20 * MS) for start in starts]
        assert len(set(periods)) == len(periods), "one answer a period"


@pytest.mark.parametrize(("on_stale", "status", "path"), [("skip", "expired", ""), ("hold", "ok", "hold"),
                                                          ("run", "ok", "primary")])  # fmt: skip
def test_an_old_input_is_treated_as_configured(
    taktd: Start, head: str, tmp_path: Path, on_stale: str, status: str, path: str
) -> None:
    running = taktd(head + BEATS.format(on_stale=on_stale))
    with running.connect() as node, node.attach("beat") as lane:
        lane.inputs["x"][:] = 7
        first_ns = time.monotonic_ns()
        lane.submit()
        replies = until(lane, 6, 20)
        assert all(reply.submitted_ns < first_ns + 20 * MS for reply in replies), "repeats are as old as the first"
        assert lane.outputs["y"].tolist() == [7] * 4 or status == "expired"
    last = replies[-1]
    assert (last.status, last.path) == (status, path)
    if status == "expired":
        assert last.cause == "stale_input"
    replayed(running, tmp_path)


def test_the_record_replays_though_inputs_come_rarely_are_cancelled_and_superseded(
    taktd: Start, head: str, tmp_path: Path
) -> None:
    """Beats that find nothing, cancelled and replaced inputs, a queue beside them: each decision comes out again."""
    running = taktd(head + BEATS.format(on_stale="hold"))
    seen: Counter[str] = Counter()
    with running.connect() as node, node.attach("beat") as lane, node.attach("work") as other:
        lane.submit()
        for number in range(40):
            time.sleep(0.013)
            if number % 5 == 0:
                lane.cancel(lane.submit())
            if number % 3 == 0:
                lane.submit()
            if number % 4 == 0:
                seen[other.infer(LONG_US, deadline_ns=time.monotonic_ns() + (number % 8) * MS).status] += 1
            collect(lane, seen)
        eventually(lambda: lane.pending == 0)
        collect(lane, seen)
    assert seen["cancelled"] > 0
    assert seen["ok"] > 0
    replayed(running, tmp_path)


# ---- the record ----


def replayed(running: Running, folder: Path) -> dict[str, Any]:
    """What the running daemon recorded, decided again in another process: identical."""
    file = folder / "run.taktrec"
    assert running.taktctl_json("record", "-o", str(file))["records"] > 0
    answer: dict[str, Any] = running.taktctl_json("replay", str(file))
    assert answer["identical"], answer
    assert answer["decisions"] > 0
    assert "does not replay" not in running.log
    return answer


def test_why_a_deadline_was_missed_is_told_and_drawn(taktd: Start, head: str, tmp_path: Path) -> None:
    yaml = head + "loops: {walk: {model: id, period: 20ms}}\nadmission: {on_refusal: uncertified}\n"
    running = taktd(yaml)
    with running.connect() as node, node.attach("walk") as lane, node.attach("work") as other:
        for _ in range(10):
            assert lane.infer(LONG_US).ok
        assert other.infer(LONG_US, deadline_ns=time.monotonic_ns() + 100_000).status == "expired"
    told = running.taktctl("why", "--last-miss")
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("work job 1 was not run: it could no longer end by its deadline")
    assert running.taktctl("why", "walk:3").stdout.startswith("walk job 3")
    replayed(running, tmp_path)
    trace = tmp_path / "trace.json"
    assert running.taktctl_json("trace", "-o", str(trace))["events"] > 0
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.long
def test_loops_beside_saturating_best_effort_are_blocked_by_nobody(taktd: Start, head: str, tmp_path: Path) -> None:
    """Accounts only; how much is left for best effort, and how late the machine is, `bench/contract.py` measures."""
    running = taktd(head + "loops: {walk: {model: id, period: 20ms}}\nadmission: {on_refusal: uncertified}\n")
    done = threading.Event()

    def saturate() -> None:
        with running.connect() as node, node.attach("work", wait="block") as lane:
            while not done.is_set():
                try:
                    lane.infer(LONG_US)
                except Detached:
                    return

    clients = [threading.Thread(target=saturate) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        with running.connect() as node, node.attach("walk", wait="block") as lane:
            replies = [lane.infer(LONG_US) for _, _ in zip(range(100), lane.ticks(), strict=False)]
    finally:
        done.set()
        for client in clients:
            client.join()
    assert not [reply for reply in replies if reply.cause == "blocked_by"]
    counted = running.loop("walk")["statistics"]
    assert counted["submitted"] == 100 == counted["ok"] + counted["expired"]
    assert counted["misses"]["blocked_by"] == 0
    replayed(running, tmp_path)
