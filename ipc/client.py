"""The Python client: connect to taktd, attach a loop or a model, call it through numpy views on shared memory.

What it is: a thin layer over the C client (`_core`, the files of libtakt) that turns tensors into numpy views once, at
attach, and picks the right ones afterwards. `infer()` is one C call; what the GIL does meanwhile is told at the top of
`_core_lane.c`. What it is not: a way to reach taktd from another machine (gRPC, ZeroMQ), or from two threads through
one lane. Who calls it: control programs, `taktctl`, the gateway.

A lane belongs to one thread at a time; the lanes of one node may be in different threads. After `os.fork()` a child
must not use its parent's nodes and lanes. A lane ends when the daemon ends or refuses to go on (`Detached`): attach
again, or have it attached again by itself (`Node.attach`, reattach). An executor that dies and is replaced does not end
it.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from taktd.ipc import _core
from taktd.ipc._core import Reply
from taktd.ipc.errors import Detached, InvalidInput, NotFound, TaktError

__all__ = ["Lane", "Node", "Reply", "Tensors", "Tick", "connect"]

Array = npt.NDArray[Any]

ATTACH_TIMEOUT_US: Final = 5_000_000
_PAUSE_FIRST_NS: Final = 50_000_000  # between two tries to have a lane again
_PAUSE_NS_MAX: Final = 2_000_000_000
_DEFAULT: Final = -2  # TAKT_TIMEOUT_DEFAULT
_WAIT_MODES: Final = {"block": 0, "spin": 1, "hybrid": 2}
_KINDS: Final = {"any": 0, "loop": 1, "model": 2}
_TRIGGERS: Final = ("client", "clock")
_KIND_NAMES: Final = {number: name for name, number in _KINDS.items()}
_DTYPE_NAMES: Final = {number: name for name, number in _core.DTYPES.items()}

# numpy has neither bfloat16 nor FP8: such tensors are views of their bits; 4-bit ones are packed two per byte.
_NUMPY: Final[dict[str, npt.DTypeLike]] = {
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "BOOL": np.bool_,
    "COMPLEX64": np.complex64,
    "COMPLEX128": np.complex128,
    "BF16": np.uint16,
    "FP8E4M3FN": np.uint8,
    "FP8E4M3FNUZ": np.uint8,
    "FP8E5M2": np.uint8,
    "FP8E5M2FNUZ": np.uint8,
    "UINT4": np.uint8,
    "INT4": np.uint8,
}


def _core_path(number: int) -> str:
    return next((name for name, known in _core.PATHS.items() if known == number), "")


class UnknownTensor(KeyError):
    """A KeyError whose text is for people: KeyError itself shows its argument quoted."""

    def __str__(self) -> str:
        return str(self.args[0])


class Tensors(dict[str, Array]):
    """Views on the tensors of one slot by name. Assigning to a name copies into shared memory, as `[...] =` would.

    A name that is not there raises a KeyError that lists those that are.
    """

    __slots__ = ()

    def __setitem__(self, name: str, value: npt.ArrayLike) -> None:
        self[name][...] = value

    def __missing__(self, name: object) -> NoReturn:
        raise UnknownTensor(f"no tensor is called {name!r} here; there are {', '.join(map(repr, self)) or 'none'}")

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("the tensors of a lane are fixed: write into them")

    __delitem__ = pop = popitem = clear = update = setdefault = _refuse


class Tick:
    """One cycle of `Lane.ticks()`.

    index: 0, 1, 2, …; counts missed cycles too. release_ns: when the cycle was due, CLOCK_MONOTONIC. missed: how many
    cycles were skipped just before this one because the program was still busy.
    """

    __slots__ = ("index", "missed", "release_ns")

    def __init__(self, index: int, release_ns: int, missed: int) -> None:
        self.index = index
        self.release_ns = release_ns
        self.missed = missed

    def __repr__(self) -> str:
        return f"Tick(index={self.index}, release_ns={self.release_ns}, missed={self.missed})"


class _Tensor:
    """What the lane's table says about one tensor."""

    __slots__ = ("bits", "dims", "dtype", "index", "name", "offsets", "type_name")

    def __init__(self, index: int, described: dict[str, Any]) -> None:
        self.index = index
        self.name: str = described["name"]
        self.type_name = _DTYPE_NAMES[described["dtype"]]
        self.bits = _core.DTYPE_BITS[described["dtype"]]
        self.dtype = np.dtype(_NUMPY[self.type_name])
        self.dims: tuple[int, ...] = described["dims"]
        self.offsets: tuple[int, ...] = described["offsets"]

    def view(self, memory: mmap.mmap | None, at: int, dims: tuple[int, ...]) -> Array:
        """The tensor of shape `dims` at this byte of the lane's memory; 4-bit ones as flat, packed bytes."""
        if self.bits < 8:
            count = int(np.prod(dims, dtype=np.int64))
            dims = ((count * self.bits + 7) // 8,)
        return np.ndarray(dims, self.dtype, memory, at)


class Lane:
    """An attached loop or model. Made by `Node.attach`; leaves with `close()` or the end of its `with` block."""

    def __init__(self, core: _core.ClientLane, again: Callable[[], _core.ClientLane] | None = None) -> None:
        """again: attaches another lane of the same name, for a lane that comes back after its end."""
        self._again = again
        self._again_ns = 0
        self._pause_ns = _PAUSE_FIRST_NS
        self._told = False  # the end of a lane with pending jobs: once, by Detached
        self._slot = 0  # whose inputs were asked for last
        self._take(core)

    def _take(self, core: _core.ClientLane) -> None:
        about = core.describe()
        self.name: str = about["name"]
        self.model: str = about["model"]
        self.kind: str = _KIND_NAMES[about["kind"]]
        self.period_ns: int = about["period_ns"]
        self.deadline_ns: int = about["deadline_ns"]
        self.jitter_ns: int = about["jitter_ns"]
        self.trigger: str = _TRIGGERS[about["trigger"]]
        self.slot_count: int = about["slot_count"]
        self.dynamic: bool = about["dynamic"]
        self._core = core
        # A mapping of its own: views keep it alive, so that one that outlives the lane reads old numbers instead of
        # crashing the process.
        self._memory: mmap.mmap | None = mmap.mmap(
            core.memfd(), about["size"], flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
        )
        stride, first = about["slot_stride"], about["slots_offset"]
        self._places: list[tuple[mmap.mmap | None, int]] = [
            (self._memory, first + stride * slot) for slot in range(self.slot_count)
        ]
        self.fallback: str = _core_path(about["local_path"])
        if self.fallback:  # one slot more: see ipc/core/local.c
            self._places.append((mmap.mmap(core.local_fd(), stride, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), 0))
        self._in = [_Tensor(i, described) for i, described in enumerate(about["inputs"])]
        self._out = [_Tensor(i, described) for i, described in enumerate(about["outputs"])]
        self._shapes = {tensor.name: tensor.dims for tensor in self._in}
        self._inputs = self._input_views()
        self._outputs = self._output_views()
        # Bound once: each saves a look-up per cycle.
        self._infer = core.infer
        self._next_slot = core.next_slot
        self._last_place = core.last_place

    def _input_views(self) -> list[Tensors]:
        return [
            Tensors({t.name: t.view(memory, at + t.offsets[0], self._shapes[t.name]) for t in self._in})
            for memory, at in self._places
        ]

    def _output_views(self) -> list[Tensors]:
        """By 2 · slot + area, as `_core.ClientLane.last_place` counts."""
        return [
            Tensors({t.name: t.view(memory, at + t.offsets[area], t.dims) for t in self._out})
            for memory, at in self._places
            for area in (0, 1)
        ]

    # Tensors ------------------------------------------------------------------------------------------------------

    @property
    def inputs(self) -> Tensors:
        """The inputs of the next free slot: write, then submit. Take it anew for each job.

        Raises Busy when every slot is pending, Detached when the lane has ended; one attached with `reattach` comes
        back here.
        """
        try:
            self._slot = slot = self._next_slot()
        except Detached:
            if self._again is None or self._memory is None:
                raise
            self._attach_again(self._again)
            self._slot = slot = self._next_slot()
        return self._inputs[slot]

    def _come_back(self) -> bool:
        """After Detached from a submission, which was not made or is lost: whether there is another lane to make it on.

        What was written for it goes along. False where jobs were pending: their loss is told once, by that Detached.
        Raises Detached while no lane is to be had, InvalidInput where the new one's inputs are others.
        """
        if self._again is None or self._memory is None:
            return False
        if self._core.pending() and not self._told:
            self._told = True
            return False
        written, specs = self._inputs[self._slot], self.input_specs
        self._attach_again(self._again)
        if self.input_specs != specs:
            raise InvalidInput(
                f'"{self.name}" has other inputs than before: {self.input_specs}, not {specs}; take `inputs` anew'
            )
        for name, view in self.inputs.items():
            view[...] = written[name]
        return True

    def _attach_again(self, again: Callable[[], _core.ClientLane]) -> None:
        """Raises Detached while it is not to be had; asks less and less often."""
        now_ns = _core.now()
        if now_ns < self._again_ns:
            left_ms = (self._again_ns - now_ns) // 1_000_000
            raise Detached(f'the lane of "{self.name}" has ended; it is asked for again in {left_ms} ms')
        try:
            core = again()
        except TaktError as error:
            self._again_ns = now_ns + self._pause_ns
            self._pause_ns = min(2 * self._pause_ns, _PAUSE_NS_MAX)
            raise Detached(f'the lane of "{self.name}" has ended, and there is no other one yet: {error}') from error
        self._again_ns, self._pause_ns, self._told = 0, _PAUSE_FIRST_NS, False
        self._core.detach()
        shapes, specs = self._shapes, self.input_specs
        self._take(core)
        for name, dims in shapes.items() if self.input_specs == specs else ():
            if dims != self._shapes[name]:
                self.set_shape(name, dims)

    @property
    def outputs(self) -> Tensors:
        """The outputs of the last reply; untouched until the next reply. Meaningful where that reply was `ok`.

        Raises NotFound before the first reply.
        """
        place = self._last_place()
        if place < 0:
            raise NotFound(f'the lane of "{self.name}" has no reply yet: infer, or submit and wait, first')
        if self.dynamic:
            return self._actual_outputs(place)
        return self._outputs[place]

    def _actual_outputs(self, place: int) -> Tensors:
        (memory, at), area = self._places[place // 2], place % 2
        return Tensors(
            {t.name: t.view(memory, at + t.offsets[area], self._core.output_shape(t.index)) for t in self._out}
        )

    def set_inputs(self, **arrays: npt.ArrayLike) -> None:
        """Copy arrays into the next free slot's inputs after checking names, dtypes and shapes; nothing is converted.

        Raises InvalidInput that names the tensor, what it expects and what it was given; then nothing was copied.
        """
        views = self.inputs
        checked = {}
        for name, value in arrays.items():
            view = views.get(name)
            if view is None:
                names = ", ".join(f'"{known}"' for known in views)
                raise InvalidInput(f'"{self.name}" has no input "{name}"; it has {names}')
            array = np.asarray(value)
            if array.dtype != view.dtype or array.shape != view.shape:
                raise InvalidInput(
                    f'input "{name}" of "{self.name}": expected {view.dtype} {view.shape}, found {array.dtype} '
                    f"{array.shape}; convert or reshape it"
                )
            checked[name] = array
        for name, array in checked.items():
            views[name] = array

    def set_shape(self, name: str, dims: Sequence[int]) -> None:
        """Model lanes: the actual shape of an input, within its declared maximum, for this and later jobs.

        Views taken before keep their old shape. Raises InvalidInput where it doesn't fit or shapes are fixed, NotFound
        for an unknown input.
        """
        shape = tuple(int(d) for d in dims)
        self._core.set_shape(name, shape)
        self._shapes[name] = shape
        self._inputs = self._input_views()

    @property
    def input_specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → (dtype as ONNX and KServe name it, declared shape)."""
        return {t.name: (t.type_name, t.dims) for t in self._in}

    def output_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an output of the last reply: a 4-bit one's flat view doesn't tell it. Raises NotFound."""
        tensor = next((t for t in self._out if t.name == name), None)
        if tensor is None:
            raise NotFound(f'"{self.name}" has no output "{name}"; it has {", ".join(t.name for t in self._out)}')
        return self._core.output_shape(tensor.index) if self.dynamic else tensor.dims

    @property
    def output_specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → (dtype as ONNX and KServe name it, declared shape)."""
        return {t.name: (t.type_name, t.dims) for t in self._out}

    # Jobs ---------------------------------------------------------------------------------------------------------

    def infer(self, timeout_us: float | None = None, *, deadline_ns: int = 0) -> Reply:
        """Submit the next free slot and wait for its reply.

        timeout_us: how long to wait; by default until the job's deadline + one period, at least 20 ms (1 s where there
        is neither). Then the reply's status is "pending": the job goes on, `wait(reply.sequence)` can still collect it.
        deadline_ns: absolute, CLOCK_MONOTONIC; 0 is the loop's own, or none for a model.
        Where the loop's fallback ends in hold or constant (`fallback`), an answer that has not come by the deadline is
        given here: "ok" on that path, with the last good outputs or the constants. The job goes on; its completion is
        then nobody's news. Its number is 0 where every slot was still with the daemon, and nothing was submitted.
        Raises Busy, Detached. A lane attached with `reattach` that has ended comes back here, with the inputs that were
        written: at once where no job was lost with it, else Detached says so first.
        """
        timeout_ns = _DEFAULT if timeout_us is None else _ns(timeout_us)
        try:
            return self._infer(deadline_ns, timeout_ns)
        except Detached:
            if not self._come_back():
                raise
        return self._infer(deadline_ns, timeout_ns)

    def submit(self, deadline_ns: int = 0) -> int:
        """Submit the next free slot; returns the job's number. Raises Busy, Detached; comes back as `infer` does."""
        try:
            return self._core.submit(deadline_ns)
        except Detached:
            if not self._come_back():
                raise
        return self._core.submit(deadline_ns)

    def repeat(self) -> int:
        """Submit a copy of the last inputs, as old as they are; returns the job's number.

        For loops with `trigger: clock` whose observation has not changed: see `beats`. Inputs that are being written
        stay as they are. Raises NotFound where nothing was submitted yet, Busy, Detached.
        """
        return self._core.repeat()

    def beats(self) -> Iterator[Reply]:
        """One reply per period of a loop with `trigger: clock`, after the daemon's beat.

        Submit the first observation before, and each newer one when it is there, in the body or before the next beat:
        a beat takes the newest. Where there is no newer one, the last is submitted again, and what happens once it is
        older than `max_age` is the configuration's `on_stale`: "expired" with the cause stale_input (skip), "ok" on the
        path hold, or "ok". Inputs that a newer one has replaced are not reported.
        Raises InvalidInput for another loop, NotFound where nothing was submitted yet, Detached.
        """
        if self.trigger != "clock":
            raise InvalidInput(f'"{self.name}" is triggered by its client: infer(), or ticks() for a beat of your own')
        return self._beats()

    def _beats(self) -> Iterator[Reply]:
        while True:
            if not self._core.pending():
                self._core.repeat()
            reply = self._core.wait(0, _DEFAULT)
            if reply.status not in ("cancelled", "pending"):
                yield reply

    def wait(self, seq: int = 0, timeout_us: float | None = None) -> Reply:
        """The reply of a job, waited for as in `infer`; 0 takes the oldest that has not been received.

        A time-out of 0 asks without waiting. Raises NotFound where nothing is pending under that number, Detached when
        the lane ended without a reply.
        """
        try:
            return self._core.wait(seq, _DEFAULT if timeout_us is None else _ns(timeout_us))
        except Detached:
            self._told = True
            raise

    def cancel(self, seq: int) -> None:
        """Ask for a job not to be run. Its reply still comes. Raises NotFound where it is not pending."""
        self._core.cancel(seq)

    @property
    def pending(self) -> int:
        """Jobs submitted whose completion has not arrived."""
        return self._core.pending()

    def fileno(self) -> int:
        """A descriptor for poll, epoll or asyncio that is readable when a job has ended.

        Take it before submitting. When it is readable, call `wait(timeout_us=0)` until its reply is pending or it
        raises NotFound; that also makes it unreadable again. Don't read from it, don't close it.
        """
        return self._core.fileno()

    def unwatch(self) -> None:
        """Until `fileno` is called again, only the lane's end makes the descriptor readable: saves system calls."""
        self._core.unwatch()

    def ticks(self, period_us: float | None = None) -> Iterator[Tick]:
        """A beat without drift: yields at once, then at each multiple of the period after that; never re-aligns.

        The period is the loop's own, also after a lane came back with another one (`reattach`); a model lane has none
        and needs `period_us`. Cycles that have gone by completely are skipped and counted in `tick.missed`.
        """
        period_ns = self.period_ns if period_us is None else _ns(period_us)
        if period_ns <= 0:
            raise InvalidInput(f'"{self.name}" has no period of its own: ticks(period_us=…) with a number above 0')
        return self._ticks(None if period_us is None else period_ns)

    def _ticks(self, period_ns: int | None) -> Iterator[Tick]:
        index, release_ns = 0, 0
        while True:
            index, release_ns, missed = _core.tick_next(index, release_ns, period_ns or self.period_ns)
            yield Tick(index, release_ns, missed)

    # Leaving ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the lane back. Views taken before stay readable and keep its memory. A second call does nothing."""
        self._core.detach()
        self._inputs, self._outputs, self._memory, self._places = [], [], None, []

    def __enter__(self) -> Lane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Lane of {self.kind} {self.name}>"


class Node:
    """A connection to one daemon. Its end ends its lanes."""

    def __init__(self, core: _core.ClientNode) -> None:
        self._core = core

    @property
    def name(self) -> str:
        """The daemon's node name."""
        return self._core.name

    @property
    def path(self) -> str:
        """The socket in use."""
        return self._core.path

    @property
    def pid(self) -> int:
        """The daemon's process, as it says itself."""
        return self._core.pid

    def attach(
        self, name: str, wait: str = "hybrid", *, kind: str = "any", timeout_us: float = ATTACH_TIMEOUT_US,
        reattach: bool = False,
    ) -> Lane:  # fmt: skip
        """Attach a loop, or a model (best effort), by name.

        wait: "spin" polls memory, "block" sleeps in the kernel, "hybrid" polls for 100 µs and then sleeps.
        kind: "any" (a loop of that name, else a model), "loop" or "model". timeout_us: how long to wait for a daemon
        that is booting. reattach: after the lane's end (the daemon is gone, the configuration has changed) the next
        `inputs`, `infer` or `submit` attaches again, with growing pauses. Detached tells of jobs that were lost with
        the old lane, once, and each time that there is no new one yet. What was written for a job that could not be
        submitted is submitted on the new lane; take `inputs` anew for the next one all the same. The new lane's jobs
        count from 1 again, and `fileno` has to be called again.
        Raises NotFound, Busy (another client has the loop), Denied, LimitReached, Incompatible,
        NotConnected.
        """
        mode, number = _number("wait", wait, _WAIT_MODES), _number("kind", kind, _KINDS)
        again = (lambda: self._core.attach(name, number, mode, 0)) if reattach else None
        return Lane(self._core.attach(name, number, mode, _ns(timeout_us)), again)

    def loops(self) -> list[dict[str, Any]]:
        """The daemon's loops, as it describes them: at least "name" and "model"."""
        return self._list("loop")

    def models(self) -> list[dict[str, Any]]:
        """The daemon's models, as it describes them: at least "name"."""
        return self._list("model")

    def _list(self, kind: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(self._core.list(_KINDS[kind]))
        return listed

    def close(self) -> None:
        """End the connection and its lanes. A second call does nothing."""
        self._core.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(path: str | os.PathLike[str] | None = None, *, timeout_us: float = 0) -> Node:
    """Connect to the daemon.

    path: its lane socket; by default $TAKTD_SOCKET, $TAKTD_RUNTIME_DIR/lanes.sock, $XDG_RUNTIME_DIR/taktd/lanes.sock,
    /run/taktd/lanes.sock, in this order. timeout_us: how long to wait for a daemon that is not there yet.
    Raises NotConnected that names the paths looked at, Denied, Incompatible.
    """
    return Node(_core.ClientNode(None if path is None else os.fspath(path), _ns(timeout_us)))


def _ns(us: float) -> int:
    if not us >= 0:
        raise InvalidInput(f"time of {us} us: must be 0 or more")
    return int(us * 1000) if us < 1e13 else 10**16


def _number(what: str, name: str, numbers: dict[str, int]) -> int:
    if name not in numbers:
        raise InvalidInput(f"{what} {name!r}: allowed are {', '.join(numbers)}")
    return numbers[name]
