"""One inference as the front doors speak of it: request, model, answer, refusal, and the interface to whoever runs it.

What gRPC and ZeroMQ have in common, so that a model behaves the same behind both. No sockets, no clock, no lanes: the
protocol modules turn bytes into a `Request`, a `Backend` (the gateway) runs it, and `fit` below decides whether the
tensors are what the model takes. Sizes are bytes, times int nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Protocol, TypeVar

from taktd.ipc import _core

Raw = bytes | bytearray | memoryview
T = TypeVar("T")

PARAMETER_PREFIX: Final = "takt_"
PRIORITY_MAX: Final = 1 << 32
TIMEOUT_US_MAX: Final = 86_400_000_000  # a day
DTYPE_BITS: Final[dict[str, int]] = {name: _core.DTYPE_BITS[number] for name, number in _core.DTYPES.items()}
NAMES_SHOWN_MAX: Final = 8
KEPT_MAX: Final = 256  # requests whose unchanging part is kept; answers likewise
KEPT_BYTES_MAX: Final = 2048  # of such a part of a request


class Outcome(Enum):
    """Why there is no result: (status of the closed set that lanes use, code as gRPC spells it)."""

    FULL = "refused", "RESOURCE_EXHAUSTED"
    DENIED = "refused", "PERMISSION_DENIED"
    EXPIRED = "expired", "DEADLINE_EXCEEDED"
    CANCELLED = "cancelled", "CANCELLED"
    INVALID = "invalid", "INVALID_ARGUMENT"
    UNKNOWN = "invalid", "NOT_FOUND"
    UNSUPPORTED = "invalid", "UNIMPLEMENTED"
    FAILED = "failed", "UNAVAILABLE"
    LOST = "lost", "UNAVAILABLE"
    DETACHED = "detached", "UNAVAILABLE"

    @property
    def status(self) -> str:
        return self.value[0]

    @property
    def code(self) -> str:
        return self.value[1]


class Refusal(Exception):
    """No result, with a sentence for a person: what happened, to which thing, found, allowed, what to do."""

    def __init__(self, outcome: Outcome, text: str, cause: str = "") -> None:
        super().__init__(text)
        self.outcome, self.cause = outcome, cause


class Rights(Enum):
    """What a principal may do; each includes the one before."""

    OBSERVE = "observe"  # readiness, metadata, statistics
    INFER = "infer"
    ADMIN = "admin"  # load and unload

    def include(self, wanted: Rights) -> bool:
        return self is wanted or _RANKS[self] >= _RANKS[wanted]


_RANKS: Final = {rights: rank for rank, rights in enumerate(Rights)}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model: dims are the largest; open_dims[i] says that dimension i may be smaller."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    open_dims: tuple[bool, ...]

    @property
    def bits(self) -> int:
        return DTYPE_BITS[self.dtype]

    @property
    def shape(self) -> list[int]:
        """As metadata shows it: -1 where open."""
        return [-1 if is_open else d for d, is_open in zip(self.dims, self.open_dims, strict=True)]


@dataclass(frozen=True, slots=True)
class Model:
    """A model as clients see it."""

    name: str
    version: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dynamic: bool  # jobs carry shapes
    max_batch: int = 1
    preferred_batches: tuple[int, ...] = ()
    max_delay_ns: int = 0
    ready: bool = True
    reason: str = ""  # why not ready


@dataclass(slots=True)
class Tensor:
    """A tensor with its elements: little endian, row-major, 4-bit types packed two per byte, low nibble first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Raw

    @property
    def nbytes(self) -> int:
        data = self.data
        return data.nbytes if isinstance(data, memoryview) else len(data)


@dataclass(slots=True)
class Request:
    """What a client asks for. Relative times count from `arrival_ns`."""

    model: str
    version: str
    id: str
    inputs: Sequence[Tensor]
    wanted: Sequence[str]  # names of outputs; none: all
    arrival_ns: int
    deadline_ns: int = 0  # absolute; 0: none
    max_age_ns: int = 0  # a job that has not started so long after its arrival is not wanted any more; 0: any age
    priority: int = 0  # 1 is the highest; 0: after all that have one

    def arrive(self, now_ns: int) -> None:
        """It was read with times relative to its arrival, which is now."""
        self.arrival_ns = now_ns
        if self.deadline_ns:
            self.deadline_ns += now_ns


