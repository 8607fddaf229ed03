"""What an executor asks of an engine: one interface, whatever the device.

The type is the state: an ``EngineSpec`` says what to load, loading gives a ``BuiltEngine``, warming that gives a
``WarmEngine``; only a warm engine can be bound to a slot, and only a bound run can be executed. Memory is passed as
``Tensor`` (an address and actual dimensions): where it lies is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from taktd.engines.tensors import TensorSpec

__all__ = ["BatchRun", "BoundRun", "BuiltEngine", "EngineSpec", "Shapes", "Tensor", "WarmEngine", "release"]

BoundRun = Callable[[], bool | None]
"""Runs one job on the memory it was bound to; returns when the outputs are written, true where one has NaN or infinity
in it that its model only flags. Raises ``EngineFailure``."""

Shapes = tuple[tuple[int, ...], ...]
"""Actual dimensions, per tensor."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One model for one device: the file, its tensors, how many jobs may share a run (1: no batching).

    ``digest``: of the model's content; what is built from it is kept under that.
    """

    model: str
    path: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int = 1
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Memory of one tensor: address, actual dimensions, and whether somebody else can write to it during the run."""

    address: int
    dims: tuple[int, ...]
    shared: bool = True


class BatchRun(Protocol):
    """A run of ``size`` jobs at once over private memory; the members are copied in and out."""

    size: int

    @property
    def run_bound(self) -> BoundRun:
        """The run alone, on whatever the private memory holds."""

    def run(self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Sequence[bool] | None:
        """Addresses per member and tensor. Returns, where anybody looks, what a ``BoundRun`` does, per member. Raises
        ``EngineFailure``."""


class WarmEngine(Protocol):
    spec: EngineSpec

    def bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> BoundRun:
        """A run over fixed memory, at the declared shapes. Costs up to a millisecond; the run itself costs nothing
        extra."""

    def run_shaped(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Shapes, bool]:
        """One run at actual input shapes; ``outputs`` carry the largest shape there is room for.

        Returns the actual output shapes, and whether an output has NaN or infinity in it that its model only flags.
        Raises ``EngineFailure``, also when a result does not fit.
        """

    def batch(self, size: int) -> BatchRun:
        """A run of ``size`` ≤ ``spec.max_batch`` jobs."""


class BuiltEngine(Protocol):
    spec: EngineSpec

    def warm(self) -> WarmEngine:
        """Runs the engine until its memory is allocated and touched. Raises ``EngineFailure``."""


def release(run: BoundRun | BatchRun) -> None:
    """Gives back what a run holds (on a GPU: a graph, registered pages). Comes before its memory is unmapped."""
    close = getattr(run, "close", None)
    if close is not None:
        close()
