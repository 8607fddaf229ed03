"""What a freshly built engine answered to a known input, and what that took: facts for its manifest.

Two builds of one model may differ in their tactics and so in their last digits; this is where one can see it. Whether
an engine is right is decided elsewhere (``taktd.engines.verify``), each time before it serves.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any, Final

import numpy as np

from taktd.engines.engine import EngineSpec, Tensor, WarmEngine, release
from taktd.engines.measure import measure
from taktd.engines.memory import private_bytes, values_at

__all__ = ["SEED", "facts_of"]

SEED: Final = 1
SHOWN_VALUES: Final = 8
MEASURE_NS: Final = 500_000_000


def facts_of(engine: WarmEngine) -> dict[str, Any]:
    """``{"golden": {seed, outputs: {name: {sha256, first}}}, "measured": cost}``. Raises ``EngineFailure``.

    Inputs: normal noise for floats, zeros else, since integers are often indices.
    """
    spec = engine.spec
    memory = [private_bytes(t.bytes) for t in (*spec.inputs, *spec.outputs)]
    addresses = [m.ctypes.data for m in memory]
    tensors = [Tensor(a, t.dims, shared=False) for a, t in zip(addresses, (*spec.inputs, *spec.outputs), strict=True)]
    random = np.random.default_rng(SEED)
    for address, tensor in zip(addresses, spec.inputs, strict=False):
        values = values_at(address, tensor.dtype, tensor.dims)
        floating = np.issubdtype(values.dtype, np.floating)
        values[...] = random.standard_normal(values.shape) if floating else 0
    run = engine.bind(tensors[: len(spec.inputs)], tensors[len(spec.inputs) :])
    try:
        run()
        golden = {"seed": SEED, "outputs": _outputs(spec, addresses[len(spec.inputs) :])}
        cost = measure(
            run, cap_ns=MEASURE_NS, clock=time.monotonic_ns, pause=lambda ns: time.sleep(ns / 1e9), switches=lambda: 0
        )
    finally:
        release(run)
    return {"golden": golden, "measured": cost.as_json()}


def _outputs(spec: EngineSpec, addresses: list[int]) -> dict[str, Any]:
    found = {}
    for address, tensor in zip(addresses, spec.outputs, strict=True):
        values = values_at(address, tensor.dtype, tensor.dims)
        first = [float(v) if np.isfinite(v) else str(v) for v in values.reshape(-1)[:SHOWN_VALUES].real]
        found[tensor.name] = {"sha256": hashlib.sha256(values.tobytes()).hexdigest(), "first": first}
    return found
