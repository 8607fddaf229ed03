"""``python -m taktd.daemon.selftest.sacrifice INDEX trap|serve``: a process that breaks its CUDA context, or uses it.

``trap``: a kernel traps; the context must answer with a sticky fault, at once and for good, as an executor's would
whose engine reads outside its tensors. ``serve``: started afterwards, it must find the device usable. Prints JSON; exit
0 if it was so, 1 with a line on standard error if not.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

from taktd.drivers import _cuda
from taktd.drivers.cuda import CudaDevice, translated
from taktd.drivers.cuda_memory import DirectMemory
from taktd.drivers.fault import DeviceFault, FaultKind

SECOND = 1_000_000_000


def main() -> int:
    index, mode = int(sys.argv[1]), sys.argv[2]
    start = time.monotonic_ns()
    device = CudaDevice(index, lambda _: DirectMemory())
    open_ms = (time.monotonic_ns() - start) / 1e6
    host, stream = device.allocate_host(64), device.stream()
    stream.fill(host.address, 7, 64)
    stream.synchronize(5 * SECOND)
    if ctypes.c_uint8.from_address(host.host_address).value != 7:
        print("the device did not write what it was told to", file=sys.stderr)
        return 1
    if mode == "serve":
        print(json.dumps({"open_ms": open_ms}))
        return 0
    with translated():
        _cuda.trap(stream.handle)
    start = time.monotonic_ns()
    seen = []
    for _ in range(2):
        try:
            stream.synchronize(5 * SECOND)
        except DeviceFault as fault:
            seen.append(fault)
    if len(seen) != 2 or not all(f.sticky and f.kind is FaultKind.LAUNCH_FAILED for f in seen):
        print(f"a trap should be a sticky launch failure, twice; found {[str(f) for f in seen]}", file=sys.stderr)
        return 1
    print(json.dumps({"open_ms": open_ms, "noticed_us": (time.monotonic_ns() - start) / 1000, "code": seen[0].code}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
