"""What Prometheus reads: families made at each scrape from the statistics pages and what the supervisor knows.

No executor is asked and nothing is kept between scrapes. Names follow Prometheus' conventions (base units, `_total`);
docs/metrics.md lists them, and a test holds the document and the dashboard to what is exposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry

from taktd.daemon.health.status import daemon_version
from taktd.daemon.limits import KINDS
from taktd.daemon.supervision.lanes import LaneState
from taktd.daemon.supervision.served_device import STAND_IN
from taktd.ipc import _core

if TYPE_CHECKING:
    from taktd.daemon.supervision.served_device import ServedDevice
    from taktd.daemon.supervisor import Supervisor

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Upper bounds of histogram buckets in ns, and how Prometheus writes them in seconds.
BUCKETS: Final = tuple(
    (us * 1000, f"{us / 1e6:.6f}".rstrip("0"))
    for us in (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
)
STATUSES: Final = ("ok", "expired", "refused", "invalid", "failed", "lost", "cancelled", "detached", "orphaned")
FLAGS: Final = (
    ("late", "Jobs answered after their deadline."),
    ("early", "Jobs submitted before their nominal arrival."),
    ("overrun", "Jobs that ran longer than admitted."),
    ("stand_in", "Jobs answered by a stand-in."),
)
LATENCIES: Final = (
    ("queue", "Time from release to start."),
    ("run", "Time from start to end."),
    ("response", "Time from release to end."),
)
_S: Final = 1e-9

Statistics = dict[str, Any]


def buckets_of(hist: dict[str, Any]) -> list[tuple[str, float]]:
    """Cumulative counts for Prometheus; what is above the last bound is in +Inf."""
    counts = [0] * len(BUCKETS)
    for upper_ns, count in hist["buckets"]:
        for index, (bound_ns, _) in enumerate(BUCKETS):
            if upper_ns <= bound_ns:
                counts[index] += count
    return [*((text, float(n)) for (_, text), n in zip(BUCKETS, counts, strict=True)), ("+Inf", float(hist["count"]))]


def exposition(supervisor: Supervisor) -> bytes:
    """The page that /metrics answers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(supervisor))
    return generate_latest(registry)