class KnownRequests:
    """What requests that come again and again have in common: all but their tensors' elements, their id, their times.

    A protocol cuts that part out of its message: it is the key, and what a message with that key means is not read
    anew. Bounded: when it is full it begins anew.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Request, tuple[tuple[str, str, tuple[int, ...]], ...]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: bytes, tensors: Sequence[Raw], arrival_ns: int) -> Request | None:
        """One like it with these tensors, without an id; None where none is known, or it has another number of them."""
        known = self._known.get(key)
        if known is None:
            return None
        like, inputs = known
        if len(inputs) != len(tensors):
            return None
        deadline_ns = like.deadline_ns
        return Request(
            like.model, like.version, "",
            [Tensor(name, dtype, shape, data) for (name, dtype, shape), data in zip(inputs, tensors, strict=True)],
            like.wanted, arrival_ns, deadline_ns and arrival_ns + deadline_ns, like.max_age_ns, like.priority,
        )  # fmt: skip

    def keep(self, key: bytes, request: Request) -> None:
        """From now on a message with that key is known, unless it is too long. request: with relative times."""
        if len(key) > KEPT_BYTES_MAX:
            return
        if len(self._known) >= KEPT_MAX:
            self._known.clear()
        inputs = tuple((tensor.name, tensor.dtype, tensor.shape) for tensor in request.inputs)
        self._known[key] = replace(request, id="", inputs=()), inputs


@dataclass(slots=True)
class Answer:
    """A result. The tensors' data are views that are valid only while the encoder runs that was given to `infer`."""

    model: Model
    outputs: list[Tensor]
    path: str
    cause: str
    late: bool
    queued_ns: int
    run_ns: int


@dataclass(frozen=True, slots=True)
class Duration:
    """Several durations together."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """What a model has done since the daemon started."""

    name: str
    version: str
    inferences: int
    success: Duration
    fail: Duration
    queue: Duration
    run: Duration
    batches: tuple[tuple[int, Duration], ...] = ()  # dispatches by their size; above 16 by the largest of a range
    answered_ms: int = 0  # when a front door gave its last answer, ms since 1970; 0: never


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks: what jobs are charged to, and what it may do."""

    name: str  # for people: "uid 1000", "grpc unix:/run/taktd/grpc.sock", "certificate robot-7"
    rights: Rights
    admits: Callable[[str], bool] = field(default=lambda model: True)  # by model name
    uid: int | None = None  # where it is known

    @property
    def charged(self) -> int | str:
        """Whose account it is."""
        return self.name if self.uid is None else self.uid


class Handle(Protocol):
    """A job that was started."""

    @property
    def ended(self) -> bool: ...

    def cancel(self) -> None:
        """Nobody waits for it any more; nothing happens where it has ended."""


class Backend(Protocol):
    """Who runs requests. Everything raises Refusal."""

    node: str
    version: str

    def live(self) -> bool: ...

    def ready(self) -> bool: ...

    def models(self) -> Sequence[Model]: ...

    def model(self, name: str, version: str) -> Model: ...

    def counts(self, name: str) -> Sequence[ModelCounts]:
        """Of one model, or of all for ""."""

    async def infer(self, request: Request, principal: Principal, encode: Callable[[Answer], T]) -> T:
        """Run one request; encode turns the answer into bytes while its tensors are still in place.

        Cancelling the task frees the job.
        """

    def enter(self, principal: Principal) -> None:
        """One more connection of theirs."""

    def leave(self, principal: Principal) -> None:
        """It has ended."""

    def start(
        self, request: Request, principal: Principal, encode: Callable[[Answer], T], done: Callable[[T | Refusal], None]
    ) -> Handle:
        """The same without a task: done is called once, perhaps before this returns."""

    async def load(self, name: str, version: int | None) -> None:
        """Serve a model again after unload; version: make it the one that is served. Returns when it is."""

    async def unload(self, name: str) -> None:
        """Take no more requests for a model. Returns when those that it has have ended."""


# ---- parameters ----


def parameter_int(name: str, value: Any, maximum: int) -> int:
    """A parameter that counts something. Raises Refusal for another type, a negative or an absurd number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refusal(Outcome.INVALID, f'parameter "{name}": found {_shown(value)}; an integer is expected')
    if not 0 <= value <= maximum:
        raise Refusal(Outcome.INVALID, f'parameter "{name}": found {value}; allowed is 0 to {maximum}')
    return value


def apply_parameters(request: Request, parameters: dict[str, Any]) -> None:
    """Take over what a request's parameters mean; the smallest deadline wins. Unknown ones of ours are refused."""
    for name, value in parameters.items():
        if name in ("timeout", "takt_deadline_us"):
            us = parameter_int(name, value, TIMEOUT_US_MAX)
            if us == 0 and name == "takt_deadline_us":
                raise Refusal(Outcome.EXPIRED, f'parameter "{name}" is 0: the deadline has passed on arrival')
            if us:
                limit_deadline(request, request.arrival_ns + us * 1000)
        elif name == "takt_max_age_us":
            request.max_age_ns = parameter_int(name, value, TIMEOUT_US_MAX) * 1000
        elif name == "priority":
            request.priority = parameter_int(name, value, PRIORITY_MAX)
        elif name.startswith(PARAMETER_PREFIX):
            known = "takt_deadline_us, takt_max_age_us"
            raise Refusal(Outcome.INVALID, f'parameter "{name[:64]}" does not exist; there are {known}')
        elif name.startswith("sequence_") and value:
            text = f'parameter "{name[:64]}": models here keep no state between requests; leave it out'
            raise Refusal(Outcome.UNSUPPORTED, text)


