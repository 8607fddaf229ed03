"""A child process of an executor that is none itself: without the real-time rights it inherited, gone with its parent.

Called first thing by the probe and by the builder of engines, which an executor starts after it has taken its rights.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

__all__ = ["become_ordinary"]

PR_SET_PDEATHSIG: Final = 1


def become_ordinary(parent: int) -> None:
    """Ends this process at once if ``parent`` is gone already. Cores stay those of the parent, which waits."""
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except OSError:
        pass  # nothing may be changed here; then there were no real-time rights either
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
