"""Room on a GPU before another executor loads there: its loops go to their stand-ins first.

Two programs' kernels that share a GPU have no worst case, and building an engine or warming it is such a program. So a
change hands the loops of each GPU that it touches to their stand-ins, announced, before the new executor starts; they
come back with the new one, or with the old one if the change is refused. Where a loop has no stand-in that is ready,
the change is refused if the loops were promised anything; else it is loaded beside them, and nothing is built there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from taktd.daemon.logbook import log
from taktd.daemon.supervision.devices import Devices, PassOverFailed
from taktd.daemon.supervision.member import Member
from taktd.daemon.supervision.served_device import ServedDevice

__all__ = ["NoRoom", "make_room"]

CAUSE: Final = "loading"


class NoRoom(Exception):
    """Loops are promised something on this GPU, and nobody can take them meanwhile. The message says what to do."""


async def make_room(devices: Devices, names: Iterable[str]) -> None:
    """Lets stand-ins serve the loops of these devices, where they are GPUs. Raises NoRoom; some may have passed over.

    From then on devices are changing, so that nobody gives the loops back: the caller says when that is over.
    """
    for name in names:
        device = devices.get(name)
        if device is None or device.member.plan.device.gpu is None or not device.member.plan.loops:
            continue
        if device.serving is None or device.serving.home != name:
            continue
        stand_in = _ready(devices, device)
        if stand_in is not None:
            log("notice", f"{name}: its loops go to {stand_in} while another engine is loaded there", device=name)
            devices.changing = True
            try:
                await devices.pass_over(device, stand_in, CAUSE)
            except PassOverFailed as failed:
                raise NoRoom(f"device {name}: its loops could not go to their stand-in: {failed}") from None
        elif device.certified:
            without = ", ".join(loop.name for loop in device.member.plan.loops)
            raise NoRoom(
                f"device {name}: nothing may be loaded on a GPU beside loops that are promised their deadlines, and no "
                f"stand-in is ready for all of {without}\n"
                f"  to do: give them `fallback: [cpu0]` (a device with driver: cpu), or restart taktd"
            )
        else:
            log("warning", f"{name}: another engine is loaded beside its loops, which may be late", device=name)


def _ready(devices: Devices, device: ServedDevice) -> Member | None:
    """Who can take all its loops now."""
    wanted = {loop.name for loop in device.member.plan.loops}
    for member in devices.line(device):
        served = {entry.loop.name for entry in member.plan.standby_of(device.name)}
        if member.home != device.name and wanted <= served and member.ready and device.lanes.synced(member):
            return member
    return None
