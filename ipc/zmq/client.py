"""The Python client of zmq.sock, for threads (`Client`) and for asyncio (`AsyncClient`). docs/zmq.md has the format.

    with Client() as client:
        result = client.infer("policy", obs=observation, deadline_us=5000)
        act(result["actions"])

A client belongs to one thread (one event loop). Answers to `AsyncClient` come in any order and are matched by id.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio

from taktd.ipc.errors import NotConnected, TaktError

VERSION: Final = 1
TIMEOUT_S: Final = 10.0
SOCKET: Final = "zmq.sock"

_DTYPES: Final[dict[str, Any]] = {
    "BOOL": np.bool_, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "UINT8": np.uint8,
    "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "FP16": np.float16, "FP32": np.float32,
    "FP64": np.float64, "COMPLEX64": np.complex64, "COMPLEX128": np.complex128,
}  # fmt: skip
_NAMES: Final = {np.dtype(kind): name for name, kind in _DTYPES.items()}


class ZmqRefused(TaktError):
    """No result: `status` of the lanes' closed set, `code` as gRPC spells it, `cause` where a deadline was missed."""

    def __init__(self, status: str, code: str, message: str, cause: str) -> None:
        super().__init__(message)
        self.status, self.code_name, self.cause = status, code, cause


class Result(dict[str, npt.NDArray[Any]]):
    """Outputs by name (raw bytes as uint8 or uint16 where numpy lacks the dtype), and how they came about."""

    def __init__(self, header: Mapping[str, Any], outputs: Mapping[str, npt.NDArray[Any]]) -> None:
        super().__init__(outputs)
        parameters = header["parameters"]
        self.path: str = parameters["takt_path"]
        self.cause: str = parameters["takt_cause"]
        self.late: bool = parameters["takt_late"]
        self.queued_us: int = parameters["takt_queued_us"]
        self.run_us: int = parameters["takt_run_us"]


def default_address(environment: Mapping[str, str] = os.environ) -> str:
    """ipc:// and the socket beside the lane socket: $TAKTD_RUNTIME_DIR, $XDG_RUNTIME_DIR/taktd, /run/taktd."""
    folders = [Path(environment[name]) for name in ("TAKTD_RUNTIME_DIR",) if environment.get(name)]
    if environment.get("XDG_RUNTIME_DIR"):
        folders.append(Path(environment["XDG_RUNTIME_DIR"]) / "taktd")
    folders.append(Path("/run/taktd"))
    paths = [folder / SOCKET for folder in folders]
    return f"ipc://{next((path for path in paths if path.exists()), paths[0])}"


def _request(
    number: int, model: str, inputs: Mapping[str, npt.ArrayLike], datatypes: Mapping[str, str],
    outputs: Sequence[str], parameters: Mapping[str, Any],
) -> list[Any]:  # fmt: skip
    arrays = {name: np.ascontiguousarray(value) for name, value in inputs.items()}
    described = []
    for name, array in arrays.items():
        datatype = datatypes.get(name) or _NAMES.get(array.dtype)
        if datatype is None:
            raise TypeError(f"{name}: {array.dtype} has no KServe name; say it by datatypes={{{name!r}: ...}}")
        # ascontiguousarray makes a scalar a vector of one.
        described.append({"name": name, "datatype": datatype, "shape": list(np.shape(inputs[name]))})
    header: dict[str, Any] = {"v": VERSION, "id": number, "op": "infer", "model": model, "inputs": described}
    if outputs:
        header["outputs"] = list(outputs)
    if parameters:
        header["parameters"] = dict(parameters)
    return [msgpack.packb(header), *(array.reshape(-1).view(np.uint8).data for array in arrays.values())]


def _parameters(deadline_us: int | None, max_age_us: int | None, priority: int) -> dict[str, int]:
    given = {"takt_deadline_us": deadline_us, "takt_max_age_us": max_age_us, "priority": priority or None}
    return {name: value for name, value in given.items() if value is not None}


def _header(frames: Sequence[zmq.Frame]) -> dict[str, Any]:
    header: dict[str, Any] = msgpack.unpackb(frames[0].buffer)
    return header


def _checked(header: dict[str, Any]) -> dict[str, Any]:
    if header["status"] != "ok":
        raise ZmqRefused(header["status"], header["code"], header["message"], header["cause"])
    return header


