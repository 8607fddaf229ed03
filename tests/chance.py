"""Random choices of tests: drawn from TAKTD_SEED, else anew each time, and told, so that a run can be had again."""

from __future__ import annotations

import os
import random


def seed(otherwise: int | None = None) -> int:
    """The seed of this run, printed. otherwise: where TAKTD_SEED is not set; None: a new one each time."""
    given = os.environ.get("TAKTD_SEED")
    if given is not None:
        found = int(given)
    elif otherwise is not None:
        found = otherwise
    else:
        found = random.SystemRandom().randrange(1, 1 << 32)
    print(f"TAKTD_SEED={found}")
    return found
