"""The demo's picture: the angle over time, and how long each action took. Needs matplotlib (the `plot` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def save_picture(end: dict[str, Any], path: Path) -> None:
    """Write a PNG from the control program's last message. Raises ImportError, OSError, ValueError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    result, plan = end["result"], end["plan"]
    times = [t for t, _, _ in end["trace"]]
    figure = Figure(figsize=(10, 6.4), dpi=110, layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[1.15, 1])

    for i, (at, force) in enumerate(plan["pushes"]):
        upper.axvspan(at, at + plan["push_s"], color="#d9822b", alpha=0.35, lw=0, label="push" if i == 0 else None)
        upper.annotate(f"push {force:+g} N", (at, 0.9), xycoords=("data", "axes fraction"), xytext=(6, 0),
                       textcoords="offset points", color="#a35a12")  # fmt: skip
    upper.axhline(0, color="0.75", lw=0.8)
    angles = _unwrapped([lean for _, lean, _ in end["trace"]])
    upper.plot(times, angles, color="#1f5fa8", lw=1.4)
    upper.set(xlim=(0, plan["seconds"]), yticks=range(-720, 721, 90), ylim=(min(angles) - 30, max(angles) + 30))
    upper.set_ylabel("angle from upright (°)")
    rail = upper.twinx()
    rail.plot(times, [x for _, _, x in end["trace"]], color="0.55", lw=0.9)
    rail.set(ylim=(-2.5, 2.5), ylabel="cart (m)")
    rail.yaxis.label.set_color("0.45")
    upper.set_xlabel("time (s)")
    upper.set_title("A pendulum swung up and balanced by a neural network behind taktd, 1 kHz", loc="left")

    edges = end["edges_us"]
    for name, counts, colour in (
        ("through the lane", end["lane_counts"], "#1f5fa8"),
        ("ONNX Runtime, same process", end["direct_counts"], "#9bb8a0"),
    ):
        total = sum(counts) or 1
        lower.stairs([100 * n / total for n in counts], edges, fill=True, alpha=0.6, color=colour, label=name)
    used = [e for e, n in zip(edges, end["lane_counts"], strict=False) if n] or [1.0, 1000.0]
    lower.axvline(1000, color="#b03a2e", lw=1, ls="--")
    lower.annotate("deadline 1 ms", (1000, 0.94), xycoords=("data", "axes fraction"), xytext=(-6, 0),
                   textcoords="offset points", ha="right", color="#b03a2e")  # fmt: skip
    lower.set(xscale="log", xlim=(max(1.0, edges[0], used[0] / 10), max(2000.0, used[-1] * 1.3)))
    lower.set(xlabel="from observation to action (µs)", ylabel="share of ticks (%)")
    lower.legend(loc="upper left", frameon=False)
    text = f"{result['ticks']} ticks, {result['late']} late\np50 {_us(result['p50_us'])}, p99 {_us(result['p99_us'])}"
    lower.annotate(text, (0.02, 0.55), xycoords="axes fraction", ha="left", color="0.25")
    figure.savefig(path)


def _unwrapped(angles_rad: list[float]) -> list[float]:
    """In degrees and without jumps; the last angle stays what it is."""
    degrees = np.degrees(np.unwrap(angles_rad))
    return [float(d) for d in degrees - 360.0 * np.round(degrees[-1] / 360.0)]


def _us(value: float | None) -> str:
    return "none" if value is None else f"{value:g} µs"
