"""What changed between two configurations, in the words of the file. A reload is taken over whole or not at all.

Who may attach, limits and the size of recordings are the supervisor's alone; for everything else change.py lets other
executors take over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from taktd.daemon.certification.certification import NotAdmitted
from taktd.daemon.config.configuration import Configuration, ConfigurationRefused, load
from taktd.daemon.doors.control_door import ControlError
from taktd.daemon.handover.change import Change, ChangeRefused, touched
from taktd.daemon.health.status import status_line
from taktd.daemon.logbook import log
from taktd.daemon.models.commands import store_of
from taktd.daemon.models.inspection import ModelRefused
from taktd.daemon.models.store import StoreError, resolved
from taktd.daemon.supervision.device_plan import DevicePlan, FallbackRefused, plans_of
from taktd.ipc import _core

if TYPE_CHECKING:
    from taktd.daemon.supervisor import Supervisor


def differences(old: Configuration, new: Configuration) -> list[tuple[str, ...]]:
    """Paths of the settings that differ, e.g. ("loops", "walk", "period")."""
    return list(_differences(old, new, ()))


def _differences(old: Any, new: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(old, BaseModel) and type(old) is type(new):
        for name, field in type(old).model_fields.items():
            yield from _differences(getattr(old, name), getattr(new, name), (*path, field.alias or name))
    elif isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if key in old and key in new:
                yield from _differences(old[key], new[key], (*path, key))
            else:
                yield (*path, key)
        if list(old) != list(new) and set(old) == set(new):
            yield (*path, "order")  # loops tie by their order in the configuration
    elif old != new:
        yield path


class Reloader:
    """Takes another configuration over, one at a time: the file read again, or a model's other version."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._lock = asyncio.Lock()
        self.doing = ""  # for people; "" while no change is made
        self._attempt = 0  # the number that the change would have had as epoch, 0 until it has got one

    # ---- who asks ----

    async def hang_up(self) -> None:
        """SIGHUP: after a change that is being made, since the file may be newer than that."""
        async with self._lock:
            try:
                done = await self._reload()
                log("notice", done, event="reload-done", epoch=self._supervisor.epoch)
            except (ControlError, ConfigurationRefused):
                pass  # _reload has told it; nobody waits for an answer

    async def reload(self) -> str:
        """Read the file again and take over what changed, all of it or nothing. Raises ControlError."""
        self._alone("reload")
        async with self._lock:
            try:
                return "\n".join([await self._reload(), *self._left_out()])
            except ConfigurationRefused as refused:
                raise ControlError(str(refused), "the running configuration stays") from None

    async def change_model(self, name: str, version: int) -> str:
        """Serve this version of a model instead. Raises ControlError; then the old one is served."""
        what = f"model {name}, version {version}"
        self._alone(what)
        async with self._lock:
            supervisor = self._supervisor
            models = dict(supervisor.configuration.models)
            try:
                file = await asyncio.to_thread(store_of(models[name]).resolve, version)
            except StoreError as error:
                raise ControlError(str(error), error.hint) from None
            models[name] = models[name].model_copy(update={"path": str(file.path)})
            try:
                await self._change(supervisor.configuration.model_copy(update={"models": models}), what)
            except ControlError as refused:
                self._tell_refused(what, refused)
                raise
            return f"{name}: version {version} is served, epoch {supervisor.epoch}"

    def _alone(self, what: str) -> None:
        if self._lock.locked():
            raise ControlError(f"{what}: another change is being made: {self.doing}", "wait until it is done")

    # ---- how it is done ----

    async def _reload(self) -> str:
        supervisor = self._supervisor
        self._attempt = 0
        supervisor.notifier.reloading(_core.now())
        try:
            done = await self._read_and_change()
            supervisor.refused = ""
            return done
        except (ControlError, ConfigurationRefused) as refused:
            supervisor.refused = str(refused)
            self._tell_refused("the configuration", refused)
            raise
        finally:
            supervisor.notifier.ready(status_line(supervisor))

    def _tell_refused(self, what: str, refused: ControlError | ConfigurationRefused) -> None:
        """One entry in the log for each that was refused, whoever asked for it. epoch: what runs, and goes on."""
        hint = f"\nto do: {refused.hint}" if isinstance(refused, ControlError) and refused.hint else ""
        attempt = {"attempt": self._attempt} if self._attempt else {}
        text = f"{what} is refused, the running one stays: {refused}{hint}"
        log("error", text, event="refused", epoch=self._supervisor.epoch, **attempt)

    async def _read_and_change(self) -> str:
        supervisor = self._supervisor
        try:
            new = await asyncio.to_thread(lambda: resolved(load(supervisor.file)))
        except StoreError as error:
            raise ControlError(str(error), error.hint) from None
        changed = [".".join(path) for path in differences(supervisor.configuration, new)]
        outdated = any(device.member.outdated for device in supervisor.devices.values())
        if not changed and not outdated and not await self._content_changed(new):
            return "reload: nothing has changed"
        what = ", ".join(changed) or ("taktd itself" if outdated else "the content of model files")
        ended = await self._change(new, f"reload of {what}")
        return "\n".join([f"reload: epoch {supervisor.epoch}, changed {what}", *ended])

    def _left_out(self) -> list[str]:
        """What runs by the configuration and is not admitted, or does not run: said at each change anew."""
        lines = []
        for name, device in self._supervisor.devices.items():
            if device.schedule is None:
                continue
            shed = device.schedule.shed.items()
            lines += [f"loop {loop} is not served, it does not fit: {why}" for loop, why in shed]
            if device.schedule.reason.startswith("not admitted"):
                lines.append(f"device {name} is not certified: {device.schedule.reason}")
        return lines

    async def _content_changed(self, new: Configuration) -> bool:
        """Whether a model's file has other content under the same name."""
        inspections = await self._inspected(new)
        served = {n: i["digest"] for d in self._supervisor.devices.values() for n, i in d.inspections.items()}
        return any(inspections[name]["digest"] != digest for name, digest in served.items())

    async def _inspected(self, new: Configuration) -> dict[str, Any]:
        try:
            return await self._supervisor.inspect(new)
        except ModelRefused as refused:
            raise ControlError(str(refused), "the running configuration stays") from None

    async def _change(self, new: Configuration, what: str) -> list[str]:
        """Which clients lost their lane by it, for people. Raises ControlError; then everything is as it was."""
        supervisor = self._supervisor
        self.doing, self._attempt = what, 0
        try:
            plans = plans_of(new, await self._inspected(new))
            self._attempt = supervisor.next_epoch()
            change = Change(supervisor.devices, new, plans, self._attempt, supervisor.judge_for(new))
            log("notice", f"{what}: {_touching(change, plans)}", epoch=change.epoch)
            await change.prepare()
            before = supervisor.configuration, supervisor.epoch
            await change.pass_over()
            supervisor.apply(new, change.epoch)
            try:
                await change.probation()
            except ChangeRefused:
                supervisor.apply(*before)
                raise
            await change.settle()
            supervisor.watch.certify([part.device.name for part in change.parts])
            for line in self._left_out():
                log("warning", line, epoch=supervisor.epoch)
            return change.ended
        except (NotAdmitted, FallbackRefused) as refused:
            raise ControlError(f"{what}: {refused}", "the running configuration stays") from None
        except ChangeRefused as refused:
            raise ControlError(f"{what} was taken back: {refused}", "what served before serves on") from None
        finally:
            self.doing = ""


def _touching(change: Change, plans: Mapping[str, DevicePlan]) -> str:
    names = touched(change.devices, plans)
    return f"executors of {', '.join(names)} are replaced" if names else "no executor is replaced"
