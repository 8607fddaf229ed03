"""The declaration of the front doors: gRPC, ZeroMQ, HTTP. Used by configuration.py.

gRPC and ZeroMQ listen on unix sockets in the runtime folder unless configured otherwise; TCP only where somebody wrote
it, and then with certificates (gRPC), CURVE keys (ZeroMQ) or for this machine alone.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from taktd.daemon.config.values import Section, refuse

__all__ = ["Grpc", "GrpcListener", "Http", "HttpSetting", "ZeroMq", "ZeroMqSetting", "default_grpc", "is_loopback"]

LISTENERS_MAX: Final = 16
UNIX: Final = "unix:"
LISTEN_FORM: Final = "unix:/path, unix: for the runtime folder, or host:port"

_MODE = re.compile(r"0?[0-7]{3}")


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _listen(value: str) -> str:
    if value.startswith(UNIX):
        path = value[len(UNIX) :]
        if path and not path.startswith("/"):
            raise refuse("is not an absolute path", LISTEN_FORM)
        return value
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise refuse("is not an address", LISTEN_FORM)
    return value


def _mode(value: str) -> str:
    if not _MODE.fullmatch(value):
        raise refuse("is not a file mode", 'three octal digits in quotes, such as "0660"')
    return value


Listen = Annotated[str, AfterValidator(_listen)]
File = Annotated[str, Field(min_length=1, max_length=4096, pattern="^/")]


class Tls(Section):
    """Mutual TLS: the server's certificate, and who signs clients' certificates."""

    certificate: File = Field(description="PEM file with the server's certificate chain; an absolute path.")
    key: File = Field(description="PEM file with its private key; an absolute path.")
    clients: File = Field(description="PEM file with the authority that signs clients; an absolute path.")


class GrpcListener(Section):
    """One address. Who reaches it has its rights."""

    listen: Listen = Field(
        default=UNIX, description="unix:/path, or host:port. Default: grpc.sock in the runtime folder."
    )
    rights: Literal["observe", "infer", "admin"] = Field(
        default="infer", description="observe: readiness, metadata, statistics; infer: also inference; admin: all."
    )
    owner: str | None = Field(default=None, description="User that the socket belongs to. Default: the daemon's own.")
    group: str | None = Field(default=None, description="Group that the socket belongs to. Default: taktd.")
    mode: Annotated[str, AfterValidator(_mode)] = Field(default="0660", description="Mode of the socket, in quotes.")
    tls: Tls | None = Field(default=None, description="Certificates; TCP needs them.")
    insecure: Literal["loopback"] | None = Field(
        default=None, description="`loopback`: TCP without certificates, on an address of this machine alone."
    )

    @model_validator(mode="after")
    def _guarded(self) -> GrpcListener:
        if self.listen.startswith(UNIX):
            return self
        for key in ("owner", "group", "mode"):
            if key in self.model_fields_set:
                raise refuse("has no meaning here", "only with a unix socket", "remove it", key=key)
        if self.tls is None and self.insecure is None:
            hint = "add `tls: {certificate, key, clients}`, or listen on a unix socket"
            raise refuse("is open to everybody", "TCP with mutual TLS", hint, key="listen")
        if self.tls is None and not is_loopback(self.listen.rpartition(":")[0]):
            hint = "`insecure: loopback` is for 127.0.0.1, ::1 and localhost"
            raise refuse("is reachable from other machines", "TCP with mutual TLS", hint, key="insecure")
        return self


class Curve(Section):
    """CURVE keys, as `taktctl` or zmq.auth make them."""

    secret_key: File = Field(description="File with the server's secret key (zmq.auth); an absolute path.")
    clients: File = Field(description="Folder with the public keys of clients; an absolute path.")


class ZeroMq(Section):
    """ROUTER for requests at zmq.sock and PUB for events at events.sock in the runtime folder; or `zmq: off`."""

    on: bool = Field(default=True, alias="\0on")
    listen: str | None = Field(default=None, description="Also tcp://host:port for requests; needs `curve`.")
    events: str | None = Field(default=None, description="Also tcp://host:port for events; needs `curve`.")
    curve: Curve | None = Field(default=None, description="Keys; TCP needs them.")
    events_high_water: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=1000, description="Events kept for a subscriber that does not read; more are dropped and counted."
    )

    @model_validator(mode="after")
    def _guarded(self) -> ZeroMq:
        for key in ("listen", "events"):
            address = getattr(self, key)
            if address is None:
                continue
            if not re.fullmatch(r"tcp://[^/]+:[0-9]{1,5}", address):
                raise refuse("is not an address", "tcp://host:port", key=key)
            if self.curve is None:
                hint = "add `curve: {secret_key, clients}`; programs on this machine use the unix socket"
                raise refuse("is open to everybody", "TCP with CURVE keys", hint, key=key)
        return self


class Http(Section):
    """/metrics and /health/*; or `http: off`."""

    listen: Listen | None = Field(default=None, description="unix:/path, or host:port on loopback. Default: off.")

    @model_validator(mode="after")
    def _near(self) -> Http:
        if self.listen is None or self.listen.startswith(UNIX):
            return self
        if not is_loopback(self.listen.rpartition(":")[0]):
            hint = "let the collector run on this machine, or put a proxy with authentication in front"
            raise refuse("is reachable from other machines", "127.0.0.1:port, [::1]:port or unix:/path", hint, "listen")
        return self


def _grpc(value: Any) -> Any:
    if value is False or value == "off":
        return ()
    return (value,) if isinstance(value, dict) else value


def _zeromq(value: Any) -> Any:
    return {"\0on": False} if value is False or value == "off" else value


def _http(value: Any) -> Any:
    return {} if value is False or value == "off" else value


Grpc = Annotated[tuple[GrpcListener, ...], BeforeValidator(_grpc), Field(max_length=LISTENERS_MAX)]
ZeroMqSetting = Annotated[ZeroMq, BeforeValidator(_zeromq)]
HttpSetting = Annotated[Http, BeforeValidator(_http)]


def default_grpc() -> tuple[GrpcListener, ...]:
    return (GrpcListener.model_validate({}),)
