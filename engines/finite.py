"""NaN and infinity in outputs: per output of a model forbidden, flagged, or allowed (the default, which costs nothing).

A ``GuardedEngine`` is a warm engine whose runs look at the outputs that have a policy before they return. The look is a
pass over the output's memory, a microsecond for a policy's actions; it is part of what is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from taktd.engines.engine import BatchRun, BoundRun, Shapes, Tensor, WarmEngine
from taktd.engines.errors import EngineFailure, FailureKind
from taktd.engines.memory import private_bytes, values_at
from taktd.engines.tensors import DType, TensorSpec

__all__ = ["ALLOW", "FLAG", "FORBID", "GuardedEngine", "Policy", "all_finite", "guarded", "make_nan"]

Policy = Literal["forbid", "flag", "allow"]
FORBID: Final = "forbid"
FLAG: Final = "flag"
ALLOW: Final = "allow"
FLAGS_TOLD: Final = 5  # per output, in words; the counter tells the rest

Values = npt.NDArray[Any]

# Types that numpy holds as integers: (bits to look at, their value in what is not finite, a NaN). After ONNX,
# *Float stored in 8 bits*: E4M3FN has no infinity, the FNUZ types have one NaN and nothing else.
_BY_BITS: Final[dict[str, tuple[int, int, int]]] = {
    "BF16": (0x7F80, 0x7F80, 0x7FC0),
    "FP8E4M3FN": (0x7F, 0x7F, 0x7F),
    "FP8E4M3FNUZ": (0xFF, 0x80, 0x80),
    "FP8E5M2": (0x7C, 0x7C, 0x7F),
    "FP8E5M2FNUZ": (0xFF, 0x80, 0x80),
}
_BY_NUMPY: Final = frozenset(("FP16", "FP32", "FP64", "COMPLEX64", "COMPLEX128"))


def all_finite(dtype: DType) -> Callable[[Values], bool] | None:
    """A test over a tensor's values; ``None`` for a type that knows no other numbers than finite ones."""
    if dtype.name in _BY_NUMPY:
        finite = np.isfinite
        return lambda values: bool(finite(values).all())
    if dtype.name in _BY_BITS:
        mask, pattern, _ = _BY_BITS[dtype.name]
        return lambda values: not ((values & mask) == pattern).any()
    return None


def make_nan(values: Values, dtype: DType) -> None:
    """Every value becomes NaN, where the type has one."""
    if dtype.name in _BY_NUMPY:
        values[...] = np.nan
    elif dtype.name in _BY_BITS:
        values[...] = _BY_BITS[dtype.name][2]


def guarded(
    engine: WarmEngine, policies: Mapping[str, Policy], tell: Callable[[str], None] = lambda text: None
) -> WarmEngine:
    """The engine itself, if no policy asks for a look. Names that the model does not have are the caller's error.

    ``tell``: the first few times that something is flagged are told in words.
    """
    watched = [
        (index, spec, policies[spec.name])
        for index, spec in enumerate(engine.spec.outputs)
        if policies.get(spec.name, ALLOW) != ALLOW and all_finite(spec.dtype) is not None
    ]
    return GuardedEngine(engine, watched, tell) if watched else engine


class GuardedEngine:
    """``flagged``: per output, how many runs had something that is not finite in it and were answered all the same."""

    def __init__(
        self, engine: WarmEngine, watched: list[tuple[int, TensorSpec, Policy]], tell: Callable[[str], None]
    ) -> None:
        self.spec = engine.spec
        self.flagged: Counter[str] = Counter()
        self._engine = engine
        self._watched = watched
        self._tell = tell

    def _look(self, outputs: Sequence[Tensor]) -> Callable[[], bool]:
        checks = []
        for index, spec, policy in self._watched:
            test = all_finite(spec.dtype)
            assert test is not None
            checks.append((test, values_at(outputs[index].address, spec.dtype, outputs[index].dims), spec.name, policy))

        def look() -> bool:
            tainted = False
            for test, values, name, policy in checks:
                if not test(values):
                    if policy == FORBID:
                        raise EngineFailure(f"output {name!r} has NaN or infinity in it", FailureKind.NOT_FINITE)
                    tainted = True
                    self.flagged[name] += 1
                    if self.flagged[name] <= FLAGS_TOLD:
                        self._tell(f"output {name!r} of model {self.spec.model!r} has NaN or infinity in it")
            return tainted

        return look

    @property
    def notes(self) -> list[str]:
        """What people should know of how the engine inside runs."""
        return list(getattr(self._engine, "notes", ()))

    def bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> BoundRun:
        run, look = self._engine.bind(inputs, outputs), self._look(outputs)

        def checked() -> bool:
            run()
            return look()

        # What the inner run holds (a captured graph, registered pages) is given back through the outer one.
        if hasattr(run, "close"):
            checked.close = run.close  # type: ignore[attr-defined]
        return checked

    def run_shaped(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Shapes, bool]:
        actual, _ = self._engine.run_shaped(inputs, outputs)
        found = [Tensor(o.address, dims, o.shared) for o, dims in zip(outputs, actual, strict=True)]
        return actual, self._look(found)()

    def batch(self, size: int) -> _GuardedBatch:
        return _GuardedBatch(self, self._engine.batch(size))

    def look_at(self, addresses: Sequence[int]) -> bool:
        """The outputs of one job, at their declared shapes; whether something in them is flagged."""
        tensors = [Tensor(address, spec.dims) for address, spec in zip(addresses, self.spec.outputs, strict=True)]
        return self._look(tensors)()

    def close(self) -> None:
        if hasattr(self._engine, "close"):
            self._engine.close()


class _GuardedBatch:
    """One member's NaN fails the batch: its members are answered by one status."""

    def __init__(self, engine: GuardedEngine, batch: BatchRun) -> None:
        self.size = batch.size
        self._engine, self._batch = engine, batch
        # Where the batch has its private outputs is its own business: to be measured, a look costs the same elsewhere.
        self._elsewhere = [private_bytes(spec.bytes) for spec in engine.spec.outputs]

    def run_bound(self) -> None:
        self._batch.run_bound()
        for _ in range(self.size):
            self._engine.look_at([memory.ctypes.data for memory in self._elsewhere])

    def run(self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[bool]:
        self._batch.run(inputs, outputs)
        return [self._engine.look_at(addresses) for addresses in outputs]

    def close(self) -> None:
        if hasattr(self._batch, "close"):
            self._batch.close()
