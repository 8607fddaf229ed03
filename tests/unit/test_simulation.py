"""Virtual time: what is given happens, what is drawn depends on the seed alone."""

from __future__ import annotations

import json
from random import Random

import pytest
from click.testing import CliRunner

from taktd.daemon.cli.check import check
from taktd.daemon.cli.simulate import simulate as simulate_command
from taktd.daemon.schedule.job import Queue, Task
from taktd.daemon.simulation.histogram import Histogram
from taktd.daemon.simulation.simulation import Distribution, Workload, rehearse, simulate

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000

CONFIGURATION = """
node: {name: cell}
devices: {cpu0: {driver: cpu}}
models: {policy: {path: policy.onnx}}
loops:
  fast: {model: policy, period: 1ms, deadline: 1ms, budget: %s, jitter: 200us}
  slow: {model: policy, period: 20ms, budget: 300us}
"""


def workload(**fields):
    tasks = (Task("fast", MS, MS, 200 * US, 100 * US), Task("slow", 20 * MS, 20 * MS, 0, 300 * US, order=1))
    return Workload(tasks, max_dispatch_ns=200 * US, **fields)


def test_given_releases_and_executions_give_the_responses_one_can_reckon():
    tasks = [Task("a", 10, 10, 0, 4, order=0), Task("b", 20, 20, 0, 6, order=1)]
    responses = simulate(tasks, [[100, 110], [99]], [[4, 2], [6]])
    assert [(each.lane, each.started_ns, each.ended_ns, each.response_ns) for each in responses] == [
        (1, 99, 105, 6),
        (0, 105, 109, 9),
        (0, 110, 112, 2),
    ]
    assert not any(response.missed for response in responses)


def test_a_miss_is_reported_with_its_cause():
    tasks = [Task("a", 10, 5, 0, 4, order=0), Task("b", 20, 20, 0, 9, order=1)]
    responses = simulate(tasks, [[100], [99]])
    (missed,) = (response for response in responses if response.missed)
    assert (missed.lane, missed.status, missed.cause) == (0, 1, 1), "expired, blocked_by"


def test_a_clock_loop_runs_at_its_beats():
    task = Task("beat", 10, 10, 0, 2, clock=True, phase_ns=3, max_age_ns=9)
    responses = simulate([task], [[101, 111, 112, 125]])
    assert [(each.sequence, each.started_ns) for each in responses if each.started_ns] == [(1, 103), (3, 113), (4, 133)]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not():
    load = workload(queues=(Queue("model", (100 * US, 150 * US)),), best_effort_hz=800)
    texts = [json.dumps(rehearse(load, SECOND, seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_an_admitted_load_misses_nothing_and_is_used_as_it_should():
    result = rehearse(workload(sporadic_ppm=0), 2 * SECOND, 5)
    fast, slow = result["loops"]
    assert result["misses"] == 0
    assert 1_998 <= fast["jobs"] <= 2_000
    assert abs(fast["utilization_ppm"] - 100_000) < 200
    assert slow["response_ns"]["max"] <= 20 * MS


def test_an_overload_shows_as_misses():
    tasks = (Task("a", MS, MS, 0, 700 * US), Task("b", MS, MS, 0, 700 * US, order=1))
    assert rehearse(Workload(tasks), SECOND // 10, 1)["misses"] > 20


def test_drawn_times_follow_the_table():
    table = Distribution(((0, 100), (500_000, 100), (990_000, 149), (1_000_000, 1_000)))
    random = Random(1)
    times = sorted(table.draw_ns(random) for _ in range(20_000))
    assert times[0] == times[9_000] == 100
    assert 145 <= times[19_800] <= 160
    assert times[-1] < 1_000


def test_a_span_that_is_none_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        rehearse(workload(), 0, 1)


def test_histogram_percentiles_are_within_their_buckets():
    histogram = Histogram()
    for value in range(1, 10_001):
        histogram.add(value)
    for ppm, exact in ((500_000, 5_000), (990_000, 9_900), (999_000, 9_990)):
        assert exact <= histogram.percentile(ppm) <= exact + exact // 64 + 1
    assert histogram.largest == histogram.percentile(1_000_000) == 10_000
    assert Histogram().percentile(500_000) == 0


# --- taktctl simulate ----------------------------------------------------------------------------------------------


def run(tmp_path, *options, budget="100us"):
    file = tmp_path / "taktd.yaml"
    file.write_text(CONFIGURATION % budget)
    return CliRunner().invoke(simulate_command, [str(file), *options])


def test_the_command_prints_json_alone_and_the_same_but_for_the_wall(tmp_path):
    first, second = (
        json.loads(run(tmp_path, "--seconds", "1", "--seed", "7", "--best-effort", "200", "--json").stdout)
        for _ in range(2)
    )
    assert first.pop("wall_s") >= 0
    second.pop("wall_s")
    assert first == second
    assert first["misses"] == 0
    assert [loop["name"] for loop in first["devices"]["cpu0"]["loops"]] == ["fast", "slow"]
    assert first["devices"]["cpu0"]["best_effort"][0]["jobs"] > 150


FIVE_LOOPS = """
devices: {cpu0: {driver: cpu, best_effort: {max_dispatch: 200us, share: 0.1}}}
models: {policy: {path: policy.onnx}, other: {path: other.onnx}}
loops:
  balance: {model: policy, period: 1ms, jitter: 100us, budget: 200us}
  walk: {model: policy, period: 5ms, budget: 400us}
  look: {model: policy, period: 20ms, budget: 300us}
  plan: {model: policy, period: 50ms, budget: 400us}
  talk: {model: policy, period: 100ms, deadline: 80ms, budget: 400us}
"""


@pytest.mark.parametrize("seconds", [20, pytest.param(3600, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_fast_loop_and_four_slower_ones_stay_within_their_exact_response_times(tmp_path, seconds):
    """Every job takes its budget; `make test-slow` simulates an hour."""
    file = tmp_path / "taktd.yaml"
    file.write_text(FIVE_LOOPS)
    checked = json.loads(CliRunner().invoke(check, [str(file), "--wcrt", "--json"]).stdout)
    assert checked["admitted"]
    result = CliRunner().invoke(simulate_command, [str(file), "--seconds", str(seconds), "--seed", "11", "--json"])
    simulated = json.loads(result.stdout)
    assert simulated["misses"] == 0
    exact = {loop["name"]: loop["wcrt_ns"] for loop in checked["devices"]["cpu0"]["loops"]}
    for loop in simulated["devices"]["cpu0"]["loops"]:
        assert loop["completed"] > seconds * 9
        assert 0 < loop["response_ns"]["max"] <= exact[loop["name"]], loop


def test_the_command_shows_a_table_and_counts_misses(tmp_path):
    result = run(tmp_path, "--seconds", "0.5", budget="900us")
    assert result.exit_code == 0
    assert "fast" in result.stdout
    assert "misses" in result.stdout


def test_the_command_refuses_what_it_cannot_use(tmp_path):
    result = CliRunner().invoke(simulate_command, [str(tmp_path / "absent.yaml")])
    assert result.exit_code == 2
    assert "absent.yaml" in result.stderr


def test_a_loop_without_a_known_cost_is_named(tmp_path):
    file = tmp_path / "taktd.yaml"
    file.write_text(CONFIGURATION.replace("budget: %s, ", ""))
    result = CliRunner().invoke(simulate_command, [str(file), "--json"])
    assert result.exit_code == 2
    assert "fast" in result.stderr


def test_the_command_draws_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "gantt.png"
    assert run(tmp_path, "--seconds", "0.2", "--plot", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
