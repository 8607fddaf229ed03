"""The demo's committed policy does what the demo shows, in pure simulation: no daemon, no clock."""

from __future__ import annotations

import math
import os
from pathlib import Path

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import onnxruntime
import pytest

from taktd.daemon.demo import plant

POLICY = Path(plant.__file__).with_name("pendulum.onnx")
STEP_S = 0.001


@pytest.fixture(scope="module")
def policy() -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(POLICY, options, providers=["CPUExecutionProvider"])


def drive(policy: onnxruntime.InferenceSession, cart: plant.CartPole, seconds: float, push_n: float = 0.0) -> float:
    """Let the policy drive at 1 kHz; the push lasts for the first 0.1 s. Returns the largest lean (rad)."""
    observation = np.zeros((1, plant.OBSERVATION_SIZE), np.float32)
    largest = 0.0
    for tick in range(int(seconds / STEP_S)):
        cart.observe(observation)
        force = float(policy.run(None, {"obs": observation})[0][0, 0])
        cart.advance(force, push_n if tick * STEP_S < 0.1 else 0.0, STEP_S)
        largest = max(largest, abs(cart.lean_rad))
    return largest


def test_it_swings_up_from_hanging_and_stands(policy: onnxruntime.InferenceSession) -> None:
    cart = plant.CartPole()
    assert math.isclose(abs(cart.lean_rad), math.pi)
    drive(policy, cart, 6.0)
    assert drive(policy, cart, 2.0) < math.radians(2)
    assert abs(cart.position) < 0.2


@pytest.mark.parametrize("push_n", [3.5, -3.5])
def test_it_stands_through_a_push(policy: onnxruntime.InferenceSession, push_n: float) -> None:
    cart = plant.CartPole(angle=0.0)
    assert math.radians(5) < drive(policy, cart, 4.0, push_n) < math.radians(45)
    assert abs(cart.lean_rad) < math.radians(2)


def test_it_swings_up_again_after_a_push_that_throws_it_over(policy: onnxruntime.InferenceSession) -> None:
    cart = plant.CartPole(angle=0.0)
    assert drive(policy, cart, 10.0, 8.0) > math.radians(90)
    assert abs(cart.lean_rad) < math.radians(2)


def test_the_policy_is_small_enough_to_commit() -> None:
    assert POLICY.stat().st_size < 100_000


def test_without_force_and_friction_energy_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plant, "CART_FRICTION_N_S_M", 0.0)
    monkeypatch.setattr(plant, "PIVOT_FRICTION_N_M_S", 0.0)

    def energy(cart: plant.CartPole) -> float:
        bob_x = cart.speed + plant.ROD_M * cart.spin * math.cos(cart.angle)
        bob_y = -plant.ROD_M * cart.spin * math.sin(cart.angle)
        height = plant.ROD_M * math.cos(cart.angle)
        kinetic = 0.5 * plant.CART_KG * cart.speed**2 + 0.5 * plant.BOB_KG * (bob_x**2 + bob_y**2)
        return kinetic + plant.BOB_KG * plant.GRAVITY_M_S2 * height

    cart = plant.CartPole(angle=0.5, spin=1.0)
    before = energy(cart)
    for _ in range(5000):
        cart.advance(0.0, 0.0, STEP_S)
    assert energy(cart) == pytest.approx(before, abs=1e-6)


def test_one_machine_and_many_obey_the_same_equations() -> None:
    states = np.random.default_rng(1).normal(size=(4, 5))
    rows = tuple(states)
    many = plant.step((rows[0], rows[1], rows[2], rows[3]), np.full(5, 3.0), np.full(5, 1.0), 0.01, np.sin, np.cos)
    for i in range(5):
        x, v, angle, spin = (float(row[i]) for row in states)
        one = plant.step((x, v, angle, spin), 3.0, 1.0, 0.01, math.sin, math.cos)
        assert [float(row[i]) for row in many] == pytest.approx(list(one), abs=1e-12)
