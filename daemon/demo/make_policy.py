"""Make the demo's policy from nothing: `python -m taktd.daemon.demo.make_policy [OUT.onnx]`, two minutes, numpy only.

A teacher (energy shaping to swing up, a linear-quadratic regulator to balance, blended smoothly) is imitated by a
network of 5 → 64 → 64 → 1. Learning only from the teacher's own runs would leave the network lost where it errs, so its
own runs are labelled by the teacher and added, round after round.

Sources: Åström & Furuta, "Swinging up a pendulum by energy control" (2000), for the teacher; Ross, Gordon & Bagnell,
"A reduction of imitation learning and structured prediction to no-regret online learning" (2011), for the rounds. The
seed is fixed; the committed pendulum.onnx came from this script.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from . import plant

Array = NDArray[np.float64]

SEED: Final = 20
HIDDEN: Final = 64
ROUNDS: Final = 8
MACHINES: Final = 192
"""Simulated side by side in each round."""
ROUND_STEPS: Final = 900
DT_S: Final = 0.01
"""Ten times the demo's period: what holds at this delay holds at 1 ms, and through a lost tick."""
STEPS_PER_ROUND: Final = 4000
LAST_STEPS: Final = 20000
BATCH: Final = 512

INPUT_SCALE: Final = np.array([1.0, 0.4, 1.0, 1.0, 0.2])
"""Brings position, speed, sin, cos and angular velocity to about ±1; folded into the first layer on export."""


def regulator() -> Array:
    """Gains (4) of the linear-quadratic regulator about upright: the discrete Riccati equation at the training step."""
    size, dt = 4, DT_S
    a, b = np.eye(size), np.zeros((size, 1))
    small = 1e-5
    for column in range(size):
        offset = np.zeros(size)
        offset[column] = small
        a[:, column] = (_after(offset, 0.0, dt) - _after(-offset, 0.0, dt)) / (2 * small)
    b[:, 0] = (_after(np.zeros(size), 1.0, dt) - _after(np.zeros(size), -1.0, dt)) / 2
    cost, effort = np.diag([4.0, 1.0, 30.0, 1.0]), np.array([[0.05]])
    value = cost.copy()
    for _ in range(3000):
        gain = np.linalg.solve(effort + b.T @ value @ b, b.T @ value @ a)
        value = cost + a.T @ value @ (a - b @ gain)
    return np.asarray(gain[0], dtype=np.float64)


def _after(state: Array, force: float, dt_s: float) -> Array:
    x, v, angle, w = state[:, None]
    return np.array(plant.step((x, v, angle, w), np.full(1, force), np.zeros(1), dt_s, np.sin, np.cos))[:, 0]


def teacher(state: plant.State[Array], gains: Array) -> Array:
    """Force (N) for each machine: pump energy far from upright, regulate near it."""
    x, v, angle, w = state
    lean = np.arctan2(np.sin(angle), np.cos(angle))
    balance = -(gains[0] * x + gains[1] * v + gains[2] * lean + gains[3] * w)

    sin, cos = np.sin(angle), np.cos(angle)
    energy = 0.5 * (plant.ROD_M * w) ** 2 + plant.GRAVITY_M_S2 * plant.ROD_M * (cos - 1.0)  # 0 when it can just stand
    pump = 1.2 * np.tanh(0.6 * energy) * 4.0 * np.tanh(1.5 * w * cos)
    wanted = pump - 1.6 * x - 1.2 * v  # cart acceleration; the rail is short
    free = plant.GRAVITY_M_S2 * sin
    swing = (
        wanted * (plant.CART_KG + plant.BOB_KG * sin**2)
        + plant.BOB_KG * cos * free
        - plant.BOB_KG * plant.ROD_M * w**2 * sin
        + plant.CART_FRICTION_N_S_M * v
    )
    near = 1.0 / (1.0 + np.exp(-12.0 * (0.55 - np.abs(lean + 0.12 * w) - 0.25 * np.abs(lean))))
    force = near * np.clip(balance, -20, 20) + (1.0 - near) * np.clip(swing, -20, 20)
    return np.asarray(np.clip(force, -plant.FORCE_MAX_N, plant.FORCE_MAX_N))


def observation(state: plant.State[Array]) -> Array:
    """(n, 5) as CartPole.observe writes it."""
    x, v, angle, w = state
    return np.stack([x, v, np.sin(angle), np.cos(angle), w], axis=1)


@dataclass
class Network:
    """Weights (in, out) and biases of three layers; tanh between them and at the end."""

    weights: list[Array]
    biases: list[Array]

    @classmethod
    def random(cls, rng: np.random.Generator) -> Network:
        sizes = [plant.OBSERVATION_SIZE, HIDDEN, HIDDEN, 1]
        pairs = list(itertools.pairwise(sizes))
        return cls([rng.normal(size=p) / np.sqrt(p[0]) for p in pairs], [np.zeros(p[1]) for p in pairs])

    def layers(self, observations: Array) -> list[Array]:
        values = [observations * INPUT_SCALE]
        for weight, bias in zip(self.weights, self.biases, strict=True):
            values.append(np.tanh(values[-1] @ weight + bias))
        return values

    def force(self, observations: Array) -> Array:
        return np.asarray(self.layers(observations)[-1][:, 0] * plant.FORCE_MAX_N)


class Adam:
    """Kingma & Ba (2015), over one network's parameters, in place."""

    def __init__(self, network: Network) -> None:
        self.parameters = network.weights + network.biases
        self.first = [np.zeros_like(p) for p in self.parameters]
        self.second = [np.zeros_like(p) for p in self.parameters]
        self.steps = 0

    def update(self, gradients: list[Array], rate: float) -> None:
        self.steps += 1
        unbias = np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        for parameter, gradient, m, s in zip(self.parameters, gradients, self.first, self.second, strict=True):
            m += 0.1 * (gradient - m)
            s += 0.001 * (gradient**2 - s)
            parameter -= rate * unbias * m / (np.sqrt(s) + 1e-8)


