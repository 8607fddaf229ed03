"""A daemon that is one: lanes.sock and lanes served by `_core.Server` in one thread, with an engine that copies inputs.

    python tests/fakes/echo_daemon.py --socket PATH [--core N] [--priority P] [--spin-us N] [--boot-ms N]
        [--until-eof]

For tests of the clients and for the bare round trip in benchmarks. It prints "ready" when it listens and ends on
SIGTERM, with --until-eof also when its standard input is closed. What its loops and models do is in their names, see
`CATALOGUE`.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import errno
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from taktd.ipc import _core

HEADER = struct.Struct("<IHHIi")
MAGIC = int.from_bytes(b"TKT1", "little")
HELLO, WELCOME, ATTACH, ATTACHED, DETACH, DETACHED, LIST, LISTING, ERROR, LANE_ENDED = range(1, 11)
LOOP, MODEL = 1, 2
PAGE = 3  # entries in one LISTING, few, so that clients have to ask again
LANES_MAX = 64

FP32 = _core.DTYPES["FP32"]
Tensors = list[tuple[str, int, tuple[int, ...]]]


@dataclass(frozen=True)
class Entry:
    """One loop or model. mode: echo, slow (30 ms), never (until cancelled), fail, end (ends the lane), denied."""

    kind: int
    tensors: Tensors
    mode: str = "echo"
    period_ns: int = 0
    deadline_ns: int = 0
    dynamic: bool = False
    slot_count: int = 4


SMALL: Tensors = [("x", FP32, (4,))]
ONE: Tensors = [("x", FP32, (1,))]
IMAGE: Tensors = [("x", FP32, (1, 3, 224, 224))]
ALL: Tensors = [(f"t_{name.lower()}", number, (3, 5)) for name, number in _core.DTYPES.items()]
MS = 1_000_000
CATALOGUE: dict[str, Entry] = {
    "echo": Entry(LOOP, SMALL, period_ns=MS, deadline_ns=MS),
    "one": Entry(LOOP, ONE, period_ns=MS, deadline_ns=MS),
    "image": Entry(LOOP, IMAGE, period_ns=10 * MS, deadline_ns=10 * MS),
    "slow": Entry(LOOP, SMALL, "slow", period_ns=MS, deadline_ns=MS),
    "never": Entry(LOOP, SMALL, "never", period_ns=MS, deadline_ns=MS),
    "fail": Entry(LOOP, SMALL, "fail", period_ns=MS, deadline_ns=MS),
    "end": Entry(LOOP, SMALL, "end", period_ns=MS, deadline_ns=MS),
    "denied": Entry(LOOP, SMALL, "denied", period_ns=MS, deadline_ns=MS),
    "m_echo": Entry(MODEL, SMALL),
    "m_dynamic": Entry(MODEL, [("x", FP32, (8, 4)), ("k", _core.DTYPES["INT64"], (2,))], dynamic=True),
    "m_all": Entry(MODEL, ALL),
    "m_never": Entry(MODEL, SMALL, "never", slot_count=3),
}


@dataclass
class Lane:
    """One lane that is served."""

    number: int
    name: str
    entry: Entry
    copies: list[list[list[tuple[int, int, int]]]]  # [slot][area] -> (to, from, bytes)


@dataclass
class Client:
    """One connection."""

    sock: socket.socket
    lanes: dict[int, Lane] = field(default_factory=dict)


class Refusal(Exception):
    """Becomes an ERROR message."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class EchoDaemon:
    """Owns everything; `run()` serves until `stop` has been called."""

    def __init__(self, path: str, *, spin_us: int = 0, boot_ms: int = 0, alive_fd: int = -1) -> None:
        self.alive_fd = alive_fd
        self.spin_ns = spin_us * 1000
        self.ready_ns = _core.now() + boot_ms * MS
        self.events = select.epoll()
        self.server = _core.Server(
            _core.create_ledger(LANES_MAX), _core.create_stats(LANES_MAX), _core.create_journal(64),
            self.events.fileno(),
        )  # fmt: skip
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(16)
        self.listener.setblocking(False)
        self.stopped, self.stopper = os.pipe()
        self.events.register(self.listener, select.EPOLLIN)
        self.events.register(self.stopped, select.EPOLLIN)
        if alive_fd >= 0:
            self.events.register(alive_fd, select.EPOLLIN)
        self.clients: dict[int, Client] = {}
        self.lanes: dict[int, Lane] = {}
        self.due: list[tuple[int, int, int, int]] = []  # (at_ns, lane, slot, sequence) of slow jobs
        self.held: dict[tuple[int, int], int] = {}  # (lane, sequence) -> slot
        self.running = True

    def stop(self) -> None:
        os.write(self.stopper, b"x")

    # Jobs -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        poll, wait, now = self.server.poll, self.server.wait, _core.now
        spin_until_ns = 0
        while self.running:
            jobs = poll(now())
            for lane, sequence, slot, deadline_ns, _, flags in jobs:
                self.take(lane, sequence, slot, deadline_ns, flags)
            if jobs:
                spin_until_ns = now() + self.spin_ns
                continue
            until_ns = min(at for at, *_ in self.due) if self.due else 0
            if wait(until_ns, spin_until_ns) & (2 | 8):
                self.look_at_clients()
            self.finish_due(now())
        for client in list(self.clients.values()):
            self.leave(client)
        self.listener.close()

    def take(self, number: int, sequence: int, slot: int, deadline_ns: int, flags: int) -> None:
        lane = self.lanes.get(number)
        if lane is None:
            return
        if flags & 0x8000:
            self.end(lane, 7, f"protocol broken, reason {deadline_ns}")
        elif flags & 2:
            held = self.held.pop((number, sequence), None)
            if held is not None:
                self.server.complete(number, held, 6, 0, 0, 0, 0, _core.now())
        elif lane.entry.mode == "echo":
            self.echo(lane, slot, flags)
        elif lane.entry.mode == "slow":
            self.due.append((_core.now() + 30 * MS, number, slot, flags))
        elif lane.entry.mode == "never":
            self.held[number, sequence] = slot
        elif lane.entry.mode == "fail":
            self.server.complete(number, slot, 4, 0, 0, 0, 0, _core.now())
        elif lane.entry.mode == "end":
            self.end(lane, None, "the operator wanted it")

    def echo(self, lane: Lane, slot: int, flags: int) -> None:
        server, now = self.server, _core.now
        server.begin(lane.number, slot, now())
        for to, source, count in lane.copies[slot][0]:
            ctypes.memmove(to, source, count)
        if flags & 1:
            server.set_output_shapes(lane.number, slot, server.shapes(lane.number, slot))
        server.complete(lane.number, slot, 0, 0, 1, 0, 0, now())

    def finish_due(self, now_ns: int) -> None:
        for job in [job for job in self.due if job[0] <= now_ns]:
            self.due.remove(job)
            if job[1] in self.lanes:
                self.echo(self.lanes[job[1]], job[2], job[3])

    # Clients ----------------------------------------------------------------------------------------------------

    def look_at_clients(self) -> None:
        for fd, _ in self.events.poll(0):
            if fd in (self.stopped, self.alive_fd):
                self.running = False
            elif fd == self.listener.fileno():
                sock, _ = self.listener.accept()
                sock.setblocking(False)
                self.clients[sock.fileno()] = Client(sock)
                self.events.register(sock, select.EPOLLIN)
            else:
                self.read(self.clients[fd])

    def read(self, client: Client) -> None:
        try:
            message = client.sock.recv(8192)
        except OSError:
            message = b""
        if not message:
            self.leave(client)
            return
        _, kind, _, request, _ = HEADER.unpack_from(message)
        handlers: dict[int, Callable[[Client, int, bytes], None]] = {
            HELLO: self.hello, ATTACH: self.attach, DETACH: self.detach, LIST: self.list,
        }  # fmt: skip
        try:
            handlers[kind](client, request, message[HEADER.size :])
        except Refusal as refusal:
            self.send(client, ERROR, request, str(refusal).encode(), code=-refusal.code)

    def send(
        self, client: Client, kind: int, request: int, body: bytes, *, code: int = 0, fds: tuple[int, ...] = ()
    ) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        client.sock.sendmsg([HEADER.pack(MAGIC, kind, 0, request, code) + body], ancillary)

    def hello(self, client: Client, request: int, body: bytes) -> None:
        least, most, _ = struct.unpack("<II64s", body)
        if not least <= 1 <= most:
            raise Refusal(errno.EPROTO, f"wire versions {least} to {most} asked for; allowed: 1")
        self.send(client, WELCOME, request, struct.pack("<II64s", 1, os.getpid(), b"echo-node"))

    def list(self, client: Client, request: int, body: bytes) -> None:
        kind, offset = struct.unpack("<II", body)
        every = [{"name": name, "model": name} for name, entry in CATALOGUE.items() if entry.kind == kind]
        after = offset + PAGE if offset + PAGE < len(every) else 0
        page = json.dumps(every[offset : offset + PAGE]).encode()
        self.send(client, LISTING, request, struct.pack("<II", len(every), after) + page)

    def attach(self, client: Client, request: int, body: bytes) -> None:
        kind, _, raw = struct.unpack("<II64s", body)
        name = raw.split(b"\0")[0].decode()
        entry = CATALOGUE.get(name)
        if _core.now() < self.ready_ns:
            raise Refusal(errno.EAGAIN, "booting: ask again")
        if entry is None or kind not in (0, entry.kind):
            raise Refusal(errno.ENOENT, f'no loop or model "{name}"; there are {", ".join(CATALOGUE)}')
        if entry.mode == "denied":
            raise Refusal(errno.EACCES, f'loop "{name}": not allowed for this user')
        if entry.kind == LOOP and any(lane.name == name for lane in self.lanes.values()):
            raise Refusal(errno.EBUSY, f'loop "{name}" is taken by another client')
        number = next((i for i in range(LANES_MAX) if i not in self.lanes), None)
        if number is None:
            raise Refusal(errno.ENOSPC, f"all {LANES_MAX} lanes are in use")
        self.add_lane(client, request, number, name, entry)

    def add_lane(self, client: Client, request: int, number: int, name: str, entry: Entry) -> None:
        outputs = [("y" if tensor == "x" else tensor, dtype, dims) for tensor, dtype, dims in entry.tensors]
        layout: Any = _core.create_lane(
            name, name, entry.kind, entry.tensors, outputs, slot_count=entry.slot_count, dynamic=entry.dynamic,
            period_ns=entry.period_ns, deadline_ns=entry.deadline_ns,
        )  # fmt: skip
        ours, theirs = _core.wake_pair()
        size = layout["total_size"]
        body = struct.pack("<QQQQ", number + 1, size, size, 1)
        self.send(client, ATTACHED, request, body, fds=(layout["fd"], theirs))
        os.close(theirs)
        self.server.add(number, layout["fd"], ours, layout, number, area=0, recover=False)
        address, inputs = self.server.slot_address, len(entry.tensors)
        copies = [
            [
                [
                    (address(number, slot, inputs + i, area), address(number, slot, i, area), tensor["bytes"])
                    for i, tensor in enumerate(layout["inputs"])
                ]
                for area in (0, 1)
            ]
            for slot in range(entry.slot_count)
        ]
        client.lanes[number] = self.lanes[number] = Lane(number, name, entry, copies)

    def detach(self, client: Client, request: int, body: bytes) -> None:
        (lane_id,) = struct.unpack("<Q", body)
        if lane_id - 1 in client.lanes:
            self.drop(client, lane_id - 1, None)
        self.send(client, DETACHED, request, body)

    def end(self, lane: Lane, status: int | None, why: str) -> None:
        client = next(client for client in self.clients.values() if lane.number in client.lanes)
        self.send(client, LANE_ENDED, 0, struct.pack("<Q", lane.number + 1) + why.encode())
        self.drop(client, lane.number, status)

    def drop(self, client: Client, number: int, status: int | None) -> None:
        del client.lanes[number], self.lanes[number]
        self.held = {key: slot for key, slot in self.held.items() if key[0] != number}
        self.due = [job for job in self.due if job[1] != number]
        self.server.remove(number, status)

    def leave(self, client: Client) -> None:
        for number in list(client.lanes):
            self.drop(client, number, None)
        del self.clients[client.sock.fileno()]
        self.events.unregister(client.sock)
        client.sock.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--socket", required=True)
    parser.add_argument("--core", type=int, default=-1)
    parser.add_argument("--priority", type=int, default=0)
    parser.add_argument("--spin-us", type=int, default=0, help="how long to poll after a job before sleeping")
    parser.add_argument("--boot-ms", type=int, default=0, help="answer 'booting' for so long")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input is closed")
    options = parser.parse_args()
    daemon = EchoDaemon(
        options.socket, spin_us=options.spin_us, boot_ms=options.boot_ms,
        alive_fd=sys.stdin.fileno() if options.until_eof else -1,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: daemon.stop())
    print("ready", flush=True)
    _core.realtime(options.priority, options.core)
    daemon.run()


if __name__ == "__main__":
    main()
