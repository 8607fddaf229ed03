"""What a shadow costs the loop that it looks at: rounds with and without one, by turns. Prints JSON and a table.

A 1 kHz loop with a network of Go1's sizes is served on the last core, SCHED_FIFO where permitted; the client, in a
process of its own, has the first core, and the shadow has none of its own. It is version 2, whose actions are others:
every job that it samples differs. What the figures mean is told in docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any, Final

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import onnx
from failover import keep_journal, now, read_journal
from run import save_policy

from taktd.daemon.benchmark import quantiles, take_core_and_priority
from taktd.daemon.control_client import ask
from taktd.daemon.foreground import Foreground, end_with_parent

CLIENT_PRIORITY: Final = 70
LOAD_S_MAX: Final = 120.0
YAML: Final = """\
devices: {{cpu0: {{driver: cpu, cores: [{core}]}}}}
models: {{policy: {{path: {store}, version: latest}}}}
loops: {{walk: {{model: policy, device: cpu0, period: 1ms, on_late: run}}}}
admission: {{on_refusal: uncertified}}
grpc: off
zmq: off
"""


def make_store(folder: Path) -> Path:
    """Version 1, and 2, whose actions are all 0.01 larger."""
    for version in ("1", "2"):
        (folder / version).mkdir(parents=True)
        save_policy(folder / version / "model.onnx")
    changed = onnx.load(str(folder / "2/model.onnx"))
    last = changed.graph.initializer[-1]  # the biases of the actions
    last.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(last) + np.float32(0.01), last.name))
    onnx.save(changed, str(folder / "2/model.onnx"))
    return folder


def round_of(daemon: Foreground, seconds: float, shadow: bool) -> dict[str, Any]:
    """One client's answers over some seconds, and what the shadow saw meanwhile."""
    environment = dict(daemon.environment)
    if shadow:
        ask("model.shadow.start", environment, answer_s_max=LOAD_S_MAX, name="policy", version=2)
    with tempfile.NamedTemporaryFile() as journal:
        client = subprocess.Popen(
            [sys.executable, __file__, "--journal", journal.name, daemon.lanes_socket], preexec_fn=end_with_parent,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert client.stdout is not None
        client.stdout.readline()
        try:
            client.wait(seconds)
        except subprocess.TimeoutExpired:
            client.send_signal(signal.SIGTERM)
            client.wait()
        answers = read_journal(Path(journal.name))
    seen = ask("model.shadow.stop", environment, name="policy")["shadow"] if shadow else {}
    return {
        "total": [a.received_ns - a.submitted_ns for a in answers],
        "run": [a.ended_ns - a.started_ns for a in answers if a.started_ns],
        "not_ok": sum(a.status != "ok" for a in answers), "samples": seen.get("samples", 0),
        "torn": seen.get("torn", 0), "times": seen.get("times", {}),
    }  # fmt: skip


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    result: dict[str, Any] = {"rounds": rounds, "seconds": seconds, "cores": len(cores)}
    with tempfile.TemporaryDirectory() as folder:
        # A version found by hand: the highest is active where nobody has chosen, so the first one is.
        store = make_store(Path(folder) / "policy")
        (store / "2").rename(store / ".2")
        with Foreground(YAML.format(core=cores[-1], store=store)) as daemon:
            (store / ".2").rename(store / "2")
            kinds: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
            for index in range(2 * rounds):
                kinds[index % 2 == 1].append(round_of(daemon, seconds, index % 2 == 1))
    for name, shadow in (("without", False), ("with", True)):
        found = kinds[shadow]
        result[name] = {
            "jobs": sum(len(r["total"]) for r in found), "not_ok": sum(r["not_ok"] for r in found),
            "total": quantiles(array("q", [v for r in found for v in r["total"]])),
            "run": quantiles(array("q", [v for r in found for v in r["run"]])),
            "samples": sum(r["samples"] for r in found), "torn": sum(r["torn"] for r in found),
            "times": found[-1]["times"],
        }  # fmt: skip
    return result


def show(result: dict[str, Any]) -> None:
    print(f"{'':8} {'jobs':>7} {'not ok':>6} {'round trip p50':>15} {'p99':>9} {'p99.9':>9} {'run p50':>9} {'p99':>9}")
    for name in ("without", "with"):
        one = result[name]
        total, run = one["total"], one["run"]
        cells = [total["p50_us"], total["p99_us"], total["p999_us"], run["p50_us"], run["p99_us"]]
        print(
            f"{name:8} {one['jobs']:7} {one['not_ok']:6} {cells[0]:12} µs " + " ".join(f"{c:6} µs" for c in cells[1:])
        )
    print(f"{result['with']['samples']} jobs sampled and compared, {result['with']['torn']} left out")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="of each kind")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each round")
    parser.add_argument("--journal", help=argparse.SUPPRESS)
    parser.add_argument("socket", nargs="?", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.journal:
        take_core_and_priority(min(os.sched_getaffinity(0)), CLIENT_PRIORITY)
        keep_journal(arguments.socket, arguments.journal)
        return
    begun = now()
    result = measure(arguments.rounds, arguments.seconds)
    show(result)
    print(json.dumps({**result, "took_s": round((now() - begun) / 1e9, 1)}))


if __name__ == "__main__":
    main()
