"""An executor without a supervisor: it serves on for a grace, and presents itself to the next one with all it holds.

A supervisor's death closes the link. From then on the executor's lanes go on as they are; between two jobs it dials the
private socket in the runtime folder, where a successor listens for a short time at its start, and hands over what that
one needs to become its supervisor: the ledgers, statistics and journal, each lane's memory and wake-up socket, and what
was said about them. Who is not adopted within the grace ends.

Rejected: descriptors kept by systemd (FileDescriptorStoreMax), which works under systemd only and is out of date
whenever a lane changes hands.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

from taktd.daemon.execution.link import DESCRIPTORS_MAX, MESSAGE_BYTES_MAX, ExecutorLink, LinkClosed
from taktd.daemon.runtime_folder import LANES_SOCKET

__all__ = ["PROTOCOL", "Estate", "Grace", "SupervisorLink"]

PROTOCOL: Final = 1  # of what is presented, layouts of its files included; another one is not adopted
DIAL_EVERY_NS: Final = 200_000_000
WORDS_KEPT_MAX: Final = 64  # log messages for the next supervisor
LANES_PER_MESSAGE: Final = (DESCRIPTORS_MAX - 2) // 4
ROOM_BYTES: Final = MESSAGE_BYTES_MAX * 3 // 4
PRESENTED: Final = ("device", "member", "epoch", "digest", "software", "max_lanes", "blocks")  # as configured
LANE_FIELDS: Final = ("lane", "name", "model", "stats", "layout", "attached", "owner")
UCRED: Final = struct.Struct("iII")

Message = dict[str, Any]
Parcel = tuple[Message, tuple[int, ...]]


class SupervisorLink(ExecutorLink):
    """The executor's end of its link, which may outlast the supervisor. lost: nobody is at the other end."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.lost = False
        self._words: deque[Message] = deque(maxlen=WORDS_KEPT_MAX)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """As ExecutorLink; without a supervisor only words for people are kept: what else is so is presented."""
        if not self.lost:
            try:
                super().send(message, descriptors)
                return
            except LinkClosed:
                self.lost = True
        if message["op"] == "log":
            self._words.append(message)

    def receive(self) -> tuple[Message, list[int]] | None:
        if self.lost:
            return None
        try:
            return super().receive()
        except LinkClosed:
            self.lost = True
            return None

    def connect(self, sock: socket.socket) -> None:
        """Somebody is there again."""
        self.socket.close()
        self.socket = sock
        self.lost = False
        while self._words and not self.lost:
            self.send(self._words.popleft())


class Estate:
    """What another supervisor must know and have of this executor; follows every message that changes it."""

    def __init__(self, plan: Message, descriptors: list[int]) -> None:
        """descriptors: of `configure`. Those of lanes are duplicated, since the core closes its own with the lane."""
        standby = plan.get("standby", ())
        self._head: Message = {
            "op": "present", "protocol": PROTOCOL, "homes": [section["device"] for section in standby],
            **{key: plan.get(key) for key in PRESENTED},
        }  # fmt: skip
        self._home: str = plan["device"]
        self._files = list(descriptors[:3])
        self._lanes: dict[tuple[str, int], tuple[Message, int, int]] = {}
        self._loops: dict[tuple[str, int], Message] = {}  # as configured, also while their lane is not there
        self.serve: Message = {}
        self.loaded: Message = {}
        given = iter(descriptors[3:])
        for entry in (*plan["loops"], *plan.get("model_lanes", ())):
            self._bring_in(self._home, entry, next(given), next(given))
        for section in standby:
            self._files += [next(given), next(given)]
            for entry in section["loops"]:
                self._bring_in(section["device"], entry, next(given), next(given))

    def _bring_in(self, device: str, entry: Message, memfd: int, wake: int) -> None:
        key = device, entry["lane"]
        kept: Message = {name: entry[name] for name in LANE_FIELDS if name in entry}
        if "name" in entry:
            self._loops[key] = kept
        self._take_out(key)
        self._lanes[key] = kept, os.dup(memfd), os.dup(wake)

    def _take_out(self, key: tuple[str, int]) -> None:
        if lane := self._lanes.pop(key, None):
            os.close(lane[1])
            os.close(lane[2])

    def follow(self, message: Message, descriptors: Sequence[int]) -> None:
        """A message from the supervisor, before its descriptors are used."""
        op = message["op"]
        if op == "epoch":
            self._head["epoch"] = message["epoch"]
        elif op == "hang_after":
            self.serve = self.serve | {"hang_after_ns": message["hang_after_ns"]}
        if "lane" not in message:
            return
        device = message.get("device", self._home)
        key = device, message["lane"]
        if op == "lane.add":
            entry = {name: value for name, value in message.items() if name not in ("op", "device", "kind")}
            self._bring_in(device, entry | {"attached": True}, *descriptors)
        elif op == "lane.swap":
            fresh = {"layout": message["layout"], "attached": False, "owner": None}
            self._bring_in(device, self._loops[key] | fresh, *descriptors)
        elif op == "lane.remove":
            self._take_out(key)
        elif op == "lane.attached" and key in self._lanes:
            self._lanes[key][0].update(attached=True, owner=message.get("owner"))

    def parcels(self, owned: Sequence[str]) -> Iterator[Parcel]:
        """Everything, in messages that the link can carry. owned: devices whose ledger this executor has."""
        yield self._head, tuple(self._files)
        yield {"op": "present.loaded", "loaded": self.loaded}, ()
        yield {"op": "present.serve", "serve": self.serve}, ()
        devices = [self._home, *self._head["homes"]]
        for device in devices:
            entries: list[Message] = []
            descriptors: list[int] = []
            room = ROOM_BYTES
            for (at, _), (entry, memfd, wake) in self._lanes.items():
                if at != device:
                    continue
                size = len(json.dumps(entry))
                if entries and (size > room or len(entries) >= LANES_PER_MESSAGE):
                    yield {"op": "present.lanes", "device": device, "lanes": entries}, tuple(descriptors)
                    entries, descriptors, room = [], [], ROOM_BYTES
                entries.append(entry)
                descriptors += [memfd, wake]
                room -= size
            if entries:
                yield {"op": "present.lanes", "device": device, "lanes": entries}, tuple(descriptors)
        yield {"op": "present.end", "owned": list(owned)}, ()


