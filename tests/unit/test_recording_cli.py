"""`taktctl record`, `replay`, `why` and `trace` over small recordings of known misses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from taktd.daemon.cli.recording import record, replay, trace, why
from taktd.daemon.recording.record import RECORD, Record, Recorder, Recording, write_recording
from taktd.daemon.recording.story import Incident, find_incident, tell
from taktd.daemon.schedule.job import NEVER, START, WAIT, Queue, Task
from taktd.daemon.scheduler import Scheduler
from tests.recordings import sections_of

US = 1_000
MS = 1_000_000
WALK, ARM, VISION = 0, 1, 2


class Run:
    """A device whose story is told event by event, at times in microseconds."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.recorder = Recorder(lambda kind, lane, aux, a, b, t: self.records.append((t, kind, lane, aux, a, b)))
        self.scheduler = Scheduler(MS, 100_000)
        self.scheduler.add_loop(WALK, Task("walk", 5 * MS, 2 * MS, 100 * US, 500 * US, order=0))
        self.scheduler.add_loop(ARM, Task("arm", 10 * MS, 10 * MS, 0, MS, order=1))
        self.scheduler.add_queue(VISION, Queue("vision", (MS,)))
        self.recorder.state(self.scheduler, 0)
        self.sequence = [0, 0, 0]

    def submit(self, t_us: int, lane: int, released_us: int | None = None) -> None:
        self.sequence[lane] += 1
        release_ns = (t_us if released_us is None else released_us) * US
        self.scheduler.submit(lane, self.sequence[lane], 0, release_ns, 0, t_us * US)
        self.recorder.submit(lane, self.sequence[lane], 0, release_ns, 0, t_us * US)
        self.decide(t_us)

    def finish(self, t_us: int, switched_out_ns: int = 0) -> None:
        self.scheduler.finish(t_us * US, switched_out_ns)
        self.recorder.finish(t_us * US, switched_out_ns)
        self.decide(t_us)

    def decide(self, t_us: int) -> None:
        while True:
            action = self.scheduler.decide(t_us * US)
            self.recorder.decided(action, t_us * US)
            if action.kind in (START, WAIT):
                return

    def recording(self) -> Recording:
        return sections_of("cpu0", self.records)


def quiet() -> Run:
    run = Run()
    for k in range(4):
        run.submit(10_000 + 5_000 * k, WALK)
        run.finish(10_400 + 5_000 * k)
    return run


def blocked_by_an_overrun() -> Run:
    run = quiet()
    run.submit(31_000, VISION)
    run.submit(31_200, WALK)
    run.decide(32_850)  # the time at which it is certain
    run.finish(34_000)
    return run


def own_overrun() -> Run:
    run = quiet()
    run.submit(40_000, WALK)
    run.finish(42_500)
    return run


def switched_out() -> Run:
    run = quiet()
    run.submit(40_000, WALK)
    run.finish(42_500, NEVER)
    return run


def woke_late() -> Run:
    run = quiet()
    run.submit(41_700, WALK, 40_000)
    return run


def incident_of(run: Run) -> Incident:
    incident = find_incident(run.recording())
    assert incident is not None
    return incident


@pytest.mark.parametrize(
    ("story", "words"),
    [
        (blocked_by_an_overrun, ["walk job 5", "vision job 1 (best effort)", "ran 3ms", "longer than the 1ms"]),
        (own_overrun, ["walk job 5 ended 600us after its deadline", "It ran 2.5ms", "500us that it was admitted with"]),
        (switched_out, ["walk job 5 ended 600us after its deadline", "The machine took the core away"]),
        (woke_late, ["walk job 5", "1.7ms passed until", "woke up late"]),
    ],
)
def test_why_names_what_happened(story: Callable[[], Run], words: list[str]) -> None:
    text = tell(incident_of(story()))
    assert [word for word in words if word not in text] == [], text


def saved(tmp_path: Path, run: Run) -> Path:
    stream = BytesIO()
    write_recording(stream, run.recording())
    file = tmp_path / "run.taktrec"
    file.write_bytes(stream.getvalue())
    return file


def invoke(*arguments: object) -> Result:
    command = {"record": record, "replay": replay, "why": why, "trace": trace}[str(arguments[0])]
    return CliRunner().invoke(command, [str(argument) for argument in arguments[1:]])


def test_why_shows_the_jobs_around(tmp_path: Path) -> None:
    file = saved(tmp_path, blocked_by_an_overrun())
    shown = invoke("why", "--last-miss", "--file", file)
    assert shown.exit_code == 0
    assert "vision job 1" in shown.stdout
    assert "walk      4" in shown.stdout
    answer = json.loads(invoke("why", "walk:5", "--file", file, "--json").stdout)
    assert answer["job"]["cause"] == "overrun"
    assert answer["before"][-1]["name"] == "walk"
    assert answer["after"][0]["name"] == "vision"


def test_why_fits_80_columns_and_is_in_milliseconds(tmp_path: Path) -> None:
    shown = invoke("why", "--last-miss", "--file", saved(tmp_path, blocked_by_an_overrun())).stdout
    table = shown[shown.index("ms from its nominal arrival") :].splitlines()
    assert max(map(len, shown.splitlines())) <= 80
    assert any(line.split() == ["walk", "4", "-6.100", "-6.100", "-5.700", "-4.200"] for line in table), shown
    assert any(line.startswith("vision") and line.rstrip().endswith("best effort, overrun") for line in table), shown


