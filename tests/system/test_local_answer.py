"""hold and constant: at the deadline the client library answers itself, in Python and in C; nothing is counted twice.

The device is a simulated one that is made too slow for its loop.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from taktd.ipc import Lane
from tests import models
from tests.conftest import Start
from tests.running import Running, eventually

CORE = Path(__file__).resolve().parents[2] / "ipc" / "core"
DEADLINE_US = 20_000
YAML = """\
allow_faults: true
devices: {{sim0: {{driver: sim, cost: 300us}}}}
models: {{id: {{path: {folder}/id.onnx}}}}
loops: {{walk: {{model: id, device: sim0, period: 20ms, budget: 3ms, on_late: run, fallback: [{fallback}]}}}}
admission: {{on_refusal: uncertified}}
"""


def start_with(taktd: Start, folder: Path, fallback: str) -> Running:
    models.identity(folder / "id.onnx", (4,))
    return taktd(YAML.format(folder=folder, fallback=fallback))


def inject(running: Running, kind: str) -> None:
    assert running.taktctl("fault", "inject", "sim0", kind).returncode == 0


class Journal:
    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.sequences: list[int] = []
        self.paths: Counter[str] = Counter()

    def infer(self, value: float) -> tuple[str, str, list[float], float]:
        begun = time.monotonic()
        self.lane.inputs["x"][:] = value
        reply = self.lane.infer()
        self.paths[reply.path] += 1
        if reply.sequence:
            self.sequences.append(reply.sequence)
        took_us = (time.monotonic() - begun) * 1e6
        return reply.status, reply.path, [float(v) for v in self.lane.outputs["y"]], took_us


def settle(running: Running, lane: Lane) -> None:
    """Until the daemon has completed what was given up."""
    eventually(lambda: sum(running.loop("walk")["statistics"][s] for s in ("ok", "expired", "failed", "lost"))
               == running.loop("walk")["statistics"]["submitted"], 10)  # fmt: skip
    assert lane.pending == 0


@pytest.mark.parametrize(
    ("fallback", "path", "values"),
    [("hold", "hold", [7.0] * 4), ("{constant: {y: [1, 2, 3, 4]}}", "constant", [1.0, 2.0, 3.0, 4.0])],
)
def test_an_answer_that_is_late_is_given_here(
    taktd: Start, tmp_path: Path, fallback: str, path: str, values: list[float]
) -> None:
    running = start_with(taktd, tmp_path, fallback)
    with running.connect() as node, node.attach("walk") as lane:
        assert lane.fallback == path
        journal = Journal(lane)
        assert journal.infer(7)[:3] == ("ok", "primary", [7.0] * 4)
        inject(running, "slow=300x")
        for number in range(8):  # more than the lane has slots
            status, by, outputs, took_us = journal.infer(number)
            assert (status, by, outputs) == ("ok", path, values)
            assert took_us >= DEADLINE_US * 0.9
        inject(running, "none")
        settle(running, lane)
        for number in range(20, 25):
            status, by, outputs, _ = journal.infer(number)
            # A machine that is out of breath may make this one late too.
            assert (status, outputs) == ("ok", [float(number)] * 4) or by == path
        settle(running, lane)
        assert journal.paths["primary"] > 1
    counted = running.loop("walk")["statistics"]
    assert journal.sequences == list(range(1, len(journal.sequences) + 1))
    assert counted["submitted"] == len(journal.sequences)


def test_there_is_nothing_to_hold_before_the_first_answer(taktd: Start, tmp_path: Path) -> None:
    running = start_with(taktd, tmp_path, "hold")
    inject(running, "slow=300x")
    with running.connect() as node, node.attach("walk") as lane:
        lane.inputs["x"][:] = 1
        reply = lane.infer()
        assert reply.path != "hold"
        if reply.status == "pending":
            assert lane.wait(reply.sequence, timeout_us=5e6).ok
    with running.connect() as node, node.attach("walk") as lane:  # attached anew: nothing of before is held
        lane.inputs["x"][:] = 2
        assert lane.infer(timeout_us=5e6).path == "primary"


def test_submit_and_wait_are_never_answered_here(taktd: Start, tmp_path: Path) -> None:
    running = start_with(taktd, tmp_path, "{constant: {y: 3}}")
    with running.connect() as node, node.attach("walk") as lane:
        inject(running, "slow=300x")
        lane.inputs["x"][:] = 5
        sequence = lane.submit()
        assert lane.wait(sequence, timeout_us=30_000).status == "pending"
        reply = lane.wait(sequence, timeout_us=5e6)
        assert (reply.status, reply.path) == ("ok", "primary")
        np.testing.assert_array_equal(lane.outputs["y"], [5] * 4)


PROGRAM = """
#include <stdio.h>
#include <takt.h>

int main(int argc, char **argv)
{
    struct takt_tensor tensor;
    struct takt_reply reply;
    takt_node *node;
    takt_lane *lane;

    if (argc < 2 || takt_connect(&node, argv[1], 0) < 0 ||
        takt_attach(node, "walk", TAKT_KIND_LOOP, TAKT_WAIT_BLOCK, 5000000000, &lane) < 0)
        return 1;
    for (int i = 0; i < 6; i++) {
        if (takt_input(lane, "x", &tensor) < 0)
            return 2;
        for (int j = 0; j < 4; j++)
            ((float *)tensor.data)[j] = (float)i;
        if (takt_infer(lane, 0, TAKT_TIMEOUT_DEFAULT, &reply) < 0 || takt_output(lane, "y", &tensor) < 0)
            return 3;
        printf("%u %u %g\\n", reply.status, reply.path, ((float *)tensor.data)[3]);
    }
    takt_detach(lane);
    takt_close(node);
    return 0;
}
"""


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("make")), reason="needs cc and make")
def test_c_programs_have_it_too(taktd: Start, tmp_path: Path) -> None:
    build = tmp_path / "build"
    subprocess.run(["make", "-s", "-C", CORE, f"BUILD={build}", f"{build}/libtakt.a"], check=True, timeout=100)
    (tmp_path / "loop.c").write_text(PROGRAM)
    subprocess.run(
        ["cc", "-Wall", "-Werror", f"-I{CORE}", "-o", tmp_path / "loop", tmp_path / "loop.c", build / "libtakt.a",
         "-pthread"], check=True,
    )  # fmt: skip
    running = start_with(taktd, tmp_path, "{constant: {y: 9}}")
    inject(running, "slow=300x")
    done = subprocess.run([tmp_path / "loop", running.lanes_socket], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["0 4 9"] * 6