def fit(
    network: Network, adam: Adam, seen: Array, wanted: Array, rng: np.random.Generator, steps: int, rate: float
) -> float:
    """Descend on squared error (in units of the largest force) for `steps` batches; the rate falls to a hundredth.

    Returns the mean error of the last hundred batches.
    """
    losses = []
    for i in range(steps):
        pick = rng.integers(0, len(seen), BATCH)
        values = network.layers(seen[pick])
        error = values[-1] - wanted[pick, None] / plant.FORCE_MAX_N
        losses.append(float(np.mean(error**2)))
        slope = 2.0 * error / BATCH
        for_weights: list[Array] = []
        for_biases: list[Array] = []
        for layer in (2, 1, 0):
            slope = slope * (1.0 - values[layer + 1] ** 2)
            for_weights.insert(0, values[layer].T @ slope)
            for_biases.insert(0, slope.sum(axis=0))
            slope = slope @ network.weights[layer].T
        adam.update(for_weights + for_biases, rate * (0.01 + 0.99 * (1 - i / steps)))
    return float(np.mean(losses[-100:]))


def beginnings(rng: np.random.Generator) -> plant.State[Array]:
    """Half hang, a quarter stand about upright, a quarter are anywhere."""
    n = MACHINES
    hang, stand = n // 2, n // 4
    free = n - hang - stand
    angle = np.concatenate(
        [np.pi + rng.normal(0, 0.05, hang), rng.normal(0, 0.25, stand), rng.uniform(-np.pi, np.pi, free)]
    )
    spin = np.concatenate([rng.normal(0, 0.05, hang), rng.normal(0, 1.0, stand), rng.normal(0, 4.0, free)])
    return rng.normal(0, 0.3, n), rng.normal(0, 0.3, n), angle, spin


def rollout(network: Network | None, gains: Array, rng: np.random.Generator) -> tuple[Array, Array, float]:
    """Drive all machines (None: by the teacher), pushed now and then.

    Returns observations, the teacher's forces, and the share of machines that stand at the end.
    """
    state = beginnings(rng)
    seen, wanted = [], []
    push = np.zeros(MACHINES)
    for i in range(ROUND_STEPS):
        if i % 10 == 0:
            push = np.where(rng.random(MACHINES) < 0.02, rng.normal(0, 4.0, MACHINES), 0.0)
        if i > ROUND_STEPS - 200:
            push = np.zeros(MACHINES)
        eyes, label = observation(state), teacher(state, gains)
        force = label if network is None else network.force(eyes)
        seen.append(eyes)
        wanted.append(label)
        x, v, angle, w = plant.step(state, force, push, DT_S, np.sin, np.cos)
        state = np.clip(x, -plant.RAIL_M, plant.RAIL_M), np.where(np.abs(x) >= plant.RAIL_M, 0.0, v), angle, w
    stands = (np.cos(state[2]) > 0.98) & (np.abs(state[3]) < 0.5) & (np.abs(state[0]) < 1.0)
    return np.concatenate(seen), np.concatenate(wanted), float(np.mean(stands))


def train() -> Network:
    """The whole recipe; prints one line per round."""
    rng = np.random.default_rng(SEED)
    gains = regulator()
    network = Network.random(rng)
    adam = Adam(network)
    seen, wanted, standing = rollout(None, gains, rng)
    print(f"teacher: {standing:.0%} stand at the end", flush=True)
    for turn in range(ROUNDS):
        loss = fit(network, adam, seen, wanted, rng, STEPS_PER_ROUND, 2e-3)
        more, labels, standing = rollout(network, gains, rng)
        seen, wanted = np.concatenate([seen, more]), np.concatenate([wanted, labels])
        print(f"round {turn + 1}/{ROUNDS}: error {loss:.5f}, {standing:.0%} stand at the end", flush=True)
    loss = fit(network, adam, seen, wanted, rng, LAST_STEPS, 2e-3)
    _, _, standing = rollout(network, gains, rng)
    print(f"final: error {loss:.5f}, {standing:.0%} stand at the end", flush=True)
    return network


def export(network: Network) -> onnx.ModelProto:
    """obs [1, 5] → force [1, 1] in newtons; scales are folded into the first layer."""
    nodes, constants = [], []

    def constant(name: str, value: Array) -> str:
        constants.append(numpy_helper.from_array(np.asarray(value, dtype=np.float32), name))
        return name

    value = "obs"
    for i, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        scaled = weight * INPUT_SCALE[:, None] if i == 0 else weight
        names = [value, constant(f"w{i}", scaled), constant(f"b{i}", bias)]
        nodes.append(helper.make_node("Gemm", names, [f"sum{i}"]))
        nodes.append(helper.make_node("Tanh", [f"sum{i}"], [f"layer{i}"]))
        value = f"layer{i}"
    nodes.append(helper.make_node("Mul", [value, constant("force_max", np.array([plant.FORCE_MAX_N]))], ["force"]))
    graph = helper.make_graph(
        nodes,
        "pendulum",
        [helper.make_tensor_value_info("obs", TensorProto.FLOAT, [1, plant.OBSERVATION_SIZE])],
        [helper.make_tensor_value_info("force", TensorProto.FLOAT, [1, 1])],
        constants,
    )
    model = helper.make_model(graph, producer_name="taktd", opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("pendulum.onnx")
    out.write_bytes(export(train()).SerializeToString())
    print(f"wrote {out}, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
