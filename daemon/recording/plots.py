"""A Gantt chart of what devices did: releases, runs, deadlines; best effort in slack; misses in red.

Needs matplotlib, which is an optional dependency and is imported when a picture is wanted. Called by `taktctl trace
--plot`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from taktd.daemon.recording.record import Recording
from taktd.daemon.recording.story import RAN, Outcome, collect_outcomes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["last_outcomes", "save_gantt"]

JOBS_MAX: Final = 20_000  # more can't be told apart on any screen
MISS, LOOP, BEST_EFFORT, EARLY = "#d62728", "#1f77b4", "#b8b8b8", "#17becf"


def last_outcomes(recording: Recording, span_ns: int) -> list[Outcome]:
    """The jobs that ended within the last span_ns of the recording, at most JOBS_MAX of them."""
    kept: deque[Outcome] = deque(maxlen=JOBS_MAX)
    collect_outcomes(recording, kept.append)
    end_ns = max((outcome.ended_ns for outcome in kept), default=0)
    return [outcome for outcome in kept if outcome.ended_ns >= end_ns - span_ns]


def save_gantt(outcomes: Sequence[Outcome], path: Path, title: str = "") -> None:
    """Writes the picture, its kind by the suffix of path. Raises ImportError, OSError, ValueError (unknown suffix)."""
    from matplotlib.figure import Figure

    devices = sorted({outcome.device for outcome in outcomes}) or [""]
    rows = {device: _rows([o for o in outcomes if o.device == device]) for device in devices}
    height = sum(1.2 + 0.45 * len(names) for names in rows.values())
    figure = Figure(figsize=(14, max(3.0, height)), layout="constrained")
    axes = figure.subplots(len(devices), 1, squeeze=False, sharex=True)
    origin_ns = min((o.started_ns or o.release_ns for o in outcomes), default=0)
    for (ax,), device in zip(axes, devices, strict=True):
        _draw(ax, [o for o in outcomes if o.device == device], rows[device], origin_ns)
        ax.set_title(device or "no jobs", loc="left", fontsize=10)
    axes[-1][0].set_xlabel("ms")
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


def _rows(outcomes: Sequence[Outcome]) -> list[str]:
    """Loops in the order of their lanes, then best effort by model."""
    order = {(not o.loop, o.lane if o.loop else 0, o.name) for o in outcomes}
    return list(dict.fromkeys(name for _, _, name in sorted(order)))


def _draw(ax: Axes, outcomes: Sequence[Outcome], names: Sequence[str], origin_ns: int) -> None:
    def ms(t_ns: int) -> float:
        return (t_ns - origin_ns) / 1e6

    at = {name: len(names) - 1 - index for index, name in enumerate(names)}
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    releases: list[tuple[float, int]] = []
    deadlines: list[tuple[float, int]] = []
    misses: list[tuple[float, int]] = []
    for o in outcomes:
        y = at[o.name]
        if o.kind == RAN:
            color = MISS if o.late else EARLY if o.early and o.loop else LOOP if o.loop else BEST_EFFORT
            bars.setdefault((o.name, color), []).append((ms(o.started_ns), (o.ended_ns - o.started_ns) / 1e6))
        if o.loop:
            releases.append((ms(o.release_ns), y))
        if o.deadline_ns:
            (misses if o.missed else deadlines).append((ms(o.deadline_ns), y))
    for (name, color), spans in bars.items():
        ax.broken_barh(spans, (at[name] - 0.3, 0.6), facecolors=color, edgecolor="none")
    _points(ax, releases, "^", "#333333", -0.36, 14)
    _points(ax, deadlines, "|", "#333333", 0.0, 90)
    _points(ax, misses, "x", MISS, 0.0, 40)
    ax.set_yticks([at[name] for name in names], labels=list(names), fontsize=8)
    ax.set_ylim(-0.7, len(names) - 0.3)
    ax.grid(axis="x", alpha=0.3)
    ax.legend(handles=_legend(), loc="lower right", bbox_to_anchor=(1, 1), fontsize=7, ncols=7, frameon=False)


def _points(ax: Axes, points: Sequence[tuple[float, int]], marker: str, color: str, shift: float, size: int) -> None:
    if points:
        ax.scatter([x for x, _ in points], [y + shift for _, y in points], marker=marker, c=color, s=size, zorder=3)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    patches = [
        Patch(color=color, label=label)
        for color, label in ((LOOP, "loop"), (EARLY, "early"), (BEST_EFFORT, "best effort, in slack"), (MISS, "missed"))
    ]
    marks = [
        Line2D([], [], marker=marker, color=color, linestyle="", label=label)
        for marker, color, label in (
            ("^", "#333333", "release"), ("|", "#333333", "deadline"), ("x", MISS, "missed deadline"),
        )
    ]  # fmt: skip
    return patches + marks
