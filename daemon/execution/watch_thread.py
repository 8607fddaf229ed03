"""Where the watch runs: the thread of the C core that answers hopeless jobs while the executor is inside an engine.

It must get a core while the executor's thread holds its own: on the same one, a priority above it. Not on another one:
when the executor dies, the last of its threads frees all its memory, some 10 ms, and at that priority nobody there
could do anything meanwhile, not even its stand-in. Without real-time rights it is the other way round: nobody has to
give way, and another core, if there is one, is free sooner. Called once, before the executor serves.
"""

from __future__ import annotations

from collections.abc import Iterable

from taktd.daemon.execution.rights import Rights
from taktd.ipc import _core

__all__ = ["start_watch", "watch_cores"]


def watch_cores(usable: Iterable[int], executors: Iterable[int], *, real_time: bool) -> list[int]:
    """The cores to run on: the executor's; without real-time rights the others, where there are any."""
    own = sorted(executors)
    return own if real_time else sorted(set(usable) - set(own)) or own


def start_watch(server: _core.Server, rights: Rights, usable: Iterable[int]) -> None:
    """usable: the cores that this process might use before it was pinned. What is refused becomes a note of rights."""
    real_time = rights.policy == "fifo"
    priority = rights.priority + 1 if real_time else 0
    try:
        server.watch(priority, watch_cores(usable, rights.affinity, real_time=real_time))
    except OSError as error:
        cores = watch_cores(usable, rights.affinity, real_time=False)
        rights.notes.append(
            f"the watch over long runs has no priority {priority} ({error.strerror}): while a job "
            "runs, the answer to another that can't make its deadline any more may come late; raise RLIMIT_RTPRIO "
            "above the executor's priority"
        )
        server.watch(0, cores)
