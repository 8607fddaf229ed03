"""System calls that fail, or end the process, at the n-th of them: for what must be whole or not there at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink")


class Counted:
    """How many of the calls were made."""

    def __init__(self) -> None:
        self.calls = 0


@contextmanager
def failing(at: int, action: Callable[[str], None]) -> Iterator[Counted]:
    """``action(name)`` instead of the ``at``-th call (from 1; 0: none); it raises, or ends the process."""
    counted, real = Counted(), {name: getattr(os, name) for name in CALLS}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            counted.calls += 1
            if counted.calls == at:
                action(name)
            return real[name](*arguments, **named)

        return call

    for name in CALLS:
        setattr(os, name, wrapped(name))
    try:
        yield counted
    finally:
        for name in CALLS:
            setattr(os, name, real[name])


def fails(number: int) -> Callable[[str], None]:
    """The call fails with this errno."""

    def action(name: str) -> None:
        raise OSError(number, os.strerror(number))

    return action


def counted(work: Callable[[], Any]) -> int:
    """How many calls ``work`` makes."""
    with failing(0, fails(0)) as seen:
        work()
    return seen.calls


def killed_at(at: int, work: Callable[[], Any]) -> None:
    """``work`` in a child process that is gone at its ``at``-th call, without any clean-up."""
    child = os.fork()
    if child == 0:
        try:
            with failing(at, lambda name: os._exit(9)):
                work()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] != 0
