"""HTTP and the gateway's doors as the configuration has them, from the start on and after each change of it.

The supervisor holds both (`http_door`, `gateway`); here is when they are made, told, made anew and closed. What has not
changed is left alone: a reload that only concerns loops interrupts nobody's connection.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from taktd.daemon.doors.http_door import HttpDoor, state_page
from taktd.daemon.health import metrics
from taktd.daemon.health.events import LOOK_S, EventFeed
from taktd.daemon.health.status import status_line
from taktd.daemon.supervision.gateway_process import GatewayProcess, wanted

if TYPE_CHECKING:
    from taktd.daemon.supervisor import Supervisor


class OuterDoors:
    """follow() after a change; the rest is for the start."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._http_at: str | None = None  # as configured; the door itself knows which port it got
        self._work = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._feeds = False

    @property
    def gateway_wanted(self) -> bool:
        """By the configuration as it is now."""
        return wanted(self._supervisor.configuration)

    def make_gateway(self) -> None:
        """If one is wanted and there is none; the supervisor starts it as soon as loops are served."""
        supervisor = self._supervisor
        if supervisor.gateway is None and self.gateway_wanted:
            supervisor.gateway = GatewayProcess(supervisor)

    def feed(self) -> None:
        """Events for whoever subscribes at the gateway."""
        if self._supervisor.gateway is not None and not self._feeds:
            self._feeds = True
            self._supervisor.every(LOOK_S, EventFeed(self._supervisor).look)

    async def open_http(self) -> None:
        """Where the configuration says, if it does."""
        supervisor = self._supervisor
        self._http_at = address = supervisor.configuration.http.listen
        if address is None:
            return
        pages = {
            "/metrics": lambda: (200, metrics.CONTENT_TYPE, metrics.exposition(supervisor)),
            "/health/live": lambda: state_page(True, "live"),
            "/health/ready": lambda: state_page(supervisor.ready, status_line(supervisor)),
            "/health/certified": lambda: state_page(supervisor.certified, status_line(supervisor)),
        }
        supervisor.http_door = HttpDoor(address, pages)
        await supervisor.http_door.begin()

    def follow(self) -> None:
        """The configuration is another one now."""
        self.make_gateway()
        if self._supervisor.gateway is not None:
            self._supervisor.gateway.follow()
            self.feed()
        if self._supervisor.configuration.http.listen != self._http_at:
            task = asyncio.get_running_loop().create_task(self._reopen_http())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reopen_http(self) -> None:
        async with self._work:
            supervisor = self._supervisor
            if supervisor.stopping or supervisor.configuration.http.listen == self._http_at:
                return
            door, supervisor.http_door = supervisor.http_door, None
            if door is not None:
                await door.close()
            await self.open_http()
