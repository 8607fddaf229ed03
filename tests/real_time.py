"""Whether this process may have real-time priorities: what needs them is skipped elsewhere, with that reason."""

from __future__ import annotations

import os


def may_have_real_time() -> bool:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True
