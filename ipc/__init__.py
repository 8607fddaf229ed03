"""Lanes: calling a model of taktd through shared memory. Needs numpy only.

    with connect() as node, node.attach("go1_walk", wait="spin") as lane:
        for tick in lane.ticks():
            lane.inputs["obs"][:] = observe()
            reply = lane.infer()
            if reply.ok:
                act(lane.outputs["continuous_actions"])

`__all__` is the list of public names; everything else, `_core` above all, is between taktd and itself.
"""

try:
    from taktd.ipc import _core as _core
except ImportError as error:
    raise ImportError(
        "taktd.ipc: its compiled part, _core, is missing or does not load in this Python; to do: in a clone run "
        "`make demo` once and use .venv/bin/python, elsewhere install taktd again"
    ) from error
from taktd.ipc.client import Lane, Node, Reply, Tensors, Tick, connect
from taktd.ipc.errors import (
    Busy,
    Denied,
    Detached,
    Incompatible,
    InvalidInput,
    LimitReached,
    NotConnected,
    NotFound,
    TaktError,
)
from taktd.ipc.stats import percentile

__all__ = [
    "Busy",
    "Denied",
    "Detached",
    "Incompatible",
    "InvalidInput",
    "Lane",
    "LimitReached",
    "Node",
    "NotConnected",
    "NotFound",
    "Reply",
    "TaktError",
    "Tensors",
    "Tick",
    "connect",
    "percentile",
]
