"""/metrics by Prometheus' own parser, /health, the dashboard and the document against what is exposed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from taktd.daemon.cli import report
from tests import models
from tests.conftest import Start
from tests.real_time import may_have_real_time
from tests.running import Running, eventually, serving

ROOT = Path(__file__).resolve().parents[2]
YAML = """\
node: {{name: cell-07}}
devices: {{cpu0: {{driver: cpu}}}}
models: {{id: {{path: {folder}/id.onnx}}}}
loops: {{walk: {{model: id, period: 10ms, budget: 1ms}}}}
admission: {{on_refusal: uncertified}}
grpc: {{listen: "unix:"}}
http: {{listen: "127.0.0.1:0"}}
"""
STAND_IN = """\
allow_faults: true
devices: {{sim0: {{driver: sim, cost: 500us}}, cpu0: {{driver: cpu}}}}
models: {{id: {{path: {folder}/id.onnx}}}}
loops:
  walk: {{model: id, device: sim0, period: 20ms, budget: 3ms, on_late: run, fallback: [cpu0]}}
  alone: {{model: id, device: cpu0, period: 100ms, budget: 3ms}}
admission: {{on_refusal: uncertified}}
http: {{listen: "127.0.0.1:0"}}
"""
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("metrics")
    models.identity(folder / "id.onnx", (4,))
    with serving(folder, YAML.format(folder=folder)) as running:
        yield running


def get(served: Running, path: str) -> tuple[int, str]:
    address = next(door["address"] for door in served.ask("status")["doors"] if door["name"] == "http")
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(served: Running) -> Samples:
    code, text = get(served, "/metrics")
    assert code == 200
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def names(served: Running) -> set[str]:
    return {name for name, _ in samples(served)}


def test_jobs_and_latencies_are_there(served: Running) -> None:
    with served.connect() as node, node.attach("walk") as loop, node.attach("id") as model:
        for _ in range(20):
            loop.infer()
        for _ in range(5):
            model.infer()
        found = samples(served)
        walk = (("device", "cpu0"), ("loop", "walk"), ("model", "id"))
        assert found["taktd_loop_submitted_total", walk] == 20
        ended = [v for (name, labels), v in found.items() if name == "taktd_loop_jobs_total" and walk[1] in labels]
        assert sum(ended) == 20
        assert found["taktd_model_jobs_total", (("device", "cpu0"), ("model", "id"), ("status", "ok"))] == 5
        assert (
            found["taktd_loop_response_seconds_count", walk]
            == found["taktd_loop_jobs_total", (*walk, ("status", "ok"))]
        )
        assert found["taktd_loop_response_seconds_sum", walk] > 0
        assert found["taktd_loop_attached", (("loop", "walk"),)] == 1
        assert found["taktd_clients", ()] == 1
    buckets = [
        (float(dict(labels)["le"]), value)
        for (name, labels), value in found.items()
        if name == "taktd_loop_run_seconds_bucket"
    ]
    assert min(buckets)[0] == 1e-5
    assert sorted(buckets)[-2][0] == 0.1
    assert [v for _, v in sorted(buckets)] == sorted(v for _, v in buckets), "cumulative"
    assert found["taktd_ready", ()] == 1
    assert found["taktd_executor_resident_memory_bytes", (("device", "cpu0"),)] > 1e7
    eventually(lambda: samples(served)["taktd_gateway_resident_memory_bytes", ()] > 1e7)


def test_names_follow_the_conventions(served: Running) -> None:
    _, text = get(served, "/metrics")
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("taktd_")
        assert family.documentation.endswith(".")
        assert not re.search(r"_(us|ns|ms|milliseconds|mb)$", family.name)
        if family.type == "counter":
            assert all(s.name.endswith("_total") for s in family.samples)


def test_an_executor_that_takes_over_is_counted(served: Running) -> None:
    key = ("taktd_switches_total", (("cause", "died"), ("loop", "walk")))
    before = samples(served)
    os.kill(served.executor("cpu0")["pid"], signal.SIGKILL)
    eventually(lambda: samples(served).get(key, 0) == before.get(key, 0) + 1)
    eventually(lambda: bool(samples(served)["taktd_ready", ()]))
    revoked = ("taktd_executor_certificates_revoked_total", (("device", "cpu0"),))
    assert samples(served)[revoked] == before[revoked], "a death takes no proof back"


def test_whether_a_stand_in_is_there_and_whether_it_is_needed_is_shown(
    taktd: Callable[..., Running], tmp_path: Path
) -> None:
    models.identity(tmp_path / "id.onnx", (4,))
    running = taktd(STAND_IN.format(folder=tmp_path))
    ready, needed = (("taktd_loop_" + name, (("loop", "walk"),)) for name in ("stand_in_ready", "on_stand_in"))
    eventually(lambda: (samples(running)[ready], samples(running)[needed]) == (1, 0), within_s=30)
    assert ("taktd_loop_stand_in_ready", (("loop", "alone"),)) not in samples(running)
    done = running.taktctl("fault", "inject", "sim0", "slow=40x")
    assert done.returncode == 0, done.stderr
    with running.connect() as node, node.attach("walk") as lane:
        for tick in lane.ticks():
            lane.infer(timeout_us=5e6)
            if tick.index % 20 == 0 and samples(running)[needed]:
                break
            assert tick.index < 1000, "the stand-in was not needed"
    os.kill(running.executor("cpu0")["pid"], signal.SIGKILL)
    eventually(lambda: samples(running)[ready] == 0, within_s=30)
    running.remember_family()


@pytest.mark.skipif(not may_have_real_time(), reason="nothing is certified without real-time rights")
def test_a_cost_that_does_not_hold_is_counted_as_a_revoked_certificate(taktd: Start, tmp_path: Path) -> None:
    models.identity(tmp_path / "id.onnx", (4,))
    running = taktd(
        f"allow_faults: true\ndevices: {{sim0: {{driver: sim, cost: 300us}}}}\n"
        f"models: {{id: {{path: {tmp_path}/id.onnx}}}}\n"
        'loops: {walk: {model: id, device: sim0, period: 20ms}}\nhttp: {listen: "127.0.0.1:0"}\n'
    )
    certified = ("taktd_executor_certified", (("device", "sim0"),))
    revoked = ("taktd_executor_certificates_revoked_total", (("device", "sim0"),))
    before = samples(running)
    assert (before[certified], before[revoked]) == (1, 0)
    assert running.taktctl("fault", "inject", "sim0", "slow=20x").returncode == 0
    with running.connect() as node, node.attach("walk") as lane:
        for tick in lane.ticks():
            lane.inputs["x"][:] = 1
            assert lane.infer().ok
            assert tick.index < 1000, running.loop("walk")
            if not samples(running)[certified]:
                break
    assert samples(running)[revoked] == 1


def test_health(served: Running) -> None:
    assert get(served, "/health/live") == (200, "live\n")
    assert get(served, "/health/ready")[0] == 200
    assert get(served, "/health/certified")[0] in (200, 503)
    assert get(served, "/nothing")[0] == 404


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_port_that_somebody_has_costs_no_loop_and_is_had_as_soon_as_it_is_free(
    taktd: Callable[..., Running], tmp_path: Path, kind: str
) -> None:
    models.identity(tmp_path / "id.onnx", (4,))
    if kind == "tcp":
        somebody = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{somebody.getsockname()[1]}"
    else:
        somebody = socket.socket(socket.AF_UNIX)
        address = f"unix:{tmp_path}/http.sock"
        somebody.bind(f"{tmp_path}/http.sock")
        somebody.listen()
    with somebody:
        running = taktd(YAML.format(folder=tmp_path).replace("127.0.0.1:0", address))
        assert f"HTTP can't listen at {address}" in running.log
        (door,) = [door for door in running.ask("status")["doors"] if door["name"] == "http"]
        assert not door["serving"]
        with running.connect() as node, node.attach("walk") as lane:
            assert lane.infer().ok
    eventually(lambda: f"HTTP listens at {address}" in running.log, 10, "it is tried again")
    if kind == "tcp":
        assert get(running, "/health/live") == (200, "live\n")


def test_nonsense_is_answered_or_hung_up_on(served: Running) -> None:
    address = next(door["address"] for door in served.ask("status")["doors"] if door["name"] == "http")
    host, _, port = address.rpartition(":")
    for data, expected in (
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405"), (b"\x16\x03\x01\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET " + b"/" * 9000 + b"\r\n\r\n", b""),
    ):  # fmt: skip
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(data)
            try:
                assert connection.recv(100).startswith(expected)
            except ConnectionResetError:
                assert not expected
    assert get(served, "/health/live")[0] == 200


def used_names(text: str) -> set[str]:
    return set(re.findall(r"taktd_[a-z_0-9]+", text))


def test_the_dashboard_shows_only_what_is_exposed(served: Running) -> None:
    dashboard = json.loads((ROOT / "docs/grafana/taktd.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 10
    used = set().union(*map(used_names, expressions))
    later = {"taktd_switches_total", "taktd_loop_misses_total", "taktd_gateway_refused_total"}  # once it has happened
    assert used <= names(served) | later
    templates = {t["query"] for t in dashboard["templating"]["list"] if t["type"] == "query"}
    assert set().union(*map(used_names, templates)) <= names(served)


def test_the_document_lists_every_family(served: Running) -> None:
    _, text = get(served, "/metrics")
    exposed = {family.name for family in text_string_to_metric_families(text)}
    listed = set(
        re.findall(r"^\| `(taktd_[a-z_0-9]+?)(?:_total)?`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    )
    assert listed == exposed


def test_top_shows_loops_and_models(served: Running) -> None:
    done = served.taktctl("top", "--count", "2", "--interval", "0.1")
    assert done.returncode == 0, done.stderr
    for word in ("cell-07", "walk", "gateway", "latency", "id"):
        assert word in done.stdout


def test_top_as_json_is_one_look_with_rates(served: Running) -> None:
    ended = threading.Event()

    def ask_again_and_again() -> None:
        with served.connect() as node, node.attach("walk") as lane:
            while not ended.wait(0.01):
                lane.inputs["x"][:] = 1
                lane.infer()

    client = threading.Thread(target=ask_again_and_again)
    client.start()
    try:
        eventually(lambda: bool(served.loop("walk")["attached"]))
        seen = served.taktctl_json("top", "--interval", "0.5")
    finally:
        ended.set()
        client.join()
    assert (seen["node"], seen["ready"]) == ("cell-07", True)
    walk = next(loop for loop in seen["loops"] if loop["name"] == "walk")
    assert 0 < walk["jobs_per_s"] <= 200
    assert walk["latency_us"] > 0
    assert {"executors", "gateway", "models", "clients", "epoch", "certified"} <= set(seen)


def test_status_says_why_a_door_is_not_open(served: Running, capsys: pytest.CaptureFixture[str]) -> None:
    status = served.ask("status")
    status["doors"].append({"name": "gateway", "path": None, "serving": False, "error": "it waits for the executors"})
    report._show_status(status)
    assert "gateway does not serve (it waits for the executors)" in capsys.readouterr().out
