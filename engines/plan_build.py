"""A build as its starter sees it: a child process with progress, a time limit and cancellation.

An executor that serves nothing yet starts it, where no admitted loop runs on that GPU (daemon/handover/gpu_room.py);
this module only runs it. It dies with whoever started it. Nothing here blocks unless asked to.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from taktd.engines.errors import ModelRefused
from taktd.engines.plan_cache import CachedPlan, PlanCache, PlanIdentity
from taktd.engines.tensorrt_build import BuildRequest

__all__ = ["PlanBuild", "Progress"]

CANCEL_GRACE_NS: Final = 5_000_000_000  # the builder hears of a cancellation at its next step
LINE_BYTES_MAX: Final = 1 << 16
TELL_NS: Final = 1_000_000_000


class Progress:
    """How far a build is. ``steps`` 0: not known."""

    phase = "starting"
    step = 0
    steps = 0

    def __str__(self) -> str:
        return f"{self.phase}, {self.step} of {self.steps}" if self.steps else self.phase


class PlanBuild:
    """One running build. ``clock`` gives CLOCK_MONOTONIC ns."""

    def __init__(
        self,
        request: BuildRequest,
        identity: PlanIdentity,
        cache: PlanCache,
        *,
        limit_ns: int,
        clock: Any = time.monotonic_ns,
    ) -> None:
        self._identity = identity
        self._cache = cache
        self._clock = clock
        self._until_ns = clock() + limit_ns
        self._limit_ns = limit_ns
        self._kill_ns = 0
        self._why = ""
        cache.folder.mkdir(parents=True, exist_ok=True)
        _tidy(cache.folder)
        self._output = cache.folder / f".build-{identity.digest}.{os.getpid()}"
        self._request = replace(request, output=str(self._output))
        self.progress = Progress()
        self._answer: dict[str, Any] | None = None
        self._rest = b""
        # A pipe that nobody reads would stop the child.
        self._words = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "taktd.engines.tensorrt_build", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(self._request.as_json().encode() + b"\n")
        self._process.stdin.close()
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._out, False)

    def fileno(self) -> int:
        """Readable when there is progress or the end."""
        return self._out

    def cancel(self, why: str = "cancelled") -> None:
        """Asks the builder to stop; ``poll`` kills it if it does not."""
        if not self._kill_ns:
            self._why = why
            self._kill_ns = self._clock() + CANCEL_GRACE_NS
            self._process.send_signal(signal.SIGTERM)

    def poll(self) -> CachedPlan | None:
        """None while it runs; then the plan, which is in the cache. Raises ``ModelRefused`` when it has failed."""
        self._read()
        now_ns = self._clock()
        if now_ns >= self._until_ns and not self._kill_ns:
            self.cancel(f"not finished within {self._limit_ns // 1_000_000_000} s")
        if self._kill_ns and now_ns >= self._kill_ns:
            self._process.kill()
        if self._process.poll() is None:
            return None
        self._read()
        return self._end()

    def wait(self, tell: Callable[[Progress], None] = lambda _: None) -> CachedPlan:
        """``poll`` until it ends. ``tell`` is called where there is something new, at most once in ``TELL_NS``."""
        told, due_ns = "", 0
        while True:
            done = self.poll()
            if done is not None:
                return done
            if str(self.progress) != told and self._clock() >= due_ns:
                told, due_ns = str(self.progress), self._clock() + TELL_NS
                tell(self.progress)
            # 20 ms: a child whose pipe is at its end may still be exiting
            select.select([self._out] if self._process.poll() is None else [], [], [], 0.02)

    def close(self) -> None:
        """Ends it at once, and takes away what it left."""
        self._process.kill()
        self._process.wait()
        self._output.unlink(missing_ok=True)
        self._words.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        while True:
            try:
                found = os.read(self._out, LINE_BYTES_MAX)
            except BlockingIOError:
                return
            if not found:
                return
            *lines, self._rest = (self._rest + found).split(b"\n")
            for line in lines:
                self._hear(line)

    def _hear(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return  # something that a library printed
        if "progress" in message:
            told = message["progress"]
            self.progress.phase, self.progress.step, self.progress.steps = told["phase"], told["step"], told["steps"]
        else:
            self._answer = message

    def _end(self) -> CachedPlan:
        try:
            if self._why:
                raise _failed(self._request.model, self._why, "Raise `build_limit`, or build ahead of time.")
            answer = self._answer or {}
            if "error" in answer:
                told = answer["error"]
                raise ModelRefused(told["what"], found=told["found"], allowed=told["allowed"], hint=told["hint"])
            if "built" not in answer or self._process.returncode != 0:
                raise _failed(self._request.model, self._last_words(), "See the journal; is there enough memory?")
            return self._cache.store(self._identity, self._output.read_bytes(), build_ns=answer["built"]["build_ns"])
        finally:
            self.close()

    def _last_words(self) -> str:
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return f"{how}{': ' + lines[-1] if lines else ''}"


def _tidy(folder: Path) -> None:
    """Takes away what builds left whose starters were killed."""
    for left in folder.glob(".build-*"):
        if not Path("/proc", left.name.rpartition(".")[2]).exists():
            left.unlink(missing_ok=True)


def _failed(model: str, found: str, hint: str) -> ModelRefused:
    return ModelRefused(
        f"the build of {Path(model).name} did not end with an engine",
        found=found,
        allowed="a finished build",
        hint=hint,
    )
