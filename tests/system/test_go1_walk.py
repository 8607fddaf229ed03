"""A real robot's policy through a lane: the Unitree Go1 walks in MuJoCo, and every action equals ONNX Runtime's own.

The policies are not part of this repository. They are looked for in $TAKTD_ROBOTS, else in ../shared/robots beside it;
where they are absent these tests are skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import pytest

from taktd.daemon.direct import open_direct
from taktd.daemon.foreground import Foreground
from taktd.ipc import connect

ROOT = Path(__file__).resolve().parents[2]
ROBOTS = Path(os.environ.get("TAKTD_ROBOTS") or ROOT.parent / "shared" / "robots")
PERIODS = {"go1": "20ms", "leap_hand": "50ms", "berkeley_humanoid": "20ms"}

pytestmark = pytest.mark.skipif(
    not (ROBOTS / "go1" / "policy.onnx").is_file(), reason=f"no robot policies in {ROBOTS} (set TAKTD_ROBOTS)"
)

SIMULATED_S = 20.0
STEP_S = 0.004
STEPS_PER_ACTION = 5
COMMAND = np.array([0.8, 0.0, 0.0])
ACTION_SCALE = 0.5


@pytest.fixture(scope="module")
def daemon() -> Iterator[Foreground]:
    core = max(os.sched_getaffinity(0))
    lines = ["node: {name: robots}", f"devices: {{cpu0: {{driver: cpu, cores: [{core}]}}}}", "models:"]
    lines += [f"  {robot}: {{path: {json.dumps(str(ROBOTS / robot / 'policy.onnx'))}}}" for robot in PERIODS]
    lines += ["loops:"]
    lines += [f"  {robot}_loop: {{model: {robot}, device: cpu0, period: {T}}}" for robot, T in PERIODS.items()]
    with Foreground("\n".join(lines) + "\n") as running:
        yield running


class Go1:
    """The robot on flat ground; what it sees and how it is moved is described with the policies."""

    def __init__(self) -> None:
        self.mujoco: Any = pytest.importorskip("mujoco", reason="mujoco is not installed")
        self.model = self.mujoco.MjModel.from_xml_path(str(ROBOTS / "go1" / "go1_flat.xml"))
        self.model.opt.timestep = STEP_S
        self.data = self.mujoco.MjData(self.model)
        self.mujoco.mj_resetDataKeyframe(self.model, self.data, 0)
        self.home = self.model.keyframe("home").qpos[7:].copy()
        self.last_action = np.zeros(12)
        self.mujoco.mj_forward(self.model, self.data)

    def observe(self) -> np.ndarray:
        """(48,) float64"""
        data = self.data
        down = data.site("imu").xmat.reshape(3, 3).T @ np.array([0.0, 0.0, -1.0])
        return np.concatenate(
            [
                data.sensor("local_linvel").data,
                data.sensor("gyro").data,
                down,
                data.qpos[7:] - self.home,
                data.qvel[6:],
                self.last_action,
                COMMAND,
            ]
        )

    def act(self, action: np.ndarray) -> None:
        self.last_action = action.astype(np.float64)
        self.data.ctrl[:] = self.home + ACTION_SCALE * self.last_action
        for _ in range(STEPS_PER_ACTION):
            self.mujoco.mj_step(self.model, self.data)
        self.mujoco.mj_forward(self.model, self.data)

    @property
    def uprightness(self) -> float:
        """Body z axis dot world z."""
        return float(self.data.body(1).xmat[8])


def test_go1_walks_for_twenty_seconds_with_actions_equal_bit_for_bit(daemon: Foreground) -> None:
    robot = Go1()
    direct = open_direct(str(ROBOTS / "go1" / "policy.onnx"))
    start_x = float(robot.data.qpos[0])
    with connect(daemon.lanes_socket) as node, node.attach("go1_loop") as lane:
        for step in range(round(SIMULATED_S / (STEP_S * STEPS_PER_ACTION))):
            observation = robot.observe()
            lane.inputs["obs"][0, :] = observation
            direct.inputs["obs"][0, :] = observation
            reply = lane.infer(timeout_us=5_000_000)
            assert reply.ok, f"step {step}: {reply}"
            direct.run()
            action = lane.outputs["continuous_actions"][0]
            assert action.tobytes() == direct.outputs["continuous_actions"][0].tobytes(), f"step {step} differs"
            robot.act(action)
    assert robot.uprightness > 0.99
    speed = (float(robot.data.qpos[0]) - start_x) / SIMULATED_S
    assert speed == pytest.approx(0.81, abs=0.05)


@pytest.mark.parametrize("robot", ["leap_hand", "berkeley_humanoid"])
def test_a_thousand_random_observations_are_answered_bit_for_bit(daemon: Foreground, robot: str) -> None:
    direct = open_direct(str(ROBOTS / robot / "policy.onnx"))
    noise = np.random.default_rng(7)
    with connect(daemon.lanes_socket) as node, node.attach(f"{robot}_loop") as lane:
        for number in range(1000):
            observation = noise.normal(size=direct.inputs["obs"].shape)
            lane.inputs["obs"][...] = observation
            direct.inputs["obs"][...] = observation
            reply = lane.infer(timeout_us=5_000_000)
            assert reply.ok, f"observation {number}: {reply}"
            direct.run()
            answer = lane.outputs["continuous_actions"]
            assert answer.tobytes() == direct.outputs["continuous_actions"].tobytes(), f"observation {number} differs"
