"""Two devices of one configuration that turn out to be one GPU, named differently: by UUID and by index, say.

The configuration alone can't show that; executors tell which card they have opened. Used at start, when they have, and
before a change, so that nothing is loaded beside the loops of a card that has an executor already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from taktd.daemon.supervision.member import Member

__all__ = ["twins"]


def twins(members: Iterable[Member], wanted: Mapping[str, str]) -> str:
    """Why these GPUs (what the configuration calls them, by device) can't be served beside these executors' others;
    "" where they can, or where it is not known yet which card that is."""
    cards = {member.home: member.gpu for member in members if member.gpu is not None}
    if not cards or not wanted:
        return ""
    from taktd.drivers.cuda_probe import CudaInfo
    from taktd.drivers.cuda_selection import twins_among  # not loaded where there is no GPU

    def card(found: dict[str, Any]) -> CudaInfo:
        return CudaInfo(**{**found, "compute": tuple(found["compute"])})

    return twins_among({name: card(found) for name, found in cards.items()}, wanted)
