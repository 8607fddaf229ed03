"""The methods of inference.GRPCInferenceService on one listener. Turns refusals into gRPC statuses.

What taktd does not have answers UNIMPLEMENTED with a sentence that names the way that there is. A request's deadline is
the smallest of the client's own gRPC deadline, `timeout` and `takt_deadline_us`; a cancelled call frees its job.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from taktd.ipc.grpc import inference_pb2 as pb
from taktd.ipc.grpc import messages
from taktd.ipc.grpc.repository import version_asked
from taktd.ipc.inference import Answer, Backend, Model, Outcome, Principal, Refusal, Request, Rights, limit_deadline

if TYPE_CHECKING:  # the classes themselves know no types
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]

SERVICE: Final = "inference.GRPCInferenceService"
STREAM_JOBS_MAX: Final = 16  # of one stream, in flight or not yet read by its client
EXTENSIONS: Final = ("model_repository", "model_configuration", "statistics", "schedule_policy", "parameters")
_DTYPES: Final = {name.removeprefix("TYPE_"): number for name, number in pb.DataType.items() if name != "TYPE_INVALID"}
_LANES: Final = (
    "shared memory by name is not there: a program on this machine attaches a lane (taktd.ipc.connect, takt.h), which "
    "needs no copy at all"
)
_UNSUPPORTED: Final = {
    "SystemSharedMemoryStatus": _LANES,
    "SystemSharedMemoryRegister": _LANES,
    "CudaSharedMemoryStatus": _LANES,
    "CudaSharedMemoryRegister": _LANES,
    "TraceSetting": "tracing over gRPC is not there: taktctl record and taktctl trace show every scheduling decision",
    "LogSettings": "log settings over gRPC are not there: the log goes to journald, read it with journalctl -u taktd",
}


class InferenceService:
    """One listener's methods: everything is done for its principal."""

    def __init__(
        self, backend: Backend, principal: Principal, clock: Callable[[], int], message_bytes_max: int,
        by_certificate: bool = False,
    ) -> None:  # fmt: skip
        """clock: CLOCK_MONOTONIC in ns. by_certificate: jobs are charged to the subject of the client's certificate."""
        self._backend, self._principal, self._clock = backend, principal, clock
        self._message_bytes_max, self._by_certificate = message_bytes_max, by_certificate
        self._reader = messages.RequestReader()

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """For grpc.aio.Server.add_generic_rpc_handlers."""
        asked: dict[str, Callable[[Any], Any]] = {
            "ServerLive": self._server_live, "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata, "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata, "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics, "RepositoryIndex": self._repository_index,
            "SystemSharedMemoryUnregister": self._unregister("System"),
            "CudaSharedMemoryUnregister": self._unregister("Cuda"),
            **{name: self._unsupported(name) for name in _UNSUPPORTED},
        }  # fmt: skip
        methods = {name: self._asking(name, answer) for name, answer in asked.items()}
        methods["RepositoryModelLoad"] = self._changing("RepositoryModelLoad", self._load)
        methods["RepositoryModelUnload"] = self._changing("RepositoryModelUnload", self._unload)
        # Bytes in, bytes out: see messages.py.
        methods["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._infer)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _asking(self, name: str, answer: Callable[[Any], Any]) -> Handler:
        async def method(data: bytes, context: Context) -> Any:
            try:
                self._need(Rights.OBSERVE)
                return answer(_parsed(name, data))
            except Refusal as refusal:
                return await _abort(context, refusal)

        return grpc.unary_unary_rpc_method_handler(method, response_serializer=_serialised)

    def _changing(self, name: str, change: Callable[[Any], Awaitable[None]]) -> Handler:
        async def method(data: bytes, context: Context) -> Any:
            try:
                self._need(Rights.ADMIN)
                request = _parsed(name, data)
                if request.repository_name:
                    text = f"no repository is called {request.repository_name[:64]!r}: there is one, without a name"
                    raise Refusal(Outcome.UNKNOWN, text)
                await change(request)
                return getattr(pb, f"{name}Response")()
            except Refusal as refusal:
                return await _abort(context, refusal)

        return grpc.unary_unary_rpc_method_handler(method, response_serializer=_serialised)

    def _need(self, rights: Rights) -> None:
        if not self._principal.rights.include(rights):
            raise Refusal(
                Outcome.DENIED,
                f"{self._principal.name} has the right to {self._principal.rights.value}, {rights.value} is needed: "
                f"use a listener with `rights: {rights.value}`",
            )

    def _principal_of(self, context: Context) -> Principal:
        if not self._by_certificate:
            return self._principal
        names = context.auth_context().get("x509_common_name", ())
        subject = b"".join(names).decode("utf-8", "replace")[:128]
        return replace(self._principal, name=f"certificate {subject or 'without a name'}")

    # ---- inference ----

    async def _infer(self, data: bytes, context: Context) -> bytes:
        try:
            self._need(Rights.INFER)
            request = self._request_from(data)
            remaining_s = context.time_remaining()
            if remaining_s is not None:
                limit_deadline(request, request.arrival_ns + int(max(remaining_s, 0.0) * 1e9))
            request_id = request.id
            return await self._backend.infer(
                request, self._principal_of(context), lambda answer: messages.encode(answer, request_id)
            )
        except Refusal as refusal:
            await _abort(context, refusal)
            raise AssertionError("abort returned") from None

    def _request_from(self, data: bytes) -> Request:
        if len(data) > self._message_bytes_max:
            raise Refusal(
                Outcome.FULL,
                f"the message has {len(data)} bytes, {self._message_bytes_max} are allowed (limits.message): send "
                "less, or attach a lane (taktd.ipc.connect, takt.h), whose tensors are shared memory and no messages",
            )
        return self._reader.read(data, self._clock())

    async def _stream(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Answers in the order of the requests; a client that does not read its answers is not read either."""
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(STREAM_JOBS_MAX)

        async def read() -> None:
            async for data in requests:
                await answers.put(asyncio.create_task(self._one_of_stream(data, principal)))
            await answers.put(None)

        principal = self._principal_of(context)
        reader = asyncio.create_task(read())
        task: asyncio.Task[bytes] | None = None
        try:
            self._need(Rights.INFER)
            while True:
                task = await _next(answers, reader)
                if task is None:
                    return
                yield await task
        except Refusal as refusal:
            await _abort(context, refusal)
        finally:
            reader.cancel()
            left = [task] if task is not None else []
            while not answers.empty():
                left += [t] if (t := answers.get_nowait()) is not None else []
            for waiting in left:
                waiting.cancel()

    async def _one_of_stream(self, data: bytes, principal: Principal) -> bytes:
        request_id = model = ""
        try:
            request = self._request_from(data)
            request_id, model = request.id, request.model

            def encode(answer: Answer) -> bytes:
                return messages.encode_in_stream(answer, request_id)

            return await self._backend.infer(request, principal, encode)
        except Refusal as refusal:
            return messages.stream_refusal(refusal, request_id, model)

    # ---- the server ----

    def _server_live(self, request: Any) -> Message:
        return pb.ServerLiveResponse(live=self._backend.live())

    def _server_ready(self, request: Any) -> Message:
        return pb.ServerReadyResponse(ready=self._backend.ready())

    def _server_metadata(self, request: Any) -> Message:
        return pb.ServerMetadataResponse(name="taktd", version=self._backend.version, extensions=EXTENSIONS)

    # ---- models ----

    def _model_ready(self, request: Any) -> Message:
        return pb.ModelReadyResponse(ready=self._backend.model(request.name, request.version).ready)

    def _model_metadata(self, request: Any) -> Message:
        model = self._backend.model(request.name, request.version)
        message = pb.ModelMetadataResponse(name=model.name, versions=[model.version], platform=model.platform)
        for specs, tensors in ((model.inputs, message.inputs), (model.outputs, message.outputs)):
            for spec in specs:
                tensors.add(name=spec.name, datatype=spec.dtype, shape=spec.shape)
        return message

    def _model_config(self, request: Any) -> Message:
        return pb.ModelConfigResponse(config=_config(self._backend.model(request.name, request.version)))

    def _model_statistics(self, request: Any) -> Message:
        if request.name:
            self._backend.model(request.name, request.version)
        message = pb.ModelStatisticsResponse()
        for counts in self._backend.counts(request.name):
            stats = message.model_stats.add(
                name=counts.name, version=counts.version, inference_count=counts.inferences,
                execution_count=sum(count.count for _, count in counts.batches), last_inference=counts.answered_ms,
            )  # fmt: skip
            inference = stats.inference_stats
            pairs = (
                (inference.success, counts.success), (inference.fail, counts.fail), (inference.queue, counts.queue),
                (inference.compute_infer, counts.run),
            )  # fmt: skip
            for field, total in pairs:
                field.count, field.ns = total.count, total.ns
            # Inputs and outputs are in place: there is nothing to prepare, and it takes no time.
            inference.compute_input.count = inference.compute_output.count = counts.run.count
            for size, ran in counts.batches:
                batch = stats.batch_stats.add(batch_size=size)
                batch.compute_infer.count, batch.compute_infer.ns = ran.count, ran.ns
                batch.compute_input.count = batch.compute_output.count = ran.count
        return message

    def _repository_index(self, request: Any) -> Message:
        message = pb.RepositoryIndexResponse()
        for model in self._backend.models():
            if model.ready or not request.ready:
                state = "READY" if model.ready else "UNAVAILABLE"
                message.models.add(name=model.name, version=model.version, state=state, reason=model.reason)
        return message

    async def _load(self, request: Any) -> None:
        await self._backend.load(request.model_name, version_asked(request.model_name, request.parameters))

    async def _unload(self, request: Any) -> None:
        if others := sorted(set(request.parameters) - {"unload_dependents"}):
            raise Refusal(Outcome.INVALID, f'parameter "{others[0][:64]}" does not exist; there is unload_dependents')
        await self._backend.unload(request.model_name)

    # ---- what is not there ----

    def _unregister(self, kind: str) -> Callable[[Any], Message]:
        def unregister(request: Any) -> Message:
            if request.name:
                raise Refusal(Outcome.UNKNOWN, f'no region "{request.name[:64]}" is registered: {_LANES}')
            message: Message = getattr(pb, f"{kind}SharedMemoryUnregisterResponse")()
            return message

        return unregister

    def _unsupported(self, name: str) -> Callable[[Any], Message]:
        def unsupported(request: Any) -> Message:
            raise Refusal(Outcome.UNSUPPORTED, f"{name}: {_UNSUPPORTED[name]}")

        return unsupported


async def _next(answers: asyncio.Queue[asyncio.Task[bytes] | None], reader: asyncio.Task[None]) -> Any:
    """The next answer of a stream; None when there will be no more, also where reading failed."""
    getter = asyncio.ensure_future(answers.get())
    await asyncio.wait([getter, reader], return_when=asyncio.FIRST_COMPLETED)
    if not getter.done() and answers.empty():
        getter.cancel()
        return None
    return await getter


def _parsed(name: str, data: bytes) -> Any:
    try:
        return getattr(pb, f"{name}Request").FromString(data)
    except DecodeError:
        raise Refusal(Outcome.INVALID, f"the message is not a {name}Request: it can't be parsed as protobuf") from None


def _serialised(message: Message) -> bytes:
    return bytes(message.SerializeToString())


def _config(model: Model) -> pb.ModelConfig:
    """Triton's view of a model: where jobs can be batched, dims are those of one job."""
    batched = model.max_batch > 1
    config = pb.ModelConfig(
        name=model.name, platform=model.platform, backend="onnxruntime",
        max_batch_size=model.max_batch if batched else 0,
    )  # fmt: skip
    for specs, tensors in ((model.inputs, config.input), (model.outputs, config.output)):
        for spec in specs:
            dims = spec.shape[1:] if batched else spec.shape
            tensors.add(name=spec.name, data_type=_DTYPES.get(spec.dtype, 0), dims=dims)
    if batched:
        config.dynamic_batching.preferred_batch_size.extend(model.preferred_batches)
        config.dynamic_batching.max_queue_delay_microseconds = model.max_delay_ns // 1000
    config.model_transaction_policy.decoupled = False
    return config


async def _abort(context: Context, refusal: Refusal) -> Any:
    """End the call with the refusal's status; the lanes' status and cause go beside it."""
    trailers = (("takt_status", refusal.outcome.status), ("takt_cause", refusal.cause))
    await context.abort(getattr(grpc.StatusCode, refusal.outcome.code), str(refusal), trailers)
