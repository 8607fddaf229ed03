"""The shadow's process as the supervisor sees it: started once, told what to run and where to look, never again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from taktd.daemon.supervision.kept_process import KeptProcess, Message


class ShadowProcess(KeptProcess):
    """changed: called whenever it has said something or ended. seen: what it said last."""

    module = "taktd.daemon.shadow.runner"
    farewell: ClassVar[Message] = {"op": "stop"}

    def __init__(self, model: str, configure: Message, changed: Callable[[], None]) -> None:
        super().__init__("shadow", {"model": model})
        self.keep = False
        self._configure, self._changed = configure, changed
        self.verified: Message = {}
        self.notes: list[str] = []
        self.seen: dict[str, Any] = {}
        self.why_ended = ""

    def _began(self) -> None:
        self.send(self._configure)

    def _take(self, message: Message) -> None:
        op = message["op"]
        if op == "ready":
            self.verified, self.notes = message["verified"], message["notes"]
            self._serves()
        elif op == "failed":
            self._failure = message["error"]
        elif op == "seen":
            self.seen = {key: value for key, value in message.items() if key != "op"}
        self._changed()

    def _died(self, was_ready: bool, why: str, pause_ns: int | None) -> None:
        self.why_ended = why
        self._changed()
