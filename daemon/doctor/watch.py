"""The machine under a running daemon: looked at once a second, compared with how it was when it was certified.

Called by the supervisor, never from an executor. Reading is done in a thread, since NVML may block for a while; what
changed is told to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
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
Opened = Callable[[], Mapping[str, str]]
_PERIOD_S: Final = SAMPLE_PERIOD_NS / 1e9
# A GPU whose clocks float goes up and down with each job: what was lost counts as back only after it stayed so long.
SETTLED_LOOKS: Final = 10


def _names(lost: tuple[Lost, ...]) -> set[tuple[str, str]]:
    return {(loss.name, loss.subject) for loss in lost}


class MachineWatch:
    """Says for each device what of its certificate's ground was lost, each time that changes."""

    def __init__(
        self, cores: Mapping[str, frozenset[int]], changed: Changed, *, opened: Opened = dict,
        tree: Tree | None = None, read_gpus: ReadGpus | None = None,
    ) -> None:  # fmt: skip
        """cores: of each device, empty where it isn't pinned. opened: the UUID of the GPU that each device's executor
        has opened, which is what no name in a configuration says for sure: an index is CUDA's there, and NVML's here.
        read_gpus: asks NVML, and is called only once some device has a GPU; None: it can't be asked."""
        self._changed = changed
        self._tree = tree or Tree()
        self._everywhere = watched_cores(self._tree, Subject())
        self._opened = opened
        self._read_gpus = read_gpus
        self._gpus: dict[str, str] = {}  # UUID by device; kept while its executor is dead
        self._gpu_problem = ""
        self._certified: dict[str, Preconditions] = {}
        self._lost: dict[str, tuple[Lost, ...]] = {}
        self._good_looks: dict[str, int] = {}
        self.follow(cores)

    def follow(self, cores: Mapping[str, frozenset[int]]) -> None:
        """Another configuration: look at these devices from now on."""
        self._cores = {device: own or self._everywhere for device, own in cores.items()}
        self._gpus = {device: uuid for device, uuid in self._gpus.items() if device in cores}
        self._lost = {device: self._lost.get(device, ()) for device in cores}
        self._certified = {device: state for device, state in self._certified.items() if device in cores}

    def _subjects(self) -> tuple[dict[str, frozenset[int]], dict[str, str]]:
        """Cores and GPU of each device; a configuration may be taken over while they are looked at in a thread."""
        self._gpus = {
            device: uuid for device, uuid in (self._gpus | dict(self._opened())).items() if device in self._cores
        }
        return dict(self._cores), self._gpus

    def _capture(
        self, cores: Mapping[str, frozenset[int]], gpus: Mapping[str, str], *, ask_gpus: bool
    ) -> dict[str, Preconditions]:
        readings = self._read_gpus() if ask_gpus and gpus and self._read_gpus is not None else None
        if readings is not None and readings.problem != self._gpu_problem:
            self._gpu_problem = readings.problem
            if readings.problem:
                log("warning", f"clocks and users of {', '.join(gpus)} can't be watched: NVML: {readings.problem}")
        return {device: capture(self._tree, own, readings, gpus.get(device, "")) for device, own in cores.items()}

    def certify(self, measured: Collection[str] = ()) -> None:
        """Take the machine as it is now for the ground of the certificates of devices that were just measured, or have
        none yet. For the others the ground stays: what was lost is not back because somebody reloaded.

        Of GPUs the next look is the ground: NVML may block, and is asked once a second only."""
        now = self._capture(*self._subjects(), ask_gpus=False)
        self._certified = now | {name: old for name, old in self._certified.items() if name not in measured}

    def look(self, now: Mapping[str, Preconditions] | None = None) -> None:
        """Compare once, and tell what changed since the last look."""
        for device, state in (self._capture(*self._subjects(), ask_gpus=True) if now is None else now).items():
            if device not in self._cores:
                continue  # gone while it was looked at
            ground = self._certified.get(device)
            if ground is not None and state.gpus and not ground.gpus:
                ground = self._certified[device] = replace(ground, gpus=state.gpus, gpu_driver=state.gpu_driver)
            if ground is not None and not ground.gpu_library:  # its GPU was opened after the certificate was given
                ground = self._certified[device] = replace(ground, gpu_library=state.gpu_library)
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
            self.look(await asyncio.to_thread(self._capture, *self._subjects(), ask_gpus=True))
