"""Which device a configuration means: by UUID, PCI address or index.

A UUID stays with the card; an index may be another card's after a reboot. Indices count by PCI address, as nvidia-smi's
do (``taktd.drivers.cuda.load_driver``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from taktd.drivers.cuda_probe import CudaInfo
from taktd.drivers.fault import DeviceFault, FaultKind

__all__ = ["matches", "select", "twins_among"]

_UUID_PREFIX = re.compile(r"^(?:gpu|mig)-")  # a slice of a card has a UUID of its own, and CUDA tells that one
_PCI = re.compile(r"^(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])$", re.IGNORECASE)


def _listed(devices: Sequence[CudaInfo]) -> str:
    return "; ".join(f"{d.index}: {d.uuid} ({d.name}, PCI {d.pci})" for d in devices) or "none"


def _pci(text: str) -> tuple[int, int, int, int] | None:
    found = _PCI.match(text)
    if not found:
        return None
    domain, bus, slot, function = found.groups()
    return int(domain or "0", 16), int(bus, 16), int(slot, 16), int(function)


def matches(device: CudaInfo, wanted: str) -> bool:
    """Whether ``wanted`` names this device."""
    if wanted.isdigit():
        return device.index == int(wanted)
    if _PCI.match(wanted):
        return _pci(device.pci) == _pci(wanted)
    plain, of_device = (_UUID_PREFIX.sub("", text.lower()).replace("-", "") for text in (wanted, device.uuid))
    return len(plain) >= 8 and of_device.startswith(plain)


def select(devices: Sequence[CudaInfo], wanted: str) -> CudaInfo:
    """The device that ``wanted`` names: "GPU-…" (or at least 8 digits of it), "0000:01:00.0", or "0".

    Raises ``DeviceFault`` NO_DEVICE, listing what there is.
    """
    found = [d for d in devices if matches(d, wanted)]
    if len(found) == 1:
        return found[0]
    raise DeviceFault(
        FaultKind.NO_DEVICE,
        f"{'no' if not found else 'more than one'} CUDA device is {wanted!r}; there are {_listed(devices)}",
        hint="Name it by its UUID: an index can change at a reboot.",
    )


def twins_among(opened: Mapping[str, CudaInfo], wanted: Mapping[str, str]) -> str:
    """Two names of a configuration for one card, in words; "" where there are none.

    ``opened``: cards by the name whose executor has opened them; ``wanted``: what a name calls its card.
    """
    for name, selector in wanted.items():
        for other, card in opened.items():
            own = opened.get(name)
            if other != name and (own.uuid == card.uuid if own else matches(card, selector)):
                return (
                    f"devices {name} and {other} are the same GPU: {name} is {selector!r}, {other} is {card.uuid} "
                    f"({card.name}, PCI {card.pci}, index {card.index}); allowed is one device for one GPU\n"
                    f"  to do: remove one of them, and move its loops to the other"
                )
    return ""