def test_of_jobs_with_one_number_the_latest_is_told_and_when(tmp_path: Path) -> None:
    run = quiet()
    for k in range(2):  # two more clients, whose numbers begin again
        run.sequence[WALK] = 0
        run.submit(60_000 + 30_000 * k, WALK)
        run.finish(60_400 + 30_000 * k)
    file = saved(tmp_path, run)
    answer = json.loads(invoke("why", "walk:1", "--file", file, "--json").stdout)
    assert (answer["job"]["release_ns"], answer["namesakes"]) == (90 * MS, 2)
    words = "was released 0.000 s before the recording's end. Its number was used 2 times before"
    assert words in answer["when"]
    assert "released 0.075 s before the recording's end.\n" in invoke("why", "walk:2", "--file", file).stdout


def test_why_about_an_unknown_name_or_number_says_what_there_is(tmp_path: Path) -> None:
    file = saved(tmp_path, quiet())
    assert "did you mean walk? Its last job in it is walk:4" in invoke("why", "wlak:2", "--file", file).stderr
    assert "it has jobs of walk" in invoke("why", "grasping:2", "--file", file).stderr
    assert "the last job of walk in it is walk:4" in invoke("why", "walk:9", "--file", file).stderr


def test_why_about_a_job_in_time_says_so(tmp_path: Path) -> None:
    file = saved(tmp_path, quiet())
    assert "missed nothing" in invoke("why", "walk:2", "--file", file).stdout


def test_why_ends_with_3_where_there_is_nothing_and_2_where_the_question_is_wrong(tmp_path: Path) -> None:
    file = saved(tmp_path, quiet())
    assert invoke("why", "--last-miss", "--file", file).exit_code == 3
    assert invoke("why", "walk:99", "--file", file).exit_code == 3
    for wrong in (["walk"], ["walk:x"], [], ["walk:1", "--last-miss"]):
        assert invoke("why", *wrong, "--file", file).exit_code == 2


def test_replay_says_identical_or_the_first_difference(tmp_path: Path) -> None:
    file = saved(tmp_path, blocked_by_an_overrun())
    same = invoke("replay", file, "--json")
    assert (same.exit_code, json.loads(same.stdout)["identical"]) == (0, True)
    run = blocked_by_an_overrun()
    index = max(n for n, r in enumerate(run.records) if r[1] == 16)
    t_ns, kind, lane, aux, a, b = run.records[index]
    run.records[index] = (t_ns + 1, kind, lane, aux, a, b + 1)
    other = invoke("replay", saved(tmp_path, run))
    assert other.exit_code == 1
    assert "differs" in other.stdout


def test_replay_refuses_what_is_no_recording(tmp_path: Path) -> None:
    file = saved(tmp_path, quiet())
    data = file.read_bytes()
    for bad in (b"", b"hello", data[:-1], data[:100], data[:8] + b"\x09" + data[9:], data + b"x"):
        file.write_bytes(bad)
        ended = invoke("replay", file, "--json")
        assert ended.exit_code == 2
        assert json.loads(ended.stdout)["error"]["what"].startswith(str(file))
    assert invoke("replay", tmp_path / "missing").exit_code == 2


def test_replay_refuses_events_that_cannot_follow(tmp_path: Path) -> None:
    recording = quiet().recording()
    recording[0].records += RECORD.pack(1, 5, 0, 0, 0, 0)  # a finish, and nothing runs
    stream = BytesIO()
    write_recording(stream, recording)
    file = tmp_path / "odd.taktrec"
    file.write_bytes(stream.getvalue())
    ended = invoke("replay", file)
    assert ended.exit_code == 2
    assert "can't follow" in ended.stderr


def test_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    file, out = saved(tmp_path, blocked_by_an_overrun()), tmp_path / "trace.json"
    assert invoke("trace", file, "-o", out).exit_code == 0
    events = json.loads(out.read_text())["traceEvents"]
    runs = [event for event in events if event["ph"] == "X"]
    assert [run["name"] for run in runs][-1] == "vision job 1"
    assert all(run["dur"] >= 0 and run["ts"] >= 0 for run in runs)
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"cpu0"}
    assert any("expired" in event["name"] for event in events if event["ph"] == "i")


def test_trace_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, out = saved(tmp_path, own_overrun()), tmp_path / "out.png"
    ended = invoke("trace", file, "--plot", out, "--last", "40ms", "--json")
    assert ended.exit_code == 0
    assert json.loads(ended.stdout)["jobs"] == 5
    assert out.read_bytes().startswith(b"\x89PNG")
    assert invoke("trace", file, "--plot", tmp_path / "out.nothing").exit_code == 2
    assert invoke("trace", file).exit_code == 2


def test_record_without_a_daemon_ends_with_3(tmp_path: Path) -> None:
    runner = CliRunner(env={"TAKTD_SOCKET": str(tmp_path / "lanes.sock")})
    ended = runner.invoke(record, ["-o", str(tmp_path / "x"), "--json"])
    assert ended.exit_code == 3
    assert "no daemon" in json.loads(ended.stdout)["error"]["what"]


def test_the_commands_import_no_plotting_library() -> None:
    code = "import sys, taktd.daemon.cli.recording; print('matplotlib' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
