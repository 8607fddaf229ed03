"""Whether a warm engine works: runs on an input of our own (zeros), in memory that nobody else has.

For an engine that is suspected while it serves, and for one that comes back after its process has died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from taktd.engines.engine import Tensor, WarmEngine, release
from taktd.engines.errors import EngineFailure
from taktd.engines.memory import private_bytes
from taktd.engines.tensors import size_bytes

__all__ = ["proof"]


def proof(engine: WarmEngine, runs: int, limit_ns: int, clock: Callable[[], int]) -> Iterator[None]:
    """One run a step. Raises ``EngineFailure`` at a run that fails, and after the last one if not even the fastest took
    at most ``limit_ns`` (0: any time will do)."""
    sides = [
        [(private_bytes(size_bytes(t.dtype, t.dims)), t.dims) for t in tensors]
        for tensors in (engine.spec.inputs, engine.spec.outputs)
    ]
    run = engine.bind(*[[Tensor(m.ctypes.data, dims, shared=False) for m, dims in side] for side in sides])
    fastest_ns = 0
    try:
        for number in range(runs):
            begun_ns = clock()
            run()
            took_ns = clock() - begun_ns
            fastest_ns = took_ns if number == 0 else min(fastest_ns, took_ns)
            yield
    finally:
        release(run)
    if limit_ns and fastest_ns > limit_ns:
        raise EngineFailure(
            f"the fastest of {runs} runs on an input of our own took {fastest_ns // 1000} us; "
            f"allowed: {limit_ns // 1000} us"
        )
