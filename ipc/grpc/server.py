"""One gRPC listener: address, rights, limits, health, reflection.

One server per listener, since Python can't learn who is behind a gRPC unix socket: the listener is the principal, and
the file's mode and owner say who gets that far.

Bounds per listener: `connections`, `calls` at a time, `message_bytes`; what goes beyond is refused with
RESOURCE_EXHAUSTED. Compressed messages are refused: a few KB could unfold to more than anybody may send.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from taktd.ipc.grpc.pool import BothPools
from taktd.ipc.grpc.service import SERVICE, InferenceService
from taktd.ipc.inference import Backend, Principal

# Above what a client opens before it has heard of a limit: HTTP/2 would reset those streams without a reason, where
# `calls` refuses them with one.
STREAMS_PER_CONNECTION_MAX: Final = 1024
METADATA_BYTES_MAX: Final = 16 << 10
HANDSHAKE_MS_MAX: Final = 10_000
IDLE_CHECK_MS: Final = 60_000
HEALTH_PERIOD_S: Final = 0.5


@dataclass(frozen=True)
class Bounds:
    """What one listener takes at most."""

    calls: int
    connections: int
    message_bytes: int


class ListenFailed(Exception):
    """The address can't be used; the message says why and what to do."""


class GrpcServer:
    """A listener from start to stop."""

    def __init__(
        self, backend: Backend, principal: Principal, bounds: Bounds, clock: Callable[[], int],
        by_certificate: bool = False,
    ) -> None:  # fmt: skip
        self._backend = backend
        self._server = grpc.aio.server(maximum_concurrent_rpcs=bounds.calls, options=_options(bounds))
        service = InferenceService(backend, principal, clock, bounds.message_bytes, by_certificate)
        self._server.add_generic_rpc_handlers((service.handlers(),))
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server, pool=cast(Any, BothPools()))
        self._shown: bool | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Bind `unix:/path` (mode 0600 until the caller changes it) or `host:port`; the port. Raises ListenFailed."""
        try:
            with _umask(0o177):
                if credentials is None:
                    port = self._server.add_insecure_port(address)
                else:
                    port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ListenFailed(f"gRPC can't listen at {address}: {error}") from None
        await self._server.start()
        await self._tell_health()
        self._watch = asyncio.create_task(self._watch_health())
        return port

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            await self._tell_health()

    async def _tell_health(self) -> None:
        """Whoever watches is told about changes only."""
        ready = self._backend.ready()
        if ready == self._shown:
            return
        self._shown = ready
        state = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, state)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; those that run get `grace_s`."""
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _options(bounds: Bounds) -> list[tuple[str, Any]]:
    return [
        # Twice: up to there the refusal is ours, and names the way that needs no message.
        ("grpc.max_receive_message_length", 2 * bounds.message_bytes),
        ("grpc.max_send_message_length", bounds.message_bytes),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
        ("grpc.max_allowed_incoming_connections", bounds.connections),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES_MAX),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS_MAX),
        ("grpc.keepalive_time_ms", IDLE_CHECK_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # identity alone
        ("grpc.so_reuseport", 0),  # a second taktd on one port is an error, not a share of the calls
    ]


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
