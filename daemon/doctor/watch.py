"""The machine under a running daemon: looked at once a second, compared with how it was when it was certified.

Called by the supervisor, never from an executor. Reading is done in a thread, since NVML may block for a while; what
changed is told to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from taktd.daemon.doctor.finding import Subject
from taktd.daemon.doctor.gpu import GpuReadings
from taktd.daemon.doctor.power import watched_cores
from taktd.daemon.doctor.preconditions import SAMPLE_PERIOD_NS, Lost, Preconditions, capture, lost
from taktd.daemon.doctor.tree import Tree

Changed = Callable[[str, tuple[Lost, ...]], None]
ReadGpus = Callable[[], GpuReadings]
_PERIOD_S: Final = SAMPLE_PERIOD_NS / 1e9


def _names(lost: tuple[Lost, ...]) -> set[tuple[str, str]]:
    return {(loss.name, loss.subject) for loss in lost}


class MachineWatch:
    """Says for each device what of its certificate's ground was lost, each time that changes."""

    def __init__(
        self, cores: Mapping[str, frozenset[int]], changed: Changed, *, tree: Tree | None = None,
        read_gpus: ReadGpus | None = None,
    ) -> None:  # fmt: skip
        """cores: of each device, empty where it isn't pinned. read_gpus: asks NVML; None where no device is a GPU."""
        self._changed = changed
        self._tree = tree or Tree()
        everywhere = watched_cores(self._tree, Subject())
        self._everywhere = everywhere
        self._cores = {device: own or everywhere for device, own in cores.items()}
        self._read_gpus = read_gpus
        self._certified: dict[str, Preconditions] = {}
        self._lost: dict[str, tuple[Lost, ...]] = dict.fromkeys(cores, ())

    def follow(self, cores: Mapping[str, frozenset[int]]) -> None:
        """Another configuration: look at these devices from now on."""
        self._cores = {device: own or self._everywhere for device, own in cores.items()}
        self._lost = {device: self._lost.get(device, ()) for device in cores}
        self._certified = {device: state for device, state in self._certified.items() if device in cores}

    def _capture(self) -> dict[str, Preconditions]:
        readings = self._read_gpus() if self._read_gpus is not None else None
        return {device: capture(self._tree, cores, readings) for device, cores in self._cores.items()}

    def certify(self) -> None:
        """Take the machine as it is now for the ground of all certificates."""
        self._certified = self._capture()

    def look(self, now: Mapping[str, Preconditions] | None = None) -> None:
        """Compare once, and tell what changed since the last look."""
        for device, state in (self._capture() if now is None else now).items():
            if device not in self._cores:
                continue  # gone while it was looked at
            found = lost(self._certified[device], state) if device in self._certified else ()
            if _names(found) != _names(self._lost.get(device, ())):
                self._lost[device] = found
                self._changed(device, found)

    async def run(self) -> None:
        """Look for ever, once a second."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            self.look(await asyncio.to_thread(self._capture))
