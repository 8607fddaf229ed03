"""The machine under a running daemon: looked at once a second, compared with how it was when it was certified.

Called by the supervisor, never from an executor. Reading is done in a thread, since NVML may block for a while; what
changed is told to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from taktd.daemon.doctor.finding import Subject
from taktd.daemon.doctor.gpu import GpuReadings
from taktd.daemon.doctor.power import watched_cores
from taktd.daemon.doctor.preconditions import SAMPLE_PERIOD_NS, Lost, Preconditions, capture, lost
from taktd.daemon.doctor.tree import Tree
from taktd.daemon.logbook import log

Changed = Callable[[str, tuple[Lost, ...]], None]
ReadGpus = Callable[[], GpuReadings]
_PERIOD_S: Final = SAMPLE_PERIOD_NS / 1e9
# A GPU whose clocks float goes up and down with each job: what was lost counts as back only after it stayed so long.
SETTLED_LOOKS: Final = 10


def _names(lost: tuple[Lost, ...]) -> set[tuple[str, str]]:
    return {(loss.name, loss.subject) for loss in lost}


class MachineWatch:
    """Says for each device what of its certificate's ground was lost, each time that changes."""

    def __init__(
        self, cores: Mapping[str, frozenset[int]], changed: Changed, *, gpus: Mapping[str, str] | None = None,
        tree: Tree | None = None, read_gpus: ReadGpus | None = None,
    ) -> None:  # fmt: skip
        """cores: of each device, empty where it isn't pinned. gpus: what the configuration calls the GPU of each device
        that has one. read_gpus: asks NVML, and is called only while some device has one; None: it can't be asked."""
        self._changed = changed
        self._tree = tree or Tree()
        self._everywhere = watched_cores(self._tree, Subject())
        self._read_gpus = read_gpus
        self._gpu_problem = ""
        self._certified: dict[str, Preconditions] = {}
        self._lost: dict[str, tuple[Lost, ...]] = {}
        self._good_looks: dict[str, int] = {}
        self.follow(cores, gpus)

    def follow(self, cores: Mapping[str, frozenset[int]], gpus: Mapping[str, str] | None = None) -> None:
        """Another configuration: look at these devices from now on."""
        self._cores = {device: own or self._everywhere for device, own in cores.items()}
        self._gpus = dict(gpus or {})
        self._lost = {device: self._lost.get(device, ()) for device in cores}
        self._certified = {device: state for device, state in self._certified.items() if device in cores}

    def _capture(self, *, ask_gpus: bool) -> dict[str, Preconditions]:
        cores, gpus = dict(self._cores), self._gpus  # a configuration may be taken over meanwhile, in another thread
        readings = self._read_gpus() if ask_gpus and gpus and self._read_gpus is not None else None
        if readings is not None and readings.problem != self._gpu_problem:
            self._gpu_problem = readings.problem
            if readings.problem:
                log("warning", f"clocks and users of {', '.join(gpus)} can't be watched: NVML: {readings.problem}")
        return {device: capture(self._tree, own, readings, gpus.get(device, "")) for device, own in cores.items()}

    def certify(self) -> None:
        """Take the machine as it is now for the ground of all certificates. Of GPUs the next look is the ground: NVML
        may block, and is asked once a second only."""
        self._certified = self._capture(ask_gpus=False)

    def look(self, now: Mapping[str, Preconditions] | None = None) -> None:
        """Compare once, and tell what changed since the last look."""
        for device, state in (self._capture(ask_gpus=True) if now is None else now).items():
            if device not in self._cores:
                continue  # gone while it was looked at
            ground = self._certified.get(device)
            if ground is not None and state.gpus and not ground.gpus:
                ground = self._certified[device] = replace(ground, gpus=state.gpus, gpu_driver=state.gpu_driver)
            found = lost(ground, state) if ground is not None else ()
            before = self._lost.get(device, ())
            found += self._unsettled(device, [loss for loss in before if _names((loss,)).isdisjoint(_names(found))])
            if _names(found) != _names(before):
                self._lost[device] = found
                self._changed(device, found)

    def _unsettled(self, device: str, back: list[Lost]) -> tuple[Lost, ...]:
        """Of what is no longer lost, what has not been so for long enough. Counts this look."""
        waiting = tuple(loss for loss in back if loss.subject.startswith("gpu"))
        self._good_looks[device] = self._good_looks.get(device, 0) + 1 if waiting else 0
        return waiting if self._good_looks[device] < SETTLED_LOOKS else ()

    async def run(self) -> None:
        """Look for ever, once a second."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            self.look(await asyncio.to_thread(self._capture, ask_gpus=True))
