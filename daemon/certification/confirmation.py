"""Whether C, measured before, holds in the first seconds of serving.

Measuring runs an engine alone; serving brings clients, other engines' code in the caches, a clock that went down. So
the first jobs of each loop are compared with what was promised for them: too many that ran beyond C, and the device is
not certified any more. Pure; served_device.py brings the counters.
"""

from __future__ import annotations

from typing import Final

from taktd.daemon.config.durations import PPM, format_duration, format_ppm

__all__ = ["RUNS", "confirm"]

RUNS: Final = 1_000  # jobs of a loop after which its C is confirmed
OVERRUNS_MIN: Final = 10  # fewer prove nothing: a hypervisor takes a core away now and then
OVERRUN_PPM_MAX: Final = 10_000  # C is p99.9 × margin: ten times as many overruns as p99.9 alone allows


def confirm(loop: str, cost_ns: int, runs: int, overruns: int) -> str | None:
    """None: too early to say; "": confirmed; else why C does not hold, for people."""
    if overruns >= OVERRUNS_MIN and overruns * PPM > runs * OVERRUN_PPM_MAX:
        share = format_ppm(overruns * PPM // runs)
        return (
            f"{overruns} of the first {runs} jobs of loop {loop} (a share of {share}) took longer than the "
            f"{format_duration(cost_ns)} it was admitted for"
        )
    return "" if runs >= RUNS else None
