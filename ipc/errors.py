"""The closed set of errors that clients meet.

Each says what happened, to which thing, what was found, what is allowed, and what to do. `errno` is the positive errno
of the C function behind it (0 where there is none), so that C and Python can be compared.
"""

from __future__ import annotations

import errno as _errno


class TaktError(Exception):
    """Base of all errors of `taktd.ipc`; itself only for what none of the others describes."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.errno = code


class NotConnected(TaktError):
    """There is no daemon at the socket, it does not answer, or the connection has ended."""


class NotFound(TaktError):
    """No loop, model, tensor, reply or pending job of that name or number."""


class Busy(TaktError):
    """Every slot of the lane is pending, or another client has the loop."""


class Denied(TaktError):
    """The configuration does not allow this user to attach, or the system refused real-time rights."""


class InvalidInput(TaktError):
    """An argument, dtype or shape does not fit."""


class Detached(TaktError):
    """The lane has ended: attach again."""


class Incompatible(TaktError):
    """Client and daemon have no wire version in common, or the lane's memory is not what this client understands."""


class LimitReached(TaktError):
    """The daemon or this process has no more lanes, descriptors or memory."""


_BY_ERRNO: dict[int, type[TaktError]] = {
    _errno.ENOENT: NotFound,
    _errno.ENODATA: NotFound,
    _errno.EBUSY: Busy,
    _errno.EACCES: Denied,
    _errno.EPERM: Denied,
    _errno.EINVAL: InvalidInput,
    _errno.EMSGSIZE: InvalidInput,
    _errno.ENAMETOOLONG: InvalidInput,
    _errno.EOPNOTSUPP: InvalidInput,
    _errno.EPIPE: Detached,
    _errno.EPROTO: Incompatible,
    _errno.ENOSPC: LimitReached,
    _errno.EMFILE: LimitReached,
    _errno.ENFILE: LimitReached,
    _errno.ENOMEM: LimitReached,
    _errno.EAGAIN: NotConnected,
    _errno.ETIMEDOUT: NotConnected,
    _errno.ENOTCONN: NotConnected,
    _errno.ECONNREFUSED: NotConnected,
    _errno.ECONNRESET: NotConnected,
}


def from_errno(code: int, message: str) -> TaktError:
    """The error for a positive errno of the C core; called from `_core`."""
    return _BY_ERRNO.get(code, TaktError)(message, code)
