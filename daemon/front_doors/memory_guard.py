"""The bound of the gateway's memory that no limit of a protocol sets. Part of the gateway.

libzmq keeps the frames of a message until its last one has come, however many there are, and tells nobody; gRPC keeps
what it has read of messages that are not whole. What limits can refuse is refused with a reason, one by one; beyond
them there is this: a gateway that has grown past everything that its limits allow ends, and is started anew, empty. Its
clients connect again; loops have their own lanes and don't notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taktd.daemon.own_process import resident_bytes

if TYPE_CHECKING:
    from taktd.daemon.config.configuration import Limits

LOOK_S: Final = 0.05
MESSAGES_MAX: Final = 4  # of the largest size, on their way in or out outside of `job_memory`
OWN_BYTES_MAX: Final = 192 << 20  # growth of the process itself: connections, streams, buffers, the allocator's holes


class MemoryGuard:
    """Says when it is too much."""

    def __init__(self, limits: Limits, at_start_bytes: int) -> None:
        self.bytes_max = at_start_bytes + limits.job_memory_bytes + MESSAGES_MAX * limits.message_bytes + OWN_BYTES_MAX

    def complaint(self) -> str:
        """A sentence for the log; "" while all is well."""
        found = resident_bytes()
        if found <= self.bytes_max:
            return ""
        return (
            f"the gateway has {found >> 20} MiB of memory, its limits come to {self.bytes_max >> 20} MiB: a client "
            "sends messages without an end, or more of them than can be kept; it starts anew, clients connect again"
        )
