"""One lane in an executor: the runs that are bound to its slots.

Bound for both output areas, so that taking a lane over from another executor binds nothing: which area is this
executor's is known only then. Nothing here decides when a job runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from taktd.daemon.execution.closed_loop import ClosedLoop
from taktd.daemon.execution.switch_rule import SwitchRule
from taktd.engines.engine import BoundRun, Tensor, WarmEngine, release
from taktd.engines.errors import EngineFailure
from taktd.ipc import _core

__all__ = ["ServedLane"]

AREAS: Final = 2
STAND_IN: Final = 2  # path
FLAG_STAND_IN: Final = 4


class ServedLane:
    """One lane in this executor. ``runs[slot]`` is the bound run of a slot at its declared shapes.

    ``shaped`` holds the slots whose job carries shapes of its own.
    """

    __slots__ = (
        "_bound", "_rehearsal", "area", "closed_loop", "cost_ns", "ended_ns", "engine", "failures", "flags",
        "input_dims", "lane", "last_ok", "last_slot", "name", "output_bytes", "output_dims", "path", "rule", "runs",
        "server", "shaped", "slots",
    )  # fmt: skip

    def __init__(
        self, server: _core.Server, lane: int, name: str, layout: dict[str, Any], engine: WarmEngine, path: int
    ) -> None:
        self.server = server
        self.lane = lane
        self.name = name
        self.engine = engine
        self.path = path
        self.flags = FLAG_STAND_IN if path == STAND_IN else 0  # of every completion
        self.area = 0
        self.slots: int = layout["slot_count"]
        self.input_dims: list[tuple[int, ...]] = [tuple(t["dims"]) for t in layout["inputs"]]
        self.output_dims: list[tuple[int, ...]] = [tuple(t["dims"]) for t in layout["outputs"]]
        self.output_bytes: list[int] = [t["bytes"] for t in layout["outputs"]]
        self._bound: list[list[BoundRun]] = [[] for _ in range(AREAS)]
        self.runs = self._bound[0]
        self.shaped: set[int] = set()
        self.failures = 0
        self.cost_ns = 0  # what a run is reckoned with; set when the lane is scheduled
        self.ended_ns = 0  # when its last run ended
        self.closed_loop = ClosedLoop()
        self._rehearsal = engine.batch(1)
        self.rule: SwitchRule | None = None  # of a loop that somebody can stand in for
        self.last_ok = 0  # sequence number of the last run that did not fail
        self.last_slot = -1  # whose outputs are the lane's last answer; -1: there is none yet

    def bind(self) -> Iterator[None]:
        """Binds one slot and area a step: each costs up to a millisecond."""
        for area, runs in enumerate(self._bound):
            for slot in range(self.slots):
                runs.append(
                    self.engine.bind(
                        [Tensor(a, d) for a, d in zip(self.inputs_of(slot), self.input_dims, strict=True)],
                        [Tensor(a, d) for a, d in zip(self.outputs_of(slot, area), self.output_dims, strict=True)],
                    )
                )
                yield

    def take(self, area: int) -> None:
        """From now on this executor answers in ``area``; what an earlier owner answered is not its last answer."""
        self.area = area
        self.runs = self._bound[area]
        self.last_slot = -1

    def close(self) -> None:
        """Lets go of the slots, before they are unmapped: an engine on a GPU has registered their pages."""
        for runs in self._bound:
            for run in runs:
                release(run)
            runs.clear()

    def inputs_of(self, slot: int) -> list[int]:
        """Addresses of the input tensors of ``slot``."""
        return [self.server.slot_address(self.lane, slot, index, 0) for index in range(len(self.input_dims))]

    def outputs_of(self, slot: int, area: int | None = None) -> list[int]:
        """Addresses of the output tensors of ``slot``, in the output area that this executor owns."""
        first = len(self.input_dims)
        place = self.area if area is None else area
        return [self.server.slot_address(self.lane, slot, first + i, place) for i in range(len(self.output_dims))]

    def warm(self) -> None:
        """A run on memory of its own, just before a job is expected: code and weights are back in the caches."""
        with suppress(EngineFailure):
            self._rehearsal.run_bound()

    def hold(self, slot: int) -> bool:
        """Copies the last answer into the outputs of ``slot``; False if there is none.

        It lies in a slot that is the client's again: whoever changed it there gets the change back.
        """
        if self.last_slot < 0:
            return False
        for to, source, size in zip(
            self.outputs_of(slot), self.outputs_of(self.last_slot), self.output_bytes, strict=True
        ):
            ctypes.memmove(to, source, size)
        self.last_slot = slot
        return True

    def run_shaped(self, slot: int) -> bool:
        """One run at the shapes that the client wrote into the slot; writes the actual output shapes back. Returns
        whether an output is flagged for NaN or infinity."""
        given = self.server.shapes(self.lane, slot)
        shapes, tainted = self.engine.run_shaped(
            [Tensor(a, d) for a, d in zip(self.inputs_of(slot), given[: len(self.input_dims)], strict=True)],
            [Tensor(a, d) for a, d in zip(self.outputs_of(slot), self.output_dims, strict=True)],
        )
        self.server.set_output_shapes(self.lane, slot, shapes)
        return tainted