def limit_deadline(request: Request, deadline_ns: int) -> None:
    """The earlier of two deadlines."""
    if not request.deadline_ns or deadline_ns < request.deadline_ns:
        request.deadline_ns = deadline_ns


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"


# ---- whether the tensors fit ----


def fit(request: Request, model: Model) -> list[Tensor]:
    """The inputs in the model's order, checked: names, each once, dtype, shape, byte count. Raises Refusal."""
    given = {tensor.name: tensor for tensor in request.inputs}
    if len(given) != len(request.inputs) or len(given) != len(model.inputs):
        _refuse_names(request, model)
    ordered = []
    for spec in model.inputs:
        tensor = given.get(spec.name)
        if tensor is None:
            _refuse_names(request, model)
        else:
            _check(tensor, spec, model)
            ordered.append(tensor)
    return ordered


def _refuse_names(request: Request, model: Model) -> None:
    names = [tensor.name for tensor in request.inputs]
    known = [spec.name for spec in model.inputs]
    there_are = f"{model.name} has {listed(known)}"
    for name in names:
        if name not in known:
            raise Refusal(Outcome.INVALID, f'input "{name[:96]}" does not exist; {there_are}')
        if names.count(name) > 1:
            raise Refusal(Outcome.INVALID, f'input "{name}" is given {names.count(name)} times; once is expected')
    missing = [name for name in known if name not in names]
    raise Refusal(Outcome.INVALID, f"missing {listed(missing)}; {there_are}")


def listed(names: Sequence[str]) -> str:
    """Names for a message; never a long message."""
    shown = ", ".join(f'"{name}"' for name in names[:NAMES_SHOWN_MAX])
    return f"{shown} and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else shown or "nothing"


def _check(tensor: Tensor, spec: TensorSpec, model: Model) -> None:
    if tensor.dtype != spec.dtype:
        raise Refusal(
            Outcome.INVALID,
            f'input "{spec.name}" of {model.name}: found datatype {tensor.dtype[:32] or "none"}; {spec.dtype} is '
            "expected",
        )
    shape = tensor.shape
    if shape != spec.dims and (
        len(shape) != len(spec.dims)
        or any(
            (not 0 <= found <= most) if is_open else found != most
            for found, most, is_open in zip(shape, spec.dims, spec.open_dims, strict=True)
        )
    ):
        rule = " (open dimensions up to " + str(list(spec.dims)) + ")" if any(spec.open_dims) else ""
        found = str(list(shape[:16])) + ("…" if len(shape) > 16 else "")
        raise Refusal(
            Outcome.INVALID,
            f'input "{spec.name}" of {model.name}: found shape {found}; {spec.shape} is expected{rule}',
        )
    expected = size_bytes(spec.bits, shape)
    size = tensor.nbytes
    if size != expected:
        raise Refusal(
            Outcome.INVALID,
            f'input "{spec.name}" of {model.name}: found {size} bytes; {expected} are expected for {spec.dtype} '
            f"{list(shape)}",
        )


def size_bytes(bits: int, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor; a scalar (no dims) has one element."""
    elements = 1
    for dim in shape:
        elements *= dim
    return (elements * bits + 7) // 8


def wanted_outputs(request: Request, model: Model) -> list[int] | None:
    """Indices of the outputs that the client asked for, in its order; None is all of them. Raises Refusal."""
    if not request.wanted:
        return None
    names = [spec.name for spec in model.outputs]
    indices = []
    for name in request.wanted:
        if name not in names:
            text = f'output "{name[:96]}" does not exist; {model.name} has {listed(names)}'
            raise Refusal(Outcome.INVALID, text)
        indices.append(names.index(name))
    if len(set(indices)) != len(indices):
        raise Refusal(Outcome.INVALID, "an output is asked for twice; once is expected")
    return indices
