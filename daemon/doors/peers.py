"""Who is at the other end of a unix socket, and whether the configuration lets them in."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from typing import Final

from taktd.daemon.config.configuration import Allow

SO_PEERGROUPS: Final = 59  # asm-generic; Python has no name for it
# What Python's getsockopt can return. A peer in more groups is judged by its primary group alone.
GROUPS_BYTES_MAX: Final = 1024
_UCRED = struct.Struct("iII")


@dataclass(frozen=True)
class Peer:
    """Credentials as of connect(). pid is 0 for a process of another pid namespace."""

    pid: int
    uid: int
    groups: frozenset[int]

    def __str__(self) -> str:
        return f"uid {self.uid}, pid {self.pid}"


def peer_of(connection: socket.socket) -> Peer:
    """The kernel's word on the peer: SO_PEERCRED and, for supplementary groups, SO_PEERGROUPS."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    groups = {gid}
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GROUPS_BYTES_MAX)
        groups.update(struct.unpack(f"{len(raw) // 4}I", raw))
    except OSError as error:
        if error.errno not in (errno.ERANGE, errno.ENOPROTOOPT):
            raise
    return Peer(pid, uid, frozenset(groups))


@dataclass(frozen=True)
class Rule:
    """An `allow:` with its names looked up once, so that no name service is asked while clients wait."""

    uids: frozenset[int]
    gids: frozenset[int]
    unknown: tuple[str, ...]  # names that nobody has on this machine: they admit nobody

    def admits(self, peer: Peer, own_uid: int) -> bool:
        return peer.uid in (0, own_uid) or peer.uid in self.uids or not self.gids.isdisjoint(peer.groups)


def _uid(name: str) -> int | None:
    if name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def _gid(name: str) -> int | None:
    if name.isdigit():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def rule_of(allow: Allow) -> Rule:
    """Look the names up. A name that does not exist is no error: it admits nobody, and `unknown` says so."""
    users = {name: _uid(name) for name in allow.users}
    groups = {name: _gid(name) for name in allow.groups}
    unknown = [f"user {n}" for n, i in users.items() if i is None] + [
        f"group {n}" for n, i in groups.items() if i is None
    ]
    return Rule(
        frozenset(i for i in users.values() if i is not None),
        frozenset(i for i in groups.values() if i is not None),
        tuple(unknown),
    )


def user_name(uid: int) -> str:
    """For messages: the name, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def own_uid() -> int:
    return os.geteuid()