def _result(header: dict[str, Any], frames: Sequence[zmq.Frame]) -> Result:
    outputs = {}
    for about, frame in zip(_checked(header)["outputs"], frames[1:], strict=True):
        flat = np.frombuffer(frame.buffer, np.uint8)
        dtype = _DTYPES.get(about["datatype"])
        if dtype is not None:
            outputs[about["name"]] = flat.view(dtype).reshape(about["shape"])
        else:
            outputs[about["name"]] = (
                flat.view(np.uint16).reshape(about["shape"]) if about["datatype"] == "BF16" else flat
            )
    return Result(header, outputs)


def _connect(socket: Any, address: str | None) -> str:
    socket.set(zmq.LINGER, 0)
    where = address or default_address()
    socket.connect(where)
    return where


class Client:
    """Requests one after the other, from one thread."""

    def __init__(self, address: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        """address: ipc:///path or tcp://host:port; by default the zmq.sock of the taktd on this machine."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._timeout_ms = int(timeout_s * 1000)
        self._number = 0
        self.address = _connect(self._socket, address)

    def infer(
        self, model: str, inputs: Mapping[str, npt.ArrayLike] | None = None, *, outputs: Sequence[str] = (),
        deadline_us: int | None = None, max_age_us: int | None = None, priority: int = 0,
        datatypes: Mapping[str, str] | None = None, **arrays: npt.ArrayLike,
    ) -> Result:  # fmt: skip
        """One inference; inputs by name. deadline_us counts from arrival. Raises ZmqRefused, NotConnected."""
        self._number += 1
        parameters = _parameters(deadline_us, max_age_us, priority)
        frames = _request(self._number, model, {**(inputs or {}), **arrays}, datatypes or {}, outputs, parameters)
        header, reply = self._ask(frames)
        return _result(header, reply)

    def models(self) -> list[dict[str, Any]]:
        """The models there are, with their tensors."""
        listed: list[dict[str, Any]] = self._simple("models")["models"]
        return listed

    def ready(self) -> bool:
        return bool(self._simple("ready")["ready"])

    def _simple(self, operation: str) -> dict[str, Any]:
        self._number += 1
        header, _ = self._ask([msgpack.packb({"v": VERSION, "id": self._number, "op": operation})])
        return _checked(header)

    def _ask(self, frames: list[Any]) -> tuple[dict[str, Any], list[zmq.Frame]]:
        self._socket.send_multipart(frames, copy=False)
        while True:
            if not self._socket.poll(self._timeout_ms):
                raise NotConnected(f"no answer from {self.address} within {self._timeout_ms} ms: is taktd running?")
            reply: list[zmq.Frame] = self._socket.recv_multipart(copy=False)
            header = _header(reply)
            if header["id"] == self._number:  # else one that came after its time-out
                return header, reply

    def close(self) -> None:
        self._context.destroy(0)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Many requests at a time, in one event loop."""

    def __init__(self, address: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._timeout_s = timeout_s
        self._number = 0
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], list[zmq.Frame]]]] = {}
        self._reader: asyncio.Task[None] | None = None
        self.address = _connect(self._socket, address)

    async def infer(
        self, model: str, inputs: Mapping[str, npt.ArrayLike] | None = None, *, outputs: Sequence[str] = (),
        deadline_us: int | None = None, max_age_us: int | None = None, priority: int = 0,
        datatypes: Mapping[str, str] | None = None, **arrays: npt.ArrayLike,
    ) -> Result:  # fmt: skip
        """As Client.infer."""
        self._number += 1
        number = self._number
        parameters = _parameters(deadline_us, max_age_us, priority)
        frames = _request(number, model, {**(inputs or {}), **arrays}, datatypes or {}, outputs, parameters)
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._socket.send_multipart(frames, copy=False)
            header, reply = await asyncio.wait_for(future, self._timeout_s)
        except asyncio.TimeoutError:
            raise NotConnected(f"no answer from {self.address} within {self._timeout_s} s: is taktd running?") from None
        finally:
            del self._waiting[number]
        return _result(header, reply)

    async def _read(self) -> None:
        while True:
            reply = await self._socket.recv_multipart(copy=False)
            header = _header(reply)
            future = self._waiting.get(header["id"])
            if future is not None and not future.done():
                future.set_result((header, reply))

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._context.destroy(0)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
