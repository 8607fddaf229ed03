"""A C program whose lane comes back by itself, through the end of taktd and all its executors."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import models
from tests.conftest import Start
from tests.running import eventually

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "ipc" / "core"

PROGRAM = """
#include <errno.h>
#include <stdio.h>
#include <takt.h>

/* Writes a line whenever its cycles begin to be answered, and whenever they are not any more. */
int main(int argc, char **argv)
{
    struct takt_tick tick = {0};
    takt_node *node;
    takt_lane *lane;
    int answered = -1;

    (void)argc;
    if (takt_connect(&node, argv[1], 5000000000) < 0 ||
        takt_attach(node, "walk", TAKT_KIND_LOOP, TAKT_WAIT_BLOCK, 5000000000, &lane) < 0)
        return 1;
    takt_set_reattach(lane, 1);
    for (;;) {
        struct takt_reply reply;
        struct takt_tensor x, y;
        int result = takt_input(lane, "x", &x);

        takt_tick_next(&tick, 5000000);
        if (result == 0) {
            ((float *)x.data)[0] = (float)tick.index;
            result = takt_infer(lane, 0, TAKT_TIMEOUT_DEFAULT, &reply);
        }
        if (result < 0 && result != -EPIPE)
            return 2;
        if (result == 0 && reply.status == TAKT_OK &&
            (takt_output(lane, "y", &y) < 0 || ((float *)y.data)[0] != (float)tick.index))
            return 3;
        if (answered != (result == 0)) {
            answered = result == 0;
            if (printf("%s\\n", answered ? "answered" : takt_lane_error(lane)) < 0 || fflush(stdout))
                return 0;
        }
    }
}
"""
YAML = """\
devices: {{cpu0: {{driver: cpu}}}}
models: {{id: {{path: {folder}/id.onnx}}}}
loops: {{walk: {{model: id, device: cpu0, period: 5ms, budget: 2ms, on_late: run}}}}
admission: {{on_refusal: uncertified}}
grace: 0s
"""


@pytest.mark.skipif(not all(map(shutil.which, ("cc", "make"))), reason="needs cc and make")
def test_it_goes_on_with_the_next_taktd(taktd: Start, tmp_path: Path) -> None:
    subprocess.run(["make", "-s", "-C", CORE, f"BUILD={tmp_path}/build", "all"], check=True, timeout=120)
    (tmp_path / "program.c").write_text(PROGRAM)
    command = ["cc", "-Wall", "-Wextra", "-Werror", f"-I{CORE}", tmp_path / "program.c", f"{tmp_path}/build/libtakt.a"]
    subprocess.run([*command, "-pthread", "-o", tmp_path / "program"], check=True, timeout=60)
    models.identity(tmp_path / "id.onnx", (4,))
    running = taktd(YAML.format(folder=tmp_path))
    with subprocess.Popen([tmp_path / "program", running.lanes_socket], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            for _ in range(3):
                assert program.stdout.readline() == "answered\n"
                running.remember_family()
                family = running.family
                running.process.kill()
                running.process.wait()
                assert "has ended" in program.stdout.readline()
                eventually(lambda f=family: not any(p.is_running() for p in f), 10, "all of it is gone")
                running.start().await_ready()
            assert program.stdout.readline() == "answered\n"
            told = running.loop("walk")
            assert told["client"]["pid"] == program.pid
        finally:
            program.kill()
    eventually(lambda: running.loop("walk")["lane"] == "free", 10)
    assert running.stop() == 0
