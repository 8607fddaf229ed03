"""The demo's machine: a pendulum on a motor-driven cart, simulated with Runge-Kutta of fourth order.

Not a general simulator: one machine, five numbers of observation, one force. `make_policy` trains on many at once
(arrays), `control` runs a single one in real time (floats); both call the same equations.

The pendulum is a point mass on a massless rod. θ is measured from upright, positive to the right; hanging is θ = π.
Equations: Florian, "Correct equations for the dynamics of the cart-pole system" (2007), with a point mass, viscous
friction and a horizontal push at the mass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

CART_KG: Final = 1.0
BOB_KG: Final = 0.25
ROD_M: Final = 0.6
GRAVITY_M_S2: Final = 9.81
CART_FRICTION_N_S_M: Final = 0.1
PIVOT_FRICTION_N_M_S: Final = 0.002
FORCE_MAX_N: Final = 15.0
RAIL_M: Final = 2.4
"""The cart stops dead at ± this position."""
OBSERVATION_SIZE: Final = 5

Value = TypeVar("Value", float, NDArray[np.float64])
"""A float for one machine, an array for many at once."""

State = tuple[Value, Value, Value, Value]
"""Cart position (m), cart velocity (m/s), angle (rad), angular velocity (rad/s)."""


def accelerations(speed: Value, spin: Value, sin: Value, cos: Value, force: Value, push: Value) -> tuple[Value, Value]:
    """Of the cart (m/s²) and of the angle (rad/s²), under a force on the cart and a push on the bob (both N)."""
    free = GRAVITY_M_S2 * sin + push * cos / BOB_KG - PIVOT_FRICTION_N_M_S * spin / (BOB_KG * ROD_M)
    pull = force - CART_FRICTION_N_S_M * speed + push + BOB_KG * ROD_M * spin * spin * sin
    cart = (pull - BOB_KG * cos * free) / (CART_KG + BOB_KG * sin * sin)
    return cart, (free - cart * cos) / ROD_M


def step(
    state: State[Value],
    force: Value,
    push: Value,
    dt_s: float,
    sin: Callable[[Value], Value],
    cos: Callable[[Value], Value],
) -> State[Value]:
    """One Runge-Kutta step, unaware of the rail's ends; `sin` and `cos` are math's for floats, numpy's for arrays."""
    x, v, a, w = state
    half = 0.5 * dt_s
    c1, s1 = accelerations(v, w, sin(a), cos(a), force, push)
    v2, w2, a2 = v + half * c1, w + half * s1, a + half * w
    c2, s2 = accelerations(v2, w2, sin(a2), cos(a2), force, push)
    v3, w3, a3 = v + half * c2, w + half * s2, a + half * w2
    c3, s3 = accelerations(v3, w3, sin(a3), cos(a3), force, push)
    v4, w4, a4 = v + dt_s * c3, w + dt_s * s3, a + dt_s * w3
    c4, s4 = accelerations(v4, w4, sin(a4), cos(a4), force, push)
    sixth = dt_s / 6.0
    return (
        x + sixth * (v + 2.0 * v2 + 2.0 * v3 + v4),
        v + sixth * (c1 + 2.0 * c2 + 2.0 * c3 + c4),
        a + sixth * (w + 2.0 * w2 + 2.0 * w3 + w4),
        w + sixth * (s1 + 2.0 * s2 + 2.0 * s3 + s4),
    )


class CartPole:
    """One machine in time: hanging at rest in the middle of the rail until a force moves it."""

    __slots__ = ("angle", "position", "speed", "spin")

    def __init__(self, angle: float = math.pi, spin: float = 0.0) -> None:
        self.position = 0.0
        self.speed = 0.0
        self.angle = angle
        self.spin = spin

    def advance(self, force: float, push: float, dt_s: float) -> None:
        """Let `dt_s` pass under a force (limited to what the motor can do) and a push on the bob, both in N."""
        force = min(max(force, -FORCE_MAX_N), FORCE_MAX_N)
        state = (self.position, self.speed, self.angle, self.spin)
        self.position, self.speed, self.angle, self.spin = step(state, force, push, dt_s, math.sin, math.cos)
        if abs(self.position) >= RAIL_M:
            self.position = math.copysign(RAIL_M, self.position)
            self.speed = 0.0

    def observe(self, into: NDArray[np.float32]) -> None:
        """Write [[position, speed, sin θ, cos θ, angular velocity]] into a float32 array of shape (1, 5)."""
        row = into[0]
        row[0] = self.position
        row[1] = self.speed
        row[2] = math.sin(self.angle)
        row[3] = math.cos(self.angle)
        row[4] = self.spin

    @property
    def lean_rad(self) -> float:
        """Angle from upright, in (-π, π]."""
        return math.remainder(self.angle, math.tau)
