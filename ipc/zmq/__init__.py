"""Requests and events over ZeroMQ, for programs that are no control loops and have no gRPC. See docs/zmq.md.

    with Client() as client:
        actions = client.infer("policy", obs=observation)["actions"]

`Client` and `AsyncClient` are for programs; `protocol` and `server` are the gateway's.
"""

from taktd.ipc.zmq.client import AsyncClient, Client, Result, ZmqRefused

__all__ = ["AsyncClient", "Client", "Result", "ZmqRefused"]
