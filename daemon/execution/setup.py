"""What an executor does once, before it serves: rights, engines, warm-up, verification, measurement.

Everything slow is here. When it is over nothing is loaded or imported any more, garbage collection is off and what
exists is frozen out of its sight.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from taktd.daemon.execution.dispatch_cost import dispatch_cost_ns
from taktd.daemon.execution.rights import Rights, move_to, take_rights
from taktd.daemon.execution.witness import open_witness
from taktd.daemon.own_process import resident_bytes, threads
from taktd.engines.engine import BuiltEngine, EngineSpec, WarmEngine
from taktd.engines.errors import ModelRefused
from taktd.engines.factory import computes_the_model, engine_opener
from taktd.engines.finite import guarded
from taktd.engines.inspect import specs_from_json
from taktd.engines.measure import DUTY_BESIDE_PERCENT, DUTY_PERCENT, CostJson, measure
from taktd.engines.proof import proof
from taktd.engines.verify import Expectation, Rules, expect, verify
from taktd.ipc import _core

__all__ = ["Prepared", "freeze", "prepare"]

MEASURE_CAP_NS: Final = 2_000_000_000  # an engine and batch size


@dataclass(slots=True)
class Prepared:
    rights: Rights
    engines: dict[str, WarmEngine]
    measured: dict[str, dict[int, CostJson]]  # model → batch size → cost; as told where it was, else measured now
    dispatch_ns: int
    helpers: set[int] = field(default_factory=set)  # threads of engines that need the rights it will serve with
    verified: dict[str, dict[str, Any]] = field(default_factory=dict)  # model → what it was compared on, how far off
    notes: list[str] = field(default_factory=list)
    gpu: dict[str, Any] | None = None  # which card it is
    told: list[dict[str, Any]] = field(default_factory=list)  # messages for the supervisor, sent outside the path

    def flagged(self, text: str) -> None:
        """An output that its model only flags had NaN in it."""
        self.told.append({"op": "log", "level": "warning", "message_id": "not-finite", "text": text, "fields": {}})

    def as_json(self) -> dict[str, Any]:
        return {
            "rights": self.rights.as_json(),
            "measured": self.measured,
            "dispatch_ns": self.dispatch_ns,
            "rss_bytes": resident_bytes(),
            "verified": self.verified,
            "notes": [*self.notes, *(n for engine in self.engines.values() for n in getattr(engine, "notes", ()))],
            "gpu": self.gpu,
        }


def prepare(plan: dict[str, Any], tell: Callable[[dict[str, Any]], None] = lambda _: None) -> Prepared:
    """Loads, warms, verifies and (where the plan has no stored measurement) measures every model of the plan, under the
    rights it will run with. ``tell``: messages to the supervisor meanwhile. Raises ``ModelRefused``, ``EngineFailure``.
    """
    models = {model["name"]: model for model in plan["models"]}
    specs = {name: _spec(model) for name, model in models.items()}
    # The reference has threads and memory of its own: both are gone before there are real-time rights to inherit.
    expected = {
        name: expect(specs[name], Rules(**model["verify"]))
        for name, model in models.items()
        if "verify" in model and computes_the_model(plan["driver"])
    }
    # Engines are loaded as by an ordinary process: a second of work at any real-time priority uses up the share that
    # the kernel leaves to real-time work on that core, also for whoever serves there, and for its own first jobs.
    room = plan.get("prepare") or plan  # beside another executor that serves, it makes do with less
    before = threads()
    # The engines' own threads and arenas are made under the affinity they keep.
    move_to(room["cores"])
    prepared = Prepared(Rights(), {}, {}, 0)
    open_engine = engine_opener(
        plan["driver"], alone=plan.get("alone", not plan.get("prepare")),
        tell=lambda text: tell({"op": "progress", "text": text}),
    )  # fmt: skip
    prepared.gpu = open_engine.gpu
    if prepared.gpu is not None:
        tell({"op": "gpu", "gpu": prepared.gpu})
    for name, model in models.items():
        prepared.engines[name] = _load(model, specs[name], open_engine, expected.get(name), prepared)
    prepared.helpers = threads() - before
    prepared.rights = take_rights(room["cores"], room["priority"], prepared.helpers)
    witness = open_witness(prepared.rights)
    cap_ns = plan.get("measure_cap_ns", MEASURE_CAP_NS)
    duty_percent = DUTY_BESIDE_PERCENT if plan.get("prepare") else DUTY_PERCENT
    prepared.measured = {
        name: model.get("measured")
        or _measure(prepared.engines[name], cap_ns, model["pause_ns"], witness, duty_percent)
        for name, model in models.items()
    }
    for name, model in models.items() if plan.get("prove") else ():
        # Its process died: the loops are with a stand-in, and come back only to an engine that works.
        for _ in proof(prepared.engines[name], plan["prove"], _slowest_ns(model), _core.now):
            time.sleep(0)
    prepared.dispatch_ns = plan.get("dispatch_ns") or dispatch_cost_ns(witness)
    return prepared


def freeze() -> None:
    """From here on the executor creates no garbage cycles; what exists is kept out of the collector's sight."""
    gc.collect()
    gc.freeze()
    gc.disable()


def _spec(model: dict[str, Any]) -> EngineSpec:
    inspection = model["inspection"]
    return EngineSpec(
        model["name"],
        model["path"],
        specs_from_json(inspection["inputs"]),
        specs_from_json(inspection["outputs"]),
        model.get("max_batch", 1),
        inspection.get("digest", ""),
    )


def _load(
    model: dict[str, Any], spec: EngineSpec, open_engine: Callable[[EngineSpec], BuiltEngine],
    expected: Expectation | None, prepared: Prepared,
) -> WarmEngine:  # fmt: skip
    policies = model.get("non_finite", {})
    outputs = [tensor.name for tensor in spec.outputs]
    for name in policies:
        if name not in outputs:
            raise ModelRefused(
                f"model {spec.model!r} has no output {name!r} to forbid NaN in",
                found=name, allowed=", ".join(outputs), hint=f"Correct models.{spec.model}.non_finite.",
            )  # fmt: skip
    engine = open_engine(spec).warm()
    if expected is not None and expected.note:
        prepared.notes.append(expected.note)
    elif expected is not None:
        prepared.verified[spec.model] = verify(engine, expected, policies)
    return guarded(engine, policies, prepared.flagged)


def _slowest_ns(model: dict[str, Any]) -> int:
    """What a run of the model took at most when it was measured here; 0: it has just been measured."""
    return int(model["measured"]["1"]["max_ns"]) if model.get("measured") else 0


def _measure(
    engine: WarmEngine, cap_ns: int, pause_ns: int, witness: _core.Witness | None, duty_percent: int
) -> dict[int, CostJson]:
    costs: dict[int, CostJson] = {}
    for size in range(1, engine.spec.max_batch + 1):
        batch = engine.batch(size)
        found = measure(
            batch.run_bound,
            cap_ns=cap_ns,
            clock=_core.now,
            pause=lambda ns: time.sleep(ns / 1e9),
            switches=_core.switched_out,
            # Loops are never batched: larger batches are best effort's, which has no pauses when it matters.
            pause_ns=pause_ns if size == 1 else 0,
            witness=witness,
            duty_percent=duty_percent,
        )
        costs[size] = found.as_json()
    return costs