class Grace:
    """How long an executor goes on alone, and its tries to be adopted meanwhile. Every step is bounded, none waits."""

    def __init__(self, link: SupervisorLink, estate: Estate, plan: Message) -> None:
        self._link, self._estate = link, estate
        self._path: str = plan.get("executors_socket", "")
        self._door = os.path.join(os.path.dirname(self._path), LANES_SOCKET)
        self.length_ns: int = plan.get("grace_ns", 0) if self._path else 0
        self._began_ns = 0
        self._due_ns = 0
        self._dialled: socket.socket | None = None
        self._parcels: deque[Parcel] = deque()

    @property
    def due_ns(self) -> int:
        """When the next step is due, 0 while there is a supervisor."""
        return self._due_ns if self._began_ns else 0

    def adopted(self) -> None:
        """The supervisor at the other end has taken this executor over."""
        self._began_ns = 0

    def over(self, now_ns: int) -> bool:
        """Whether nobody came in time. The first call begins the grace."""
        if not self._began_ns:
            self._began_ns = self._due_ns = now_ns
            self._hang_up()
        return now_ns - self._began_ns >= self.length_ns

    def step(self, now_ns: int, owned: Sequence[str]) -> bool:
        """Dial, or send the next piece. True when a supervisor has everything, and the link is used again."""
        self._due_ns = now_ns + DIAL_EVERY_NS
        if not os.path.exists(self._door):  # systemd's socket unit took it away: nobody will come
            self.length_ns = 0
            return False
        if self._dialled is None and not self._dial():
            return False
        assert self._dialled is not None
        if not self._parcels:
            self._parcels.extend(self._estate.parcels(owned))
        link = ExecutorLink(self._dialled)
        try:
            while self._parcels:
                link.send(*self._parcels[0])
                self._parcels.popleft()
        except BlockingIOError:
            self._due_ns = now_ns + DIAL_EVERY_NS // 10
            return False
        except (LinkClosed, OSError):
            self._hang_up()
            return False
        self._link.connect(self._dialled)
        self._dialled = None
        return True

    def _dial(self) -> bool:
        dialled = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        dialled.setblocking(False)
        try:
            dialled.connect(self._path)
            _, uid, _ = UCRED.unpack(dialled.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
            if uid != os.geteuid():
                raise PermissionError(errno.EPERM, "another user's")
        except OSError:
            dialled.close()
            return False
        self._dialled = dialled
        return True

    def _hang_up(self) -> None:
        self._parcels.clear()
        if self._dialled is not None:
            self._dialled.close()
            self._dialled = None