class Collector:
    """Families of one scrape."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not read anything."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._daemon()
        yield from self._devices()
        yield from self._loops()
        yield from self._models()
        yield from self._holdings()
        yield from self._gateway()

    # ---- the daemon ----

    def _daemon(self) -> Iterator[Metric]:
        s = self._supervisor
        build = GaugeMetricFamily("taktd_build_info", "Version and node; always 1.", labels=["version", "node"])
        build.add_metric([daemon_version(), s.configuration.node.name], 1)
        yield build
        yield _gauge("taktd_ready", "Every admitted loop is answered by an executor.", s.ready)
        yield _gauge(
            "taktd_certified", "Ready, and every deadline is proven on this machine as it is now.", s.certified
        )
        yield _gauge("taktd_epoch", "Number of the applied configuration.", s.epoch)
        switches = CounterMetricFamily(
            "taktd_switches", "Times a loop passed to another executor or back.", labels=["loop", "cause"]
        )
        for (loop, cause), count in s.devices.switches.items():
            switches.add_metric([loop, cause], count)
        yield switches
        unclaimed = CounterMetricFamily(
            "taktd_lanes_unclaimed", "Lanes ended since their client did not come to the taktd that was started again."
        )
        unclaimed.add_metric([], s.takeover.unclaimed)
        yield unclaimed
        yield _gauge(
            "taktd_configuration_refused", "What the file says is refused, and is not what runs.", bool(s.refused)
        )

    # ---- devices ----

    def _devices(self) -> Iterator[Metric]:
        families = {
            name: GaugeMetricFamily(f"taktd_{name}", text, labels=["device"])
            for name, text in (
                ("executor_ready", "The device's executor serves."),
                ("executor_certified", "Its loops are proven on valid measurements."),
                ("executor_resident_memory_bytes", "Memory of the executor's process."),
                ("device_utilization_admitted_ratio", "Share of the device that admitted loops may use."),
                ("device_slack_ratio", "Share of the device that no admitted loop can need."),
                ("device_best_effort_dispatch_seconds", "Longest dispatch of best effort without a known gap."),
            )
        }
        restarts = CounterMetricFamily("taktd_executor_restarts", "Starts after the first.", labels=["device"])
        revoked = CounterMetricFamily(
            "taktd_executor_certificates_revoked", "Times a proof was withdrawn.", labels=["device"]
        )
        busy = CounterMetricFamily("taktd_device_busy_seconds", "Time spent running jobs.", labels=["device"])
        lanes = GaugeMetricFamily("taktd_lanes", "Lanes there are.", labels=["device", "kind", "state"])
        for name, device in self._supervisor.devices.items():
            about = device.as_json()
            families["executor_ready"].add_metric([name], about["ready"])
            families["executor_certified"].add_metric([name], about["certified"])
            families["executor_resident_memory_bytes"].add_metric([name], _resident_bytes(about["pid"]))
            verdict = device.schedule.verdict if device.schedule is not None else {}
            admitted = verdict.get("utilization_ppm", 0) / 1e6
            families["device_utilization_admitted_ratio"].add_metric([name], admitted)
            families["device_slack_ratio"].add_metric([name], max(0.0, 1 - admitted))
            longest_ns = device.schedule.serve.get("max_dispatch_ns", 0) if device.schedule is not None else 0
            families["device_best_effort_dispatch_seconds"].add_metric([name], longest_ns * _S)
            restarts.add_metric([name], about["restarts"])
            revoked.add_metric([name], about["revocations"])
            blocks = device.lanes.stats_blocks.values()
            busy.add_metric([name], _S * sum(_read(device, block)["run_us"]["sum_ns"] for block in blocks))
            for (kind, state), count in _lane_counts(device).items():
                lanes.add_metric([name, kind, state], count)
        yield from (*families.values(), restarts, revoked, busy, lanes)

    # ---- loops and models ----

    def _loops(self) -> Iterator[Metric]:
        s = self._supervisor
        gauges = {
            name: GaugeMetricFamily(f"taktd_loop_{name}", text, labels=["loop"])
            for name, text in (
                ("attached", "A client has the loop."),
                ("period_seconds", "Declared minimum time between two jobs."),
                ("deadline_seconds", "Declared relative deadline."),
                ("cost_seconds", "Execution time that admission reckons with."),
                ("margin_seconds", "Time that is left in the worst case."),
                ("stand_in_ready", "The loop's stand-in is warm and can be relied on."),
                ("on_stand_in", "A stand-in answers the loop now."),
            )
        }
        rows: list[tuple[list[str], Statistics]] = []
        for name, loop in s.configuration.loops.items():
            gauges["period_seconds"].add_metric([name], loop.period_ns * _S)
            gauges["deadline_seconds"].add_metric([name], loop.deadline_ns * _S)
            device = s.devices.get(loop.device)
            if device is None:
                continue
            gauges["attached"].add_metric([name], device.lanes.attached(name))
            gauges["on_stand_in"].add_metric([name], device.serving is not None and device.role == STAND_IN)
            planned = any(one.name == name for one in device.member.plan.loops)
            if planned and any(one.kind == "device" for one in loop.fallback):
                gauges["stand_in_ready"].add_metric([name], not s.devices.stand_in_reason(name, device))
            if device.schedule is not None:
                task = device.schedule.serve["tasks"].get(name)
                if task:
                    gauges["cost_seconds"].add_metric([name], task["cost_ns"] * _S)
                verdicts = {v["name"]: v for v in device.schedule.verdict.get("loops", ())}
                if (margin_ns := verdicts.get(name, {}).get("margin_ns")) is not None:
                    gauges["margin_seconds"].add_metric([name], margin_ns * _S)
            block = device.lanes.stats_blocks["loop", name]
            rows.append(([name, loop.model, loop.device], _read(device, block)))
        yield from gauges.values()
        yield from _job_families("loop", ["loop", "model", "device"], rows)
        misses = CounterMetricFamily("taktd_loop_misses", "Deadlines missed, by cause.", labels=["loop", "cause"])
        for labels, statistics in rows:
            for cause, count in statistics["misses"].items():
                misses.add_metric([labels[0], cause], count)
        yield misses

    def _models(self) -> Iterator[Metric]:
        s = self._supervisor
        rows = [
            ([name, model.device or ""], _read(device, device.lanes.stats_blocks["model", name]))
            for name, model in s.configuration.models.items()
            if (device := s.devices.get(model.device or "")) and ("model", name) in device.lanes.stats_blocks
        ]
        yield from _job_families("model", ["model", "device"], rows)

    # ---- accounts ----

    def _holdings(self) -> Iterator[Metric]:
        s = self._supervisor
        clients = len(s.lane_door.connections) if s.lane_door else 0
        yield _gauge("taktd_clients", "Connections to the lane socket.", clients)
        held = GaugeMetricFamily("taktd_held", "What clients hold, as charged by the supervisor.", labels=["kind"])
        for kind in KINDS[:3]:
            held.add_metric([kind], s.charges.held(kind))
        yield held

    def _gateway(self) -> Iterator[Metric]:
        gateway = self._supervisor.gateway
        if gateway is None:
            return
        counters = gateway.counters
        yield _gauge("taktd_gateway_ready", "gRPC and ZeroMQ are served.", gateway.ready)
        yield _counter("taktd_gateway_restarts", "Starts of the gateway after the first.", gateway.restarts)
        yield _gauge("taktd_gateway_resident_memory_bytes", "Memory of the gateway.", counters.get("rss_bytes", 0))
        yield _gauge("taktd_gateway_jobs", "Requests in the gateway.", counters.get("jobs", 0))
        yield _gauge("taktd_gateway_waiting", "Requests that wait for a slot.", counters.get("waiting", 0))
        yield _gauge("taktd_gateway_job_memory_bytes", "Tensors of those requests.", counters.get("job_memory", 0))
        yield _gauge("taktd_gateway_lanes", "Lanes that the gateway holds.", counters.get("lanes", 0))
        yield _gauge("taktd_gateway_zmq_connections", "ZeroMQ clients.", counters.get("zmq_connections", 0))
        yield _counter("taktd_gateway_answered", "Requests with a result.", counters.get("answered", 0))
        refused = CounterMetricFamily("taktd_gateway_refused", "Requests without a result.", labels=["status", "code"])
        for key, count in counters.get("refused", {}).items():
            refused.add_metric(key.split(" "), count)
        yield refused
        for name, text in (
            ("zmq_replies_dropped", "Replies that a ZeroMQ client had no room for."),
            ("zmq_clients_gone", "Requests whose ZeroMQ client had gone."),
            ("zmq_connections_cut", "ZeroMQ connections that asked for nothing and were one too many."),
            ("events_sent", "Events published."),
            ("completions_left_out", "Completions of loops that could not be copied in time."),
            ("events_dropped", "Events that some subscriber had no room for."),
        ):
            yield _counter(f"taktd_gateway_{name}", text, counters.get(name, 0))


def _job_families(noun: str, labels: list[str], rows: list[tuple[list[str], Statistics]]) -> Iterator[Metric]:
    jobs = CounterMetricFamily(f"taktd_{noun}_jobs", "Jobs that ended, by status.", labels=[*labels, "status"])
    submitted = CounterMetricFamily(f"taktd_{noun}_submitted", "Jobs submitted.", labels=labels)
    flags = [(f, CounterMetricFamily(f"taktd_{noun}_{f}", text, labels=labels)) for f, text in FLAGS]
    latencies = [
        (name, HistogramMetricFamily(f"taktd_{noun}_{name}_seconds", text, labels=labels)) for name, text in LATENCIES
    ]
    for values, statistics in rows:
        submitted.add_metric(values, statistics["submitted"])
        for status in STATUSES:
            jobs.add_metric([*values, status], statistics[status])
        for flag, family in flags:
            family.add_metric(values, statistics[flag])
        for name, histogram in latencies:
            hist = statistics["total_us" if name == "response" else f"{name}_us"]
            histogram.add_metric(values, buckets=buckets_of(hist), sum_value=hist["sum_ns"] * _S)
    yield from (submitted, jobs, *(family for _, family in flags), *(family for _, family in latencies))


def _read(device: ServedDevice, block: int) -> Statistics:
    return dict(_core.stats_read(device.lanes.stats_fd, block))


def _lane_counts(device: ServedDevice) -> dict[tuple[str, str], int]:
    counts = {(kind, state.value): 0 for kind in ("loop", "model") for state in LaneState}
    for lane in device.lanes.lanes.values():
        counts[lane.kind.name.lower(), lane.state.value] += 1
    return counts


def _resident_bytes(pid: int | None) -> int:
    with suppress(psutil.Error):
        if pid is not None:
            return int(psutil.Process(pid).memory_info().rss)
    return 0


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
