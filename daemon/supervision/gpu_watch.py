"""GPUs that break beside any CUDA call: looked after once a second; who owns one that can't be trusted is ended.

NVML tells XIDs by events (gpu_events.py), the kernel's log where it may be read. After a fatal one the device's
executor is fenced: its loops go on from their stand-ins at once, as after any death. It comes back after it has found
the card usable again and proven its engines (PROVING_RUNS). Reading is done in a thread, since NVML may block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from taktd.daemon.doctor.gpu import find_nvml
from taktd.daemon.logbook import log
from taktd.daemon.supervision.devices import Devices
from taktd.daemon.supervision.gpu_events import XidEvent, XidWatch
from taktd.daemon.supervision.kernel_log import KernelLog
from taktd.ipc import _core

__all__ = ["GpuWatch"]

PERIOD_S: Final = 1.0  # NVML's calls take locks in the driver: no more often
AGAIN_NS: Final = 10_000_000_000  # until NVML is tried again after it has failed
SAME_NS: Final = 5_000_000_000  # both sources tell of one XID: it is acted upon once


class GpuWatch:
    """Asks nobody anything while no executor has opened a GPU."""

    def __init__(
        self, devices: Devices, *, find: Callable[[], Any | None] = find_nvml, kernel_log: KernelLog | None = None
    ) -> None:
        self._devices = devices
        self._find = find
        self._kernel_log = kernel_log
        self._cards: dict[str, dict[str, Any]] = {}  # by device; kept while its executor is dead
        self._watch: XidWatch | None = None
        self._watched: tuple[str, ...] = ()
        self._due_ns = 0
        self._problem = ""
        self._acted: dict[tuple[str, int], int] = {}

    async def run(self) -> None:
        """Look for ever."""
        try:
            while True:
                await asyncio.sleep(PERIOD_S)
                await self.look()
        finally:
            if self._watch is not None:
                self._watch.close()
            if self._kernel_log is not None:
                self._kernel_log.close()

    async def look(self) -> None:
        """One look, and what follows from it."""
        self._cards = {name: device.member.gpu or self._cards.get(name, {}) for name, device in self._devices.items()}
        uuids = tuple(sorted({card["uuid"] for card in self._cards.values() if card}))
        if not uuids:
            return
        for event in await asyncio.to_thread(self._collect, uuids):
            self._act(event)

    # ---- in the thread ----

    def _collect(self, uuids: tuple[str, ...]) -> list[XidEvent]:
        if self._kernel_log is None:
            self._kernel_log = KernelLog()
        by_pci = {card["pci"].lower().rpartition(".")[0]: card["uuid"] for card in self._cards.values() if card}
        found = [XidEvent(by_pci[pci], xid) for pci, xid in self._kernel_log.xids() if pci in by_pci]
        watch = self._nvml(uuids)
        if watch is not None:
            found += watch.poll()
            self._tell(watch.problem)
        return found

    def _nvml(self, uuids: tuple[str, ...]) -> XidWatch | None:
        """Listening to these cards, None while NVML can't be asked."""
        broken = self._watch is not None and bool(self._watch.problem)
        if self._watch is not None and self._watched == uuids and not broken:
            return self._watch
        if broken and _core.now() < self._due_ns:
            return None
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        module = self._find()
        if module is None:
            self._tell("nvidia-ml-py is not installed")
            return None
        self._watch, self._watched, self._due_ns = XidWatch(module, uuids), uuids, _core.now() + AGAIN_NS
        return self._watch

    def _tell(self, problem: str) -> None:
        if problem == self._problem:
            return
        self._problem = problem
        if problem:
            where = self._kernel_log.problem if self._kernel_log is not None else ""
            instead = f", and the kernel's log can't be read ({where})" if where else "; the kernel's log is read"
            log("warning", f"faults that GPUs report beside any job are not heard of: {problem}{instead}")

    # ---- in the event loop ----

    def _act(self, event: XidEvent) -> None:
        now_ns = _core.now()
        key = (event.uuid, event.xid)
        if now_ns - self._acted.get(key, -SAME_NS) < SAME_NS:
            return
        self._acted[key] = now_ns
        for name, card in self._cards.items():
            if card.get("uuid") != event.uuid or name not in self._devices:
                continue
            if not event.fatal:
                log("warning", f"{name}: {event.text}", device=name, cause=f"XID {event.xid}")
                continue
            log(
                "error", f"{name}: {event.text}; its executor is ended, its loops go to their stand-ins",
                event="gpu-fault", device=name, cause=f"XID {event.xid}",
            )  # fmt: skip
            for member in list(self._devices.members):
                if member.home == name and member.ready:
                    member.fence(event.text)
