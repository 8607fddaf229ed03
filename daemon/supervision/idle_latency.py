"""Keeping the processor out of slow idle states: /dev/cpu_dma_latency, held open with a bound in microseconds.

The kernel honours the bound for as long as the descriptor is open, on all cores. The drop-in cpu-dma-latency.conf gives
the daemon the device and $TAKTD_CPU_DMA_LATENCY_US; without the variable nothing is held. Called by the supervisor.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Final

from taktd.daemon.logbook import log

DEVICE: Final = "/dev/cpu_dma_latency"
VARIABLE: Final = "TAKTD_CPU_DMA_LATENCY_US"
MICROSECONDS_MAX: Final = 2_000_000_000  # the kernel's own default, which bounds nothing


def hold(environment: Mapping[str, str], device: str = DEVICE) -> int | None:
    """The descriptor that holds the bound until it is closed; None where none is asked for or it can't be had."""
    text = environment.get(VARIABLE, "")
    if not text:
        return None
    if not text.isdigit() or int(text) > MICROSECONDS_MAX:
        log("warning", f"{VARIABLE}={text!r} is no number of us up to {MICROSECONDS_MAX}: nothing is held")
        return None
    try:
        descriptor = os.open(device, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        log("warning", f"{device} can't be held: {(error.strerror or str(error)).lower()}; idle states stay")
        return None
    try:
        os.write(descriptor, struct.pack("=i", int(text)))
    except OSError as error:
        os.close(descriptor)
        log("warning", f"{device} does not take {text} us: {(error.strerror or str(error)).lower()}")
        return None
    return descriptor
