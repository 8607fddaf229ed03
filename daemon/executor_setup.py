"""What an executor does once, before it serves: rights, engines, warm-up, measurement.

Everything slow is here. When it is over nothing is loaded or imported any more, garbage collection is off and what
exists
is frozen out of its sight.
"""

from __future__ import annotations

import gc
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from taktd.daemon.dispatch_cost import dispatch_cost_ns
from taktd.daemon.rights import Rights, take_rights
from taktd.engines.engine import EngineSpec, WarmEngine
from taktd.engines.inspect import specs_from_json
from taktd.engines.measure import CostJson, measure
from taktd.engines.onnx_cpu import OnnxCpuEngine
from taktd.ipc import _core

__all__ = ["Prepared", "freeze", "prepare"]

MEASURE_CAP_NS: Final = 2_000_000_000  # an engine and batch size


@dataclass(slots=True)
class Prepared:
    rights: Rights
    engines: dict[str, WarmEngine]
    measured: dict[str, dict[int, CostJson]]  # model → batch size → cost; only what was measured now
    dispatch_ns: int

    def as_json(self) -> dict[str, Any]:
        return {
            "rights": self.rights.as_json(),
            "measured": self.measured,
            "dispatch_ns": self.dispatch_ns,
            "rss_bytes": _resident_bytes(),
            "records": True,
        }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def prepare(plan: dict[str, Any]) -> Prepared:
    """Loads, warms and (where the plan has no stored measurement) measures every model of the plan, under the rights it
    will run with. Raises ``ModelRefused`` or ``EngineFailure``."""
    # The engines' own threads and arenas are made under the affinity they keep.
    rights = take_rights(plan["cores"], plan["priority"])
    engines = {model["name"]: _load(model) for model in plan["models"]}
    measured = {
        model["name"]: _measure(engines[model["name"]], plan.get("measure_cap_ns", MEASURE_CAP_NS))
        for model in plan["models"]
        if not model.get("measured")
    }
    dispatch_ns = plan.get("dispatch_ns") or dispatch_cost_ns()
    return Prepared(rights, engines, measured, dispatch_ns)


def freeze() -> None:
    """From here on the executor creates no garbage cycles; what exists is kept out of the collector's sight."""
    gc.collect()
    gc.freeze()
    gc.disable()


def _load(model: dict[str, Any]) -> WarmEngine:
    inspection = model["inspection"]
    spec = EngineSpec(
        model["name"],
        model["path"],
        specs_from_json(inspection["inputs"]),
        specs_from_json(inspection["outputs"]),
        model.get("max_batch", 1),
    )
    return OnnxCpuEngine(spec).warm()


def _measure(engine: WarmEngine, cap_ns: int) -> dict[int, CostJson]:
    costs: dict[int, CostJson] = {}
    for size in range(1, engine.spec.max_batch + 1):
        batch = engine.batch(size)
        found = measure(
            batch.run_bound,
            cap_ns=cap_ns,
            clock=_core.now,
            pause=lambda ns: time.sleep(ns / 1e9),
            switches=_core.switched_out,
        )
        costs[size] = found.as_json()
    return costs
